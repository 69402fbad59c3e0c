"""How long do the tensors of a bucket take in one launch, and how long as one flat tensor with its copies?

Both ways by turns, with zeros in the model's own shapes and collectives of the purpose that is asked about.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from mics_strategy.collectives.by_size import AnyCollective
from mics_strategy.collectives.calibration import slowest_s
from mics_strategy.collectives.coalesced import Coalesced
from mics_strategy.collectives.crossover import RUNS
from mics_strategy.collectives.peers import Peers
from mics_strategy.collectives.workspace import Workspace
from mics_strategy.config import sum_dtype_of
from mics_strategy.errors import LifecycleError
from mics_strategy.mesh import Mesh
from mics_strategy.sharding.direct import coalesced_of, in_one_launch
from mics_strategy.sharding.gradients.loose import CoalescedGradients
from mics_strategy.sharding.layout import BucketLayout

SUM = "reduce"  # the purpose of sums in a backward; every other is of a gather
_WHAT = "a trial"
_Run = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is gathered, or summed.

    Attributes:
        purpose: Of the collective.
        layout: Of the bucket.
        dtype: In which it travels.
        num_stages: Of the collective: over the same ranks it may go in one or in two.
    """

    purpose: str
    layout: BucketLayout
    dtype: torch.dtype
    num_stages: int

    @property
    def shapes(self) -> tuple[torch.Size, ...]:
        """Of the tensors; what matters of the layout."""
        return tuple(region.shape for region in self.layout.regions)

    @property
    def text(self) -> str:
        """Names it among others over the same ranks."""
        shapes = ";".join("x".join(map(str, shape)) for shape in self.shapes)
        digest = hashlib.blake2b(shapes.encode(), digest_size=8).hexdigest()
        tensors = f"{len(self.shapes)} tensors {digest} {self.dtype} over {self.layout.ranks}"
        return f"{self.purpose} coalesced, {tensors}, stages {self.num_stages}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Both ways, by the median of some runs of the slowest rank."""

    flat_s: float
    coalesced_s: float

    @property
    def coalesces(self) -> bool:
        """Whether one launch is no slower."""
        return self.coalesced_s <= self.flat_s


def measure(question: Question, mesh: Mesh, control: Peers, device: torch.device) -> Answer:
    """Move tensors of these shapes in both ways by turns. Collective over all ranks; the same answer on all."""
    workspace = Workspace()
    across = mesh.trial(question.purpose, workspace)
    coalesced = coalesced_of(across, question.layout, question.dtype.itemsize)
    if coalesced is None:
        raise LifecycleError(f"{question.text}: no other way. This is a defect; please report it.")
    ways = _ways_to_sum if question.purpose == SUM else _ways_to_gather
    runs = ways(question, across, coalesced, device)
    workspace.use(torch.empty(workspace.needed_bytes, dtype=torch.uint8, device=device))
    times_s: list[list[float]] = [[], []]
    for _ in range(RUNS):
        for run, of_way in zip(runs, times_s, strict=True):
            of_way.append(slowest_s(run, control, device))
    flat_s, coalesced_s = (statistics.median(of_way[1:]) for of_way in times_s)  # the first was to warm up
    return Answer(flat_s=flat_s, coalesced_s=coalesced_s)


def _ways_to_gather(
    question: Question, across: AnyCollective, coalesced: Coalesced, device: torch.device
) -> tuple[_Run, _Run]:
    layout, dtype = question.layout, question.dtype
    shard, flat = _zeros(layout.full_numel // across.size, dtype, device), _zeros(layout.full_numel, dtype, device)
    wholes = layout.compact_views(_zeros(layout.compact_numel, dtype, device))
    pieces, parts = _pairs(layout, flat, wholes)
    direct = in_one_launch(coalesced, layout, [whole.view(-1) for whole in wholes], _WHAT)
    across.reserve_gather(shard.numel(), dtype)
    coalesced.reserve_gather(shard.numel(), dtype)

    def by_flat() -> None:
        across.gather(flat, shard, _WHAT).wait()
        torch._foreach_copy_(parts, pieces)

    return by_flat, lambda: direct(shard).wait()


def _ways_to_sum(
    question: Question, across: AnyCollective, coalesced: Coalesced, device: torch.device
) -> tuple[_Run, _Run]:
    layout, wire = question.layout, question.dtype
    out = _zeros(layout.full_numel // across.size, sum_dtype_of(wire), device)
    flat = _zeros(layout.full_numel, wire, device)
    grads = [_zeros(shape.numel(), wire, device).view(shape) for shape in question.shapes]
    pieces, parts = _pairs(layout, flat, grads)
    kept = CoalescedGradients(coalesced, layout, wire)
    across.reserve_reduce(flat.numel(), wire, out.dtype)
    coalesced.reserve_reduce(out.numel(), wire)

    def by_flat() -> None:
        torch._foreach_copy_(pieces, parts)
        across.reduce(out, flat, False, _WHAT).wait()

    def in_one() -> None:
        for position, grad in enumerate(grads):
            kept.keep(position, grad)
        kept.reduce(out, flat, False, _WHAT).wait()

    return by_flat, in_one


def _pairs(
    layout: BucketLayout, flat: torch.Tensor, wholes: list[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Places in the flat form, and in the tensors themselves."""
    pairs = [pair for position, whole in enumerate(wholes) for pair in layout.pieces(flat, whole, position)]
    return [piece for piece, _ in pairs], [part for _, part in pairs]


def _zeros(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros(numel, dtype=dtype, device=device)
