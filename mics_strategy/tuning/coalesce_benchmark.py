"""How long do the tensors of a bucket take in one launch, and how long as one flat tensor with its copies?

Both ways by turns, with zeros in the model's own shapes and collectives of the purpose that is asked about.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from mics_strategy.comm.coalesced import CoalescedCommunicator
from mics_strategy.comm.communicator import AnyCommunicator
from mics_strategy.comm.control import ControlGroup
from mics_strategy.comm.process_groups import ProcessGroups
from mics_strategy.comm.workspace import Workspace
from mics_strategy.config import sum_dtype_of
from mics_strategy.engine.layout import BucketLayout
from mics_strategy.engine.zero_copy_gather import coalesced_comm_for, coalesced_gather
from mics_strategy.engine.zero_copy_reduce import CoalescedGrads
from mics_strategy.errors import LifecycleError
from mics_strategy.tuning.autotune import time_slowest_rank
from mics_strategy.tuning.threshold import RUNS

REDUCE_SCATTER = "grad_reduce_scatter"  # the purpose of sums in a backward; every other is of a gather
_WHAT = "a trial"
_Run = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What is gathered, or summed.

    Attributes:
        role: Of the collective.
        layout: Of the bucket.
        dtype: In which it travels.
        num_stages: Of the collective: over the same ranks it may go in one or in two.
    """

    role: str
    layout: BucketLayout
    dtype: torch.dtype
    num_stages: int

    @property
    def shapes(self) -> tuple[torch.Size, ...]:
        """Of the tensors; what matters of the layout."""
        return tuple(region.shape for region in self.layout.param_slices)

    @property
    def text(self) -> str:
        """Names it among others over the same ranks."""
        shapes = ";".join("x".join(map(str, shape)) for shape in self.shapes)
        digest = hashlib.blake2b(shapes.encode(), digest_size=8).hexdigest()
        tensors = f"{len(self.shapes)} tensors {digest} {self.dtype} over {self.layout.ranks}"
        return f"{self.role} coalesced, {tensors}, stages {self.num_stages}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Both ways, by the median of some runs of the slowest rank."""

    flat_s: float
    coalesced_s: float

    @property
    def coalesces(self) -> bool:
        """Whether one launch is no slower."""
        return self.coalesced_s <= self.flat_s


def benchmark(candidate: Candidate, groups: ProcessGroups, control: ControlGroup, device: torch.device) -> Measurement:
    """Move tensors of these shapes in both ways by turns. Collective over all ranks; the same answer on all."""
    workspace = Workspace()
    across = groups.make_benchmark_communicator(candidate.role, workspace)
    coalesced = coalesced_comm_for(across, candidate.layout, candidate.dtype.itemsize)
    if coalesced is None:
        raise LifecycleError(f"{candidate.text}: no other way. This is a defect; please report it.")
    ways = _reduce_scatter_runs if candidate.role == REDUCE_SCATTER else _all_gather_runs
    runs = ways(candidate, across, coalesced, device)
    workspace.bind(torch.empty(workspace.needed_bytes, dtype=torch.uint8, device=device))
    times_s: list[list[float]] = [[], []]
    for _ in range(RUNS):
        for run, of_way in zip(runs, times_s, strict=True):
            of_way.append(time_slowest_rank(run, control, device))
    flat_s, coalesced_s = (statistics.median(of_way[1:]) for of_way in times_s)  # the first was to warm up
    return Measurement(flat_s=flat_s, coalesced_s=coalesced_s)


def _all_gather_runs(
    question: Candidate, across: AnyCommunicator, coalesced: CoalescedCommunicator, device: torch.device
) -> tuple[_Run, _Run]:
    layout, dtype = question.layout, question.dtype
    shard, flat = _zeros(layout.full_numel // across.size, dtype, device), _zeros(layout.full_numel, dtype, device)
    wholes = layout.unpadded_views(_zeros(layout.unpadded_numel, dtype, device))
    pieces, parts = _pairs(layout, flat, wholes)
    direct = coalesced_gather(coalesced, layout, [whole.view(-1) for whole in wholes], _WHAT)
    across.reserve_all_gather(shard.numel(), dtype)
    coalesced.reserve_all_gather(shard.numel(), dtype)

    def by_flat() -> None:
        across.all_gather(flat, shard, _WHAT).wait()
        torch._foreach_copy_(parts, pieces)

    return by_flat, lambda: direct(shard).wait()


def _reduce_scatter_runs(
    question: Candidate, across: AnyCommunicator, coalesced: CoalescedCommunicator, device: torch.device
) -> tuple[_Run, _Run]:
    layout, wire = question.layout, question.dtype
    out = _zeros(layout.full_numel // across.size, sum_dtype_of(wire), device)
    flat = _zeros(layout.full_numel, wire, device)
    grads = [_zeros(shape.numel(), wire, device).view(shape) for shape in question.shapes]
    pieces, parts = _pairs(layout, flat, grads)
    kept = CoalescedGrads(coalesced, layout, wire)
    across.reserve_reduce_scatter(flat.numel(), wire, out.dtype)
    coalesced.reserve_reduce_scatter(out.numel(), wire)

    def by_flat() -> None:
        torch._foreach_copy_(pieces, parts)
        across.reduce_scatter(out, flat, False, _WHAT).wait()

    def in_one() -> None:
        for position, grad in enumerate(grads):
            kept.keep(position, grad)
        kept.reduce_scatter(out, flat, False, _WHAT).wait()

    return by_flat, in_one


def _pairs(
    layout: BucketLayout, flat: torch.Tensor, wholes: list[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Places in the flat form, and in the tensors themselves."""
    pairs = [pair for position, whole in enumerate(wholes) for pair in layout.copy_pairs(flat, whole, position)]
    return [piece for piece, _ in pairs], [part for _, part in pairs]


def _zeros(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros(numel, dtype=dtype, device=device)
