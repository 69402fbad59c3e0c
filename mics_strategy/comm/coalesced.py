"""How do ranks gather and sum several tensors in one launch, each whole where it belongs?

A tensor of which every rank has an equal part needs no flat form: the parts side by side are the tensor. The backend
takes all tensors of a bucket at once (NCCL puts them into one kernel), so no copy goes in front of a sum or behind a
gather. Whether that is faster than one flat tensor and a copy depends on sizes and links, and is measured.
"""

from __future__ import annotations

import torch

from mics_strategy.comm import route as routes
from mics_strategy.comm.queue import CollectiveQueue
from mics_strategy.comm.transport import Transport
from mics_strategy.comm.work import Work, check_shapes
from mics_strategy.comm.workspace import Workspace, aligned_bytes


class RowViews:
    """What a slice of the flat form has of every tensor: some rows, in each of which a tensor's numbers are together.

    Args:
        rows: Of the slice.
        places: Where each tensor's numbers begin in a row, and how many they are.
        dtype: In which they travel.
    """

    def __init__(self, rows: int, places: list[tuple[int, int]], dtype: torch.dtype) -> None:
        self.rows = rows
        self.dtype = dtype
        self._places = places
        self._views: dict[int, list[torch.Tensor]] = {}

    @property
    def numels(self) -> list[int]:
        """Of each tensor, elements in a slice."""
        return [self.rows * numel for _, numel in self._places]

    def views_of(self, slice_: torch.Tensor) -> list[torch.Tensor]:
        """Views [rows, numel]. Slices are few and stay where they are, so the views are made once."""
        address = slice_.data_ptr()
        if address not in self._views:
            table = slice_.view(self.rows, -1)
            self._views[address] = [table[:, start : start + numel] for start, numel in self._places]
        return self._views[address]


class CoalescedCommunicator:
    """Collectives in one or two stages over ranks whose backend takes several tensors at once, nothing encoded.

    Args:
        route: For the account.
        transports: Of the slow stage, and of the fast one where there is one.
        programs: Runs them.
        workspace: Of the programs.

    Attributes:
        num_stages: One or two.
    """

    def __init__(
        self, route: routes.Route, transports: list[Transport], programs: CollectiveQueue, workspace: Workspace
    ) -> None:
        self._route = route
        self._inter, self._intra = transports[0], transports[1] if len(transports) > 1 else None
        self._queue = programs
        self._workspace = workspace
        self.size = route.size
        self.num_stages = len(transports)

    def all_gather(self, wholes: list[torch.Tensor], shard: torch.Tensor, parts: RowViews, what: str) -> Work:
        """Put every rank's parts of `shard` side by side, in the order of the ranks' index.

        Args:
            wholes: [size * part] each, contiguous; overwritten.
            shard: [n]; must stay unchanged until the handle has been waited for.
            parts: Of `shard`, one for each of `wholes`.
            what: Names the caller in errors.

        Cost:
            That of `Collective.gather`; padding of `shard` is counted, though not sent. A shard of several rows is
            copied once. In two stages the second starts when the first has ended.
        """
        for whole, numel in zip(wholes, parts.numels, strict=True):
            check_shapes(whole.numel() == numel * self.size and whole.dtype == shard.dtype, what, shard, whole)
        full_numel = shard.numel() * self.size
        asked = self._queue.next_op("Gather", what, full_numel, shard.dtype)
        self._queue.log(routes.all_gather_traffic(self._route, full_numel, shard.dtype))
        return self._queue.submit(asked, lambda: self._all_gather(wholes, shard, parts))

    def reserve_all_gather(self, numel: int, dtype: torch.dtype) -> None:
        """Announce gathers of shards of `numel` elements."""
        self._workspace.reserve(aligned_bytes((numel, dtype)))

    def _all_gather(self, wholes: list[torch.Tensor], shard: torch.Tensor, parts: RowViews) -> None:
        own = [part.view(-1) for part in parts.views_of(shard)] if parts.rows == 1 else self._pack(shard, parts)
        fast = self._intra
        mine = wholes if fast is None else [whole.view(fast.size, -1)[fast.index] for whole in wholes]
        self._inter.all_gather_coalesced(mine, own).wait()
        if fast is not None:
            fast.all_gather_coalesced(wholes, mine).wait()

    def _pack(self, shard: torch.Tensor, parts: RowViews) -> list[torch.Tensor]:
        """The numbers of each tensor side by side."""
        own = self._split_scratch(parts.numels, shard.numel(), shard.dtype)
        torch._foreach_copy_([each.view(parts.rows, -1) for each in own], parts.views_of(shard))
        return own

    def _split_scratch(self, numels: list[int], total: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Tensors in a piece of the workspace, which has `total` elements."""
        return list(self._workspace.allocate(total, dtype)[: sum(numels)].split(numels))

    def reduce_scatter(
        self, out: torch.Tensor, fulls: list[torch.Tensor], parts: RowViews, accumulate: bool, what: str
    ) -> Work:
        """Sum every rank's `fulls` and keep this rank's part of each.

        Args:
            out: [n], fp32 or wider: its parts hold the sums, or have them added; padding stays as it is.
            fulls: [size * part] each, contiguous, the wire dtype.
            parts: Of `out`, one for each of `fulls`.
            accumulate: Add to `out` instead of overwriting it.
            what: Names the caller in errors.

        Returns:
            The handle, which keeps `fulls` until it has been waited for.

        Cost:
            That of `Collective.reduce`. The backend adds in the wire dtype, in an order of its own.
        """
        for full, numel in zip(fulls, parts.numels, strict=True):
            check_shapes(full.numel() == numel * self.size and full.dtype == parts.dtype, what, out, full)
        full_numel = out.numel() * self.size
        asked = self._queue.next_op("Reduction", what, full_numel, parts.dtype)
        self._queue.log(routes.reduce_scatter_traffic(self._route, full_numel, parts.dtype))
        return self._queue.submit(asked, lambda: self._reduce_scatter(out, fulls, parts, accumulate)).keep_alive(fulls)

    def reserve_reduce_scatter(self, numel: int, wire: torch.dtype) -> None:
        """Announce sums of `numel` elements for each rank."""
        halves = numel * self._inter.size if self._intra is not None else 0
        self._workspace.reserve(aligned_bytes((numel, wire), (halves, wire)))

    def _reduce_scatter(self, out: torch.Tensor, fulls: list[torch.Tensor], parts: RowViews, accumulate: bool) -> None:
        if self._intra is not None:
            numels = [full.numel() // self._intra.size for full in fulls]
            halves = self._split_scratch(numels, out.numel() * self._inter.size, parts.dtype)
            self._intra.reduce_scatter_coalesced(halves, fulls).wait()
            fulls = halves
        arrived = self._split_scratch(parts.numels, out.numel(), parts.dtype)
        self._inter.reduce_scatter_coalesced(arrived, fulls).wait()
        summed = [each.view(parts.rows, -1) for each in arrived]
        if accumulate:
            torch._foreach_add_(parts.views_of(out), summed)
        else:
            torch._foreach_copy_(parts.views_of(out), summed)
