"""Autotuner of the size threshold of hierarchical collectives, and its cache.

Each size is timed several times with both algorithms in turn, flat and hierarchical, by the communicators that the
model will use. Ranks synchronize before each run, and the time of the slowest rank counts.

A result is a number in a small JSON file in the user's cache folder, named by a digest of all that it depends on, the
links among it. Sums in one and in several stages round differently, so results are kept: the same job on the same nodes
is then bitwise reproducible. A cache that cannot be used costs a measurement and a warning, never the job.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import socket
import statistics
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mics_strategy.comm.communicator import AnyCommunicator, SizeDispatch
from mics_strategy.comm.consensus import gather_objects
from mics_strategy.comm.control import ControlGroup
from mics_strategy.comm.resources import CommResources
from mics_strategy.comm.route import ALL_GATHER, ALL_REDUCE, NEVER, REDUCE_SCATTER, TunableCollective
from mics_strategy.comm.transport import backend_of
from mics_strategy.comm.work import Work
from mics_strategy.comm.workspace import Workspace
from mics_strategy.scopes import Scopes
from mics_strategy.topology import Span
from mics_strategy.tuning.threshold import (
    FLAT,
    HIERARCHICAL,
    POINT_TO_POINT_SIZES_BYTES,
    RUNS,
    SIZES_BYTES,
    SizeTiming,
    is_next_affordable,
    threshold_bytes,
)
from mics_strategy.version import package_version

_log = logging.getLogger(__name__)
CACHE_DIR = "$XDG_CACHE_HOME (or ~/.cache)/mics_strategy/tuning"
_FORMAT = 3  # raised when collectives change so much that earlier measurements are void
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE", "NCCL_IB_HCA", "NCCL_NET")
_LABEL = "a benchmark"
_DTYPE = torch.float32
_TIMED_BACKENDS = ("gloo", "nccl")
_NAMES = {ALL_GATHER: "all-gathers", REDUCE_SCATTER: "reduce-scatters", ALL_REDUCE: "all-reduces"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningResult:
    """The threshold of one collective over one span.

    Attributes:
        collective: "all_gather", "reduce_scatter" or "all_reduce".
        span: Span of the collective.
        from_bytes: Bytes of the full tensor from which on it is hierarchical; 0: always; `NEVER`: never.
        timings: Timings of this job; empty where it has not measured.
        was_measured: Whether no model of this process had the result before.
    """

    collective: str
    span: Span
    from_bytes: int
    timings: tuple[SizeTiming, ...] = ()
    was_measured: bool = True


def autotune(scopes: Scopes, resources: CommResources) -> list[TuningResult]:
    """Find the size from which collectives are hierarchical.

    Collective over all ranks where any is untuned.

    1. Use results that this process has for the same ranks.
    2. Rank 0 loads results of earlier jobs from the cache, and broadcasts them.
    3. All ranks measure the remaining ones together, and rank 0 stores them.

    Args:
        scopes: Ranks and axes of each model state.
        resources: Makes the communicators that are timed.

    Returns:
        One result for each of `Scopes.untuned`; none where the transport sends nothing and times mean nothing.

    Cost:
        A gather and a broadcast of objects, where this process lacks a result. What is measured takes up to
        `SIZES_BYTES` twice `RUNS` times, in about 0.4 s: sizes stop growing before that.
    """
    untuned = scopes.untuned()
    control = resources.control_group("control", scopes.span(1, scopes.job_size)) if untuned else None
    key = backend_key(control.transport.group, resources.device) if control is not None else None
    if control is None or key is None:
        return []
    in_process = _tuned_in_process.setdefault(dist.group.WORLD, {})
    missing = {tunable: role for tunable, role in untuned.items() if (key, tunable) not in in_process}
    if missing:
        hosts = gather_objects(socket.gethostname())[:: scopes.ranks_per_node]
        tuning_keys = {
            tunable: TuningKey.for_this_job(*tunable, hosts, scopes.ranks_per_node, key) for tunable in missing
        }
        loaded = [load_cached(tuning_key) for tuning_key in tuning_keys.values()] if control.index == 0 else []
        cached = dict(zip(missing, control.broadcast_object(loaded, 0), strict=True))
        for tunable, role in missing.items():
            result = _tune(tunable, role, cached[tunable], resources=resources, control=control, scopes=scopes)
            if cached[tunable] is None and control.index == 0:
                store_result(tuning_keys[tunable], result.from_bytes, result.timings)
            in_process[key, tunable] = result
        resources.traffic_log.drain()
    results = {tunable: in_process[key, tunable] for tunable in untuned}
    return [dataclasses.replace(result, was_measured=tunable in missing) for tunable, result in results.items()]


def backend_key(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Backend and device as text. It is None where times mean nothing, as among simulated ranks."""
    backend = backend_of(group, device.type)
    if backend not in _TIMED_BACKENDS:
        return None
    return f"{backend} on {torch.cuda.get_device_name() if device.type == 'cuda' else device.type}"


def _tune(
    tunable: TunableCollective,
    role: str,
    cached_bytes: int | None,
    *,
    resources: CommResources,
    control: ControlGroup,
    scopes: Scopes,
) -> TuningResult:
    """The cached threshold of one collective, or else the measured one."""
    collective, span = tunable
    if cached_bytes is not None:
        return TuningResult(collective=collective, span=span, from_bytes=cached_bytes)
    timings: tuple[SizeTiming, ...] = ()
    workspace = Workspace()
    comm = resources.size_dispatch(role, scopes.with_both_algorithms(), workspace)
    if comm is not None:
        sizes = POINT_TO_POINT_SIZES_BYTES if resources.is_point_to_point else SIZES_BYTES
        timings = benchmark(collective, comm, workspace, control, resources.device, sizes)
    from_bytes = threshold_bytes(timings, flat_in_doubt=not resources.is_point_to_point)
    return TuningResult(collective=collective, span=span, from_bytes=from_bytes, timings=timings)


_tuned_in_process: weakref.WeakKeyDictionary[Any, dict[tuple[str, TunableCollective], TuningResult]] = (
    weakref.WeakKeyDictionary()
)


def benchmark(
    collective: str,
    comm: SizeDispatch,
    workspace: Workspace,
    control: ControlGroup,
    device: torch.device,
    sizes_bytes: Sequence[int],
) -> tuple[SizeTiming, ...]:
    """Time one collective with both algorithms, size by size.

    Collective over all ranks; equal results on all.

    Args:
        collective: "all_gather", "reduce_scatter" or "all_reduce".
        comm: Communicator with both algorithms.
        workspace: Scratch memory of both.
        control: Control group of all ranks.
        device: Device of the tensors.
        sizes_bytes: Sizes of the full tensor, ascending; those that would take too long are left out.
    """
    timings: list[SizeTiming] = []
    num_in_a_row = collectives_in_a_row(device)
    for size_bytes in sizes_bytes:
        numel = max(1, size_bytes // _DTYPE.itemsize // comm.size)
        full_bytes = numel * comm.size * _DTYPE.itemsize
        if not is_next_affordable(timings, num_in_a_row):
            break
        if timings and full_bytes <= timings[-1].full_bytes:  # with many ranks, each has only one element
            continue
        comms = comm.flat, comm.hierarchical
        starters = [collective_starter(collective, sized_comm, numel, device) for sized_comm in comms]
        workspace.bind(torch.empty(workspace.needed_bytes, dtype=torch.uint8, device=device))
        times_s: tuple[list[float], list[float]] = [], []
        for _ in range(RUNS):
            for start, run_times_s in zip(starters, times_s, strict=True):
                run = partial(run_collective, start, num_in_a_row)
                run_times_s.append(time_slowest_rank(run, control, device) / num_in_a_row)
        timings.append(_timing(full_bytes, *(run_times_s[1:] for run_times_s in times_s)))  # the first run warms up
    return tuple(timings)


def _timing(full_bytes: int, flat_s: list[float], hierarchical_s: list[float]) -> SizeTiming:
    pairs = [*zip(flat_s, hierarchical_s, strict=True)]
    if all(flat < hierarchical for flat, hierarchical in pairs):
        winner = FLAT
    else:
        winner = HIERARCHICAL if all(hierarchical < flat for flat, hierarchical in pairs) else ""
    return SizeTiming(full_bytes, statistics.median(flat_s), statistics.median(hierarchical_s), winner)


def collective_starter(collective: str, comm: AnyCommunicator, numel: int, device: torch.device) -> Callable[[], Work]:
    """A function that starts a collective on zeros.

    Scratch memory is reserved, and must be bound before the first call.

    Args:
        collective: "all_gather", "reduce_scatter" or "all_reduce".
        comm: Communicator.
        numel: Elements of each rank.
        device: Device of the tensors.
    """
    shard = torch.zeros(numel, dtype=_DTYPE, device=device)
    full = torch.zeros(numel * comm.size, dtype=_DTYPE, device=device)
    sized = comm.for_bytes(full.numel() * full.itemsize)
    sized.reserve(collective, full.numel(), _DTYPE, _DTYPE)
    if collective == ALL_GATHER:
        return lambda: sized.all_gather(full, shard, _LABEL)
    if collective == REDUCE_SCATTER:
        return lambda: sized.reduce_scatter(shard, full, False, _LABEL)
    return lambda: sized.all_reduce(full, _DTYPE, _LABEL)


def collectives_in_a_row(device: torch.device) -> int:
    """Collectives of one timed run. A GPU gets several, as from the engine: of one alone, its launch is measured."""
    return 4 if device.type == "cuda" else 1


def run_collective(start: Callable[[], Work], count: int) -> None:
    """Start a collective and wait for it, several times."""
    for _ in range(count):
        start().wait()


def time_slowest_rank(run: Callable[[], object], control: ControlGroup, device: torch.device) -> float:
    """Time of a run on the slowest rank, seconds. The maximum synchronizes ranks, so the next run starts on all."""
    _synchronize(device)
    start_s = time.perf_counter()
    run()
    _synchronize(device)
    elapsed_s = torch.tensor([time.perf_counter() - start_s], dtype=torch.float64, device=device)
    return control.all_reduce_scalar(elapsed_s, is_max=True).item()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def report(results: Iterable[TuningResult]) -> str:
    """New results, and how to pin or disable the choice, as text; empty for none."""
    new_results = [result for result in results if result.was_measured]
    if not new_results:
        return ""
    lines = ["mics_strategy chose for `hierarchical='auto'` which collectives over several nodes have several stages:"]
    for result in new_results:
        words = {0: "of any size", NEVER: "of no size"}
        size = words.get(result.from_bytes, f"of {result.from_bytes:,} B or more")
        source = "measured now" if result.timings else "measured by an earlier job"
        lines.append(f"  {_NAMES[result.collective]} over {result.span.name} {size}, {source}")
        lines += [f"    {line}" for line in _table(result.timings)]
    thresholds = [result.from_bytes for result in new_results if result.collective != ALL_GATHER] or [
        new_results[0].from_bytes
    ]
    largest = max(thresholds)
    pin = f"`hierarchical={ {0: True, NEVER: False}.get(largest, largest) }`"
    lines.append(
        f"The choice is cached in {CACHE_DIR} for the next job on the same nodes. {pin} pins it, so that sums "
        "round equally in every job; True means always several stages, False never."
    )
    return "\n".join(lines)


def _table(timings: Sequence[SizeTiming]) -> list[str]:
    if not timings:
        return []
    rows = {
        "bytes": [f"{timing.full_bytes:,}" for timing in timings],
        "flat, ms": [f"{1e3 * timing.flat_s:.2f}" for timing in timings],
        "hierarchical, ms": [f"{1e3 * timing.hierarchical_s:.2f}" for timing in timings],
    }
    return [f"{name:17}" + "".join(f"{cell:>10}" for cell in cells) for name, cells in rows.items()]


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningKey:
    """All that a tuning result depends on.

    Attributes:
        hosts: Names of the nodes, in order.
        ranks_per_node: Ranks of a node.
        collective: Collective that was measured.
        span: Sizes and strides of the axes that it spans.
        backend_key: Backend and device.
        interfaces: Environment variables that choose network interfaces.
        version: Versions of torch, of this package, and of the cache format.
    """

    hosts: tuple[str, ...]
    ranks_per_node: int
    collective: str
    span: str
    backend_key: str
    interfaces: str
    version: str

    @classmethod
    def for_this_job(
        cls, collective: str, span: Span, hosts: Sequence[str], ranks_per_node: int, backend_key: str
    ) -> TuningKey:
        """The key of one collective over one span in this process."""
        return cls(
            hosts=tuple(hosts),
            ranks_per_node=ranks_per_node,
            collective=collective,
            span=" ".join(f"{axis.name}:{axis.size}x{axis.stride}" for axis in span.axes),
            backend_key=backend_key,
            interfaces=" ".join(f"{name}={os.environ[name]}" for name in _INTERFACES if name in os.environ),
            version=f"torch {torch.__version__}, mics_strategy {package_version()}, format {_FORMAT}",
        )

    def describe(self) -> dict[str, Any]:
        """The fields as stored in JSON."""
        return {**dataclasses.asdict(self), "hosts": [*self.hosts]}

    @property
    def file_name(self) -> str:
        """Name of the cache file: equal for equal keys only."""
        text = json.dumps(self.describe(), sort_keys=True)
        return f"{hashlib.blake2b(text.encode(), digest_size=12).hexdigest()}.json"


def cache_folder() -> Path:
    """`CACHE_DIR`, for this user."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mics_strategy" / "tuning"


def load_cached(key: TuningKey) -> int | None:
    """The cached result for a key; None where there is no usable one."""
    try:
        entry = json.loads((cache_folder() / key.file_name).read_text())
        decision = entry["decision"]
        if entry["links"] == key.describe() and type(decision) is int and decision >= 0:
            return decision
        reason = "its contents do not match its name"
    except FileNotFoundError:
        return None
    except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:  # RuntimeError: there is no home
        reason = repr(error)
    _log.warning("The cache of measurements for 'auto' cannot be read, so they are repeated: %s", reason)
    return None


def store_result(key: TuningKey, decision: int, timings: Sequence[Any]) -> None:
    """Store a result and its measurements for later jobs, atomically."""
    text = json.dumps(
        {
            "decision": decision,
            "links": key.describe(),
            "timings": [dataclasses.asdict(timing) for timing in timings],
        },
        indent=1,
    )
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f"{key.file_name}.{os.getpid()}.partial"
        partial.write_text(text)
        partial.replace(folder / key.file_name)
    except (OSError, RuntimeError) as error:
        _log.warning(
            "The cache of measurements for 'auto' cannot be written, so the next job measures again and its sums may "
            "round differently: %r. Pin the values that rank 0 prints, or set XDG_CACHE_HOME to a writable folder.",
            error,
        )
