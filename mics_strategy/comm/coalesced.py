"""All-gathers and reduce-scatters of several tensors in one launch.

They need no flat buffer.

A tensor of which every rank has an equal part needs no flat buffer: the parts in rank order are the tensor. The backend
takes all tensors of a bucket at once (NCCL puts them into one kernel), so there is no copy before a reduce-scatter or
after an all-gather. Whether that is faster than one flat buffer and a copy depends on sizes and links, and is measured.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from mics_strategy.comm import route as routes
from mics_strategy.comm.work import Work, check_shapes
from mics_strategy.comm.workspace import Workspace, aligned_bytes

if TYPE_CHECKING:
    from mics_strategy.comm.queue import CollectiveQueue
    from mics_strategy.comm.transport import BackendTransport


class RowViews:
    """Views of the tensors inside a slice of the flat buffer.

    A slice has rows, in each of which a tensor is contiguous.

    Args:
        rows: Rows of the slice.
        extents: Start and length of each tensor in a row, in elements.
        dtype: Dtype on the wire.
    """

    def __init__(self, rows: int, extents: list[tuple[int, int]], dtype: torch.dtype) -> None:
        self.rows = rows
        self.dtype = dtype
        self._extents = extents
        self._views: dict[int, list[torch.Tensor]] = {}

    @property
    def numels(self) -> list[int]:
        """Elements of each tensor in a slice."""
        return [self.rows * numel for _, numel in self._extents]

    def views_of(self, slice_: torch.Tensor) -> list[torch.Tensor]:
        """Views [rows, numel] of the tensors.

        They are cached, since slices are few and keep their addresses.
        """
        address = slice_.data_ptr()
        if address not in self._views:
            table = slice_.view(self.rows, -1)
            self._views[address] = [table[:, start : start + numel] for start, numel in self._extents]
        return self._views[address]


class CoalescedCommunicator:
    """Unquantized collectives on several tensors in one launch.

    They have one or two stages.

    Args:
        route: Route for the traffic log.
        transports: Transports of the inter-node stage and, where there is one, of the intra-node stage.
        queue: Queue that runs the tasks.
        workspace: Scratch memory of the tasks.

    Attributes:
        size: Ranks that take part.
        num_stages: Stages, 1 or 2.
    """

    def __init__(
        self, route: routes.Route, transports: list[BackendTransport], queue: CollectiveQueue, workspace: Workspace
    ) -> None:
        self._route = route
        self._inter, self._intra = transports[0], transports[1] if len(transports) > 1 else None
        self._queue = queue
        self._workspace = workspace
        self.size = route.size
        self.num_stages = len(transports)

    def all_gather(self, outs: list[torch.Tensor], shard: torch.Tensor, parts: RowViews, label: str) -> Work:
        """Put every rank's parts of `shard` into `outs`, in the order of the ranks' index.

        Args:
            outs: [size * part] each, contiguous; overwritten.
            shard: [n]; must stay unchanged until the work has been waited for.
            parts: Views of the parts in `shard`, one for each of `outs`.
            label: Label of the payload in errors.

        Cost:
            That of `Communicator.all_gather`; padding of `shard` is counted, though not sent. A shard of several rows
            is copied once. In two stages the second starts when the first has ended.
        """
        for out, numel in zip(outs, parts.numels, strict=True):
            check_shapes(out.numel() == numel * self.size and out.dtype == shard.dtype, label, shard, out)
        full_numel = shard.numel() * self.size
        op = self._queue.next_op("All-gather", label, full_numel, shard.dtype)
        self._queue.log(routes.all_gather_traffic(self._route, full_numel, shard.dtype))
        return self._queue.submit(op, partial(self._all_gather, outs, shard, parts))

    def reserve_all_gather(self, numel: int, dtype: torch.dtype) -> None:
        """Reserve workspace for all-gathers of shards of `numel` elements."""
        self._workspace.reserve(aligned_bytes((numel, dtype)))

    def _all_gather(self, outs: list[torch.Tensor], shard: torch.Tensor, parts: RowViews) -> None:
        shards = [part.view(-1) for part in parts.views_of(shard)] if parts.rows == 1 else self._pack(shard, parts)
        intra = self._intra
        node_slices = outs if intra is None else [out.view(intra.size, -1)[intra.index] for out in outs]
        self._inter.all_gather_coalesced(node_slices, shards).wait()
        if intra is not None:
            intra.all_gather_coalesced(outs, node_slices).wait()

    def _pack(self, shard: torch.Tensor, parts: RowViews) -> list[torch.Tensor]:
        """Copy the rows of each tensor into one contiguous tensor."""
        packed = self._split_scratch(parts.numels, shard.numel(), shard.dtype)
        torch._foreach_copy_([tensor.view(parts.rows, -1) for tensor in packed], parts.views_of(shard))
        return packed

    def _split_scratch(self, numels: list[int], total: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Allocate `total` elements of the workspace, split into tensors of `numels`."""
        return list(self._workspace.allocate(total, dtype)[: sum(numels)].split(numels))

    def reduce_scatter(
        self, out: torch.Tensor, fulls: list[torch.Tensor], parts: RowViews, accumulate: bool, label: str
    ) -> Work:
        """Sum every rank's `fulls` and keep this rank's part of each.

        Args:
            out: [n], fp32 or wider; its parts are overwritten with the sums, or added to. Padding stays unchanged.
            fulls: [size * part] each, contiguous, the wire dtype.
            parts: Views of the parts in `out`, one for each of `fulls`.
            accumulate: Whether to add to `out` instead of overwriting it.
            label: Label of the payload in errors.

        Returns:
            The work, which keeps `fulls` alive until it has been waited for.

        Cost:
            That of `Communicator.reduce_scatter`. The backend adds in the wire dtype, in an unspecified order.
        """
        for full, numel in zip(fulls, parts.numels, strict=True):
            check_shapes(full.numel() == numel * self.size and full.dtype == parts.dtype, label, out, full)
        full_numel = out.numel() * self.size
        op = self._queue.next_op("Reduce-scatter", label, full_numel, parts.dtype)
        self._queue.log(routes.reduce_scatter_traffic(self._route, full_numel, parts.dtype))
        return self._queue.submit(op, partial(self._reduce_scatter, out, fulls, parts, accumulate)).keep_alive(fulls)

    def reserve_reduce_scatter(self, numel: int, wire: torch.dtype) -> None:
        """Reserve workspace for reduce-scatters of `numel` elements for each rank."""
        node_numel = numel * self._inter.size if self._intra is not None else 0
        self._workspace.reserve(aligned_bytes((numel, wire), (node_numel, wire)))

    def _reduce_scatter(self, out: torch.Tensor, fulls: list[torch.Tensor], parts: RowViews, accumulate: bool) -> None:
        if self._intra is not None:
            numels = [full.numel() // self._intra.size for full in fulls]
            node_sums = self._split_scratch(numels, out.numel() * self._inter.size, parts.dtype)
            self._intra.reduce_scatter_coalesced(node_sums, fulls).wait()
            fulls = node_sums
        sums = self._split_scratch(parts.numels, out.numel(), parts.dtype)
        self._inter.reduce_scatter_coalesced(sums, fulls).wait()
        row_sums = [tensor.view(parts.rows, -1) for tensor in sums]
        if accumulate:
            torch._foreach_add_(parts.views_of(out), row_sums)
        else:
            torch._foreach_copy_(parts.views_of(out), row_sums)
