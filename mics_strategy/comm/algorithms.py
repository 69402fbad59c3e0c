"""Algorithms of one stage: how the ranks of one group sum, and with which codec.

A stage takes a table, one row for each rank, whole. `stages` puts the stages together, over any transport.

A stage is a generator; up to its first `yield` it waits for no rank (see `queue`). `make_algorithm` chooses the
algorithm of a stage.

Sums add the rows in the order of the ranks, in fp32 or wider. That makes one rounding for each contribution of a narrow
wire dtype instead of one for each step of a ring, and the same bits in every run. Backends add by themselves on
accelerators, in the wire dtype, and in plain all-reduces (`Stages.all_reduce`).
"""

from __future__ import annotations

import torch
from typing_extensions import override

from mics_strategy.comm.codecs.format import Summands
from mics_strategy.comm.codecs.quantizer import Quantizer
from mics_strategy.comm.route import Stage
from mics_strategy.comm.transport import Transport
from mics_strategy.comm.work import Steps
from mics_strategy.comm.workspace import Workspace

_SEED_OF_GATHERS = 1 << 32  # beyond all ranks


class NativeAlgorithm:
    """Sums by the backend's own collectives, which add in the wire dtype, in an unspecified order.

    Args:
        transport: Transport of the group.
        workspace: Scratch memory for sums.
    """

    def __init__(self, transport: Transport, workspace: Workspace) -> None:
        self.transport = transport
        self._workspace = workspace

    def reduce_scatter(
        self,
        out: torch.Tensor,
        table: torch.Tensor,
        wire: torch.dtype,
        accumulate: bool,
        tag: int,
        residual: torch.Tensor | None = None,
    ) -> Steps:
        """Sum the rows that all ranks have for this rank.

        Args:
            out: [n]; overwritten with the sum, or added to.
            table: [size * n], unchanged; one row for each rank.
            wire: Dtype of unquantized payloads.
            accumulate: Whether to add to `out` instead of overwriting it.
            tag: Tag of the collective, the same on all ranks.
            residual: [size * n] fp32, what earlier encodings have lost, updated; None without feedback.
        """
        yield
        if out.dtype == wire and not accumulate:
            self.transport.reduce_scatter(out, table)
            return
        total = self._workspace.allocate(out.numel(), wire)
        self.transport.reduce_scatter(total, table)
        if accumulate:
            out.add_(total)
        else:
            out.copy_(total)

    def all_reduce(self, table: torch.Tensor, wire: torch.dtype, dtype: torch.dtype, tag: int) -> Steps:
        """Sum the tables of all ranks, in place; every rank ends with the same bits.

        Args:
            table: [size * n].
            wire: Dtype of the payloads.
            dtype: Dtype of the sum, fp32 or wider, before it is sent.
            tag: Tag of the collective, the same on all ranks.
        """
        yield
        self.transport.all_reduce(table)


class OrderedAlgorithm(NativeAlgorithm):
    """Exchanges rows, and adds them in rank order, in the dtype of the sum."""

    @override
    def reduce_scatter(
        self,
        out: torch.Tensor,
        table: torch.Tensor,
        wire: torch.dtype,
        accumulate: bool,
        tag: int,
        residual: torch.Tensor | None = None,
    ) -> Steps:
        sent = table if table.dtype == wire else self._workspace.allocate(table.numel(), wire).copy_(table)
        received = self._workspace.allocate(table.numel(), wire)
        pending = self.transport.exchange(received, sent, tag)
        yield
        pending.wait()
        rows, own = list(received.view(self.transport.size, -1)), self.transport.index
        rows[own] = sent.view(self.transport.size, -1)[own]
        for index, row in enumerate(rows):
            if accumulate or index:
                out.add_(row)
            else:
                out.copy_(row)

    @override
    def all_reduce(self, table: torch.Tensor, wire: torch.dtype, dtype: torch.dtype, tag: int) -> Steps:
        total = self._workspace.allocate(table.numel() // self.transport.size, dtype)
        yield from self.reduce_scatter(total, table, wire, False, tag)
        narrow = table if wire == table.dtype else self._workspace.allocate(table.numel(), wire)
        local_row = narrow.view(self.transport.size, -1)[self.transport.index].copy_(total)
        self.transport.all_gather(narrow, local_row, tag).wait()
        if narrow is not table:
            table.copy_(narrow)


class QuantizedAlgorithm:
    """Sends tables quantized.

    A rank's own row of a sum is not sent and stays exact.

    Args:
        transport: Transport of the group.
        workspace: Scratch memory for payloads.
        quantizer: Encodes and decodes the payloads of sums.
        gather_quantizer: Encodes those of all-gathers. A task may encode one before and the other after the next task
            has started, so each draws random numbers of its own, in the order of the tasks.
    """

    def __init__(
        self, transport: Transport, workspace: Workspace, quantizer: Quantizer, gather_quantizer: Quantizer
    ) -> None:
        self.transport = transport
        self._workspace = workspace
        self.quantizer = quantizer
        self.gather_quantizer = gather_quantizer
        self._codec = quantizer.codec

    def reduce_scatter(
        self,
        out: torch.Tensor,
        table: torch.Tensor,
        wire: torch.dtype,
        accumulate: bool,
        tag: int,
        residual: torch.Tensor | None = None,
    ) -> Steps:
        """See `NativeAlgorithm.reduce_scatter`. The residual of this rank's row belongs to the next stage."""
        rows, index = table.view(self.transport.size, -1), self.transport.index
        payloads, received = (self._workspace.allocate_payloads(self._codec, *rows.shape) for _ in range(2))
        self._encode_others(rows, payloads, None if residual is None else residual.view(self.transport.size, -1))
        pending = self.transport.exchange(received.view(-1), payloads.view(-1), tag)
        yield
        pending.wait()
        summands = Summands(rows=received, exact=rows[index], exact_index=index)
        self.quantizer.decode_sum(summands, out, accumulate=accumulate)

    def _encode_others(self, rows: torch.Tensor, payloads: torch.Tensor, residuals: torch.Tensor | None) -> None:
        """Encode the rows of the ranks before and after this one."""
        index = self.transport.index
        for others in (slice(0, index), slice(index + 1, self.transport.size)):
            if others.start < others.stop:
                self.quantizer.encode(rows[others], payloads[others], None if residuals is None else residuals[others])


def make_algorithm(
    transport: Transport, stage: Stage, workspace: Workspace, device: torch.device
) -> NativeAlgorithm | QuantizedAlgorithm:
    """The algorithm of one stage of a route."""
    if stage.codec is not None:
        workspace.encode_ahead()
        rank = transport.fingerprint.ranks[transport.index]
        quantizer = Quantizer(stage.codec, device, workspace.generator_for(stage.codec, rank))
        of_gathers = workspace.generator_for(stage.codec, rank + _SEED_OF_GATHERS)
        gather_quantizer = quantizer if of_gathers is None else Quantizer(stage.codec, device, of_gathers)
        return QuantizedAlgorithm(transport, workspace, quantizer, gather_quantizer)
    return (NativeAlgorithm if transport.sums_natively else OrderedAlgorithm)(transport, workspace)
