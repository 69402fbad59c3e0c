"""How long does a collective take in two stages, and how long directly, on the links of this job?

Every size is moved some times in both ways by turns, by the very collectives that will move the model. Ranks meet
before each run, and the slowest one's time counts.
"""

from __future__ import annotations

import dataclasses
import socket
import statistics
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mics_strategy.comm.communicator import AnyCommunicator, Communicator, SizeDispatch
from mics_strategy.comm.control import ControlGroup
from mics_strategy.comm.traffic import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from mics_strategy.comm.transport import backend_of
from mics_strategy.comm.workspace import Workspace
from mics_strategy.scopes import Scopes
from mics_strategy.topology import Span
from mics_strategy.tuning import cache
from mics_strategy.tuning.cache import TuningKey
from mics_strategy.tuning.threshold import (
    RUNS,
    SIZES_BYTES,
    SizeTiming,
    TunableCollective,
    is_next_affordable,
    threshold_bytes,
)

_WHAT = "a calibration"
_DTYPE = torch.float32
_TIMED_BACKENDS = ("gloo", "nccl")
_NAMES = {ALL_GATHER: "gathers", REDUCE_SCATTER: "sums", ALL_REDUCE: "all-reduces"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningResult:
    """What was decided for one collective over one span.

    Attributes:
        collective: Which of the three.
        span: Over which.
        from_bytes: Of the whole tensor, from which on it goes in two stages; 0: always.
        timings: Where this job has measured it.
        was_measured: Whether no model of this process had it before.
    """

    collective: str
    span: Span
    from_bytes: int
    timings: tuple[SizeTiming, ...] = ()
    was_measured: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkContext:
    """Where it is measured.

    Attributes:
        control_group: All ranks.
        device: Of the tensors.
        make_communicator: Gives the collective of a purpose in both ways, which uses that workspace. Collective.
        gather: Every rank's text, in rank order. Collective.
    """

    control_group: ControlGroup
    device: torch.device
    make_communicator: Callable[[str, Workspace], AnyCommunicator | None]
    gather: Callable[[str], list[str]]


def autotune(scopes: Scopes, context: BenchmarkContext) -> list[TuningResult]:
    """Find from which size on collectives go in two stages. Collective over all ranks where anything is undecided.

    1. What this process has found before, for the same ranks, holds.
    2. Rank 0 looks up what jobs before have found, and tells all ranks.
    3. What nobody knows is measured, on all ranks at once, and rank 0 keeps it.

    Returns:
        One for each of `Scopes.undecided`; nothing where the transport moves nothing, so that times say nothing.

    Cost:
        For what this process does not know, a gather and a broadcast of objects. For what is measured, up to
        `SIZES_BYTES` twice `RUNS` times, in about 0.4 s: sizes stop growing before.
    """
    mover = backend_key(context.control_group.transport.group, context.device)
    undecided = scopes.untuned()
    if not undecided or mover is None:
        return []
    in_process = _tuned_in_process.setdefault(dist.group.WORLD, {})
    asked = {crossing: purpose for crossing, purpose in undecided.items() if (mover, crossing) not in in_process}
    if asked:
        hosts = context.gather(socket.gethostname())[:: scopes.ranks_per_node]
        links = [TuningKey.for_this_job(*crossing, hosts, scopes.ranks_per_node, mover) for crossing in asked]
        kept = context.control_group.broadcast_object(
            [cache.load(each) for each in links] if context.control_group.index == 0 else [], 0
        )
        for (crossing, purpose), each, from_bytes in zip(asked.items(), links, kept, strict=True):
            in_process[mover, crossing] = _tune(crossing, purpose, each, from_bytes, context)
    found = {crossing: in_process[mover, crossing] for crossing in undecided}
    return [dataclasses.replace(each, was_measured=crossing in asked) for crossing, each in found.items()]


def backend_key(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """What moves tensors, in words; None where times say nothing, as among simulated ranks."""
    backend = backend_of(group, device.type)
    if backend not in _TIMED_BACKENDS:
        return None
    return f"{backend} on {torch.cuda.get_device_name() if device.type == 'cuda' else device.type}"


def _tune(
    crossing: TunableCollective, purpose: str, links: TuningKey, kept: int | None, context: BenchmarkContext
) -> TuningResult:
    collective, span = crossing
    if kept is not None:
        return TuningResult(collective=collective, span=span, from_bytes=kept)
    timings: tuple[SizeTiming, ...] = ()
    workspace = Workspace()
    both = context.make_communicator(purpose, workspace)
    if isinstance(both, SizeDispatch):
        timings = benchmark(collective, both, workspace, context.control_group, context.device)
    from_bytes = threshold_bytes(timings)
    if context.control_group.index == 0:
        cache.store(links, from_bytes, timings)
    return TuningResult(collective=collective, span=span, from_bytes=from_bytes, timings=timings)


_tuned_in_process: weakref.WeakKeyDictionary[Any, dict[tuple[str, TunableCollective], TuningResult]] = (
    weakref.WeakKeyDictionary()
)


def benchmark(
    collective: str, both: SizeDispatch, workspace: Workspace, control: ControlGroup, device: torch.device
) -> tuple[SizeTiming, ...]:
    """Times of one collective in both ways, size by size, the same numbers on all ranks. Collective over all ranks.

    Args:
        collective: Which of the three.
        both: The ways.
        workspace: That they use.
        control: All ranks.
        device: Of the tensors.
    """
    timings: list[SizeTiming] = []
    for size_bytes in SIZES_BYTES:
        numel = max(1, size_bytes // _DTYPE.itemsize // both.size)
        full_bytes = numel * both.size * _DTYPE.itemsize
        if not is_next_affordable(timings):
            break
        if timings and full_bytes <= timings[-1].full_bytes:  # each of many ranks has one element
            continue
        ways = both.flat, both.hierarchical
        runs = [_make_runner(collective, way, numel, device) for way in ways]
        workspace.bind(torch.empty(workspace.needed_bytes, dtype=torch.uint8, device=device))
        times_s: tuple[list[float], list[float]] = [], []
        for _ in range(RUNS):
            for run, of_way in zip(runs, times_s, strict=True):
                of_way.append(time_slowest_rank(run, control, device))
        timings.append(_timing(full_bytes, *(of_way[1:] for of_way in times_s)))  # the first was to warm up
    return tuple(timings)


def _timing(full_bytes: int, flat_s: list[float], hierarchical_s: list[float]) -> SizeTiming:
    is_flat_faster = all(one < other for one, other in zip(flat_s, hierarchical_s, strict=True))
    return SizeTiming(full_bytes, statistics.median(flat_s), statistics.median(hierarchical_s), is_flat_faster)


def _make_runner(collective: str, way: Communicator, numel: int, device: torch.device) -> Callable[[], None]:
    """What moves a tensor of `numel` elements for each rank once, and waits for it."""
    shard = torch.zeros(numel, dtype=_DTYPE, device=device)
    full = torch.zeros(numel * way.size, dtype=_DTYPE, device=device)
    if collective == ALL_GATHER:
        way.reserve_all_gather(numel, _DTYPE)
        return lambda: way.all_gather(full, shard, _WHAT).wait()
    if collective == REDUCE_SCATTER:
        way.reserve_reduce_scatter(full.numel(), _DTYPE, _DTYPE)
        return lambda: way.reduce_scatter(shard, full, False, _WHAT).wait()
    way.reserve_all_reduce(full.numel(), _DTYPE, _DTYPE)
    return lambda: way.all_reduce(full, _DTYPE, _WHAT).wait()


def time_slowest_rank(run: Callable[[], None], control: ControlGroup, device: torch.device) -> float:
    """How long a run takes on the slowest rank. The maximum makes ranks meet, so the next run begins on all at once."""
    _synchronize(device)
    start_s = time.perf_counter()
    run()
    _synchronize(device)
    own_s = torch.tensor([time.perf_counter() - start_s], dtype=torch.float64, device=device)
    return control.all_reduce_scalar(own_s, is_max=True).item()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def report(findings: Iterable[TuningResult]) -> str:
    """What is news of it, and how to pin it or switch it off, as text; empty where nothing is."""
    found = [finding for finding in findings if finding.was_measured]
    if not found:
        return ""
    lines = ["mics_strategy decided by `hierarchical='auto'` which collectives over several nodes go in two stages:"]
    for finding in found:
        size = f"of {finding.from_bytes:,} B or more" if finding.from_bytes else "of any size"
        source = "measured now" if finding.timings else "measured by a job before"
        lines.append(f"  {_NAMES[finding.collective]} over {finding.span.name} {size}, {source}")
        lines += [f"    {line}" for line in _table(finding.timings)]
    sums = [finding.from_bytes for finding in found if finding.collective != ALL_GATHER] or [found[0].from_bytes]
    pin = f"`hierarchical={max(sums) or True}`"
    lines.append(
        f"It is kept in {cache.CACHE_DIR} for the next job on the same nodes. {pin} pins it, so that sums "
        "round alike wherever it is given; True means two stages always, False never."
    )
    return "\n".join(lines)


def _table(timings: Sequence[SizeTiming]) -> list[str]:
    if not timings:
        return []
    rows = {
        "bytes": [f"{timing.full_bytes:,}" for timing in timings],
        "directly, ms": [f"{1e3 * timing.flat_s:.2f}" for timing in timings],
        "in two stages, ms": [f"{1e3 * timing.hierarchical_s:.2f}" for timing in timings],
    }
    return [f"{name:17}" + "".join(f"{cell:>10}" for cell in cells) for name, cells in rows.items()]
