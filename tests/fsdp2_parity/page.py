"""The page docs/fsdp2-behaviours.md: `python -m tests.fsdp2_parity.page > docs/fsdp2-behaviours.md`."""

import textwrap
from collections.abc import Iterator, Mapping

from tests.fsdp2_parity.suite import AREAS

HEAD = """\
# What FSDP2's own tests claim, and what is true here

PyTorch tests FSDP2 in `test/distributed/_composable/fsdp/`. `tests/fsdp2_parity/` plays the same
scenarios with `shard()`, whose units are the modules that those tests shard. `python -m
tests.fsdp2_parity.page` writes this page from the suite, and a test compares both.

- *Trained*: a scenario equals one plain process at every step and on every rank: losses, gradients,
  norms and parameters, to 1e-9 in fp64 (2e-6 under mixed precision). It runs with parameters that
  are resharded after a forward (`reshard_after_forward=True`) and with parameters that stay whole
  (`False`), on two ranks, and on two nodes of two with replicas or with a secondary copy (an
  integer). FSDP2 plays it in the same program. Where it raises, the table counts it in the next
  column.
- *Facts*: what is compared with no training.
- *Refused*: an error with a remedy, on every rank alike.
- *Nothing alike*: an interface of FSDP2 for which there is nothing here, or no need.

"""
ABSENT: Mapping[str, Mapping[str, str]] = {
    "training": {
        "`set_requires_gradient_sync`, `set_is_last_backward`, `set_reshard_after_backward`": (
            "the last hop of gradients waits for whatever needs it, so that no loop has flags to set"
        ),
        "`fully_shard([a, b])`": "a unit is one module; what is in no other unit belongs to the root",
        "`set_modules_to_forward_prefetch`, `set_modules_to_backward_prefetch`": (
            "the order of units is recorded; `prefetch` is their number"
        ),
        "`unshard()`, `reshard()` of a module": "hooks and slots decide; no loop calls them",
        "`CPUOffloadPolicy`": "not offered",
        "`set_post_optim_event`, `share_comm_ctx`, `reset_iter_state`": (
            "the engine waits for optimizers by itself, several sharded models need no common context, and what an "
            "exception leaves behind is cleared at the next use"
        ),
        "CUDA graphs, delayed kernels": "need a GPU: `tests/gpu`, `tests/cuda_harness`",
    },
    "mixed precision": {
        "a policy for each module, `output_dtype`, `cast_forward_inputs=False`": (
            "one `param_dtype` for the model; a module that needs another casts in its own forward"
        ),
    },
    "init": {
        "`mesh=`, process groups": "`ShardConfig` names scopes, and the launcher's environment the nodes",
        "`shard_placement_fn`": "the layout chooses rows, or the dimension that pads less",
        "`ignored_params`": "all parameters of a model are sharded; shard the module inside instead",
        "`set_all_reduce_hook`": "`grad_codec` changes what is sent",
        "lazy initialization": "`shard()` allocates everything at once",
        "`fsdp_pre_all_gather` of tensor subclasses": "`weight_codec` changes what is sent",
    },
    "state": {"`fully_shard.state`, `FSDPModule`": "`shard()` returns the handle, and classes stay"},
    "communication": {
        "`set_custom_all_gather`, allocators": "one transport for each backend",
        "overlap in milliseconds": "needs a GPU: `tests/gpu`; without time: `tests/engine/test_overlap.py`",
        "log messages": "`sharded.plan`, `sharded.traffic()`, `sharded.profile()`",
        "collectives traced by `torch.compile`": "hooks stay outside of graphs; compiled modules train",
    },
}


def _row(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def _table() -> Iterator[str]:
    yield _row("area", "trained", "of these FSDP2 raises", "facts", "refused", "nothing alike")
    yield _row(*["---"] * 6).replace(" ", "")
    totals = [0] * 5
    for name, area in AREAS.items():
        raising = sum(bool(scenario.fsdp2_raises) for scenario in area.scenarios.values())
        counts = (len(area.scenarios), raising, len(area.facts), len(area.refused), len(ABSENT.get(name, {})))
        totals = [total + count for total, count in zip(totals, counts, strict=True)]
        yield _row(name, *counts)
    yield _row("all", *totals)


def _item(name: str, text: str) -> str:
    return textwrap.fill(
        f"- {name}: {text}", 100, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False
    )


def _lists() -> Iterator[str]:
    yield "\n## Trained and held, by area"
    for name, area in AREAS.items():
        yield f"\n### {name.capitalize()}\n"
        for case, scenario in area.scenarios.items():
            yield _item(case, f"trained; FSDP2: {scenario.fsdp2_raises}" if scenario.fsdp2_raises else "trained")
        for case in area.facts:
            yield _item(case, "held")
    yield "\n## Refused, with the sentence\n"
    for area in AREAS.values():
        for case, (_, _, sentence) in area.refused.items():
            yield _item(case, f'"{sentence}"')
    yield "\n## Nothing alike, and why\n"
    for absent in ABSENT.values():
        for what, why in absent.items():
            yield _item(what, why)


def page() -> str:
    """The page, from the suite."""
    return HEAD + "\n".join((*_table(), *_lists())) + "\n"


if __name__ == "__main__":
    print(page(), end="")
