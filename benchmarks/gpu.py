"""What do kernels and engine reach on one GPU?

``python -m benchmarks.gpu`` measures seven things, prints a table of each as soon as it has it, and writes JSON:

- ``codecs``: bytes by time of every codec operation beside a plain copy (`gpu_codecs`);
- ``engine``: tokens/s at world size 1 beside plain PyTorch, FSDP2 and Megatron-FSDP (`gpu_training`);
- ``pretended``: steps and host time of one of 8 ranks, beside FSDP2 (`gpu_pretended`);
- ``ranks``: steps of 2 and 4 ranks on the device, over gloo (`gpu_ranks`);
- ``overlap``: whether a unit is gathered while the one before it computes;
- ``memory``: what is allocated, beside what account and estimate say (`gpu_memory`);
- ``trace``: two steps, in a file to look at (`gpu_trace`).

`pretended` and the last three pretend to be rank 0 of many. So order and memory are the real ones, and no time says
anything of a network. See docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import itertools
import json
import platform
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from benchmarks.gpu_codecs import Meter, Row, Sizes, Stamp, measure_codecs
from benchmarks.gpu_memory import measure_memory
from benchmarks.gpu_model import SIZES, Block, Shape
from benchmarks.gpu_pretended import WARM_UP, compare_pretended, config_of, pretended_ranks, sharded
from benchmarks.gpu_ranks import measure_ranks
from benchmarks.gpu_trace import measure_trace
from benchmarks.gpu_training import Rounds, compare_engines
from benchmarks.megatron_peer import DISTRIBUTION, installed_version
from mics_strategy.engine.streams import Op, OpChain, OpStream
from mics_strategy.engine.unit import GatherResources, Unit

PARTS = ("codecs", "engine", "pretended", "ranks", "overlap", "memory", "trace")
_RANKS_SIZE = "30m"  # all ranks are on one device, and gloo moves what they send through host memory
_OVERLAP_RANKS = 8
_SMOKE = Sizes(numel=5000, pieces=3, rounds=1, calls=1)


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment on the stream on which `what` happens to a unit; marks are listed in the order of the host."""

    event: str
    unit: str
    stamp: Stamp


class Trace:
    """Marks of one step, while it is on.

    Args:
        meter: Of the device.
    """

    def __init__(self, meter: Meter) -> None:
        self.is_on = False
        self.marks: list[Mark] = []
        self._meter = meter

    def mark(self, event: str, unit: str) -> None:
        """Note that something begins or ends now."""
        if self.is_on:
            self.marks.append(Mark(event, unit, self._meter.mark()))

    @contextmanager
    def gathers(self) -> Iterator[None]:
        """Note when the gather of each unit begins and ends, on the stream that brings it."""
        original = Unit.start_unshard

        def start_unshard(unit: Unit, resources: GatherResources, **options: Any) -> None:
            marking: Any = _Marking(resources.stream, unit.name, self)
            original(unit, replace(resources, stream=marking), **options)

        with mock.patch.object(Unit, "start_unshard", start_unshard):
            yield

    def watch(self, name: str, block: nn.Module) -> None:
        """Note when the forward and the backward of a block begin and end.

        Before the engine is told of an end, and after it was told of a beginning: what is gathered only when it is
        needed then comes after the end of the block before. A backward ends when the gradient of the block's input is
        there, of a view that the engine does not watch.
        """

        def before(_: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            self.mark("forward begins", name)
            viewed = args[0].view_as(args[0])
            viewed.register_hook(lambda _: self.mark("backward ends", name))
            return (viewed, *args[1:])

        def after(_: nn.Module, __: Any, output: torch.Tensor) -> None:
            self.mark("forward ends", name)
            output.register_hook(lambda _: self.mark("backward begins", name))

        block.register_forward_pre_hook(before)
        block.register_forward_hook(after, prepend=True)


class _Marking:
    """A stream that marks the chains which bring a unit."""

    def __init__(self, stream: OpStream, unit: str, trace: Trace) -> None:
        self._stream, self._unit, self._trace = stream, unit, trace

    def launch(self, ops: list[Op], **options: Any) -> OpChain:
        """See `OpStream.launch`."""
        begin, end = (partial(self._trace.mark, f"gather {word}", self._unit) for word in ("begins", "ends"))
        return self._stream.launch([begin, *ops, end], **options)


def measure_overlap(shape: Shape, device: torch.device) -> Iterator[Row]:
    """One step with overlap and, to see that the measurement tells a difference, one without."""
    for overlap in ("all", "none"):
        with pretended_ranks(_OVERLAP_RANKS):
            marks = _traced_step(shape, device, overlap)
        for row in overlap_rows(marks, Meter(device)):
            expected = row["gathers"] if overlap == "all" else 0
            is_expected = row["gathers"] > 0 and row["issued early"] == expected
            yield {"overlap": overlap, **row, "problem": "" if is_expected else f"{expected} early are expected"}


def _traced_step(shape: Shape, device: torch.device, overlap: str) -> list[Mark]:
    trained = sharded(shape, device, config_of("mics", _OVERLAP_RANKS, overlap=overlap))[0]
    trace = Trace(Meter(device))
    for name, module in trained.model.named_modules():
        if isinstance(module, Block):
            trace.watch(name, module)
    with trace.gathers():
        for step in range(WARM_UP + 1):
            trace.is_on = step == WARM_UP
            trace.mark("step begins", "")
            trained.step(shape.batch(step, device))
    return trace.marks


def overlap_rows(marks: list[Mark], meter: Meter) -> Iterator[Row]:
    """For forward and backward: gathers of a block, and how many of them came before the block ahead of it had ended.

    ``issued early`` counts in the order of the host, ``begun early`` in the time of the device; ``hidden`` is the share
    of the gathers' time in which the block ahead computed. Without streams there are no times.
    """
    turn = next(index for index, mark in enumerate(marks) if mark.event == "backward begins")
    for phase, of_phase in (("forward", marks[:turn]), ("backward", marks[turn:])):
        begins = {mark.unit: index for index, mark in enumerate(of_phase) if mark.event == f"{phase} begins"}
        ends = {mark.unit: index for index, mark in enumerate(of_phase) if mark.event == f"{phase} ends"}
        gathers = {
            mark.unit: index for index, mark in reversed([*enumerate(of_phase)]) if mark.event == "gather begins"
        }
        arrivals = {mark.unit: index for index, mark in reversed([*enumerate(of_phase)]) if mark.event == "gather ends"}
        places = [
            (begins[ahead], ends[ahead], gathers[unit], arrivals[unit])
            for ahead, unit in itertools.pairwise(begins)
            if unit in gathers
        ]
        row: Row = {"phase": phase, "gathers": len(places), "issued early": sum(g < end for _, end, g, _ in places)}
        if meter.is_cuda:
            row |= _overlap_row([[meter.seconds(marks[0].stamp, of_phase[i].stamp) for i in place] for place in places])
        yield row


def _overlap_row(times: list[list[float]]) -> Row:
    """From when the block ahead begins and ends, and the gather begins and ends."""
    hidden = sum(max(0.0, min(end, arrival) - max(begin, gather)) for begin, end, gather, arrival in times)
    gathering = sum(arrival - gather for _, _, gather, arrival in times)
    early = sum(gather < end for _, end, gather, _ in times)
    return {"begun early": early, "gather ms": gathering * 1e3, "hidden": hidden / gathering if gathering else None}


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").splitlines()[0])
    add = made.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda", help="on the CPU only the codecs' figures mean something")
    add("--smoke", action="store_true", help="everything tiny and once: to see in seconds whether it runs")
    add("--parts", default=",".join(PARTS), help="any of %(default)s")
    add("--size", choices=tuple(SIZES), default="1b", help="of the model, but of `ranks`")
    add("--numel", type=int, default=Sizes().numel, help="values of a tensor that is encoded")
    add("--rounds", type=int, default=Rounds().rounds, help="in each, every engine is built and trained once")
    add("--steps", type=int, default=Rounds().steps, help="measured in each round")
    add("--loss-tolerance", type=float, default=Rounds().loss_tolerance, help="between engines, relative")
    add("--compile", action="store_true", help="measure engines with compiled blocks as well")
    add("--output", type=Path, default=None, help="a folder for gpu.json and the trace")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write; 0 when all parts ran and found nothing wrong. A missed target is not wrong."""
    options = parser().parse_args(arguments)
    chosen = options.parts.split(",")
    unknown = [part for part in chosen if part not in PARTS]
    if unknown or (options.device == "cuda" and not torch.cuda.is_available()):
        reason = f"`--parts {unknown[0]}` is not known: use {','.join(PARTS)}" if unknown else "no CUDA device is there"
        print(reason, file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device()) if options.device == "cuda" else torch.device("cpu")
    tables: dict[str, list[Row]] = {}
    for name, part in _parts(options, device).items():
        if name in chosen:
            tables[name] = _run(name, part, device)
            print(f"\n{name}\n{table(tables[name])}", flush=True)
            if options.output is not None:
                _write(tables, options, device)
    return 1 if any(row.get("problem") for rows in tables.values() for row in rows) else 0


def _parts(options: argparse.Namespace, device: torch.device) -> dict[str, Callable[[], Iterator[Row]]]:
    shape = SIZES["tiny" if options.smoke else options.size]
    sizes = _SMOKE if options.smoke else Sizes(numel=options.numel)
    rounds = Rounds(
        rounds=options.rounds,
        steps=options.steps,
        loss_tolerance=options.loss_tolerance,
        is_compiled=options.compile,
    )
    if options.smoke:
        rounds = replace(rounds, rounds=1, warm_up=1, steps=2)
    return {
        "codecs": lambda: measure_codecs(device, sizes),
        "engine": lambda: compare_engines(shape, device, rounds),
        "pretended": lambda: compare_pretended(shape, device, rounds),
        "ranks": lambda: measure_ranks(SIZES["tiny" if options.smoke else _RANKS_SIZE], device, rounds),
        "overlap": lambda: measure_overlap(shape, device),
        "memory": lambda: measure_memory(shape, device),
        "trace": lambda: measure_trace(shape, device, options.output),
    }


def _run(name: str, part: Callable[[], Iterator[Row]], device: torch.device) -> list[Row]:
    """The rows of a part. One that fails keeps those it has, and the other parts run: the device may be lent once."""
    rows: list[Row] = []
    try:
        Meter(device).release()
        for row in part():
            rows.append(row)
            print(f"{name}:", *(_cell(value) for value in row.values() if not isinstance(value, list)), flush=True)
    except Exception as error:
        traceback.print_exc()
        rows.append({"problem": f"{type(error).__name__}: {error}".splitlines()[0]})
    return rows


def table(rows: list[Row]) -> str:
    """Rows as text, with the columns that any of them has; lists are for the file only."""
    keys = dict.fromkeys(key for row in rows for key in row)
    columns = [name for name in keys if name not in ("problem", "not measured", "losses")]
    lines = [columns, *([_cell(row.get(name)) for name in columns] for row in rows)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(columns))]
    text = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    return "\n".join(f"{line}  {_remark(row)}".rstrip() for line, row in zip(text, [{}, *rows], strict=True))


def _remark(row: Row) -> str:
    if row.get("problem"):
        return f"WRONG: {row['problem']}"
    return f"not measured: {row['not measured']}" if row.get("not measured") else ""


def _cell(value: object) -> str:
    if not isinstance(value, float):
        return "-" if value is None else str(value)
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.4f}"


def _write(tables: dict[str, list[Row]], options: argparse.Namespace, device: torch.device) -> None:
    options.output.mkdir(parents=True, exist_ok=True)
    facts = {
        "options": {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()},
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            DISTRIBUTION: installed_version(),
        },
        "has_triton": importlib.util.find_spec("triton") is not None,
    }
    (options.output / "gpu.json").write_text(json.dumps({**facts, "parts": tables}, indent=1))


if __name__ == "__main__":
    sys.exit(main())
