"""Does anything in a training use memory that no stream, event or reference has made its own?

Every preset meets every option, and each time another loop.
"""

from itertools import product
from typing import Any

import pytest
import torch

from mics_strategy import finish_saves, load_checkpoint, save_checkpoint
from mics_strategy.engine import layout
from tests.cuda_harness.machine import Machine
from tests.cuda_harness.runs import (
    LOOPS,
    PRESETS,
    Loop,
    config_of,
    declared,
    interrupted,
    left_out,
    raising,
    run,
    start,
    two_forwards,
    unused,
)
from tests.cuda_harness.simulated_ranks import simulate_gpus
from tests.rank_report import RankContext

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "prefetch": {"prefetch": 2},
    "no overlap": {"overlap": "none"},
    "bf16": {"param_dtype": "bfloat16"},
    "bf16 wires": {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16"},
    "coalesced": {"coalesce": True},
    "coalesced bf16 wires": {"coalesce": True, "param_dtype": "bfloat16", "reduce_dtype": "bfloat16"},
    "two stages": {"hierarchical": True},
    "one stage": {"hierarchical": False},
    "int8": {"weight_codec": "int8", "grad_codec": "int8", "codec_links": "all"},
    "int4": {"grad_codec": "int4"},
    "codecs": {
        "weight_codec": "int8",
        "grad_codec": "int4",
        "codec_links": "all",
        "grad_codec_hops": "all",
        "prefetch": 2,
    },
    "every backward": {"second_hop": "micro_step"},
    "poison": {"check": "poison", "prefetch": 2},
}
WAYS: list[tuple[Loop, str]] = [(loop, "") for loop in LOOPS]
WAYS += [(LOOPS[0], "reentrant"), (LOOPS[1], "non_reentrant"), (LOOPS[6], "reentrant")]


def _cells() -> list[Any]:
    cells = []
    for (row, preset), (column, option) in product(enumerate(PRESETS), enumerate(OPTIONS)):
        if preset == "ddp" and option in (
            "coalesced",
            "coalesced bf16 wires",
            "int8",
            "codecs",
        ):  # nothing of it travels so
            continue
        loop, recomputes = WAYS[(5 * row + column) % len(WAYS)]
        name = f"{preset}-{option}-{loop.__name__}{'-' if recomputes else ''}{recomputes}".replace(" ", "_")
        cells.append(pytest.param(preset, option, loop, recomputes, id=name))
    return cells


@pytest.mark.wide(every=5)
@pytest.mark.parametrize(("preset", "option", "loop", "recomputes"), _cells())
def test_every_access_is_ordered(preset: str, option: str, loop: Loop, recomputes: str) -> None:
    assert run(config_of(preset, **OPTIONS[option]), loop, recomputes=recomputes).races == []


@pytest.mark.parametrize("preset", ["paro-iig", "paro-nig"])
@pytest.mark.parametrize(
    "codecs",
    [{}, {"grad_codec": "int8", "codec_links": "all"}, {"grad_accum_dtype": "bfloat16"}],
    ids=["plain", "int8", "sums in bf16"],
)
def test_a_second_hop_takes_a_buffer_that_the_one_before_has_sent(preset: str, codecs: dict[str, str]) -> None:
    """Sums in fp32 are cast into one of two buffers, with codecs on the stream that encodes ahead; others are sent."""
    assert run(config_of(preset, **OPTIONS["bf16 wires"], **codecs), declared).races == []


@pytest.mark.parametrize("preset", ["mics", "ddp", "paro-nii"])
@pytest.mark.parametrize("fields", [{}, {"outer_codec": "int8", "param_dtype": "bfloat16"}], ids=["plain", "int8"])
@pytest.mark.parametrize(
    "steps",
    [{"outer_every": 1}, {"outer_every": 2, "outer_delay": 1}, {"outer_every": 2, "outer_fragments": 2}],
    ids=["each", "delay", "fragments"],
)
def test_an_outer_step_is_ordered(preset: str, steps: dict[str, int], fields: dict[str, str]) -> None:
    """It writes the masters, which all-gathers and casts of other streams read."""
    assert run(config_of(preset, **steps, **fields), declared).races == []


@pytest.mark.wide(every=2)
@pytest.mark.parametrize("preset", ["mics", "zero3", "paro-iig"])
@pytest.mark.parametrize("option", ["default", "bf16", "every backward"])
def test_an_optimizer_writes_behind_the_gathers_of_an_interrupted_forward(preset: str, option: str) -> None:
    assert run(config_of(preset, **OPTIONS[option]), interrupted).races == []


@pytest.mark.wide
@pytest.mark.parametrize("loop", [declared, raising, unused, two_forwards])
@pytest.mark.parametrize("codecs", [False, True], ids=["plain", "codecs"])
@pytest.mark.parametrize("preset", ["mics", "zero3", "paro-iig", "zeropp-hpz"])
def test_every_access_is_ordered_in_units_of_several_buckets(
    preset: str, codecs: bool, loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They use the staging buffers one after the other."""
    monkeypatch.setattr(layout, "MAX_BUCKET_BYTES", 1)
    options = {"param_dtype": "bfloat16"} | (OPTIONS["codecs"] if codecs else {})
    assert run(config_of(preset, **options), loop).races == []


def test_what_only_other_ranks_use_has_arrived_before_weights_change() -> None:
    """A gather that this rank takes part in for others reads the weights of this one."""
    assert run(config_of("zero1"), left_out).races == []


def _save(ctx: RankContext, machine: Machine, preset: str) -> None:
    """Save, train on while it is written, load what was."""
    training = start(machine, config_of(preset, ranks_per_node=2, param_dtype="bfloat16"), rank=ctx.rank)
    training.step()
    expected = {name: parameter.to_local().clone() for name, parameter in training.model.named_parameters()}
    for number in range(2):
        save_checkpoint(ctx.tmp_path / f"{number}", training.sharded, training.optimizers, asynchronous=True)
        training.step()
    finish_saves(training.sharded)
    load_checkpoint(ctx.tmp_path / "0", training.sharded, training.optimizers)
    for name, parameter in training.model.named_parameters():
        assert torch.equal(parameter.to_local(), expected[name])
    training.step()


@pytest.mark.parametrize("preset", ["mics", "zero2"])
def test_every_access_is_ordered_while_a_checkpoint_is_written(preset: str) -> None:
    machines, _ = simulate_gpus(4, _save, preset, ranks_per_node=2)
    assert [machine.races for machine in machines] == [[]] * 4
    assert all(machine.launches for machine in machines)


def test_every_preset_and_every_option_meets_most_loops() -> None:
    cells = [cell.values for cell in _cells()]
    for place, names in ((0, PRESETS), (1, OPTIONS)):
        for name in names:
            assert len({(loop, recomputes) for *at, loop, recomputes in cells if at[place] == name}) >= 7
