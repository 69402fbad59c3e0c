"""What do host and device do in two steps of `mics`? A trace to look at.

``trace.json.gz`` is read by ui.perfetto.dev and chrome://tracing. Each step, and the forward of each block, has a name
of its own in it. The rank is one of 8 that are pretended (`gpu_pretended`), so that gathers have something to bring.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.gpu_codecs import Row
from benchmarks.gpu_model import Block, Shape
from benchmarks.gpu_pretended import WARM_UP, config_of, pretended_ranks, sharded
from benchmarks.gpu_training import Trained
from benchmarks.workload import Batch

FILE = "trace.json.gz"
STEPS = 2
MAX_BYTES = 16_000_000
_RANKS = 8
_HOST, _LAUNCH = ("cpu_op",), ("cuda_runtime", "cuda_driver")  # categories of events of torch's profiler
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


def measure_trace(shape: Shape, device: torch.device, folder: Path | None) -> Iterator[Row]:
    """Trace two steps into a folder; a row for each step says what the trace holds of it."""
    if folder is None:
        yield {"step": None, "not measured": "a trace is a file, and no `--output` says where"}
        return
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE
    with pretended_ranks(_RANKS):
        trained = sharded(shape, device, config_of("mics", _RANKS))[0]
        batches = [shape.batch(step, device) for step in range(WARM_UP + STEPS)]
        for batch in batches[:WARM_UP]:
            trained.step(batch)
        write_trace(trained, batches[WARM_UP:], path)
    num_bytes = path.stat().st_size
    yield from trace_rows(read_events(path), num_bytes, is_cuda=device.type == "cuda")


def write_trace(trained: Trained, batches: Sequence[Batch], path: Path) -> None:
    """Train on batches and write what happens as a Chrome trace, compressed if the name ends with ``.gz``."""
    is_cuda = batches[0].inputs.is_cuda
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    with ExitStack() as stack:
        for name, module in trained.model.named_modules():
            if isinstance(module, Block):
                named = record_function(f"forward of {name}")(module.forward)
                stack.enter_context(mock.patch.object(module, "forward", named))
        with profile(activities=activities) as profiler:
            for step, batch in enumerate(batches):
                with record_function(step_name(step)):
                    trained.step(batch)
            if is_cuda:
                torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))


def step_name(step: int) -> str:
    """Name of a step in the trace."""
    return f"step {step}"


def read_events(path: Path) -> list[dict[str, Any]]:
    """Events of a trace that have a begin and a duration."""
    with gzip.open(path, "rt") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


def trace_rows(events: Sequence[dict[str, Any]], num_bytes: int, *, is_cuda: bool) -> Iterator[Row]:
    """What the trace holds of each step: operators of the host, and what they launched on the device.

    An event of the device belongs to the step in which it was launched, whenever it ran.

    Args:
        events: Events of the trace.
        num_bytes: Bytes of its file.
        is_cuda: Whether events of a device are expected.
    """
    for step in range(STEPS):
        row: Row = {"step": step, "operators": 0, "kernels": None, "streams": None, "trace MB": num_bytes / 1e6}
        span = next((e for e in events if e["name"] == step_name(step) and e.get("cat") == "user_annotation"), None)
        if span is None:
            yield {**row, "problem": f"the trace has no step {step}"}
            continue
        begin, end = span["ts"], span["ts"] + span["dur"]
        inside = [event for event in events if begin <= event["ts"] < end]
        row["operators"] = sum(event.get("cat") in _HOST for event in inside)
        if is_cuda:
            launches = {_argument(event, "correlation") for event in inside if event.get("cat") in _LAUNCH}
            launched = [e for e in events if e.get("cat") in _DEVICE and _argument(e, "correlation") in launches]
            row |= {"kernels": len(launched), "streams": len({_argument(event, "stream") for event in launched})}
        yield {**row, "problem": _problem(row)}


def _problem(row: Row) -> str:
    if not row["operators"] or row["kernels"] == 0:
        return "the trace holds nothing of this step"
    return f"more than {MAX_BYTES / 1e6:.0f} MB" if row["trace MB"] * 1e6 > MAX_BYTES else ""


def _argument(event: dict[str, Any], name: str) -> object:
    return event.get("args", {}).get(name)
