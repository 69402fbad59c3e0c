"""Which gradients may stay where autograd has put them until their sums are made?

Where ranks read one another's memory, a gradient need not be copied into the flat form: its stretches are offered as
they lie. Nor need it where the backend takes several tensors at once and each rank keeps an equal part of it. One that
is not contiguous, or in another dtype than the wire's, or cut along another dimension than the first, takes the flat
form, and so does one that arrives twice; both kinds may be in one sum.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
from typing_extensions import override

from mics_strategy.comm.communicator import AnyCommunicator, Communicator
from mics_strategy.comm.peer_memory.communicator import PeerMemoryCommunicator, ReduceInputs, ShardViews
from mics_strategy.comm.peer_memory.readv import IOV_MAX, SourceVec
from mics_strategy.engine.zero_copy_gather import coalesced_comm_for, parts_of

if TYPE_CHECKING:
    from mics_strategy.comm.coalesced import CoalescedCommunicator
    from mics_strategy.comm.work import Work
    from mics_strategy.engine.bucket import BucketSpec
    from mics_strategy.engine.layout import BucketLayout


class InPlaceGrads(ABC):
    """The gradients of one bucket and one backward that are in no flat form.

    Args:
        eligible: Of each parameter, by its layout.
        wire_dtype: Dtype in which gradients travel.
    """

    def __init__(self, eligible: list[bool], wire_dtype: torch.dtype) -> None:
        self._eligible = eligible
        self._wire_dtype = wire_dtype
        self._grads: dict[int, torch.Tensor] = {}

    def keep(self, position: int, grad: torch.Tensor) -> bool:
        """Keep a gradient as it is; whether that is possible.

        Nobody writes to it meanwhile: autograd gives a parameter a tensor to which nothing else refers, or a copy; but
        not where the gradient is part of a graph itself.
        """
        stays = (
            self._eligible[position]
            and type(grad) is torch.Tensor
            and grad.dtype is self._wire_dtype
            and grad.is_contiguous()
            and not grad.requires_grad
        )
        if stays:
            self._grads[position] = grad
        return stays

    def pop(self, position: int) -> torch.Tensor | None:
        """A gradient that has to take the flat form after all; None where it does already."""
        return self._grads.pop(position, None)

    def clear(self) -> None:
        """Forget all."""
        self._grads = {}

    def reduce_scatter(self, out: torch.Tensor, flat: torch.Tensor, accumulate: bool, what: str) -> Work:
        """Sum what was kept, and of all other parameters what is in the flat form. Nothing is kept afterwards.

        Args:
            out: [n], fp32 or wider: holds the sum of this rank's slice, or has it added; padding stays as it is.
            flat: [full_numel] in the wire dtype.
            accumulate: Add to `out` instead of overwriting it.
            what: Names the caller in errors.
        """
        grads, self._grads = self._grads, {}
        return self._reduce_scatter(out, grads, flat, accumulate, what)

    @abstractmethod
    def _reduce_scatter(
        self, out: torch.Tensor, grads: dict[int, torch.Tensor], flat: torch.Tensor, accumulate: bool, what: str
    ) -> Work:
        """See `reduce_scatter`; `grads` were kept."""


class PeerReadGrads(InPlaceGrads):
    """The ranks of a node read one another's where they are.

    Args:
        across: What sums the flat form.
        apart: The same, for what has none.
        layout: Of the bucket.
        wire_dtype: See `InPlaceGrads`.
    """

    def __init__(
        self, across: Communicator, apart: PeerMemoryCommunicator, layout: BucketLayout, wire_dtype: torch.dtype
    ) -> None:
        super().__init__([not region.dim for region in layout.param_slices], wire_dtype)
        self._peer_memory = apart
        self._index = across.index
        self._slices = [_Slice(layout, rows) for rows in layout.shard_slices(across.size)]
        own = self._slices[across.index].stretches
        self._cut = ShardViews([(each.offset, each.numel) for each in own], wire_dtype)

    @override
    def _reduce_scatter(
        self, out: torch.Tensor, grads: dict[int, torch.Tensor], flat: torch.Tensor, accumulate: bool, what: str
    ) -> Work:
        own = self._slices[self._index].views(grads, flat)
        spreads = [slice_.spread(grads, flat) for slice_ in self._slices]
        summands = ReduceInputs(own, spreads, [flat, *grads.values()])
        return self._peer_memory.reduce_scatter(out, summands, self._cut, accumulate, what)


class CoalescedGrads(InPlaceGrads):
    """The backend sums all of them in one launch, each whole. What is in the flat form is copied out of it first.

    Args:
        coalesced: Sums them.
        layout: Of the bucket.
        wire_dtype: See `InPlaceGrads`.
    """

    def __init__(self, coalesced: CoalescedCommunicator, layout: BucketLayout, wire_dtype: torch.dtype) -> None:
        super().__init__([True] * len(layout.param_slices), wire_dtype)
        self._coalesced = coalesced
        self._layout = layout
        self._parts = parts_of(layout, coalesced.size, wire_dtype)

    @override
    def _reduce_scatter(
        self, out: torch.Tensor, grads: dict[int, torch.Tensor], flat: torch.Tensor, accumulate: bool, what: str
    ) -> Work:
        wholes = [
            grads[position].view(-1) if position in grads else self._from_flat(flat, position)
            for position in range(len(self._layout.param_slices))
        ]
        return self._coalesced.reduce_scatter(out, wholes, self._parts, accumulate, what)

    def _from_flat(self, flat: torch.Tensor, position: int) -> torch.Tensor:
        rows = flat.view(self._layout.ranks, self._layout.shard_numel)
        region = self._layout.param_slices[position]
        return rows[:, region.offset : region.offset + region.chunk_numel].reshape(-1)


class _Slice:
    """What one rank is to have of the sums: some rows of the flat form."""

    def __init__(self, layout: BucketLayout, rows: range) -> None:
        self.stretches = layout.extents(rows)
        self._numel = len(rows) * layout.shard_numel
        self._first = rows.start * layout.shard_numel

    def spread(self, grads: dict[int, torch.Tensor], flat: torch.Tensor) -> SourceVec:
        """Where its stretches are."""
        places = {position: grad.data_ptr() for position, grad in grads.items()}
        itemsize, beginning = flat.itemsize, flat.data_ptr() + self._first * flat.itemsize
        addresses = [
            places[each.position] + (each.start or 0) * itemsize
            if each.position in places
            else beginning + each.offset * itemsize
            for each in self.stretches
        ]
        return SourceVec(addresses, self._numel * itemsize)

    def views(self, grads: dict[int, torch.Tensor], flat: torch.Tensor) -> list[torch.Tensor]:
        """The same as tensors."""
        return [
            grads[each.position].view(-1).narrow(0, each.start or 0, each.numel)
            if each.position in grads
            else flat.narrow(0, self._first + each.offset, each.numel)
            for each in self.stretches
        ]


def plan_in_place_reduce(
    across: AnyCommunicator | None, bucket: BucketSpec, wire_dtype: torch.dtype
) -> InPlaceGrads | None:
    """Keeps gradients of a bucket as they are; None where they take the flat form anyway."""
    if across is None or bucket.param_dtype != wire_dtype:
        return None
    layout = bucket.layout
    coalesced = coalesced_comm_for(across, layout, wire_dtype.itemsize) if bucket.coalesce_reduce_scatter else None
    if coalesced is not None:
        return CoalescedGrads(coalesced, layout, wire_dtype)
    if not isinstance(across, Communicator) or across.peer_memory is None:
        return None
    if max(len(layout.extents(rows)) for rows in layout.shard_slices(across.size)) > IOV_MAX:
        return None
    return PeerReadGrads(across, across.peer_memory, layout, wire_dtype)
