"""How do the ranks of one group gather and add, as they are or encoded?

A stage is one step of a collective inside one group. It is begun, which starts to send, and finished, which waits and
puts the result in place; several may be under way. It runs within a program (see `lane`).

Pieces are added in the order of the ranks in the dtype of the sum, fp32 or wider, which makes one rounding per
contribution of a narrow wire instead of one per hop of a ring, and the same bits in every run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from mics_strategy.comm.codecs.format import Codec
from mics_strategy.comm.codecs.quantizer import Quantizer
from mics_strategy.comm.transport import Transport, as_one_view
from mics_strategy.comm.workspace import Workspace, aligned_bytes

Completion = Callable[[], None]
SumCompletion = Callable[[torch.Tensor, bool], None]


class GroupAlgorithm(Protocol):
    """One step of a collective inside one group."""

    transport: Transport

    def all_gather_scratch_bytes(self, numel: int, dtype: torch.dtype, wire: torch.dtype) -> int:
        """Of workspace, for `start_all_gather` of `numel` elements from each rank."""

    def start_all_gather(self, rows: list[torch.Tensor], own: torch.Tensor, wire: torch.dtype, tag: int) -> Completion:
        """Put every rank's `own` into its row, the same bits on all ranks.

        Args:
            rows: [n] for each rank, contiguous.
            own: [n], same dtype; may be its row.
            wire: Dtype in which unencoded numbers travel.
            tag: Of the transfer, the same on all ranks.
        """

    def reduce_scatter_scratch_bytes(self, numel: int, dtype: torch.dtype, wire: torch.dtype) -> int:
        """Of workspace, for `start_reduce_scatter` of `numel` elements for each rank."""

    def start_reduce_scatter(self, pieces: list[torch.Tensor], wire: torch.dtype, tag: int) -> SumCompletion:
        """Add what all ranks have for this one.

        Args:
            pieces: [n] for each rank, contiguous; unchanged until finished.
            wire: Dtype in which unencoded numbers travel.
            tag: Of the transfer, the same on all ranks.

        Returns:
            What takes the tensor for the sum, [n], fp32 or wider, and whether to add to it.
        """


class PlainAlgorithm:
    """Sends numbers as they are, or rounded to a narrower dtype.

    Args:
        transport: Of the group.
        workspace: Lends what is received before it is added.
    """

    def __init__(self, transport: Transport, workspace: Workspace) -> None:
        self.transport = transport
        self._workspace = workspace

    def all_gather_scratch_bytes(self, numel: int, dtype: torch.dtype, wire: torch.dtype) -> int:
        """See `Stage.gather_bytes`."""
        return 0 if wire == dtype else self.transport.size * aligned_bytes((numel, wire))

    def start_all_gather(self, rows: list[torch.Tensor], own: torch.Tensor, wire: torch.dtype, tag: int) -> Completion:
        """See `Stage.start_all_gather`."""
        if wire == own.dtype:
            return self.transport.all_gather(rows, own, tag).wait
        narrow = [self._workspace.allocate(own.numel(), wire) for _ in rows]
        pieces = self.transport.all_gather(narrow, narrow[self.transport.index].copy_(own), tag)

        def finish() -> None:
            pieces.wait()
            for row, arrived in zip(rows, narrow, strict=True):
                row.copy_(arrived)

        return finish

    def reduce_scatter_scratch_bytes(self, numel: int, dtype: torch.dtype, wire: torch.dtype) -> int:
        """See `Stage.reduce_scatter_scratch_bytes`."""
        return (self.transport.size + 1) * aligned_bytes((numel, wire)) * (1 if wire == dtype else 2)

    def start_reduce_scatter(self, pieces: list[torch.Tensor], wire: torch.dtype, tag: int) -> SumCompletion:
        """See `Stage.start_reduce_scatter`."""
        numel, size = pieces[0].numel(), self.transport.size
        if wire != pieces[0].dtype:
            pieces = [self._workspace.allocate(numel, wire).copy_(piece) for piece in pieces]
        if pieces[0].is_cuda:
            return self._begin_reduce_scatter(pieces)
        own = self.transport.index
        arrived = [pieces[own] if index == own else self._workspace.allocate(numel, wire) for index in range(size)]
        under_way = self.transport.exchange(arrived, pieces, tag)

        def finish(out: torch.Tensor, accumulate: bool) -> None:
            for index, piece in enumerate(arrived):
                under_way.wait_recv(index)
                if accumulate or index:
                    out.add_(piece)
                else:
                    out.copy_(piece)
            under_way.wait()

        return finish

    def _begin_reduce_scatter(self, pieces: list[torch.Tensor]) -> SumCompletion:
        """With NCCL's own, which adds in the wire dtype in no said order."""
        numel = pieces[0].numel()
        total, full = self._workspace.allocate(numel, pieces[0].dtype), as_one_view(pieces)
        if full is None:
            full = self._workspace.allocate(len(pieces) * numel, pieces[0].dtype)
            torch.cat(pieces, out=full)
        work = self.transport.reduce_scatter(total, full)

        def finish(out: torch.Tensor, accumulate: bool) -> None:
            work.wait()
            if accumulate:
                out.add_(total)
            else:
                out.copy_(total)

        return finish


class QuantizedAlgorithm:
    """Sends numbers encoded.

    Every rank decodes what travelled, its own share of a gather, too: all have the same bits. A rank's own share of a
    sum does not travel and stays exact.

    Args:
        transport: Of the group.
        workspace: Lends what is encoded.
        codec: How.
        device: Where the tensors are.
    """

    def __init__(self, transport: Transport, workspace: Workspace, codec: Codec, device: torch.device) -> None:
        self.transport = transport
        self._workspace = workspace
        self._codec = codec
        noise = workspace.generator_for(codec, transport.fingerprint.ranks[transport.index])
        self._quantizer = Quantizer(codec, device, noise)

    def _rows(self, numel: int) -> list[torch.Tensor]:
        num_bytes = self._codec.encoded_bytes(numel)
        return [self._workspace.allocate(num_bytes, torch.uint8) for _ in range(self.transport.size)]

    def all_gather_scratch_bytes(self, numel: int, dtype: torch.dtype, wire: torch.dtype) -> int:
        """See `Stage.gather_bytes`."""
        return self.transport.size * aligned_bytes((self._codec.encoded_bytes(numel), torch.uint8))

    def start_all_gather(self, rows: list[torch.Tensor], own: torch.Tensor, wire: torch.dtype, tag: int) -> Completion:
        """See `Stage.start_all_gather`."""
        encoded = self._rows(own.numel())
        mine = encoded[self.transport.index]
        self._quantizer.encode(own, mine)
        pieces = self.transport.all_gather(encoded, mine, tag)

        def finish() -> None:
            for index, (row, arrived) in enumerate(zip(rows, encoded, strict=True)):
                pieces.wait_recv(index)
                self._quantizer.decode(arrived, row)
            pieces.wait()

        return finish

    def reduce_scatter_scratch_bytes(self, numel: int, dtype: torch.dtype, wire: torch.dtype) -> int:
        """See `Stage.reduce_scatter_scratch_bytes`."""
        return 2 * self.all_gather_scratch_bytes(numel, dtype, wire) + aligned_bytes((numel, torch.float32))

    def start_reduce_scatter(self, pieces: list[torch.Tensor], wire: torch.dtype, tag: int) -> SumCompletion:
        """See `Stage.start_reduce_scatter`."""
        own, numel = self.transport.index, pieces[0].numel()
        outgoing, arrived = self._rows(numel), self._rows(numel)
        for index, (piece, encoded) in enumerate(zip(pieces, outgoing, strict=True)):
            if index != own:
                self._quantizer.encode(piece, encoded)
        under_way = self.transport.exchange(arrived, outgoing, tag)
        decoded = self._workspace.allocate(numel, torch.float32)

        def finish(out: torch.Tensor, accumulate: bool) -> None:
            if not accumulate:
                out.zero_()
            for index, encoded in enumerate(arrived):
                under_way.wait_recv(index)
                if index == own:
                    out.add_(pieces[own])
                elif out.dtype == torch.float32:
                    self._quantizer.decode_add(encoded, out)
                else:
                    self._quantizer.decode(encoded, decoded)
                    out.add_(decoded)
            under_way.wait()

        return finish


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
