"""Algorithms of one stage, of whole tensors, by a backend's own collectives.

A stage takes a table, one row for each rank, and runs on the current stream. All but `NativeAlgorithm` have the bits of
their twins in `algorithms`: sums in the order of the ranks, in fp32 or wider.

`make_table_algorithm` chooses the algorithm of a hop.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Protocol

import torch
from typing_extensions import override

from mics_strategy.comm.codecs.format import Summands
from mics_strategy.comm.codecs.quantizer import Quantizer
from mics_strategy.comm.workspace import Workspace, aligned_bytes

if TYPE_CHECKING:
    from mics_strategy.comm.route import Hop
    from mics_strategy.comm.transport import BackendTransport
    from mics_strategy.comm.work import Steps


class TableAlgorithm(Protocol):
    """One stage of a collective inside one group, of whole tensors.

    A table is [size * n], contiguous, with one row for each rank. A stage is a generator that encodes before its
    first `yield`, if it encodes at all; see `queue`.
    """

    def sum_dtype(self, wire: torch.dtype, dtype: torch.dtype) -> torch.dtype:
        """Dtype in which sums go on to the next stage; the last sums have `dtype`."""

    def all_gather_scratch_bytes(self, numel: int) -> int:
        """Bytes of workspace for `all_gather` of `numel` elements from each rank."""

    def all_gather(self, table: torch.Tensor, shard: torch.Tensor) -> Steps:
        """Put every rank's `shard`, [n], into its row.

        In place if it is its row. The dtypes are the same. What `table` holds is the reference of a codec of
        differences.
        """

    def reduce_scatter_scratch_bytes(self, numel: int, wire: torch.dtype) -> int:
        """Bytes of workspace for `reduce_scatter` of `numel` elements for each rank."""

    def reduce_scatter(
        self,
        out: torch.Tensor,
        table: torch.Tensor,
        wire: torch.dtype,
        accumulate: bool,
        residual: torch.Tensor | None = None,
    ) -> Steps:
        """Sum the rows that all ranks have for this rank.

        Args:
            out: [n]; overwritten with the sum, or added to.
            table: [size * n], unchanged.
            wire: Dtype of unquantized payloads.
            accumulate: Whether to add to `out` instead of overwriting it.
            residual: [size * n] fp32, what earlier encodings of the other ranks' rows have lost, updated; None without
                feedback.
        """

    def all_reduce_scratch_bytes(self, numel: int, wire: torch.dtype, dtype: torch.dtype) -> int:
        """Bytes of workspace for `all_reduce` of `numel` elements for each rank."""

    def all_reduce(
        self, table: torch.Tensor, wire: torch.dtype, dtype: torch.dtype, residual: torch.Tensor | None = None
    ) -> Steps:
        """Sum the tables of all ranks, in place; every rank ends with the same bits.

        Args:
            table: [size * n].
            wire: Dtype of unquantized payloads.
            dtype: Dtype of the sum, fp32 or wider, before it is sent.
            residual: [size * n] fp32, what earlier encodings have lost, of this rank's row in the sum, updated; None
                without feedback.
        """


class NativeAlgorithm:
    """Uses the backend's own collectives.

    They add in the wire dtype, in an unspecified order.

    Args:
        transport: Transport of the group.
        workspace: Scratch memory for sums.
    """

    def __init__(self, transport: BackendTransport, workspace: Workspace) -> None:
        self.transport = transport
        self._workspace = workspace

    def sum_dtype(self, wire: torch.dtype, dtype: torch.dtype) -> torch.dtype:
        """See `TableAlgorithm.sum_dtype`."""
        return wire

    def all_gather_scratch_bytes(self, numel: int) -> int:
        """See `TableAlgorithm.all_gather_scratch_bytes`."""
        return 0

    def all_gather(self, table: torch.Tensor, shard: torch.Tensor) -> Steps:
        """See `TableAlgorithm.all_gather`."""
        yield
        self.transport.all_gather(table, shard).wait()

    def reduce_scatter_scratch_bytes(self, numel: int, wire: torch.dtype) -> int:
        """See `TableAlgorithm.reduce_scatter_scratch_bytes`."""
        return aligned_bytes((numel, wire))

    def reduce_scatter(
        self,
        out: torch.Tensor,
        table: torch.Tensor,
        wire: torch.dtype,
        accumulate: bool,
        residual: torch.Tensor | None = None,
    ) -> Steps:
        """See `TableAlgorithm.reduce_scatter`."""
        yield
        if out.dtype == wire and not accumulate:
            self.transport.reduce_scatter(out, table).wait()
            return
        total = self._workspace.allocate(out.numel(), wire)
        self.transport.reduce_scatter(total, table).wait()
        if accumulate:
            out.add_(total)
        else:
            out.copy_(total)

    def all_reduce_scratch_bytes(self, numel: int, wire: torch.dtype, dtype: torch.dtype) -> int:
        """See `TableAlgorithm.all_reduce_scratch_bytes`."""
        return 0

    def all_reduce(
        self, table: torch.Tensor, wire: torch.dtype, dtype: torch.dtype, residual: torch.Tensor | None = None
    ) -> Steps:
        """See `TableAlgorithm.all_reduce`."""
        yield
        self.transport.all_reduce(table).wait()


class OrderedAlgorithm(NativeAlgorithm):
    """Exchanges rows, and adds them in rank order, in the dtype of the sum."""

    @override
    def sum_dtype(self, wire: torch.dtype, dtype: torch.dtype) -> torch.dtype:
        return dtype

    @override
    def reduce_scatter_scratch_bytes(self, numel: int, wire: torch.dtype) -> int:
        return 2 * aligned_bytes((self.transport.size * numel, wire))

    @override
    def reduce_scatter(
        self,
        out: torch.Tensor,
        table: torch.Tensor,
        wire: torch.dtype,
        accumulate: bool,
        residual: torch.Tensor | None = None,
    ) -> Steps:
        yield
        sent = table if table.dtype == wire else self._workspace.allocate(table.numel(), wire).copy_(table)
        received = self._workspace.allocate(table.numel(), wire)
        self.transport.exchange(received, sent).wait()
        for index, row in enumerate(received.view(self.transport.size, -1)):
            if accumulate or index:
                out.add_(row)
            else:
                out.copy_(row)

    @override
    def all_reduce_scratch_bytes(self, numel: int, wire: torch.dtype, dtype: torch.dtype) -> int:
        own_bytes = aligned_bytes((numel, dtype), (self.transport.size * numel, wire))
        return self.reduce_scatter_scratch_bytes(numel, wire) + own_bytes

    @override
    def all_reduce(
        self, table: torch.Tensor, wire: torch.dtype, dtype: torch.dtype, residual: torch.Tensor | None = None
    ) -> Steps:
        total = self._workspace.allocate(table.numel() // self.transport.size, dtype)
        yield from self.reduce_scatter(total, table, wire, False)
        narrow = table if wire == table.dtype else self._workspace.allocate(table.numel(), wire)
        local_row = narrow.view(self.transport.size, -1)[self.transport.index].copy_(total)
        yield from self.all_gather(narrow, local_row)
        if narrow is not table:
            table.copy_(narrow)


class QuantizedTableAlgorithm:
    """Sends tables quantized, with the bits of `QuantizedAlgorithm`.

    All rows are encoded in one launch, this rank's as well, though nothing reads it in a sum.

    Args:
        transport: Transport of the group.
        workspace: Scratch memory for payloads.
        quantizer: Encodes and decodes the payloads.
    """

    def __init__(self, transport: BackendTransport, workspace: Workspace, quantizer: Quantizer) -> None:
        self.transport = transport
        self._workspace = workspace
        self._quantizer = quantizer
        self._codec = quantizer.codec

    def sum_dtype(self, wire: torch.dtype, dtype: torch.dtype) -> torch.dtype:
        """See `TableAlgorithm.sum_dtype`."""
        return dtype

    def _allocate_payloads(self, numel: int) -> torch.Tensor:
        num_bytes = self._codec.encoded_bytes(numel)
        return self._workspace.allocate(self.transport.size * num_bytes, torch.uint8).view(-1, num_bytes)

    def all_gather_scratch_bytes(self, numel: int) -> int:
        """See `TableAlgorithm.all_gather_scratch_bytes`."""
        payload_bytes = aligned_bytes((self.transport.size * self._codec.encoded_bytes(numel), torch.uint8))
        return payload_bytes + (aligned_bytes((numel, torch.float32)) if self._codec.differences else 0)

    def all_gather(self, table: torch.Tensor, shard: torch.Tensor) -> Steps:
        """See `TableAlgorithm.all_gather`."""
        payloads = self._allocate_payloads(shard.numel())
        if not self._codec.differences:
            self._quantizer.encode(shard, payloads[self.transport.index])
            yield
            self._gather_payloads(payloads, table)
            return
        rows, index = table.view(self.transport.size, -1), self.transport.index
        scratch = self._workspace.allocate(shard.numel(), torch.float32)
        self._quantizer.encode_difference(shard, rows[index], payloads[index], scratch)
        yield
        self.transport.all_gather(payloads.view(-1), payloads[index]).wait()
        for payload, row in zip(payloads, rows, strict=True):
            self._quantizer.decode_difference(payload, row, scratch)

    def _gather_payloads(self, payloads: torch.Tensor, table: torch.Tensor) -> None:
        """All-gather the payloads in place, and decode all of them."""
        self.transport.all_gather(payloads.view(-1), payloads[self.transport.index]).wait()
        self._quantizer.decode(payloads, table.view(self.transport.size, -1))

    def reduce_scatter_scratch_bytes(self, numel: int, wire: torch.dtype) -> int:
        """See `TableAlgorithm.reduce_scatter_scratch_bytes`."""
        return 2 * self.all_gather_scratch_bytes(numel) + aligned_bytes((numel, torch.float32))

    def reduce_scatter(
        self,
        out: torch.Tensor,
        table: torch.Tensor,
        wire: torch.dtype,
        accumulate: bool,
        residual: torch.Tensor | None = None,
    ) -> Steps:
        """See `TableAlgorithm.reduce_scatter`."""
        summands = yield from self.exchange(table, residual)
        self._quantizer.decode_sum(summands, out, accumulate=accumulate)

    def reduce_scatter_sums(self, out: torch.Tensor, table: Summands, accumulate: bool) -> None:
        """Reduce-scatter a table that is itself a sum, without storing it."""
        self._quantizer.decode_sum(self._exchange_sums(table), out, accumulate=accumulate)

    def exchange(self, table: torch.Tensor, residual: torch.Tensor | None = None) -> Generator[None, None, Summands]:
        """Send every rank its row, and receive the contributions to this rank's sum.

        With feedback this rank's row is not encoded: its residual belongs to the next stage.
        """
        rows = table.view(self.transport.size, -1)
        payloads = self._allocate_payloads(rows.shape[1])
        if residual is None:
            self._quantizer.encode(rows, payloads)
        else:
            residual_rows, index = residual.view(self.transport.size, -1), self.transport.index
            for others in (slice(0, index), slice(index + 1, self.transport.size)):
                if others.start < others.stop:
                    self._quantizer.encode(rows[others], payloads[others], residual_rows[others])
        yield
        return self._exchange_payloads(payloads, rows[self.transport.index])

    def _exchange_sums(self, table: Summands) -> Summands:
        numel = table.exact.numel() // self.transport.size
        payloads, local_sum = self._allocate_payloads(numel), self._workspace.allocate(numel, torch.float32)
        self._quantizer.encode_sum(table, payloads, kept=local_sum, kept_row=self.transport.index)
        return self._exchange_payloads(payloads, local_sum)

    def _exchange_payloads(self, payloads: torch.Tensor, local_row: torch.Tensor) -> Summands:
        received = self._allocate_payloads(local_row.numel())
        self.transport.exchange(received.view(-1), payloads.view(-1)).wait()
        return Summands(codec=self._codec, rows=received, exact=local_row, exact_index=self.transport.index)

    def all_reduce_scratch_bytes(self, numel: int, wire: torch.dtype, dtype: torch.dtype) -> int:
        """See `TableAlgorithm.all_reduce_scratch_bytes`."""
        gather_bytes = self.all_gather_scratch_bytes(numel) + aligned_bytes((numel, dtype))
        return self.reduce_scatter_scratch_bytes(numel, wire) + gather_bytes

    def all_reduce(
        self, table: torch.Tensor, wire: torch.dtype, dtype: torch.dtype, residual: torch.Tensor | None = None
    ) -> Steps:
        """See `TableAlgorithm.all_reduce`."""
        summands = yield from self.exchange(table, residual)
        local_residual = None if residual is None else residual.view(self.transport.size, -1)[self.transport.index]
        self._sum_and_gather(summands, table, dtype, local_residual)

    def all_reduce_sums(self, out: torch.Tensor, table: Summands) -> None:
        """All-reduce a table that is itself a sum, without storing it, into `out`."""
        self._sum_and_gather(self._exchange_sums(table), out, torch.float32)

    def _sum_and_gather(
        self, summands: Summands, table: torch.Tensor, dtype: torch.dtype, residual: torch.Tensor | None = None
    ) -> None:
        """Encode the sum of the contributions, and send it to all ranks.

        A sum in a wider dtype than fp32, or with feedback, is stored first.
        """
        payloads = self._allocate_payloads(summands.exact.numel())
        local_payload = payloads[self.transport.index]
        if dtype == torch.float32 and residual is None:
            self._quantizer.encode_sum(summands, local_payload[None])
        else:
            total = self._workspace.allocate(summands.exact.numel(), dtype)
            self._quantizer.decode_sum(summands, total, accumulate=False)
            self._quantizer.encode(total, local_payload, residual)
        self._gather_payloads(payloads, table)


def make_table_algorithm(
    transport: BackendTransport, hop: Hop, workspace: Workspace, device: torch.device
) -> TableAlgorithm:
    """The algorithm for one hop of a route, by the backend's collectives."""
    if hop.codec is not None:
        workspace.encode_ahead()
        generator = workspace.generator_for(hop.codec, transport.fingerprint.ranks[transport.index])
        return QuantizedTableAlgorithm(transport, workspace, Quantizer(hop.codec, device, generator))
    return (NativeAlgorithm if transport.sums_natively else OrderedAlgorithm)(transport, workspace)
