"""Algorithms of one stage of a point-to-point collective: plain, quantized, ring.

A stage is one step of a collective inside one group. It is started, which posts the sends, and finished, which waits
and puts the result in place. Several stages may be in flight. A stage runs within a task of a queue (see `queue`).

`make_algorithm` chooses the algorithm of a hop. Those of backends other than gloo are in `native`.

Sums add the pieces in the order of the ranks, in the dtype of the sum, fp32 or wider. That makes one rounding per
contribution of a narrow wire dtype instead of one per step of a ring, and the same bits in every run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch

from mics_strategy.comm.codecs.quantizer import Quantizer
from mics_strategy.comm.route import Algorithm
from mics_strategy.comm.workspace import Workspace, aligned_bytes

if TYPE_CHECKING:
    from mics_strategy.comm.route import Hop
    from mics_strategy.comm.transport import GlooTransport

Completion = Callable[[], None]  # waits for the stage, and puts its result in place
_SEED_OF_GATHERS = 1 << 32  # beyond all ranks
SumCompletion = Callable[[torch.Tensor, bool], None]  # the same for a sum: the output, and whether to add to it
Residuals = list[torch.Tensor]  # [n] fp32 for each rank; that of this rank stays unused


class SumAlgorithm(Protocol):
    """One stage of a reduce-scatter inside one group."""

    @property
    def transport(self) -> GlooTransport:
        """Transport of the group."""

    def reduce_scatter_scratch_bytes(self, numel: int, dtype: torch.dtype, wire: torch.dtype) -> int:
        """Bytes of workspace for `start_reduce_scatter` of `numel` elements for each rank."""

    def start_reduce_scatter(
        self, pieces: list[torch.Tensor], wire: torch.dtype, tag: int, residuals: Residuals | None = None
    ) -> SumCompletion:
        """Sum the pieces that all ranks have for this rank.

        Args:
            pieces: [n] for each rank, contiguous; unchanged until finished.
            wire: Dtype of unquantized payloads.
            tag: Tag of the collective, the same on all ranks.
            residuals: Residuals of earlier encodings of the pieces, updated; None without feedback.

        Returns:
            The completion. It takes the output, [n], fp32 or wider, and whether to add to it.
        """


class GroupAlgorithm(SumAlgorithm, Protocol):
    """One stage of any collective inside one group."""

    def all_gather_scratch_bytes(self, numel: int, dtype: torch.dtype, wire: torch.dtype) -> int:
        """Bytes of workspace for `start_all_gather` of `numel` elements from each rank."""

    def start_all_gather(
        self, rows: list[torch.Tensor], shard: torch.Tensor, wire: torch.dtype, tag: int
    ) -> Completion:
        """Put every rank's `shard` into its row, with the same bits on all ranks.

        Args:
            rows: [n] for each rank, contiguous.
            shard: [n], same dtype; may be its row.
            wire: Dtype of unquantized payloads.
            tag: Tag of the collective, the same on all ranks.
        """


class PlainAlgorithm:
    """Sends data unquantized, or rounded to a narrower dtype.

    Args:
        transport: Transport of the group.
        workspace: Scratch memory for received pieces.
    """

    def __init__(self, transport: GlooTransport, workspace: Workspace) -> None:
        self.transport = transport
        self._workspace = workspace

    def all_gather_scratch_bytes(self, numel: int, dtype: torch.dtype, wire: torch.dtype) -> int:
        """See `GroupAlgorithm.all_gather_scratch_bytes`."""
        return 0 if wire == dtype else self.transport.size * aligned_bytes((numel, wire))

    def start_all_gather(
        self, rows: list[torch.Tensor], shard: torch.Tensor, wire: torch.dtype, tag: int
    ) -> Completion:
        """See `GroupAlgorithm.start_all_gather`."""
        if wire == shard.dtype:
            return self.transport.all_gather(rows, shard, tag).wait
        narrow_rows = [self._workspace.allocate(shard.numel(), wire) for _ in rows]
        pending = self.transport.all_gather(narrow_rows, narrow_rows[self.transport.index].copy_(shard), tag)

        def finish() -> None:
            pending.wait()
            for row, narrow_row in zip(rows, narrow_rows, strict=True):
                row.copy_(narrow_row)

        return finish

    def reduce_scatter_scratch_bytes(self, numel: int, dtype: torch.dtype, wire: torch.dtype) -> int:
        """See `SumAlgorithm.reduce_scatter_scratch_bytes`."""
        return (self.transport.size + 1) * aligned_bytes((numel, wire)) * (1 if wire == dtype else 2)

    def start_reduce_scatter(
        self, pieces: list[torch.Tensor], wire: torch.dtype, tag: int, residuals: Residuals | None = None
    ) -> SumCompletion:
        """See `SumAlgorithm.start_reduce_scatter`."""
        numel, size = pieces[0].numel(), self.transport.size
        if wire != pieces[0].dtype:
            pieces = [self._workspace.allocate(numel, wire).copy_(piece) for piece in pieces]
        rank = self.transport.index
        received = [pieces[rank] if index == rank else self._workspace.allocate(numel, wire) for index in range(size)]
        pending = self.transport.exchange(received, pieces, tag)

        def finish(out: torch.Tensor, accumulate: bool) -> None:
            for index, piece in enumerate(received):
                pending.wait_recv(index)
                if accumulate or index:
                    out.add_(piece)
                else:
                    out.copy_(piece)
            pending.wait()

        return finish


class QuantizedAlgorithm:
    """Sends the pieces of sums quantized.

    A rank's own piece of a sum is not sent and stays exact. All-gathers send payloads, which a `PlainAlgorithm` can do:
    they are encoded before the first stage, and decoded behind the last one with a codec.

    Args:
        transport: Transport of the group.
        workspace: Scratch memory for payloads.
        quantizer: Encodes and decodes the payloads of sums.
        gather_quantizer: Encodes those of all-gathers. A task may encode one before and the other after the next task
            has started, so each draws random numbers of its own, in the order of the tasks.
    """

    def __init__(
        self, transport: GlooTransport, workspace: Workspace, quantizer: Quantizer, gather_quantizer: Quantizer
    ) -> None:
        self.transport = transport
        self._workspace = workspace
        self.quantizer = quantizer
        self.gather_quantizer = gather_quantizer
        self._codec = quantizer.codec

    def _allocate_payloads(self, numel: int) -> list[torch.Tensor]:
        num_bytes = self._codec.encoded_bytes(numel)
        return [self._workspace.allocate(num_bytes, torch.uint8) for _ in range(self.transport.size)]

    def reduce_scatter_scratch_bytes(self, numel: int, dtype: torch.dtype, wire: torch.dtype) -> int:
        """See `SumAlgorithm.reduce_scatter_scratch_bytes`."""
        payload_bytes = aligned_bytes((self._codec.encoded_bytes(numel), torch.uint8))
        return 2 * self.transport.size * payload_bytes + aligned_bytes((numel, torch.float32))

    def start_reduce_scatter(
        self, pieces: list[torch.Tensor], wire: torch.dtype, tag: int, residuals: Residuals | None = None
    ) -> SumCompletion:
        """See `SumAlgorithm.start_reduce_scatter`."""
        rank, numel = self.transport.index, pieces[0].numel()
        sent, received = self._allocate_payloads(numel), self._allocate_payloads(numel)
        for index, (piece, payload) in enumerate(zip(pieces, sent, strict=True)):
            if index != rank:
                self.quantizer.encode(piece, payload, residuals[index] if residuals is not None else None)
        pending = self.transport.exchange(received, sent, tag)
        decoded = self._workspace.allocate(numel, torch.float32)

        def finish(out: torch.Tensor, accumulate: bool) -> None:
            if not accumulate:
                out.zero_()
            for index, payload in enumerate(received):
                pending.wait_recv(index)
                if index == rank:
                    out.add_(pieces[rank])
                elif out.dtype == torch.float32:
                    self.quantizer.decode_add(payload, out)
                else:
                    self.quantizer.decode(payload, decoded)
                    out.add_(decoded)
            pending.wait()

        return finish


class RingAlgorithm:
    """Sends data from rank to rank around a ring.

    Partial sums are sent in the wire dtype, and a narrow one rounds them at every rank.

    Args:
        transport: Transport of the group.
        workspace: Scratch memory for received pieces.

    Source:
        PaRO (arXiv:2310.06003) section 3.3, the ring that HO-Ring is compared with.
    """

    def __init__(self, transport: GlooTransport, workspace: Workspace) -> None:
        self.transport = transport
        self._workspace = workspace
        ranks = transport.fingerprint.ranks
        self._ring = sorted(range(transport.size), key=lambda index: ranks[index])  # indices of shards
        self._ring_index = self._ring.index(transport.index)
        self._prev = self._ring[self._ring_index - 1]
        self._next = self._ring[(self._ring_index + 1) % transport.size]

    def all_gather_scratch_bytes(self, numel: int, dtype: torch.dtype, wire: torch.dtype) -> int:
        """See `GroupAlgorithm.all_gather_scratch_bytes`."""
        return 0 if wire == dtype else self.transport.size * aligned_bytes((numel, wire))

    def start_all_gather(
        self, rows: list[torch.Tensor], shard: torch.Tensor, wire: torch.dtype, tag: int
    ) -> Completion:
        """See `GroupAlgorithm.start_all_gather`."""
        if wire == shard.dtype:
            return self._ring_all_gather(rows, shard, tag)
        narrow_rows = [self._workspace.allocate(shard.numel(), wire) for _ in rows]
        finish_ring = self._ring_all_gather(narrow_rows, narrow_rows[self.transport.index].copy_(shard), tag)

        def finish() -> None:
            finish_ring()
            for row, narrow_row in zip(rows, narrow_rows, strict=True):
                row.copy_(narrow_row)

        return finish

    def _ring_all_gather(self, rows: list[torch.Tensor], shard: torch.Tensor, tag: int) -> Completion:
        """Gather around the ring.

        1. Receive the rows of all other ranks from the previous rank, that of the previous rank first.
        2. Send this rank's row, and each received row but the last, to the next rank.
        """
        sources = [self._ring[self._ring_index - step] for step in range(1, self.transport.size)]
        local_row = rows[self.transport.index]
        if shard.data_ptr() != local_row.data_ptr():
            local_row.copy_(shard)
        recvs = [self.transport.recv(rows[index], self._prev, tag) for index in sources]
        sends = [self.transport.send(local_row, self._next, tag)]

        def finish() -> None:
            for index, recv in zip(sources, recvs, strict=True):
                recv.wait()
                if index != sources[-1]:
                    sends.append(self.transport.send(rows[index], self._next, tag))
            for send in sends:
                send.wait()

        return finish

    def reduce_scatter_scratch_bytes(self, numel: int, dtype: torch.dtype, wire: torch.dtype) -> int:
        """See `SumAlgorithm.reduce_scatter_scratch_bytes`."""
        return self.transport.size * aligned_bytes((numel, wire)) * (1 if wire == dtype else 2)

    def start_reduce_scatter(
        self, pieces: list[torch.Tensor], wire: torch.dtype, tag: int, residuals: Residuals | None = None
    ) -> SumCompletion:
        """See `SumAlgorithm.start_reduce_scatter`.

        1. Send the piece of the previous rank to the next rank: it goes all the way round, to the previous rank.
        2. Add the local piece to every received partial sum, and send it on; the last sum is that of this rank.
        """
        numel = pieces[0].numel()
        if wire != pieces[0].dtype:
            pieces = [self._workspace.allocate(numel, wire).copy_(piece) for piece in pieces]
        targets = [self._ring[self._ring_index - step] for step in range(2, self.transport.size + 1)]
        partial_sums = [self._workspace.allocate(numel, wire) for _ in targets]
        recvs = [self.transport.recv(partial_sum, self._prev, tag) for partial_sum in partial_sums]
        sends = [self.transport.send(pieces[self._prev], self._next, tag)]

        def finish(out: torch.Tensor, accumulate: bool) -> None:
            for index, recv, partial_sum in zip(targets, recvs, partial_sums, strict=True):
                recv.wait()
                if index != self.transport.index:
                    sends.append(self.transport.send(partial_sum.add_(pieces[index]), self._next, tag))
            total = partial_sums[-1]
            if accumulate:
                out.add_(total)
            else:
                out.copy_(total)
            out.add_(pieces[self.transport.index])
            for send in sends:
                send.wait()

        return finish


def make_algorithm(
    transport: GlooTransport, hop: Hop, workspace: Workspace, device: torch.device
) -> GroupAlgorithm | QuantizedAlgorithm:
    """The algorithm for one hop of a route, point to point."""
    if hop.codec is not None:
        workspace.encode_ahead()
        rank = transport.fingerprint.ranks[transport.index]
        quantizer = Quantizer(hop.codec, device, workspace.generator_for(hop.codec, rank))
        of_gathers = workspace.generator_for(hop.codec, rank + _SEED_OF_GATHERS)
        gather_quantizer = quantizer if of_gathers is None else Quantizer(hop.codec, device, of_gathers)
        return QuantizedAlgorithm(transport, workspace, quantizer, gather_quantizer)
    if hop.algorithm is Algorithm.RING:
        return RingAlgorithm(transport, workspace)
    return PlainAlgorithm(transport, workspace)
