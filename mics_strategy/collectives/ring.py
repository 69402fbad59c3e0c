"""How do ranks of several nodes gather and add in one stage, at the least cost for the links between nodes?

Every rank sends to one neighbour only, in the order of the ranks' numbers, so a transfer leaves each node once, in
whatever order the shards are. It costs M (p - 1) / p per node, two stages M (p - k) / p. It is what
`hierarchical=False` means where messages are sent point to point.
"""

from __future__ import annotations

import torch

from mics_strategy.collectives.stages import Completion, SumCompletion
from mics_strategy.collectives.transport import Transport
from mics_strategy.collectives.workspace import Workspace, aligned_bytes


class RingAlgorithm:
    """Passes numbers on from neighbour to neighbour.

    Sums travel in the wire dtype, and a narrow one rounds them at every rank.

    Args:
        transport: Of the group; point to point.
        workspace: Lends what is received.

    Source:
        PaRO (arXiv:2310.06003) section 3.3, the ring that HO-Ring is compared with.
    """

    def __init__(self, transport: Transport, workspace: Workspace) -> None:
        self.transport = transport
        self._workspace = workspace
        ranks = transport.fingerprint.ranks
        self._ring = sorted(range(transport.size), key=lambda index: ranks[index])  # indices of shards
        self._ring_index = self._ring.index(transport.index)
        self._prev = self._ring[self._ring_index - 1]
        self._next = self._ring[(self._ring_index + 1) % transport.size]

    def all_gather_scratch_bytes(self, numel: int, dtype: torch.dtype, wire: torch.dtype) -> int:
        """See `Stage.gather_bytes`."""
        return 0 if wire == dtype else self.transport.size * aligned_bytes((numel, wire))

    def start_all_gather(self, rows: list[torch.Tensor], own: torch.Tensor, wire: torch.dtype, tag: int) -> Completion:
        """See `Stage.start_all_gather`."""
        if wire == own.dtype:
            return self._ring_all_gather(rows, own, tag)
        narrow = [self._workspace.allocate(own.numel(), wire) for _ in rows]
        arrive = self._ring_all_gather(narrow, narrow[self.transport.index].copy_(own), tag)

        def finish() -> None:
            arrive()
            for row, arrived in zip(rows, narrow, strict=True):
                row.copy_(arrived)

        return finish

    def _ring_all_gather(self, rows: list[torch.Tensor], own: torch.Tensor, tag: int) -> Completion:
        """Gather.

        1. Receive the rows of the ranks on the left, the nearest first, from the next on the left.
        2. Send the own row to the right, and each that arrives but the last.
        """
        arriving = [self._ring[self._ring_index - step] for step in range(1, self.transport.size)]
        mine = rows[self.transport.index]
        if own.data_ptr() != mine.data_ptr():
            mine.copy_(own)
        arrivals = [self.transport.recv(rows[index], self._prev, tag) for index in arriving]
        departures = [self.transport.send(mine, self._next, tag)]

        def finish() -> None:
            for index, arrival in zip(arriving, arrivals, strict=True):
                arrival.wait()
                if index != arriving[-1]:
                    departures.append(self.transport.send(rows[index], self._next, tag))
            for departure in departures:
                departure.wait()

        return finish

    def reduce_scatter_scratch_bytes(self, numel: int, dtype: torch.dtype, wire: torch.dtype) -> int:
        """See `Stage.reduce_scatter_scratch_bytes`."""
        return self.transport.size * aligned_bytes((numel, wire)) * (1 if wire == dtype else 2)

    def start_reduce_scatter(self, pieces: list[torch.Tensor], wire: torch.dtype, tag: int) -> SumCompletion:
        """See `Stage.start_reduce_scatter`.

        1. Send the piece of the rank on the left to the right: it goes all the way round, to that rank.
        2. Add the own piece to every sum that arrives, and send it on; the last one is this rank's.
        """
        numel = pieces[0].numel()
        if wire != pieces[0].dtype:
            pieces = [self._workspace.allocate(numel, wire).copy_(piece) for piece in pieces]
        arriving = [self._ring[self._ring_index - step] for step in range(2, self.transport.size + 1)]
        sums = [self._workspace.allocate(numel, wire) for _ in arriving]
        arrivals = [self.transport.recv(each, self._prev, tag) for each in sums]
        departures = [self.transport.send(pieces[self._prev], self._next, tag)]

        def finish(out: torch.Tensor, accumulate: bool) -> None:
            for index, arrival, each in zip(arriving, arrivals, sums, strict=True):
                arrival.wait()
                if index != self.transport.index:
                    departures.append(self.transport.send(each.add_(pieces[index]), self._next, tag))
            total = sums[-1]
            if accumulate:
                out.add_(total)
            else:
                out.copy_(total)
            out.add_(pieces[self.transport.index])
            for departure in departures:
                departure.wait()

        return finish
