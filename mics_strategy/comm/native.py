"""Algorithms of one stage of backends that pipeline by themselves, as NCCL does.

Tensors go whole, in one native collective a stage. A stage takes a table, one row for each rank, and runs on the
current stream. `native_stages` puts the stages together.

`make_table_algorithm` chooses the algorithm of a hop. All but `NativeAlgorithm` have the bits of their twins in
`algorithms`: sums in the order of the ranks, in fp32 or wider.
"""

from __future__ import annotations

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
            residual: [size * n] fp32, what earlier encodings have lost, updated; None without feedback.
        """

    def all_reduce_scratch_bytes(self, numel: int, wire: torch.dtype, dtype: torch.dtype) -> int:
        """Bytes of workspace for an all-reduce of `numel` elements for each rank.

        Gathered payloads are not among them.
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

    def all_reduce(self, table: torch.Tensor, wire: torch.dtype, dtype: torch.dtype) -> Steps:
        """Sum the tables of all ranks, in place; every rank ends with the same bits.

        Args:
            table: [size * n].
            wire: Dtype of the payloads.
            dtype: Dtype of the sum, fp32 or wider, before it is sent.
        """
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
    def all_reduce(self, table: torch.Tensor, wire: torch.dtype, dtype: torch.dtype) -> Steps:
        total = self._workspace.allocate(table.numel() // self.transport.size, dtype)
        yield from self.reduce_scatter(total, table, wire, False)
        narrow = table if wire == table.dtype else self._workspace.allocate(table.numel(), wire)
        local_row = narrow.view(self.transport.size, -1)[self.transport.index].copy_(total)
        self.transport.all_gather(narrow, local_row).wait()
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
        self.quantizer = quantizer
        self._codec = quantizer.codec

    def sum_dtype(self, wire: torch.dtype, dtype: torch.dtype) -> torch.dtype:
        """See `TableAlgorithm.sum_dtype`."""
        return dtype

    def _allocate_payloads(self, numel: int) -> torch.Tensor:
        num_bytes = self._codec.encoded_bytes(numel)
        return self._workspace.allocate(self.transport.size * num_bytes, torch.uint8).view(-1, num_bytes)

    def reduce_scatter_scratch_bytes(self, numel: int, wire: torch.dtype) -> int:
        """See `TableAlgorithm.reduce_scatter_scratch_bytes`."""
        return 2 * aligned_bytes((self.transport.size * self._codec.encoded_bytes(numel), torch.uint8))

    def reduce_scatter(
        self,
        out: torch.Tensor,
        table: torch.Tensor,
        wire: torch.dtype,
        accumulate: bool,
        residual: torch.Tensor | None = None,
    ) -> Steps:
        """See `TableAlgorithm.reduce_scatter`.

        With feedback this rank's row is not encoded: its residual belongs to the next stage.
        """
        rows, index = table.view(self.transport.size, -1), self.transport.index
        payloads = self._allocate_payloads(rows.shape[1])
        if residual is None:
            self.quantizer.encode(rows, payloads)
        else:
            self._encode_others(rows, payloads, residual.view(self.transport.size, -1))
        yield
        received = self._allocate_payloads(rows.shape[1])
        self.transport.exchange(received.view(-1), payloads.view(-1)).wait()
        summands = Summands(rows=received, exact=rows[index], exact_index=index)
        self.quantizer.decode_sum(summands, out, accumulate=accumulate)

    def _encode_others(self, rows: torch.Tensor, payloads: torch.Tensor, residuals: torch.Tensor) -> None:
        """Encode the rows of the other ranks with feedback."""
        index = self.transport.index
        for others in (slice(0, index), slice(index + 1, self.transport.size)):
            if others.start < others.stop:
                self.quantizer.encode(rows[others], payloads[others], residuals[others])

    def all_reduce_scratch_bytes(self, numel: int, wire: torch.dtype, dtype: torch.dtype) -> int:
        """See `TableAlgorithm.all_reduce_scratch_bytes`."""
        return self.reduce_scatter_scratch_bytes(numel, wire) + aligned_bytes((numel, dtype))


def make_table_algorithm(
    transport: BackendTransport, hop: Hop, workspace: Workspace, device: torch.device
) -> NativeAlgorithm | QuantizedTableAlgorithm:
    """The algorithm for one hop of a route, by the backend's collectives."""
    if hop.codec is not None:
        workspace.encode_ahead()
        generator = workspace.generator_for(hop.codec, transport.fingerprint.ranks[transport.index])
        return QuantizedTableAlgorithm(transport, workspace, Quantizer(hop.codec, device, generator))
    return (NativeAlgorithm if transport.sums_natively else OrderedAlgorithm)(transport, workspace)
