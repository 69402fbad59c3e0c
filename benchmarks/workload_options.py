"""Options of commands that train a `Workload`, and what they make of it.

The default shape of the model is that of its `--compute`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

from benchmarks.workload import AWAY, CORES, Workload

# Few tokens and a small vocabulary: the blocks hold 99 % of the parameters, and cores have little to do. The link of
# 200 Mbit/s needs 0.66 of the time that two nodes' blocks sleep in four micro-steps.
_AWAY_DEFAULTS = {
    "width": [192],
    "layers": 12,
    "vocabulary": 64,
    "sequence": 4,
    "micro_batch": 1,
    "forward_ms": 6.0,
    "backward_ms": 12.0,
}


def add_options(made: argparse.ArgumentParser, *, accumulation: Sequence[int]) -> None:
    """The model's options, with these micro-steps of a step by default."""
    add = made.add_argument
    add("--compute", choices=(CORES, AWAY), default=CORES, help="away: layers sleep, as if they computed on a GPU")
    add("--forward-ms", type=float, default=0.0, help="sleep of a layer's forward; with --compute away, by default 6")
    add("--backward-ms", type=float, default=0.0, help="and of its backward, by default 12")
    add("--accumulation", type=int, nargs="+", default=[*accumulation], help="micro-steps of a step; each in turn")
    add("--width", type=int, nargs="+", default=[256], help="of the model; each in turn")
    add("--layers", type=int, default=6)
    add("--vocabulary", type=int, default=2048)
    add("--sequence", type=int, default=64)
    add("--micro-batch", type=int, default=2)


def parse(made: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options of a command line.

    Raises:
        ValueError: Layers sleep for no time, or where they compute.
    """
    options = made.parse_args(arguments)
    if options.compute == AWAY:
        made.set_defaults(**_AWAY_DEFAULTS)
        options = made.parse_args(arguments)
    asked = f"`--forward-ms {options.forward_ms:g} --backward-ms {options.backward_ms:g}`"
    if options.compute == CORES and (options.forward_ms or options.backward_ms):
        raise ValueError(
            f"{asked} was asked for, and with `--compute {CORES}` no layer sleeps. Add `--compute {AWAY}`."
        )
    if options.compute == AWAY and not (0 < options.forward_ms < math.inf and 0 < options.backward_ms < math.inf):
        raise ValueError(f"{asked} is no time of a layer. Use finite numbers above 0 for both.")
    return options


def workloads(options: argparse.Namespace, dtype: str = "float32") -> list[Workload]:
    """What is trained, one width and number of micro-steps after the other."""
    return [
        Workload(
            width=width,
            layers=options.layers,
            vocabulary=options.vocabulary,
            sequence=options.sequence,
            micro_batch=options.micro_batch,
            accumulation=accumulation,
            dtype=dtype,
            compute=options.compute,
            forward_s=options.forward_ms / 1e3,
            backward_s=options.backward_ms / 1e3,
        )
        for width in options.width
        for accumulation in options.accumulation
    ]
