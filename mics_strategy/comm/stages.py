"""Collectives over the stages of a route, over any transport.

Tensors go whole. An all-gather has n stages, all but the first in place; a reduce-scatter has n, and an all-reduce
2 n - 1, however many nodes there are. An all-reduce over one stage that neither encodes nor widens is the backend's
own, on gloo as well: the second hop of most trainings.

::

    all-gather, 2 nodes of 2 ranks, rows 0 to 3; rank 0 has row 0, rank 1 of its node has row 2: the rank inside a
    node is the most significant digit of a row's number

    between nodes    rank 0:  [0 1 . .]    rank 1:  [. . 2 3]     an own row becomes `strides[1]` adjacent rows
    inside a node    rank 0:  [0 1 2 3]    rank 1:  [0 1 2 3]     these become `strides[2]` rows, all of them

A reduce-scatter runs backwards, fastest links first, so that slow links carry only what a node has summed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from mics_strategy.comm import route as routes
from mics_strategy.comm.algorithms import NativeAlgorithm, QuantizedAlgorithm, make_algorithm
from mics_strategy.comm.codecs.quantizer import Quantizer
from mics_strategy.comm.residuals import residuals_by_stage
from mics_strategy.comm.route import Route
from mics_strategy.comm.transport import Transport
from mics_strategy.comm.work import Steps
from mics_strategy.comm.workspace import Workspace


class Stages:
    """Runs collectives over the stages of a route.

    Each collective is a task of a queue (see `queue`): a generator that waits for no rank before its first `yield`, and
    has a part of the workspace for itself, of the size that `comm/scratch.py` computes.

    Args:
        route: Stages, with their codecs.
        transports: Transports of the stages, slowest links first.
        workspace: Scratch memory.
        device: Device of the tensors.

    Attributes:
        index: Index of this rank among those of the route.
    """

    def __init__(
        self, route: Route, transports: Sequence[Transport], workspace: Workspace, device: torch.device
    ) -> None:
        self._route = route
        self._workspace = workspace
        self._strides = route.strides
        self._transports = transports
        self._sum_dtype = partial(routes.sum_dtype, sums_natively=transports[0].sums_natively)
        self.index = sum(transport.index * stride for transport, stride in zip(transports, self._strides, strict=False))
        self._algorithms = [
            make_algorithm(transport, stage, workspace, device)
            for transport, stage in zip(transports, route.stages, strict=True)
        ]

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor, tag: int) -> Steps:
        """Put every rank's `shard` into `out`; see `Communicator.all_gather`.

        1. All-gather over the slowest links, into this rank's rows of `out`. Where the first stages are quantized, the
           shard is encoded once for all of them, and what has arrived is decoded, this rank's own payload as well.
        2. All-gather these rows over the next faster links, in place: they are contiguous.
        """
        if not shard.numel():
            return iter(())
        table, slowest = out.view(self._route.size, -1), self._algorithms[0]
        if isinstance(slowest, QuantizedAlgorithm):
            return self._gather_encoded(slowest.gather_quantizer, table, shard, tag)
        return self._gather_rows(table, shard, range(len(self._transports)), tag)

    def _gather_encoded(self, quantizer: Quantizer, table: torch.Tensor, shard: torch.Tensor, tag: int) -> Steps:
        """All-gather over several stages of which the first ones are quantized."""
        num_encoded = self._route.num_quantized
        payloads = self._workspace.allocate_payloads(quantizer.codec, self._strides[num_encoded], shard.numel())
        own, rows = self.index % len(payloads), len(payloads)
        first = self.index - own
        if not quantizer.codec.differences:
            quantizer.encode(shard, payloads[own])
            yield from self._gather_rows(payloads, payloads[own], range(num_encoded), tag)
            quantizer.decode(payloads, table[first : first + rows])
        else:
            scratch = self._workspace.allocate(shard.numel(), torch.float32)
            quantizer.encode_difference(shard, table[self.index], payloads[own], scratch)
            yield from self._gather_rows(payloads, payloads[own], range(num_encoded), tag)
            for payload, row in zip(payloads, table[first : first + rows], strict=True):
                quantizer.decode_difference(payload, row, scratch)
        yield from self._gather_rows(table, None, range(num_encoded, len(self._transports)), tag)

    def _gather_rows(
        self, table: torch.Tensor, shard: torch.Tensor | None, stages: range, tag: int, ranks_per_row: int = 1
    ) -> Steps:
        """All-gather this rank's rows of a table over some stages.

        Args:
            table: [rows, n] of all ranks of these stages, and of all stages before.
            shard: Rows of this rank, if they are not in the table.
            stages: Indices of the stages.
            tag: Tag of the collective, the same on all ranks.
            ranks_per_row: Ranks that have a share of each row.
        """
        own = self.index // ranks_per_row % len(table)
        for stage in stages:
            inner, outer = (self._strides[index] // ranks_per_row for index in (stage, stage + 1))
            source = table[own - own % inner :][:inner].view(-1) if shard is None else shard
            pending = self._transports[stage].all_gather(table[own - own % outer :][:outer].view(-1), source, tag)
            if stage == stages.start:
                yield
            pending.wait()
            shard = None

    def reduce_scatter(
        self, out: torch.Tensor, full: torch.Tensor, accumulate: bool, residual: torch.Tensor | None, tag: int
    ) -> Steps:
        """Sum every `full` and keep this rank's slice; see `Communicator.reduce_scatter`.

        1. Reduce-scatter over the fastest links: this rank keeps one slice.
        2. Reduce-scatter the slice over the next slower links.
        """
        if not full.numel():
            return
        wire, residuals = full.dtype, residuals_by_stage(self._route, self.index, residual)
        table = full
        for algorithm, total, source, inner_residual in self._faster_stages(full, wire, out.dtype, residuals):
            yield from algorithm.reduce_scatter(total, source, wire, False, tag, inner_residual)
            table = total
        yield from self._algorithms[0].reduce_scatter(out, table, wire, accumulate, tag, residuals[0])

    def _faster_stages(
        self, table: torch.Tensor, wire: torch.dtype, dtype: torch.dtype, residuals: list[torch.Tensor | None]
    ) -> Iterator[tuple[NativeAlgorithm | QuantizedAlgorithm, torch.Tensor, torch.Tensor, torch.Tensor | None]]:
        """The reduce-scatters over all but the slowest links, fastest first.

        Args:
            table: [size * n], unchanged.
            wire: Dtype of unquantized payloads.
            dtype: Dtype of the last sums.
            residuals: Residual of each stage.

        Returns:
            Of each stage its algorithm, scratch memory for this rank's sums, the table and the residual.
        """
        stages = zip(self._route.stages, self._algorithms, residuals, strict=True)
        for stage, algorithm, residual in reversed([*stages][1:]):
            total = self._workspace.allocate(table.numel() // stage.size, self._sum_dtype(stage, wire, dtype))
            yield algorithm, total, table, residual
            table = total

    def all_reduce(self, tensor: torch.Tensor, wire: torch.dtype, residual: torch.Tensor | None, tag: int) -> Steps:
        """Sum `tensor` over all ranks; see `Communicator.all_reduce`.

        Where one stage neither encodes nor widens, the backend does it. Elsewhere:

        1. Reduce-scatter over all but the slowest links; this rank keeps a slice.
        2. All-reduce the slice over the slowest links.
        3. All-gather the slices over the faster links, never quantized again, so that all ranks have the same bits:
           between nodes as the encoded sums, inside them decoded.
        """
        if routes.is_plain_all_reduce(self._route, wire, tensor.dtype):
            yield
            self._transports[0].barrier(tag)
            self._transports[0].all_reduce(tensor)
            return
        if not tensor.numel():
            return
        dtype = self._sum_dtype(self._route.stages[-1], wire, tensor.dtype)
        full, size = self._padded(tensor, dtype), self._route.stages[0].size
        residuals = residuals_by_stage(self._route, self.index, residual)
        table = full
        for algorithm, total, source, inner_residual in self._faster_stages(full, wire, tensor.dtype, residuals):
            yield from algorithm.reduce_scatter(total, source, wire, False, tag, inner_residual)
            table = total
        num_encoded, slowest = self._route.num_quantized_sums, self._algorithms[0]
        is_last = len(self._transports) == max(num_encoded, 1)
        if not is_last and wire != dtype:
            full = self._workspace.allocate(full.numel(), wire)
        slices = full.view(self._route.num_slices, -1)
        if isinstance(slowest, QuantizedAlgorithm):
            total = self._workspace.allocate(table.numel() // size, tensor.dtype)
            yield from slowest.reduce_scatter(total, table, wire, False, tag, residuals[0])
            yield from self._gather_sums(slowest, total, slices, tag, residuals[0])
        else:
            yield from slowest.all_reduce(table, wire, tensor.dtype, tag)
            if wire != dtype and not is_last:
                table = slices[self.index // size].copy_(table)
            yield from self._gather_rows(slices, table, range(1, len(self._transports)), tag, size)
        if full is not tensor:
            tensor.copy_(full[: tensor.numel()])

    def _gather_sums(
        self,
        slowest: QuantizedAlgorithm,
        total: torch.Tensor,
        slices: torch.Tensor,
        tag: int,
        residual: torch.Tensor | None,
    ) -> Steps:
        """Encode this rank's share of the sum, and all-gather the shares.

        Args:
            slowest: Algorithm of the slowest links.
            total: [n / size of the slowest stage], the sum of this rank's share of its slice.
            slices: [slices, n]; overwritten.
            tag: Tag of the collective, the same on all ranks.
            residual: Residual of the slice; None without feedback.
        """
        num_encoded, size = self._route.num_quantized_sums, self._route.stages[0].size
        payloads = self._workspace.allocate_payloads(slowest.quantizer.codec, self._strides[num_encoded], total.numel())
        own = self.index % len(payloads)
        total_residual = None if residual is None else residual.view(size, -1)[slowest.transport.index]
        slowest.gather_quantizer.encode(total, payloads[own], total_residual)
        yield from self._gather_rows(payloads, payloads[own], range(num_encoded), tag)
        first, num_slices = (self.index - own) // size, len(payloads) // size
        slowest.quantizer.decode(payloads, slices[first : first + num_slices].view(len(payloads), -1))
        yield from self._gather_rows(slices, None, range(num_encoded, len(self._transports)), tag, size)

    def _padded(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """`tensor` in `dtype`, with zeros up to equal slices of all ranks.

        It is `tensor` itself where nothing changes.
        """
        numel = self._route.num_slices * routes.all_reduce_slice(self._route, tensor.numel())
        if numel == tensor.numel() and dtype == tensor.dtype:
            return tensor
        full = self._workspace.allocate(numel, dtype)
        full[: tensor.numel()].copy_(tensor)
        full[tensor.numel() :].zero_()
        return full
