"""Which gathers put parameters straight where they are used, and which need the flat form?

Ranks that read one another's memory read every stretch into its parameter. A backend that takes several tensors at once
gathers every parameter for itself, where each rank has an equal part of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from mics_strategy.comm.coalesced import CoalescedCommunicator, RowViews
from mics_strategy.comm.communicator import AnyCommunicator, Communicator
from mics_strategy.comm.peer_memory.readv import ScatterTarget
from mics_strategy.comm.work import Work

if TYPE_CHECKING:
    from mics_strategy.comm.peer_memory.communicator import PeerMemoryCommunicator
    from mics_strategy.engine.layout import BucketLayout

InPlaceGather = Callable[[torch.Tensor], Work]


def plan_in_place_gather(
    across: AnyCommunicator | None, layout: BucketLayout, wholes: list[torch.Tensor], name: str, *, coalesces: bool
) -> InPlaceGather | None:
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
    coalesced = coalesced_comm_for(across, layout, wholes[0].itemsize) if coalesces and wholes else None
    if coalesced is not None:
        return coalesced_gather(coalesced, layout, flat, name)
    if (
        isinstance(across, Communicator)
        and across.peer_memory is not None
        and not any(r.dim for r in layout.param_slices)
    ):
        return peer_read_gather(across.peer_memory, across.size, layout, flat, name)
    return None


def coalesced_comm_for(across: AnyCommunicator, layout: BucketLayout, itemsize: int) -> CoalescedCommunicator | None:
    """What moves the tensors of a bucket in one launch, each whole; None where that cannot be."""
    if not layout.is_evenly_divisible:
        return None
    return across.for_bytes(layout.full_numel * itemsize).coalesced


def parts_of(layout: BucketLayout, size: int, dtype: torch.dtype) -> RowViews:
    """What the slice of each of `size` ranks has of every parameter."""
    places = [(region.offset, region.chunk_numel) for region in layout.param_slices]
    return RowViews(layout.ranks // size, places, dtype)


def coalesced_gather(
    coalesced: CoalescedCommunicator, layout: BucketLayout, wholes: list[torch.Tensor], name: str
) -> InPlaceGather:
    """What gathers a shard into `wholes`, each flat, as several tensors."""
    parts = parts_of(layout, coalesced.size, wholes[0].dtype)
    return lambda shard: coalesced.all_gather(wholes, shard, parts, name)


def peer_read_gather(
    apart: PeerMemoryCommunicator, size: int, layout: BucketLayout, wholes: list[torch.Tensor], name: str
) -> InPlaceGather:
    """An all-gather that reads the other ranks' shards straight into the parameters."""
    dtype = wholes[0].dtype if wholes else torch.float32
    found = []
    for rows in layout.shard_slices(size):
        parts = [
            (each.offset, wholes[each.position].narrow(0, each.start or 0, each.numel))
            for each in layout.extents(rows)
            if layout.param_slices[each.position].dim == 0 or each.row == 0  # a scalar: every row has the same
        ]
        found.append(ScatterTarget(parts, len(rows) * layout.shard_numel, dtype))
    return lambda shard: apart.all_gather(found, shard, name)
