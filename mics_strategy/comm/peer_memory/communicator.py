"""How do ranks gather and sum what lies apart: parameters and gradients, each where it is used and where it was made?

Ranks that read one another's memory need no flat form, which is a copy more of everything: a rank reads the stretches
that it needs, from where its neighbours have them to where they belong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mics_strategy.comm import route as routes
from mics_strategy.comm.peer_memory.readv import GatherTarget, ScatterTarget, SourceVec
from mics_strategy.comm.queue import CollectiveQueue
from mics_strategy.comm.transport import Transport
from mics_strategy.comm.work import Work, check_shapes
from mics_strategy.comm.workspace import Workspace


class ShardViews:
    """The stretches of a slice of the flat form; what is in none is padding.

    Args:
        stretches: Where each begins, and its length, in elements.
        dtype: In which they travel.
    """

    def __init__(self, stretches: Sequence[tuple[int, int]], dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._stretches = stretches
        self._views: dict[int, list[torch.Tensor]] = {}

    def views_of(self, slice_: torch.Tensor) -> list[torch.Tensor]:
        """Views of the stretches. Slices are few and stay where they are, so the views are made once."""
        address = slice_.data_ptr()
        if address not in self._views:
            self._views[address] = [slice_[start : start + numel] for start, numel in self._stretches]
        return self._views[address]


@dataclass(frozen=True, slots=True)
class ReduceInputs:
    """What one rank has for the sums of all: stretches that lie apart, contiguous.

    Attributes:
        own: For this rank's slice, in the order of its cut.
        spreads: For the slice of each rank, by its index; the own one is not used.
        keep_alive: What all of them lie in.
    """

    own: list[torch.Tensor]
    spreads: list[SourceVec]
    keep_alive: list[torch.Tensor]


class PeerMemoryCommunicator:
    """Collectives of one stage over ranks that read one another's memory, nothing encoded.

    Args:
        route: For the account.
        transport: Of the ranks.
        programs: Runs them.
        workspace: Of the programs.
    """

    def __init__(
        self, route: routes.Route, transport: Transport, programs: CollectiveQueue, workspace: Workspace
    ) -> None:
        self._route = route
        self._transport = transport
        self._queue = programs
        self._workspace = workspace

    def all_gather(self, rows: list[ScatterTarget], shard: torch.Tensor, what: str) -> Work:
        """Put the elements of every rank's `shard` where they belong.

        Args:
            rows: For each rank, in the order of their index.
            shard: [n], as many as each row; must stay unchanged until the handle has been waited for.
            what: Names the caller in errors.

        Cost:
            That of `Collective.gather`.
        """
        transport, full_numel = self._transport, shard.numel() * self._transport.size
        check_shapes(rows[transport.index].numel() == shard.numel(), what, shard, shard)
        asked = self._queue.next_op("Gather", what, full_numel, shard.dtype)
        self._queue.log(routes.all_gather_traffic(self._route, full_numel, shard.dtype))
        return self._queue.submit(asked, lambda: transport.all_gather_into(rows, shard, asked.tag).wait())

    def reduce_scatter(
        self, out: torch.Tensor, summands: ReduceInputs, cut: ShardViews, accumulate: bool, what: str
    ) -> Work:
        """Sum every rank's summands of this rank's slice, in the order of the ranks.

        Args:
            out: [n], fp32 or wider: holds the sum, or has it added; padding stays as it is.
            summands: What this rank has.
            cut: Of the slice that this rank keeps.
            accumulate: Add to `out` instead of overwriting it.
            what: Names the caller in errors.

        Cost:
            That of `Collective.reduce`, whose workspace it uses; padding is counted, though not read.
        """
        full_numel = out.numel() * self._transport.size
        asked = self._queue.next_op("Reduction", what, full_numel, cut.dtype)
        self._queue.log(routes.reduce_scatter_traffic(self._route, full_numel, cut.dtype))
        return self._queue.submit(asked, lambda: self._reduce_scatter(out, summands, cut, accumulate, asked.tag))

    def _reduce_scatter(
        self, out: torch.Tensor, summands: ReduceInputs, cut: ShardViews, accumulate: bool, tag: int
    ) -> None:
        transport, sums = self._transport, cut.views_of(out)
        others = [index for index in range(transport.size) if index != transport.index]
        arrived = {index: cut.views_of(self._workspace.allocate(out.numel(), cut.dtype)) for index in others}
        targets = {index: GatherTarget(parts, out.numel(), cut.dtype) for index, parts in arrived.items()}
        under_way = transport.all_to_all_scattered(targets, summands.spreads, tag)
        for index in range(transport.size):
            under_way.wait_recv(index)
            parts = arrived.get(index, summands.own)
            if not sums:  # a rank behind the last row, whose slice is padding
                continue
            if accumulate or index:
                torch._foreach_add_(sums, parts)
            else:
                torch._foreach_copy_(sums, parts)
        under_way.wait()
