"""Does a model that is trained with encoded communication learn as well?

``python -m benchmarks.convergence`` trains a small LLaMA on the text of the demo, once for each variant and seed, on 4
gloo ranks of this machine that stand for 2 nodes of 2, and compares the loss on held-out text. See docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.util
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException, spawn

from benchmarks.learning import Curve, learn
from mics_strategy import Codec, ShardConfig, Topology
from recipes.config import Recipe, load_recipe
from recipes.data.prepare import prepare
from recipes.models.build import num_parameters

UNCOMPRESSED = "uncompressed"
_DEMO = Path(__file__).parents[1] / "recipes" / "llama" / "demo.yaml"
_CHANGES = (  # to the demo's recipe, so that many trainings end in minutes, each with a loss that has stopped falling
    "model.vocab_size=512",
    "model.num_layers=2",
    "data.sequence_length=64",
    "data.validation_sequences=128",
    "batch.global_size=16",
    "batch.micro_size=4",
    "schedule.warmup_steps=50",
    "schedule.floor=0",
)
_RANKS, _RANKS_PER_NODE = 4, 2
_SILENCE = datetime.timedelta(seconds=60)  # of one rank in a collective; then the others give up
_SHOWN = 6  # points of a curve in the table
_WHOLE = 2**30  # values in a block: more than any piece has
_INT8_INT4: dict[str, Any] = {"weight_codec": "int8", "grad_codec": "int4"}
_BOTH = Codec(bits=4, block_size=128, rotation=True, feedback=True)
_SYNCED: dict[str, Any] = {  # parameters cross nodes in param syncs, as few bytes as with the secondary copy
    "params": "partition",
    "secondary_params": "none",
    "weight_codec": Codec(bits=8, differences=True),
}
_ISLANDS = {"params": "partition", "grads": "partition", "optimizer": "partition", "secondary_params": "none"}
VARIANTS: dict[str, dict[str, Any]] = {  # fields of ShardConfig on top of zeropp-hpz
    UNCOMPRESSED: {},
    "other-order": {"hierarchical": False},  # the same numbers added in another order: what rounding alone does
    "int8-int8": {"weight_codec": "int8", "grad_codec": "int8"},
    "int8-int4": _INT8_INT4,
    "int8-int4-half": {**_INT8_INT4, "grad_codec_until": 0.5},
    "int8-int4-stochastic": {**_INT8_INT4, "grad_codec": Codec(bits=4, rounding="stochastic")},
    "int8-int4-rotation": {**_INT8_INT4, "grad_codec": Codec(bits=4, block_size=128, rotation=True)},
    "int8-int4-feedback": {**_INT8_INT4, "grad_codec": Codec(bits=4, block_size=128, feedback=True)},
    "int8-int4-both": {**_INT8_INT4, "grad_codec": _BOTH},
    "differences": _SYNCED,
    "differences-int4": {**_SYNCED, "grad_codec": "int4"},
    "differences-int4-both": {**_SYNCED, "grad_codec": _BOTH},
    "differences-4-int4-both": {
        **_SYNCED,
        "weight_codec": Codec(bits=4, block_size=128, differences=True),
        "grad_codec": _BOTH,
    },
    "outer-30": {**_ISLANDS, "outer_every": 30},
    "outer-30-int4": {**_ISLANDS, "outer_every": 30, "outer_codec": "int4"},
    "outer-30-diloco": {**_ISLANDS, "outer_every": 30, "outer_momentum": 0.9},  # the rates of its paper
    "outer-30-mean": {**_ISLANDS, "outer_every": 30, "outer_lr": 1.0, "outer_momentum": 0.0},
    "outer-30-warm": {**_ISLANDS, "outer_every": 30},
    "outer-30-warm-delay": {**_ISLANDS, "outer_every": 30, "outer_delay": 5},
    "outer-30-warm-delay-half": {**_ISLANDS, "outer_every": 30, "outer_delay": 5, "outer_alpha": 0.5},
    "outer-30-warm-fragments": {**_ISLANDS, "outer_every": 30, "outer_fragments": 3},
    "outer-30-warm-fragments-int4": {
        **_ISLANDS,
        "outer_every": 30,
        "outer_fragments": 3,
        "outer_codec": "int4",
    },
    "outer-30-warm-both": {**_ISLANDS, "outer_every": 30, "outer_fragments": 3, "outer_delay": 5},
    "outer-30-warm-both-int4": {
        **_ISLANDS,
        "outer_every": 30,
        "outer_fragments": 3,
        "outer_delay": 5,
        "outer_codec": "int4",
    },
    "outer-30-warm-int4": {**_ISLANDS, "outer_every": 30, "outer_codec": "int4"},
    "delayed": {**_ISLANDS, "second_hop": "delayed"},  # every second step updates
    "int2-nodes": {"grad_codec": "int2", "codec_links": "slow"},  # between nodes; parameters are not encoded
    "int2-nodes-both": {
        "grad_codec": Codec(bits=2, block_size=128, rotation=True, feedback=True),
        "codec_links": "slow",
    },
    "bf16": {"reduce_dtype": "bfloat16"},  # gradients rounded to eight bits of fraction: how far chaos goes
    "non-blocked": {
        "weight_codec": Codec(bits=8, block_size=_WHOLE),
        "grad_codec": Codec(bits=4, block_size=_WHOLE),
    },
}
_WARM = "outer-30-warm"  # begins names of variants whose first fifth is synchronous: without `outer_` fields
DEFAULT_VARIANTS = ("other-order", "int8-int4", "int8-int4-half", "non-blocked")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One variant beside the uncompressed one.

    Attributes:
        variant: Its name.
        loss: At the end; mean over seeds.
        distances: (own - uncompressed) / uncompressed at the end, for each seed.
        sent_share: Bytes of the first optimizer step by those of the uncompressed one.
    """

    variant: str
    loss: float
    distances: tuple[float, ...]
    sent_share: float

    @property
    def largest(self) -> float:
        """The distance farthest from 0; NaN if a training gave NaN."""
        return max(self.distances, key=lambda distance: (distance != distance, abs(distance)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """What every rank does: all variants for the first seed, then for the next."""

    recipe: Recipe
    names: list[str]
    seeds: list[int]
    every: int
    muon_lr: float | None


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, print and write; 0 when all trainings ended."""
    options = parser().parse_args(arguments)
    unknown = sorted({*options.variants} - {*VARIANTS})
    if unknown:
        print(f"`{unknown[0]}` is no variant. Known: {', '.join(VARIANTS)}.", file=sys.stderr)
        return 2
    recipe = _recipe(options)
    names = [UNCOMPRESSED, *(name for name in options.variants if name != UNCOMPRESSED)]
    data = prepare(recipe.data, recipe.model.vocab_rows)
    parameters = num_parameters(recipe.model, recipe.data.sequence_length)
    epochs = recipe.trainer.max_steps * recipe.global_batch / data.train.num_samples
    print(f"{parameters / 1e6:.2f} M parameters; {data.origin}")
    print(f"{recipe.trainer.max_steps} steps, {epochs:.1f} epochs; 4 ranks as 2 nodes of 2", flush=True)
    try:
        curves = _train(recipe, names, options)
    except (TimeoutError, ProcessException) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    print(f"\n{table(rows(curves))}\n\n{curve_table(curves)}")
    _write(curves, options, parameters)
    return 0


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.convergence", description=__doc__.splitlines()[0])
    add = made.add_argument
    add("--variants", nargs="+", default=list(DEFAULT_VARIANTS), help=f"beside {UNCOMPRESSED}: {', '.join(VARIANTS)}")
    add("--seeds", type=int, nargs="+", default=[1, 2, 3])
    add("--steps", type=int, default=400, help="of the optimizer")
    add("--every", type=int, default=40, help="steps between evaluations")
    add("--muon-lr", type=float, help="of torch's Muon for the matrices of layers, beside AdamW for the rest")
    add("--recipe", nargs="+", default=[], metavar="FIELD=VALUE", help="of the demo's recipe, to change it")
    add("--timeout-s", type=float, default=3600.0, help="for everything")
    add("--output", type=Path, default=Path("runs/convergence"), help="a folder for JSON and, with matplotlib, a plot")
    return made


def rows(curves: list[Curve]) -> list[Row]:
    """Compare the ends of curves, in the order in which variants come first."""
    base = {curve.seed: curve for curve in curves if curve.variant == UNCOMPRESSED}
    table_rows = []
    for variant in dict.fromkeys(curve.variant for curve in curves):
        variant_curves = [curve for curve in curves if curve.variant == variant]
        table_rows.append(
            Row(
                variant=variant,
                loss=statistics.fmean(curve.losses[-1] for curve in variant_curves),
                distances=tuple(curve.losses[-1] / base[curve.seed].losses[-1] - 1 for curve in variant_curves),
                sent_share=variant_curves[0].sent_bytes / base[variant_curves[0].seed].sent_bytes,
            )
        )
    return table_rows


def table(rows_by_variant: list[Row]) -> str:
    """Rows as text."""
    num_seeds = len(rows_by_variant[0].distances)
    heads = ["variant", "loss", *(f"seed {index + 1}" for index in range(num_seeds)), "largest", "sent"]
    return _aligned(
        [
            heads,
            *(
                [
                    row.variant,
                    f"{row.loss:.4f}",
                    *(f"{distance:+.2%}" for distance in (*row.distances, row.largest)),
                    f"{row.sent_share:.3f}",
                ]
                for row in rows_by_variant
            ),
        ]
    )


def curve_table(curves: list[Curve]) -> str:
    """The loss on held-out text at some steps, mean over seeds."""
    points = len(curves[0].steps)
    chosen = sorted({round(index * (points - 1) / (_SHOWN - 1)) for index in range(_SHOWN)})
    lines = [["steps", *(str(curves[0].steps[point]) for point in chosen)]]
    for variant in dict.fromkeys(curve.variant for curve in curves):
        variant_curves = [curve for curve in curves if curve.variant == variant]
        lines.append(
            [variant, *(f"{statistics.fmean(c.losses[point] for c in variant_curves):.3f}" for point in chosen)]
        )
    return _aligned(lines)


def _aligned(lines: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    )


def _recipe(options: argparse.Namespace) -> Recipe:
    changes = [*_CHANGES, f"trainer.max_steps={options.steps}", *options.recipe]
    return load_recipe([f"--config={_DEMO}", *(f"--{change}" for change in changes)], has_cuda=False)


def _configs(variant: str, steps: int) -> dict[int, ShardConfig]:
    """Configurations of a variant, each by the number of steps before it."""
    topology = Topology(ranks_per_node=_RANKS_PER_NODE)
    fields = {"topology": topology, "codec_links": "all", "training_steps": steps, **VARIANTS[variant]}
    config = ShardConfig.preset("zeropp-hpz", **fields)
    if not variant.startswith(_WARM):
        return {0: config}
    synchronous = {name: value for name, value in fields.items() if not name.startswith("outer_")}
    return {0: ShardConfig.preset("zeropp-hpz", **synchronous), steps // 5: config}


def _train(recipe: Recipe, names: list[str], options: argparse.Namespace) -> list[Curve]:
    """Start the ranks, wait for them, and read what rank 0 wrote.

    Raises:
        TimeoutError: Time is over. All ranks have ended.
    """
    deadline = time.monotonic() + options.timeout_s
    options.output.mkdir(parents=True, exist_ok=True)
    written = options.output / "curves.jsonl"  # grows with every training, so that an interrupted run leaves something
    written.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="convergence-") as folder:
        job = (
            _Job(recipe=recipe, names=names, seeds=options.seeds, every=options.every, muon_lr=options.muon_lr),
            folder,
            written,
        )
        ranks = spawn(_rank, job, nprocs=_RANKS, join=False)
        try:
            while not ranks.join(timeout=1.0):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the trainings have not ended after {options.timeout_s:g} s")
        finally:
            for process in ranks.processes:
                process.kill()
    return [Curve(**json.loads(line)) for line in written.read_text().splitlines()]


def _rank(rank: int, job: _Job, folder: str, written: Path) -> None:
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    for seed in job.seeds:
        trainer = dataclasses.replace(job.recipe.trainer, seed=seed)
        for name in job.names:
            store = Path(folder, f"store-{name}-{seed}")
            dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=_RANKS, timeout=_SILENCE)
            configs = _configs(name, trainer.max_steps)
            curve = learn(
                dataclasses.replace(job.recipe, trainer=trainer), name, configs, every=job.every, muon_lr=job.muon_lr
            )
            if rank == 0:
                with written.open("a") as file:
                    file.write(json.dumps(dataclasses.asdict(curve)) + "\n")
                print(f"seed {seed}  {name}: {curve.losses[-1]:.4f} after {curve.elapsed_s:.0f} s", flush=True)
            dist.barrier()
            dist.destroy_process_group()


def _write(curves: list[Curve], options: argparse.Namespace, parameters: int) -> None:
    facts: dict[str, Any] = {
        "options": {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()},
        "date": datetime.date.today().isoformat(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "parameters": parameters,
        "rows": [dataclasses.asdict(row) for row in rows(curves)],
        "curves": [dataclasses.asdict(curve) for curve in curves],
    }
    (options.output / "convergence.json").write_text(json.dumps(facts, indent=1))
    if importlib.util.find_spec("matplotlib") is None:
        print("No plot: matplotlib is not installed (the extra `bench` has it).")
        return
    _plot(curves, options.output / "convergence.png")


def _plot(curves: list[Curve], path: Path) -> None:
    """Mean curves; needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for variant in dict.fromkeys(curve.variant for curve in curves):
        losses_by_seed = [curve.losses for curve in curves if curve.variant == variant]
        axes.plot(
            curves[0].steps, [statistics.fmean(losses) for losses in zip(*losses_by_seed, strict=True)], label=variant
        )
    axes.set_xlabel("optimizer steps")
    axes.set_ylabel("loss on held-out text, mean over seeds")
    axes.legend()
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main())
