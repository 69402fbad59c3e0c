"""How do ranks gather and sum several tensors in one launch, each whole where it belongs?

A tensor of which every rank has an equal part needs no flat form: the parts side by side are the tensor. The backend
takes all tensors of a bucket at once (NCCL puts them into one kernel), so no copy goes in front of a sum or behind a
gather. Whether that is faster than one flat tensor and a copy depends on sizes and links, and is measured.
"""

from __future__ import annotations

import torch

from mics_strategy.collectives import route as routes
from mics_strategy.collectives.ops import Handle, check_fit
from mics_strategy.collectives.programs import Programs
from mics_strategy.collectives.transport import Transport
from mics_strategy.collectives.workspace import Workspace, aligned_bytes


class Parts:
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

    def of(self, slice_: torch.Tensor) -> list[torch.Tensor]:
        """Views [rows, numel]. Slices are few and stay where they are, so the views are made once."""
        address = slice_.data_ptr()
        if address not in self._views:
            table = slice_.view(self.rows, -1)
            self._views[address] = [table[:, start : start + numel] for start, numel in self._places]
        return self._views[address]


class Coalesced:
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
        self, route: routes.Route, transports: list[Transport], programs: Programs, workspace: Workspace
    ) -> None:
        self._route = route
        self._slow, self._fast = transports[0], transports[1] if len(transports) > 1 else None
        self._programs = programs
        self._workspace = workspace
        self.size = route.size
        self.num_stages = len(transports)

    def gather(self, wholes: list[torch.Tensor], shard: torch.Tensor, parts: Parts, what: str) -> Handle:
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
            check_fit(whole.numel() == numel * self.size and whole.dtype == shard.dtype, what, shard, whole)
        full_numel = shard.numel() * self.size
        asked = self._programs.ask("Gather", what, full_numel, shard.dtype)
        self._programs.write(routes.gather_messages(self._route, full_numel, shard.dtype))
        return self._programs.run(asked, lambda: self._gather(wholes, shard, parts))

    def reserve_gather(self, numel: int, dtype: torch.dtype) -> None:
        """Announce gathers of shards of `numel` elements."""
        self._workspace.reserve(aligned_bytes((numel, dtype)))

    def _gather(self, wholes: list[torch.Tensor], shard: torch.Tensor, parts: Parts) -> None:
        own = [part.view(-1) for part in parts.of(shard)] if parts.rows == 1 else self._together(shard, parts)
        fast = self._fast
        mine = wholes if fast is None else [whole.view(fast.size, -1)[fast.index] for whole in wholes]
        self._slow.gather_each(mine, own).wait()
        if fast is not None:
            fast.gather_each(wholes, mine).wait()

    def _together(self, shard: torch.Tensor, parts: Parts) -> list[torch.Tensor]:
        """The numbers of each tensor side by side."""
        own = self._side_by_side(parts.numels, shard.numel(), shard.dtype)
        torch._foreach_copy_([each.view(parts.rows, -1) for each in own], parts.of(shard))
        return own

    def _side_by_side(self, numels: list[int], total: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Tensors in a piece of the workspace, which has `total` elements."""
        return list(self._workspace.take(total, dtype)[: sum(numels)].split(numels))

    def reduce(self, out: torch.Tensor, fulls: list[torch.Tensor], parts: Parts, accumulate: bool, what: str) -> Handle:
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
            check_fit(full.numel() == numel * self.size and full.dtype == parts.dtype, what, out, full)
        full_numel = out.numel() * self.size
        asked = self._programs.ask("Reduction", what, full_numel, parts.dtype)
        self._programs.write(routes.reduce_messages(self._route, full_numel, parts.dtype))
        return self._programs.run(asked, lambda: self._reduce(out, fulls, parts, accumulate)).keep(fulls)

    def reserve_reduce(self, numel: int, wire: torch.dtype) -> None:
        """Announce sums of `numel` elements for each rank."""
        halves = numel * self._slow.size if self._fast is not None else 0
        self._workspace.reserve(aligned_bytes((numel, wire), (halves, wire)))

    def _reduce(self, out: torch.Tensor, fulls: list[torch.Tensor], parts: Parts, accumulate: bool) -> None:
        if self._fast is not None:
            numels = [full.numel() // self._fast.size for full in fulls]
            halves = self._side_by_side(numels, out.numel() * self._slow.size, parts.dtype)
            self._fast.reduce_scatter_each(halves, fulls).wait()
            fulls = halves
        arrived = self._side_by_side(parts.numels, out.numel(), parts.dtype)
        self._slow.reduce_scatter_each(arrived, fulls).wait()
        summed = [each.view(parts.rows, -1) for each in arrived]
        if accumulate:
            torch._foreach_add_(parts.of(out), summed)
        else:
            torch._foreach_copy_(parts.of(out), summed)
