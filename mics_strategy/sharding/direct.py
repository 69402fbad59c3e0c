"""Which gathers put parameters straight where they are used, and which need the flat form?

Ranks that read one another's memory read every stretch into its parameter. A backend that takes several tensors at once
gathers every parameter for itself, where each rank has an equal part of it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from mics_strategy.collectives.apart import Apart
from mics_strategy.collectives.by_size import AnyCollective, BySize
from mics_strategy.collectives.coalesced import Coalesced, Parts
from mics_strategy.collectives.collective import Collective
from mics_strategy.collectives.ops import Handle
from mics_strategy.collectives.process_memory import Stretches
from mics_strategy.sharding.layout import BucketLayout

DirectGather = Callable[[torch.Tensor], Handle]


def plan_direct(
    across: AnyCollective | None, layout: BucketLayout, wholes: list[torch.Tensor], name: str, *, coalesces: bool
) -> DirectGather | None:
    """What gathers a shard into the parameters themselves; None where they take the flat form first.

    Args:
        across: Gathers the flat form.
        layout: Of the bucket.
        wholes: Its parameters, contiguous.
        name: Of the bucket.
        coalesces: Whether it may be several tensors in one launch.
    """
    if across is None:
        return None
    flat = [whole.view(-1) for whole in wholes]
    coalesced = coalesced_of(across, layout, wholes[0].itemsize) if coalesces and wholes else None
    if coalesced is not None:
        return in_one_launch(coalesced, layout, flat, name)
    if isinstance(across, Collective) and across.apart is not None and not any(r.dim for r in layout.regions):
        return _reads(across.apart, across.size, layout, flat, name)
    return None


def coalesced_of(across: AnyCollective, layout: BucketLayout, itemsize: int) -> Coalesced | None:
    """What moves the tensors of a bucket in one launch, each whole; None where that cannot be."""
    if not layout.is_even:
        return None
    chosen = across.of(layout.full_numel * itemsize) if isinstance(across, BySize) else across
    return chosen.coalesced


def parts_of(layout: BucketLayout, size: int, dtype: torch.dtype) -> Parts:
    """What the slice of each of `size` ranks has of every parameter."""
    places = [(region.offset, region.chunk_numel) for region in layout.regions]
    return Parts(layout.ranks // size, places, dtype)


def in_one_launch(coalesced: Coalesced, layout: BucketLayout, wholes: list[torch.Tensor], name: str) -> DirectGather:
    """What gathers a shard into `wholes`, each flat, as several tensors."""
    parts = parts_of(layout, coalesced.size, wholes[0].dtype)
    return lambda shard: coalesced.gather(wholes, shard, parts, name)


def _reads(apart: Apart, size: int, layout: BucketLayout, wholes: list[torch.Tensor], name: str) -> DirectGather:
    dtype = wholes[0].dtype if wholes else torch.float32
    found = []
    for rows in layout.slices(size):
        parts = [
            (each.offset, wholes[each.position].narrow(0, each.start or 0, each.numel))
            for each in layout.stretches(rows)
            if layout.regions[each.position].dim == 0 or each.row == 0  # a scalar: every row has the same
        ]
        found.append(Stretches(parts, len(rows) * layout.shard_numel, dtype))
    return lambda shard: apart.gather(found, shard, name)
