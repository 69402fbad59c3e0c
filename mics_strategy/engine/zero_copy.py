"""Collectives that read gradients and write parameters without the flat buffer.

A bucket of one parameter whose rows divide evenly is its own flat buffer: any all-gather writes it in place. For other
buckets two transports offer such collectives. Ranks that read one another's memory copy every extent of a shard into
its parameter, and read every extent of a gradient where autograd has stored it. A backend that accepts several tensors
in one launch gathers and reduces each parameter as a tensor of its own, if each rank has an equal part of it.

A gradient takes the flat buffer where it is not contiguous, has another dtype than the wire, arrives twice, or (with
peer memory) is sharded along another dimension than the first. One reduce-scatter may have gradients of both kinds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from typing_extensions import override

from mics_strategy.comm.communicator import CoalescedCommunicator, RowViews
from mics_strategy.comm.peer_memory.communicator import PeerMemoryCommunicator, ReduceInputs, ShardViews
from mics_strategy.comm.peer_memory.readv import IOV_MAX, ScatterTarget, SourceVec
from mics_strategy.comm.work import Work
from mics_strategy.engine.lifecycle import GradFlag, GradFlags

if TYPE_CHECKING:
    from mics_strategy.comm.communicator import AnyCommunicator
    from mics_strategy.engine.layout import BucketLayout, BucketSpec

InPlaceGather = Callable[[torch.Tensor], Work]  # all-gathers a shard into the unsharded parameters


def plan_in_place_gather(
    comm: AnyCommunicator | None, layout: BucketLayout, params: list[torch.Tensor], label: str, *, coalesces: bool
) -> InPlaceGather | None:
    """All-gather of a shard into the parameters; None where they take the flat buffer.

    Args:
        comm: Communicator of the all-gather; None where nothing is sent.
        layout: Layout of the bucket.
        params: Unsharded parameters, contiguous.
        label: Label of the bucket in errors.
        coalesces: Whether to send the parameters as several tensors in one launch, where that is possible.
    """
    if comm is None or not params:
        return None
    flat_params = [param.view(-1) for param in params]
    if layout.is_one_parameter:
        route_comm = comm.for_bytes(layout.full_numel * params[0].itemsize)
        return partial(route_comm.all_gather, flat_params[0], label=label)
    coalesced = coalesced_comm_for(comm, layout, params[0].itemsize) if coalesces else None
    if coalesced is not None:
        return coalesced_gather(coalesced, layout, flat_params, label)
    peer_memory = comm.for_bytes(layout.full_numel * params[0].itemsize).peer_memory
    if peer_memory is None or any(param_slice.dim for param_slice in layout.param_slices):
        return None
    return peer_read_gather(peer_memory, comm.size, layout, flat_params, label)


def coalesced_comm_for(comm: AnyCommunicator, layout: BucketLayout, itemsize: int) -> CoalescedCommunicator | None:
    """Communicator of several tensors in one launch; None if a bucket cannot use it."""
    if not layout.is_evenly_divisible:
        return None
    return comm.for_bytes(layout.full_numel * itemsize).coalesced


def row_views(layout: BucketLayout, size: int, dtype: torch.dtype) -> RowViews:
    """Views of the parameters in one of `size` ranks' slice of the flat buffer."""
    extents = [(param_slice.offset, param_slice.chunk_numel) for param_slice in layout.param_slices]
    return RowViews(layout.ranks // size, extents, dtype)


def coalesced_gather(
    coalesced: CoalescedCommunicator, layout: BucketLayout, flat_params: list[torch.Tensor], label: str
) -> InPlaceGather:
    """An all-gather of a shard into `flat_params`, [numel] each, in one launch.

    Each parameter is a tensor of its own.
    """
    rows = row_views(layout, coalesced.size, flat_params[0].dtype)
    return lambda shard: coalesced.all_gather(flat_params, shard, rows, label)


def peer_read_gather(
    peer_memory: PeerMemoryCommunicator, size: int, layout: BucketLayout, flat_params: list[torch.Tensor], label: str
) -> InPlaceGather:
    """An all-gather that copies shards of `size` ranks to `flat_params`, [numel] each.

    It reads the memory of the other ranks.
    """
    targets = []
    for rows in layout.shard_slices(size):
        places = [
            (extent.offset, flat_params[extent.position].narrow(0, extent.start or 0, extent.numel))
            for extent in layout.extents(rows)
            if layout.param_slices[extent.position].dim == 0 or extent.row == 0  # every row has the same scalars
        ]
        targets.append(ScatterTarget(places, len(rows) * layout.shard_numel, flat_params[0].dtype))
    return lambda shard: peer_memory.all_gather(targets, shard, label)


def can_reduce_in_place(spec: BucketSpec, wire_dtype: torch.dtype) -> bool:
    """Whether gradients can be sent as autograd stores them: in the parameters' dtype."""
    return spec.trainable and spec.param_dtype == wire_dtype


def plan_in_place_reduce(
    comm: AnyCommunicator | None, spec: BucketSpec, wire_dtype: torch.dtype
) -> InPlaceGrads | None:
    """The in-place gradients of a bucket; None where they take the flat buffer."""
    if comm is None or not can_reduce_in_place(spec, wire_dtype):
        return None
    layout = spec.layout
    coalesced = coalesced_comm_for(comm, layout, wire_dtype.itemsize) if spec.coalesce_reduce_scatter else None
    if coalesced is not None:
        return CoalescedGrads(coalesced, layout, wire_dtype)
    peer_memory = comm.for_bytes(layout.full_numel * wire_dtype.itemsize).peer_memory
    if peer_memory is None or max(len(layout.extents(rows)) for rows in layout.shard_slices(comm.size)) > IOV_MAX:
        return None
    return PeerReadGrads(comm, peer_memory, layout, wire_dtype)


class InPlaceGrads(ABC):
    """Gradients of one bucket and one backward that stay where autograd stored them.

    Args:
        eligible: Whether the layout lets each parameter's gradient stay.
        wire_dtype: Dtype on the wire.
    """

    def __init__(self, eligible: list[bool], wire_dtype: torch.dtype) -> None:
        self._eligible = eligible
        self._wire_dtype = wire_dtype

    def select(self, grads: dict[int, torch.Tensor], flags: GradFlags) -> dict[int, torch.Tensor]:
        """The gradients that can stay in place until the reduce-scatter has read them.

        Args:
            grads: Gradients by position.
            flags: Flags of the parameters; of one that has arrived before, the flat buffer holds a part.
        """
        return {
            position: grad
            for position, grad in grads.items()
            if self._eligible[position]
            and type(grad) is torch.Tensor
            and grad.dtype is self._wire_dtype
            and grad.is_contiguous()
            and not flags.has(GradFlag.ARRIVED, position)
        }

    @abstractmethod
    def reduce_scatter(
        self, out: torch.Tensor, grads: dict[int, torch.Tensor], flat: torch.Tensor, accumulate: bool, label: str
    ) -> Work:
        """Sum the gradients in place, all others in the flat buffer.

        Args:
            out: [n], fp32 or wider: overwritten with the sum of this rank's slice, or added to. Padding is unchanged.
            grads: Gradients in place, by position.
            flat: [full_numel] in the wire dtype.
            accumulate: Whether to add to `out` instead of overwriting it.
            label: Label of the bucket in errors.
        """


class PeerReadGrads(InPlaceGrads):
    """In-place gradients that the ranks of a node read from one another's memory.

    Args:
        comm: Communicator of the reduce-scatter.
        peer_memory: The same collective on scattered tensors.
        layout: Layout of the bucket.
        wire_dtype: See `InPlaceGrads`.
    """

    def __init__(
        self, comm: AnyCommunicator, peer_memory: PeerMemoryCommunicator, layout: BucketLayout, wire_dtype: torch.dtype
    ) -> None:
        super().__init__([not param_slice.dim for param_slice in layout.param_slices], wire_dtype)
        self._peer_memory = peer_memory
        self._index = comm.index
        self._slices = [_RankSlice(layout, rows) for rows in layout.shard_slices(comm.size)]
        extents = self._slices[comm.index].extents
        self._shard_views = ShardViews([(extent.offset, extent.numel) for extent in extents], wire_dtype)

    @override
    def reduce_scatter(
        self, out: torch.Tensor, grads: dict[int, torch.Tensor], flat: torch.Tensor, accumulate: bool, label: str
    ) -> Work:
        local_views = self._slices[self._index].views(grads, flat)
        sources = [rank_slice.source(grads, flat) for rank_slice in self._slices]
        inputs = ReduceInputs(local_views, sources, [flat, *grads.values()])
        return self._peer_memory.reduce_scatter(out, inputs, self._shard_views, accumulate, label)


class CoalescedGrads(InPlaceGrads):
    """In-place gradients that the backend reduces as several tensors in one launch.

    Gradients in the flat buffer are copied out of it first.

    Args:
        coalesced: Communicator of several tensors.
        layout: Layout of the bucket.
        wire_dtype: See `InPlaceGrads`.
    """

    def __init__(self, coalesced: CoalescedCommunicator, layout: BucketLayout, wire_dtype: torch.dtype) -> None:
        super().__init__([True] * len(layout.param_slices), wire_dtype)
        self._coalesced = coalesced
        self._layout = layout
        self._rows = row_views(layout, coalesced.size, wire_dtype)

    @override
    def reduce_scatter(
        self, out: torch.Tensor, grads: dict[int, torch.Tensor], flat: torch.Tensor, accumulate: bool, label: str
    ) -> Work:
        full_grads = [
            grads[position].view(-1) if position in grads else self._from_flat(flat, position)
            for position in range(len(self._layout.param_slices))
        ]
        return self._coalesced.reduce_scatter(out, full_grads, self._rows, accumulate, label)

    def _from_flat(self, flat: torch.Tensor, position: int) -> torch.Tensor:
        table = flat.view(self._layout.ranks, self._layout.shard_numel)
        param_slice = self._layout.param_slices[position]
        return table[:, param_slice.offset : param_slice.offset + param_slice.chunk_numel].reshape(-1)


class _RankSlice:
    """The slice of the flat buffer whose sum one rank receives: some of its rows."""

    def __init__(self, layout: BucketLayout, rows: range) -> None:
        self.extents = layout.extents(rows)
        self._numel = len(rows) * layout.shard_numel
        self._start = rows.start * layout.shard_numel

    def source(self, grads: dict[int, torch.Tensor], flat: torch.Tensor) -> SourceVec:
        """Addresses of the extents, in the gradients or in the flat buffer."""
        grad_addresses = {position: grad.data_ptr() for position, grad in grads.items()}
        itemsize, slice_address = flat.itemsize, flat.data_ptr() + self._start * flat.itemsize
        addresses = [
            grad_addresses[extent.position] + (extent.start or 0) * itemsize
            if extent.position in grad_addresses
            else slice_address + extent.offset * itemsize
            for extent in self.extents
        ]
        return SourceVec(addresses, self._numel * itemsize)

    def views(self, grads: dict[int, torch.Tensor], flat: torch.Tensor) -> list[torch.Tensor]:
        """The extents as tensors."""
        return [
            grads[extent.position].view(-1).narrow(0, extent.start or 0, extent.numel)
            if extent.position in grads
            else flat.narrow(0, self._start + extent.offset, extent.numel)
            for extent in self.extents
        ]
