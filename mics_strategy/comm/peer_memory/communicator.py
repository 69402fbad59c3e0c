"""Collectives on scattered tensors, for ranks that read one another's memory.

Such ranks need no flat buffer, which is one more copy of everything: a rank reads the extents that it needs from the
parameters or gradients of its peers, and writes them to their destinations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from mics_strategy.comm import route as routes
from mics_strategy.comm import traffic
from mics_strategy.comm.peer_memory.readv import GatherTarget, ScatterTarget, SourceVec
from mics_strategy.comm.work import Steps, Work, check_shapes

if TYPE_CHECKING:
    from mics_strategy.comm.queue import CollectiveQueue
    from mics_strategy.comm.transport import GlooTransport
    from mics_strategy.comm.workspace import Workspace


class ShardViews:
    """Views of the extents of a slice of the flat buffer.

    Elements outside of them are padding.

    Args:
        extents: Start and length of each extent, in elements.
        dtype: Dtype on the wire.
    """

    def __init__(self, extents: Sequence[tuple[int, int]], dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._extents = extents
        self._views: dict[int, list[torch.Tensor]] = {}

    def views_of(self, slice_: torch.Tensor) -> list[torch.Tensor]:
        """Views of the extents.

        They are cached, since slices are few and keep their addresses.
        """
        address = slice_.data_ptr()
        if address not in self._views:
            self._views[address] = [slice_[start : start + numel] for start, numel in self._extents]
        return self._views[address]


@dataclass(frozen=True, slots=True)
class ReduceInputs:
    """The inputs of one rank to a reduce-scatter: scattered contiguous tensors.

    Attributes:
        local_parts: Parts for this rank's own slice, in the order of its extents.
        sources: Addresses of the parts for the slice of each rank, by its index; this rank's own entry is unused.
        keep_alive: Tensors that hold all parts.
    """

    local_parts: list[torch.Tensor]
    sources: list[SourceVec]
    keep_alive: list[torch.Tensor]


class PeerMemoryCommunicator:
    """Collectives of one stage over ranks that read one another's memory, unquantized.

    Args:
        route: Route for the traffic log.
        transport: Transport of the ranks.
        queue: Queue that runs the tasks.
        workspace: Scratch memory of the tasks.
    """

    def __init__(
        self, route: routes.Route, transport: GlooTransport, queue: CollectiveQueue, workspace: Workspace
    ) -> None:
        self._route = route
        self._transport = transport
        self._queue = queue
        self._workspace = workspace

    def all_gather(self, rows: list[ScatterTarget], shard: torch.Tensor, label: str) -> Work:
        """Scatter the elements of every rank's `shard` to their destinations.

        Args:
            rows: Destinations of each rank's shard, in the order of the ranks' index.
            shard: [n], as many elements as each row; must stay unchanged until the work has been waited for.
            label: Label of the payload in errors.

        Cost:
            That of `Communicator.all_gather`.
        """
        full_numel = shard.numel() * self._transport.size
        check_shapes(rows[self._transport.index].numel() == shard.numel(), label, shard, shard)
        op = self._queue.next_op("All-gather", label, full_numel, shard.dtype)
        self._queue.log(traffic.all_gather_traffic(self._route, full_numel, shard.dtype))
        return self._queue.submit(op, partial(self._all_gather, rows, shard, op.tag))

    def _all_gather(self, rows: list[ScatterTarget], shard: torch.Tensor, tag: int) -> Steps:
        yield
        self._transport.all_gather_into(rows, shard, tag).wait()

    def reduce_scatter(
        self, out: torch.Tensor, inputs: ReduceInputs, views: ShardViews, accumulate: bool, label: str
    ) -> Work:
        """Sum the inputs of all ranks for this rank's slice, in the order of the ranks.

        Args:
            out: [n], fp32 or wider; overwritten with the sum, or added to. Padding stays unchanged.
            inputs: Inputs of this rank.
            views: Extents of the slice that this rank keeps.
            accumulate: Whether to add to `out` instead of overwriting it.
            label: Label of the payload in errors.

        Cost:
            That of `Communicator.reduce_scatter`, with its workspace; padding is counted, though not read.
        """
        full_numel = out.numel() * self._transport.size
        op = self._queue.next_op("Reduce-scatter", label, full_numel, views.dtype)
        self._queue.log(traffic.reduce_scatter_traffic(self._route, full_numel, views.dtype))
        return self._queue.submit(op, partial(self._reduce_scatter, out, inputs, views, accumulate, op.tag))

    def _reduce_scatter(
        self, out: torch.Tensor, inputs: ReduceInputs, views: ShardViews, accumulate: bool, tag: int
    ) -> Steps:
        yield
        transport, sums = self._transport, views.views_of(out)
        others = [index for index in range(transport.size) if index != transport.index]
        received = {index: views.views_of(self._workspace.allocate(out.numel(), views.dtype)) for index in others}
        targets = {index: GatherTarget(parts, out.numel(), views.dtype) for index, parts in received.items()}
        transport.all_to_all_scattered(targets, inputs.sources, tag).wait()
        for index in range(transport.size):
            parts = received.get(index, inputs.local_parts)
            if not sums:  # a rank after the last row, whose slice is all padding
                continue
            if accumulate or index:
                torch._foreach_add_(sums, parts)
            else:
                torch._foreach_copy_(sums, parts)
