"""Timings of a bucket's collectives, coalesced and as one flat buffer.

Those of the flat buffer include its copies.

Both are timed in turn, on zeros in the model's own shapes, with communicators of the role in question.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mics_strategy.comm.workspace import Workspace
from mics_strategy.config import sum_dtype_of
from mics_strategy.engine.zero_copy import CoalescedGrads, coalesced_comm_for, coalesced_gather
from mics_strategy.errors import LifecycleError
from mics_strategy.tuning.autotune import time_slowest_rank
from mics_strategy.tuning.threshold import RUNS

if TYPE_CHECKING:
    from mics_strategy.comm.coalesced import CoalescedCommunicator
    from mics_strategy.comm.communicator import AnyCommunicator
    from mics_strategy.comm.control import ControlGroup
    from mics_strategy.comm.process_groups import ProcessGroups
    from mics_strategy.engine.layout import BucketLayout

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
        num_stages: Stages of the collective, 1 or 2; over the same ranks both are possible.
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
    """Times of both alternatives, seconds.

    They are medians over several runs, on the slowest rank.
    """

    flat_s: float
    coalesced_s: float

    @property
    def coalesces(self) -> bool:
        """Whether the coalesced alternative is at least as fast."""
        return self.coalesced_s <= self.flat_s


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
    comm.reserve_all_gather(shard.numel(), dtype)
    coalesced.reserve_all_gather(shard.numel(), dtype)

    def run_flat() -> None:
        comm.all_gather(flat, shard, _LABEL).wait()
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
    comm.reserve_reduce_scatter(flat.numel(), wire, out.dtype)
    coalesced.reserve_reduce_scatter(out.numel(), wire)

    def run_flat() -> None:
        torch._foreach_copy_(flat_parts, grad_parts)
        comm.reduce_scatter(out, flat, False, _LABEL).wait()

    def run_coalesced() -> None:
        for position, grad in enumerate(grads):
            coalesced_grads.keep(position, grad)
        coalesced_grads.reduce_scatter(out, flat, False, _LABEL).wait()

    return run_flat, run_coalesced


def _copy_pairs(
    layout: BucketLayout, flat: torch.Tensor, tensors: list[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Views of the flat buffer, and of the tensors copied from or to it."""
    pairs = [pair for position, tensor in enumerate(tensors) for pair in layout.copy_pairs(flat, tensor, position)]
    return [flat_part for flat_part, _ in pairs], [part for _, part in pairs]


def _zeros(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros(numel, dtype=dtype, device=device)
