"""Choice between coalesced collectives and those of one flat buffer.

One coalesced launch saves the copies between the parameters and the flat buffer, and costs the backend more work per
tensor. Which is faster depends on the tensors and the links. So both are timed in turn when a job starts, on zeros in
the model's own shapes, with communicators of the role in question and with the copies of the flat buffer. The results
are cached for later jobs.
"""

from __future__ import annotations

import hashlib
import socket
import statistics
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mics_strategy.comm import route as routes
from mics_strategy.comm.communicator import AnyCommunicator, CoalescedCommunicator
from mics_strategy.comm.consensus import gather_objects
from mics_strategy.comm.control import ControlGroup
from mics_strategy.comm.process_groups import ProcessGroups
from mics_strategy.comm.workspace import Workspace
from mics_strategy.config import ShardConfig, sum_dtype_of
from mics_strategy.engine.bucket import param_comms
from mics_strategy.engine.bucket_specs import NOTHING_TO_COALESCE, BucketSpec, coalescible_roles, with_coalescing
from mics_strategy.engine.layout import BucketLayout
from mics_strategy.engine.zero_copy import (
    CoalescedGrads,
    coalesced_comm_for,
    coalesced_gather,
)
from mics_strategy.errors import ConfigError, LifecycleError
from mics_strategy.tuning.autotune import (
    CACHE_DIR,
    TuningKey,
    backend_key,
    load_cached,
    store_result,
    time_slowest_rank,
)
from mics_strategy.tuning.threshold import RUNS

REDUCE_SCATTER = "grad_reduce_scatter"  # the role of the only reduce-scatter; all others are all-gathers
_LABEL = "a benchmark"
_Run = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One collective of a bucket that can be coalesced.

    Attributes:
        role: Role of the collective.
        layout: Layout of the bucket.
        dtype: Dtype on the wire.
        num_stages: Stages of the collective, 1 to 3; over the same ranks one and several are possible.
    """

    role: str
    layout: BucketLayout
    dtype: torch.dtype
    num_stages: int

    @property
    def shapes(self) -> tuple[torch.Size, ...]:
        """Shapes of the tensors, all of the layout that matters for the time."""
        return tuple(param_slice.shape for param_slice in self.layout.param_slices)

    @property
    def text(self) -> str:
        """Name among the candidates over the same ranks; the key of its cached result."""
        shapes = ";".join("x".join(map(str, shape)) for shape in self.shapes)
        digest = hashlib.blake2b(shapes.encode(), digest_size=8).hexdigest()
        tensors = f"{len(self.shapes)} tensors {digest} {self.dtype} over {self.layout.ranks}"
        return f"{self.role} coalesced, {tensors}, stages {self.num_stages}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Times of both alternatives, seconds. They are medians over several runs, on the slowest rank."""

    flat_s: float
    coalesced_s: float

    @property
    def coalesces(self) -> bool:
        """Whether the coalesced alternative is at least as fast."""
        return self.coalesced_s <= self.flat_s


def choose_coalescing(
    specs: list[tuple[BucketSpec, ...]], config: ShardConfig, groups: ProcessGroups, device: torch.device
) -> list[tuple[BucketSpec, ...]]:
    """Return the buckets with their choice of coalesced collectives.

    Collective where anything is measured.

    Args:
        specs: Buckets of every unit, the same on all ranks.
        config: Configuration; `coalesce` decides or asks for a measurement.
        groups: The process groups.
        device: Device of the tensors.

    Raises:
        ConfigError: On every rank: `coalesce=True`, but no bucket can be coalesced.
    """
    by_spec = {id(spec): _candidates(spec, groups) for unit_specs in specs for spec in unit_specs}
    candidates = {candidate.text: candidate for of_spec in by_spec.values() for candidate in of_spec}
    if config.coalesce is True and not candidates:
        raise ConfigError(NOTHING_TO_COALESCE)
    if config.coalesce == "auto":
        faster = _benchmarked(candidates, groups, device)
    else:
        faster = set(candidates) if config.coalesce else set()

    def with_choice(spec: BucketSpec) -> BucketSpec:
        return with_coalescing(spec, {one.role for one in by_spec[id(spec)] if one.text in faster})

    return [tuple(map(with_choice, unit_specs)) for unit_specs in specs]


def _candidates(spec: BucketSpec, groups: ProcessGroups) -> list[Candidate]:
    """The collectives of a bucket that can be coalesced on this backend."""
    comms = {**param_comms(groups, trainable=spec.trainable), REDUCE_SCATTER: groups.grad_comm}
    candidates = []
    for role in coalescible_roles(spec, groups.scopes):
        comm, dtype = comms[role], spec.wire_dtype if role == REDUCE_SCATTER else spec.param_dtype
        coalesced = coalesced_comm_for(comm, spec.layout, dtype.itemsize) if comm is not None else None
        if coalesced is not None:
            stages = coalesced.num_stages
            candidates.append(Candidate(role=role, layout=spec.layout, dtype=dtype, num_stages=stages))
    return candidates


def _benchmarked(candidates: dict[str, Candidate], groups: ProcessGroups, device: torch.device) -> set[str]:
    """The candidates that are faster coalesced.

    Results are those of this process, of earlier jobs, or of a measurement.
    """
    control = groups.island.job_group  # rank 0 chooses for all islands
    key = backend_key(control.transport.group, device) if control is not None else None
    if control is None or key is None or not candidates:
        return set()
    in_process = _benchmarked_in_process.setdefault(dist.group.WORLD, {})
    spans = {text: groups.scopes.span_of(candidate.role) for text, candidate in candidates.items()}
    missing = [text for text in candidates if (key, text, spans[text]) not in in_process]
    if missing:
        hosts = gather_objects(socket.gethostname())[:: groups.scopes.ranks_per_node]
        tuning_keys = {
            text: TuningKey.for_this_job(text, spans[text], hosts, groups.scopes.ranks_per_node, key)
            for text in missing
        }
        loaded = [load_cached(tuning_keys[text]) for text in missing] if groups.rank == 0 else []
        cached = dict(zip(missing, control.broadcast_object(loaded, 0), strict=True))
        measured = {
            text: benchmark(candidates[text], groups, control, device) for text in missing if cached[text] is None
        }
        groups.traffic_log.drain()
        if groups.rank == 0:
            for text, measurement in measured.items():
                store_result(tuning_keys[text], int(measurement.coalesces), [measurement])
            print(report({text: (candidates[text], measured.get(text), cached[text]) for text in missing}), flush=True)
        for text in missing:
            in_process[key, text, spans[text]] = measured[text].coalesces if text in measured else bool(cached[text])
    return {text for text in candidates if in_process[key, text, spans[text]]}


_benchmarked_in_process: weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], bool]] = weakref.WeakKeyDictionary()


def report(results: dict[str, tuple[Candidate, Measurement | None, int | None]]) -> str:
    """The choices of `coalesce='auto'`, and how to pin them, as text.

    Args:
        results: Candidate, measurement of this job if any, and cached result if any, by the candidate's text.
    """
    lines = ["mics_strategy chose for `coalesce='auto'` which tensors are sent in one launch, without a flat buffer:"]
    for candidate, measurement, cached in results.values():
        collective = "reduce-scatter" if candidate.role == REDUCE_SCATTER else "all-gather"
        size = f"{len(candidate.shapes)} tensors, {candidate.layout.full_numel * candidate.dtype.itemsize:,} B"
        if measurement is None:
            lines.append(f"  {collective} of {size}: {'one launch' if cached else 'flat'}, measured by an earlier job")
        else:
            choice = "one launch" if measurement.coalesces else "flat"
            times = f"{1e3 * measurement.coalesced_s:.2f} ms in one launch, {1e3 * measurement.flat_s:.2f} ms flat"
            lines.append(f"  {collective} of {size}: {choice}, measured now ({times})")
    lines.append(
        f"The choice is cached in {CACHE_DIR} for the next job on the same nodes. `coalesce=True` or False pins it."
    )
    return "\n".join(lines)


def benchmark(candidate: Candidate, groups: ProcessGroups, control: ControlGroup, device: torch.device) -> Measurement:
    """Time both alternatives in turn. Collective over all ranks; equal results on all."""
    workspace = Workspace()
    comm = groups.make_benchmark_communicator(candidate.role, workspace)
    coalesced = coalesced_comm_for(comm, candidate.layout, candidate.dtype.itemsize)
    if coalesced is None:
        raise LifecycleError(f"{candidate.text} has no coalesced communicator. This is a defect; please report it.")
    make_runs = _reduce_scatter_runs if candidate.role == REDUCE_SCATTER else _all_gather_runs
    runs = make_runs(candidate, comm, coalesced, device)
    workspace.bind(torch.empty(workspace.needed_bytes, dtype=torch.uint8, device=device))
    times_s: list[list[float]] = [[], []]
    for _ in range(RUNS):
        for run, run_times_s in zip(runs, times_s, strict=True):
            run_times_s.append(time_slowest_rank(run, control, device))
    flat_s, coalesced_s = (statistics.median(run_times_s[1:]) for run_times_s in times_s)  # the first run warms up
    return Measurement(flat_s=flat_s, coalesced_s=coalesced_s)


def _all_gather_runs(
    candidate: Candidate, comm: AnyCommunicator, coalesced: CoalescedCommunicator, device: torch.device
) -> tuple[_Run, _Run]:
    layout, dtype = candidate.layout, candidate.dtype
    shard, flat = _zeros(layout.full_numel // comm.size, dtype, device), _zeros(layout.full_numel, dtype, device)
    params = layout.unpadded_views(_zeros(layout.unpadded_numel, dtype, device))
    flat_parts, param_parts = _copy_pairs(layout, flat, params)
    gather = coalesced_gather(coalesced, layout, [param.view(-1) for param in params], _LABEL)
    sized = comm.for_bytes(flat.numel() * flat.itemsize)
    sized.reserve(routes.ALL_GATHER, flat.numel(), dtype, dtype)
    coalesced.reserve(routes.ALL_GATHER, flat.numel(), dtype)

    def run_flat() -> None:
        sized.all_gather(flat, shard, _LABEL).wait()
        torch._foreach_copy_(param_parts, flat_parts)

    return run_flat, lambda: gather(shard).wait()


def _reduce_scatter_runs(
    candidate: Candidate, comm: AnyCommunicator, coalesced: CoalescedCommunicator, device: torch.device
) -> tuple[_Run, _Run]:
    layout, wire = candidate.layout, candidate.dtype
    out = _zeros(layout.full_numel // comm.size, sum_dtype_of(wire), device)
    flat = _zeros(layout.full_numel, wire, device)
    grads = [_zeros(shape.numel(), wire, device).view(shape) for shape in candidate.shapes]
    flat_parts, grad_parts = _copy_pairs(layout, flat, grads)
    coalesced_grads = CoalescedGrads(coalesced, layout, wire)
    sized = comm.for_bytes(flat.numel() * flat.itemsize)
    sized.reserve(routes.REDUCE_SCATTER, flat.numel(), wire, out.dtype)
    coalesced.reserve(routes.REDUCE_SCATTER, flat.numel(), wire)

    def run_flat() -> None:
        torch._foreach_copy_(flat_parts, grad_parts)
        sized.reduce_scatter(out, flat, False, _LABEL).wait()

    def run_coalesced() -> None:
        coalesced_grads.reduce_scatter(out, dict(enumerate(grads)), flat, False, _LABEL).wait()

    return run_flat, run_coalesced


def _copy_pairs(
    layout: BucketLayout, flat: torch.Tensor, tensors: list[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Views of the flat buffer, and of the tensors copied from or to it."""
    pairs = [pair for position, tensor in enumerate(tensors) for pair in layout.copy_pairs(flat, tensor, position)]
    return [flat_part for flat_part, _ in pairs], [part for _, part in pairs]


def _zeros(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros(numel, dtype=dtype, device=device)
