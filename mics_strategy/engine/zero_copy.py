"""Collectives that read gradients and write parameters without the flat buffer.

A bucket of one parameter whose rows divide evenly is its own flat buffer: any all-gather writes it in place. For other
buckets a backend that accepts several tensors in one launch gathers and reduces each parameter as a tensor of its own,
if each rank has an equal part of it.

A gradient takes the flat buffer where it is not contiguous, has another dtype than the wire, or arrives twice. One
reduce-scatter may have gradients of both kinds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from mics_strategy.comm.communicator import AnyCommunicator, CoalescedCommunicator, RowViews
from mics_strategy.comm.work import Work
from mics_strategy.engine.bucket_specs import BucketSpec, can_reduce_in_place
from mics_strategy.engine.layout import BucketLayout
from mics_strategy.engine.lifecycle import GradFlag, GradFlags

InPlaceGather = Callable[[torch.Tensor], Work]  # all-gathers a shard into the unsharded parameters


def plan_in_place_gather(
    comm: AnyCommunicator | None, spec: BucketSpec, params: list[torch.Tensor]
) -> InPlaceGather | None:
    """All-gather of a shard into the parameters; None where they take the flat buffer.

    Args:
        comm: Communicator of the all-gather; None where nothing is sent.
        spec: The bucket.
        params: Unsharded parameters, contiguous.
    """
    if comm is None or not params:
        return None
    layout, flat_params = spec.layout, [param.view(-1) for param in params]
    if layout.is_one_parameter:
        route_comm = comm.for_bytes(layout.full_numel * params[0].itemsize)
        return partial(route_comm.all_gather, flat_params[0], label=spec.name)
    coalesced = coalesced_comm_for(comm, layout, params[0].itemsize) if spec.coalesce_all_gather else None
    return None if coalesced is None else coalesced_gather(coalesced, layout, flat_params, spec.name)


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


def plan_in_place_reduce(comm: AnyCommunicator | None, spec: BucketSpec) -> CoalescedGrads | None:
    """The in-place gradients of a bucket; None where they take the flat buffer."""
    if comm is None or not can_reduce_in_place(spec):
        return None
    layout, wire_dtype = spec.layout, spec.wire_dtype
    coalesced = coalesced_comm_for(comm, layout, wire_dtype.itemsize) if spec.coalesce_reduce_scatter else None
    return None if coalesced is None else CoalescedGrads(coalesced, layout, wire_dtype)


class CoalescedGrads:
    """Gradients of one bucket that the backend reduces as several tensors in one launch, as autograd stored them.

    Gradients in the flat buffer are copied out of it first.

    Args:
        coalesced: Communicator of several tensors.
        layout: Layout of the bucket.
        wire_dtype: Dtype on the wire.
    """

    def __init__(self, coalesced: CoalescedCommunicator, layout: BucketLayout, wire_dtype: torch.dtype) -> None:
        self._coalesced = coalesced
        self._layout = layout
        self._wire_dtype = wire_dtype
        self._rows = row_views(layout, coalesced.size, wire_dtype)

    def select(self, grads: dict[int, torch.Tensor], flags: GradFlags) -> dict[int, torch.Tensor]:
        """The gradients that can stay in place until the reduce-scatter has read them.

        Args:
            grads: Gradients by position.
            flags: Flags of the parameters; of one that has arrived before, the flat buffer holds a part.
        """
        return {
            position: grad
            for position, grad in grads.items()
            if type(grad) is torch.Tensor
            and grad.dtype is self._wire_dtype
            and grad.is_contiguous()
            and not flags.has(GradFlag.ARRIVED, position)
        }

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
        full_grads = [
            grads[position].view(-1) if position in grads else self._from_flat(flat, position)
            for position in range(len(self._layout.param_slices))
        ]
        return self._coalesced.reduce_scatter(out, full_grads, self._rows, accumulate, label)

    def _from_flat(self, flat: torch.Tensor, position: int) -> torch.Tensor:
        table = flat.view(self._layout.ranks, self._layout.shard_numel)
        param_slice = self._layout.param_slices[position]
        return table[:, param_slice.offset : param_slice.offset + param_slice.chunk_numel].reshape(-1)
