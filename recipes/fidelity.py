"""The command that compares training under every strategy with DDP: `mics fidelity`.

Each strategy trains the same small model on the same global batches through the ordinary program `mics pretrain`, in
float32 on CPU ranks of this machine that stand for nodes of two ranks. `curves` compares the losses.

1. Train GPT-2 and BERT under DDP, under DDP with micro-batches of half the size, and under each strategy.
2. Compare every curve with DDP's, print the table, write losses and figure.
3. End with 1 where a strategy that quantizes nothing differs by more than rounding.

Source:
    Fidelity of MiCS (arXiv:2205.00119, section 5.4), PaRO (arXiv:2310.06003, section 4.5) and ZeRO++
    (arXiv:2306.10209, section 5.4).
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mics_strategy import ShardConfig
from mics_strategy.errors import MiCSError, command_error

from .curves import CONTROL, REFERENCE, Curve, compare, failures, read_curve, table, write_files
from .errors import RecipeError, require

_RECIPES = {"gpt2": "gpt2-small", "bert": "bert-base"}
_RANKS_PER_NODE = 2
_MICRO_SIZE = 2
_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {  # presets with further fields
    "mics-int8": ("mics", {"weight_codec": "int8", "grad_codec": "int8", "codec_links": "all"}),
}
STRATEGIES = ("mics", "paro-iig", "zero3", "zeropp-hpz", "mics-int8", "zeropp")
_OVERRIDES = (  # of the recipes' `ci` block: small models that learn within a hundred steps
    "model.vocab_size=512",
    "model.hidden_size=64",
    "model.num_layers=2",
    "model.num_heads=4",
    "model.dropout=0.0",  # draws would differ where a strategy rounds at random
    "data.sequence_length=64",
    "data.validation_sequences=64",
    "optimizer.lr=2e-3",
    "schedule.warmup_steps=10",
    "trainer.precision=32-true",
    "trainer.framework=lightning",
    "trainer.checkpoint_format=full",
    "trainer.log_every_steps=1",
    "trainer.resume=never",
    "sample.num_tokens=0",
)
_INTERMEDIATE = {"gpt2": 256, "bert": 128}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One training.

    Attributes:
        family: Architecture.
        label: Name in the table.
        strategy: Name in the recipe.
        shard: Fields of `ShardConfig` on top of the preset.
        micro_size: Sequences of a rank in one micro-step.
        is_quantized: Whether parameters or gradients are rounded on the wire.
    """

    family: str
    label: str
    strategy: str
    shard: dict[str, Any]
    micro_size: int = _MICRO_SIZE
    is_quantized: bool = False


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0 where everything that quantizes nothing trains as DDP does, 1 where not.

    Args:
        arguments: Options; default: those of the process.
    """
    options = parser().parse_args(arguments)
    try:
        differences = run(options)
    except (MiCSError, OSError) as error:
        print(command_error("fidelity", error), file=sys.stderr)
        return 2
    for sentence in differences:
        print(sentence, file=sys.stderr)
    return 1 if differences else 0


def parser() -> argparse.ArgumentParser:
    """Make the parser of the command's options."""
    parser = argparse.ArgumentParser(
        prog="mics fidelity", description="Compares training under each strategy with DDP."
    )
    parser.add_argument("--family", choices=[*_RECIPES, "both"], default="both", help="model; default: both")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps; default: 100")
    parser.add_argument("--ranks", type=int, default=4, help="ranks of this machine, nodes of 2; default: 4")
    parser.add_argument("--global-batch", type=int, default=16, help="sequences per optimizer step; default: 16")
    parser.add_argument("--source", choices=("local_docs", "grammar"), default="local_docs", help="text")
    parser.add_argument("--strategies", default=",".join(STRATEGIES), help=f"default: {','.join(STRATEGIES)}")
    parser.add_argument("--out", type=Path, default=Path("runs/fidelity"), help="folder; default: runs/fidelity")
    parser.add_argument("--cache-dir", default="auto", help="prepared tokens, as data.cache_dir")
    return parser


def run(options: argparse.Namespace) -> list[str]:
    """Train, compare, print and write; return what differs though it quantizes nothing.

    Raises:
        RecipeError: An option cannot be used, or a training ended with an error.
    """
    _check(options)
    names = [name for name in options.strategies.split(",") if name]
    families = [*_RECIPES] if options.family == "both" else [options.family]
    planned = [job for family in families for job in jobs(family, names)]
    options.out.mkdir(parents=True, exist_ok=True)
    curves = [train(job, options) for job in planned]
    comparisons = compare(curves)
    facts = {name: str(value) for name, value in vars(options).items() if name not in ("out", "cache_dir")}
    files = write_files(curves, facts, options.out)
    print(f"\n{table(comparisons)}\n\nwritten: {', '.join(map(str, files))}", flush=True)
    return failures(comparisons)


def _check(options: argparse.Namespace) -> None:
    if "RANK" in os.environ or "SLURM_PROCID" in os.environ:
        raise RecipeError(
            "A launcher started this process, but the command starts the ranks of each training itself. Run it once, "
            "without torchrun or srun."
        )
    require(options.steps >= 1, "steps", options.steps, "at least 1")
    is_whole = options.ranks >= _RANKS_PER_NODE and options.ranks % _RANKS_PER_NODE == 0
    require(is_whole, "ranks", options.ranks, f"a multiple of {_RANKS_PER_NODE}")
    round_size = options.ranks * _MICRO_SIZE
    is_shared = options.global_batch >= round_size and options.global_batch % round_size == 0
    require(is_shared, "global-batch", options.global_batch, f"a multiple of {round_size}, ranks times {_MICRO_SIZE}")


def jobs(family: str, names: Sequence[str]) -> list[Job]:
    """Return the trainings of one family: DDP, the control, and the strategies.

    Raises:
        mics_strategy.errors.ConfigError: A name is neither a preset nor one of this command's.
    """
    listed = [
        Job(family=family, label=REFERENCE, strategy="ddp", shard={}),
        Job(family=family, label=CONTROL, strategy="ddp", shard={}, micro_size=_MICRO_SIZE // 2),
    ]
    for name in dict.fromkeys(names):
        preset, fields = _VARIANTS.get(name, (name, {}))
        config = ShardConfig.preset(preset, **fields)
        is_quantized = not config.weight_codec == config.grad_codec == "none"
        strategy = "mics" if preset == "mics" else f"mics_{preset}"
        shard = {"partition_size": _RANKS_PER_NODE, "hierarchical": True, **fields}
        listed.append(Job(family=family, label=name, strategy=strategy, shard=shard, is_quantized=is_quantized))
    return listed


def train(job: Job, options: argparse.Namespace) -> Curve:
    """Run one training by `mics pretrain`, and return its curve.

    Args:
        job: Training.
        options: Options of the command.

    Raises:
        RecipeError: It ended with an error.
    """
    folder = options.out / job.family / job.label.replace(", ", "-").replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    begin_s = time.perf_counter()
    with (folder / "log.txt").open("w") as log:
        code = subprocess.run(_command(job, options, folder), env=_environment(), stdout=log, stderr=log).returncode
    if code:
        lines = (folder / "log.txt").read_text().splitlines()
        raise RecipeError(
            f"The training of {job.family} with {job.label} ended with code {code}. Its last lines, of "
            f"{folder / 'log.txt'}:\n" + "\n".join(lines[-5:])
        )
    curve = read_curve(folder / "metrics.jsonl", job.family, job.label, is_quantized=job.is_quantized)
    first, *_, last = curve.losses.values() if len(curve.losses) > 1 else (*curve.losses.values(),) * 2
    seconds = time.perf_counter() - begin_s
    print(f"{job.family:<4}  {job.label:<24}{seconds:5.0f} s, loss {first:.3f} -> {last:.3f}", flush=True)
    return curve


def _command(job: Job, options: argparse.Namespace, folder: Path) -> list[str]:
    fields = ", ".join(f"{name}: {str(value).lower()}" for name, value in job.shard.items())
    overrides = [
        *_OVERRIDES,
        f"model.intermediate_size={_INTERMEDIATE[job.family]}",
        f"data.source={options.source}",
        f"data.cache_dir={options.cache_dir}",
        f"batch.global_size={options.global_batch}",
        f"batch.micro_size={job.micro_size}",
        f"strategy.name={job.strategy}",
        f"strategy.shard={{{fields}}}",
        f"strategy.ranks_per_node={_RANKS_PER_NODE}",
        f"trainer.devices={options.ranks}",
        f"trainer.max_steps={options.steps}",
        f"trainer.output_dir={folder}",
    ]
    program = [sys.executable, "-m", f"{__package__}.pretrain", _RECIPES[job.family], "--ci"]
    return [*program, *(f"--{override}" for override in overrides)]


def _environment() -> dict[str, str]:
    """Return the environment without an allocation of SLURM, whose ranks Lightning would wait for."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    return {"OMP_NUM_THREADS": "1", **kept}


if __name__ == "__main__":
    sys.exit(main())
