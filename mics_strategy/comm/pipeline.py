"""Collectives over the stages of a route in chunks, point to point.

A slice goes through the stages in chunks. While one chunk is on the inter-node links, the previous one is on the
intra-node links, so that a collective takes about as long as the slowest of its stages, not as long as all of them.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from mics_strategy.comm import route as routes
from mics_strategy.comm.algorithms import Completion, PlainAlgorithm, QuantizedAlgorithm, SumCompletion, make_algorithm
from mics_strategy.comm.codecs.quantizer import Quantizer
from mics_strategy.comm.pieces import PieceTable, finish_all, nothing
from mics_strategy.comm.residuals import residuals_by_stage
from mics_strategy.comm.workspace import Workspace, aligned_bytes

if TYPE_CHECKING:
    from mics_strategy.comm.route import Route
    from mics_strategy.comm.transport import GlooTransport
    from mics_strategy.comm.work import Steps

_Batches = Iterable[tuple[Completion, list[tuple[int, int]]]]  # after the completion, these pieces are in place
_Sums = Iterable[tuple[list[tuple[SumCompletion, torch.Tensor]], int]]  # of one chunk, each with its output


class StagePipeline:
    """Runs collectives over the stages of a route in chunks; see `Stages`.

    Args:
        route: Stages, with their codecs.
        transports: Transports of the stages, slowest links first.
        workspace: Scratch memory.
        device: Device of the tensors.

    Attributes:
        index: Index of this rank among those of the route.
        quantizer: Quantizer of shards that are encoded once for all stages of an all-gather; None where they are not.
    """

    def __init__(
        self, route: Route, transports: list[GlooTransport], workspace: Workspace, device: torch.device
    ) -> None:
        self._route = route
        self._workspace = workspace
        self._transports = transports
        self._strides = route.strides
        self.index = sum(transport.index * stride for transport, stride in zip(transports, self._strides, strict=False))
        self._sum_algorithms = [
            make_algorithm(transport, hop, workspace, device)
            for transport, hop in zip(transports, route.hops, strict=True)
        ]
        self._gather_algorithms = [
            PlainAlgorithm(algorithm.transport, workspace) if isinstance(algorithm, QuantizedAlgorithm) else algorithm
            for algorithm in self._sum_algorithms
        ]
        codec = route.all_gather_codec
        self.quantizer = Quantizer(codec, device, workspace.generator_for(codec, self.index)) if codec else None

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor, tag: int) -> Steps:
        """Put every rank's `shard`, or payload, into `out`; see `Communicator.all_gather`.

        1. All-gather each chunk over the slowest links. Where only the first stages are quantized, it is encoded once
           for all of them, and decoded behind the last of them.
        2. All-gather each chunk over the next faster links as soon as it has arrived, while the next one is on the
           slower links. The chunks of this rank's own shard need no step and go first.
        """
        chunks = routes.chunks_of(self._route, shard.numel(), shard.itemsize)
        full = PieceTable(out.view(self._route.size, -1), chunks)
        num_encoded = self._route.num_quantized if self.quantizer is None else 0
        payloads = self._allocate_payloads(num_encoded, [end - start for start, end in chunks])
        started = [
            self._start_first(full, payloads, chunk, shard[start:end], tag) for chunk, (start, end) in enumerate(chunks)
        ]
        yield
        self._finish_gather(self._first_batches(started, payloads or full), payloads, full, shard.dtype, tag)

    def _allocate_payloads(self, num_stages: int, numels: list[int]) -> PieceTable | None:
        """Payloads of all ranks of the first stages, for chunks of `numels` elements.

        None for no stage.
        """
        codec = self._route.hops[0].codec
        if not num_stages or codec is None:
            return None
        num_bytes = [codec.encoded_bytes(numel) for numel in numels]
        values = self._workspace.allocate(self._strides[num_stages] * sum(num_bytes), torch.uint8)
        ends = list(itertools.accumulate(num_bytes))
        chunks = list(zip([0, *ends], ends, strict=False))
        scratch = self._workspace.allocate(max(numels), torch.float32) if codec.differences else None
        return PieceTable(values.view(self._strides[num_stages], -1), chunks, scratch=scratch)

    def _payload_bytes(self, num_stages: int, numels: list[int]) -> int:
        """Bytes of workspace for `_allocate_payloads`."""
        codec = self._route.hops[0].codec
        num_bytes = sum(codec.encoded_bytes(numel) for numel in numels) if codec is not None else 0
        scratch = [(max(numels, default=0), torch.float32)] if codec is not None and codec.differences else []
        return aligned_bytes((self._strides[num_stages] * num_bytes, torch.uint8), *scratch) if num_stages else 0

    def _start_first(
        self,
        full: PieceTable,
        payloads: PieceTable | None,
        chunk: int,
        shard: torch.Tensor,
        tag: int,
        residual: torch.Tensor | None = None,
    ) -> Completion:
        """Start the first stage of an all-gather with one chunk of this rank's shard.

        The chunk is encoded if there are payloads.
        """
        table, own = full, self.index
        first = self._sum_algorithms[0]
        if payloads is not None and isinstance(first, QuantizedAlgorithm):
            table, own = payloads, self.index % len(payloads.values)
            payload = payloads.piece(own, chunk)
            if payloads.scratch is None:
                first.gather_quantizer.encode(shard, payload, residual)
            else:
                scratch = payloads.scratch[: shard.numel()]
                first.gather_quantizer.encode_difference(shard, full.piece(self.index, chunk), payload, scratch)
            shard = payloads.piece(own, chunk)
        rows = [table.piece(row, chunk) for row in self._members(0, own, table)]
        return self._gather_algorithms[0].start_all_gather(rows, shard, shard.dtype, tag)

    def _first_batches(self, started: list[Completion], table: PieceTable) -> _Batches:
        """The pieces of the first stage: those of this rank first."""
        own = self.index % len(table.values)
        yield nothing, table.pieces_of(own)
        for chunk, finish in enumerate(started):
            yield finish, [(row, chunk) for row in self._members(0, own, table) if row != own]

    def _members(self, stage: int, row: int, table: PieceTable) -> range:
        """The rows of the ranks of one stage that have `row` on one of them."""
        transport, stride = self._transports[stage], self._strides[stage] // table.ranks_per_row
        first = row - transport.index * stride
        return range(first, first + transport.size * stride, stride)

    def _finish_gather(
        self, batches: _Batches, payloads: PieceTable | None, full: PieceTable, wire: torch.dtype, tag: int
    ) -> None:
        """Gather the pieces of the first stage over all others."""
        stage = 1
        if payloads is not None:
            while self._strides[stage] < len(payloads.values):
                batches = self._gather_over(stage, batches, payloads, torch.uint8, tag)
                stage += 1
            batches = self._decode(batches, payloads, full)
        for last in range(stage, len(self._transports)):
            batches = self._gather_over(last, batches, full, wire, tag)
        for finish, _ in batches:
            finish()

    def _gather_over(self, stage: int, batches: _Batches, table: PieceTable, wire: torch.dtype, tag: int) -> _Batches:
        """All-gather each piece over one stage as soon as it is in place.

        What has arrived is passed on. A batch is waited for when the next one has been started.
        """
        algorithm = self._gather_algorithms[stage]
        is_rounded = wire != table.values.dtype  # then own pieces as well
        previous: tuple[Completion, list[tuple[int, int]]] = (nothing, [])
        for finish, pieces in batches:
            finish()
            started: list[Completion] = []
            arriving: list[tuple[int, int]] = []
            for row, chunk in pieces:
                members = self._members(stage, row, table)
                rows = [table.piece(member, chunk) for member in members]
                started.append(algorithm.start_all_gather(rows, table.piece(row, chunk), wire, tag))
                arriving += [(member, chunk) for member in members if is_rounded or member != row]
            if not is_rounded:
                yield nothing, pieces
            yield previous
            previous = partial(finish_all, started), arriving
        yield previous

    def _decode(self, batches: _Batches, payloads: PieceTable, full: PieceTable) -> _Batches:
        """Decode payloads, this rank's as well, into `full`.

        Pieces of `full` that are complete are passed on.
        """
        first = self._sum_algorithms[0]
        base, ranks_per_row = self.index - self.index % len(payloads.values), full.ranks_per_row
        counts: Counter[tuple[int, int]] = Counter()
        for finish, pieces in batches:
            finish()
            complete = []
            for payload_row, chunk in pieces:
                row, share = divmod(base + payload_row, ranks_per_row)
                target = full.piece(row, chunk).view(ranks_per_row, -1)[share]
                if isinstance(first, QuantizedAlgorithm):
                    payload, scratch = payloads.piece(payload_row, chunk), payloads.scratch
                    if scratch is None:
                        first.quantizer.decode(payload, target)
                    else:
                        first.quantizer.decode_difference(payload, target, scratch[: target.numel()])
                counts[row, chunk] += 1
                if counts[row, chunk] == ranks_per_row:
                    complete.append((row, chunk))
            yield nothing, complete

    def all_gather_quantized(self, quantizer: Quantizer, out: torch.Tensor, shard: torch.Tensor, tag: int) -> Steps:
        """Encode once, gather the payloads over all stages, and decode all of them.

        This rank's own payload is decoded as well.
        """
        if not shard.numel():
            return
        num_bytes = quantizer.codec.encoded_bytes(shard.numel())
        payloads = self._workspace.allocate(self._route.size * num_bytes, torch.uint8)
        rows, slices = payloads.view(self._route.size, num_bytes), out.view(self._route.size, -1)
        scratch = self._workspace.allocate(shard.numel(), torch.float32) if quantizer.codec.differences else None
        if scratch is None:
            quantizer.encode(shard, rows[self.index])
        else:
            quantizer.encode_difference(shard, slices[self.index], rows[self.index], scratch)
        yield from self.all_gather(payloads, rows[self.index], tag)
        for row, slice_ in zip(rows, slices, strict=True):
            if scratch is None:
                quantizer.decode(row, slice_)
            else:
                quantizer.decode_difference(row, slice_, scratch)

    def reserve_all_gather(self, numel: int, dtype: torch.dtype) -> None:
        """Reserve workspace for all-gathers of shards of `numel` elements."""
        if self.quantizer is not None:
            num_bytes = self.quantizer.codec.encoded_bytes(numel)
            scratch = [(numel, torch.float32)] if self.quantizer.codec.differences else []
            self._workspace.reserve(aligned_bytes((self._route.size * num_bytes, torch.uint8), *scratch))
        elif numel:
            numels = [end - start for start, end in routes.chunks_of(self._route, numel, dtype.itemsize)]
            self._workspace.reserve(self._payload_bytes(self._route.num_quantized, numels))

    def reduce_scatter(
        self, out: torch.Tensor, full: torch.Tensor, accumulate: bool, tag: int, residual: torch.Tensor | None
    ) -> Steps:
        """Sum every `full` and keep this rank's slice; see `Communicator.reduce_scatter`.

        1. Reduce-scatter each chunk over the fastest links: this rank keeps one slice, in the dtype of the sum.
        2. Reduce-scatter each chunk of the slice over the next slower links as soon as it is summed.
        """
        wire = full.dtype
        chunks = routes.chunks_of(self._route, out.numel(), wire.itemsize)
        tables = [PieceTable(out.view(1, -1), chunks), *self._allocate_sums(chunks, out, 1)]
        tables.append(PieceTable(full.view(self._route.size, -1), chunks))
        tables = self._with_residuals(tables, residual)
        last = len(self._transports) - 1
        sums: _Sums = [(self._start_sums(last, tables, chunk, wire, tag), chunk) for chunk in range(len(chunks))]
        yield
        for stage in reversed(range(last)):
            sums = self._sum_over(stage, sums, tables, wire, tag)
        for finishes, _ in list(sums):
            for finish, total in finishes:
                finish(total, accumulate)

    def _with_residuals(self, tables: list[PieceTable], residual: torch.Tensor | None) -> list[PieceTable]:
        """The tables of a sum; that which stage k encodes, with its residual."""
        for stage, part in enumerate(residuals_by_stage(self._route, self.index, residual), start=1):
            if part is not None:
                tables[stage] = replace(tables[stage], residual=part.view(tables[stage].values.shape))
        return tables

    def _allocate_sums(self, chunks: list[tuple[int, int]], like: torch.Tensor, ranks_per_row: int) -> list[PieceTable]:
        """Tables of the sums for each stage but the last and fastest.

        They have the dtype of `like`.
        """
        numel = sum(end - start for start, end in chunks)
        tables = []
        for stride in self._strides[1:-1]:
            rows = stride // ranks_per_row
            values = self._workspace.allocate(rows * numel, like.dtype)
            tables.append(PieceTable(values.view(rows, -1), chunks, ranks_per_row))
        return tables

    def _sums_bytes(
        self,
        chunks: list[tuple[int, int]],
        ranks_per_row: int,
        dtypes: tuple[torch.dtype, torch.dtype],
        wire: torch.dtype,
    ) -> int:
        """Bytes of workspace for the sums of each stage but the slowest.

        What is received there is counted as well.

        Args:
            chunks: Chunks of a row.
            ranks_per_row: Ranks that have a share of each row.
            dtypes: Dtype of the full tensor, and of the sums.
            wire: Dtype of unquantized payloads.
        """
        numel, (full_dtype, dtype) = sum(end - start for start, end in chunks), dtypes
        num_bytes = 0
        for algorithm, stride in zip(self._sum_algorithms[1:], self._strides[1:-1], strict=True):
            rows = stride // ranks_per_row
            source = full_dtype if algorithm is self._sum_algorithms[-1] else dtype
            num_bytes += aligned_bytes((rows * numel, dtype))
            num_bytes += sum(
                algorithm.reduce_scatter_scratch_bytes(piece_numel, source, wire)
                for piece_numel in routes.piece_numels(chunks, rows)
            )
        return num_bytes

    def _start_sums(
        self, stage: int, tables: list[PieceTable], chunk: int, wire: torch.dtype, tag: int
    ) -> list[tuple[SumCompletion, torch.Tensor]]:
        """Start one stage of a reduce-scatter for one chunk of all rows.

        Each is returned with its output.

        The rows of a single chunk are adjacent, and go as one.
        """
        algorithm, source, target = self._sum_algorithms[stage], tables[stage + 1], tables[stage]
        size, rows = algorithm.transport.size, len(target.values)
        if len(source.chunks) == 1:
            pieces = list(source.values.view(size, -1))
            residuals = None if source.residual is None else list(source.residual.view(size, -1))
            return [(algorithm.start_reduce_scatter(pieces, wire, tag, residuals), target.values.view(-1))]
        started = []
        for row in range(rows):
            sent = range(row, size * rows, rows)
            pieces = [source.piece(index, chunk) for index in sent]
            lost = [part for index in sent if (part := source.residual_piece(index, chunk)) is not None]
            started.append((algorithm.start_reduce_scatter(pieces, wire, tag, lost or None), target.piece(row, chunk)))
        return started

    def _sum_over(self, stage: int, sums: _Sums, tables: list[PieceTable], wire: torch.dtype, tag: int) -> _Sums:
        """Start each chunk on one stage as soon as it is summed on the faster one.

        It is passed on when the next one has been started.
        """
        previous: tuple[list[tuple[SumCompletion, torch.Tensor]], int] | None = None
        for finishes, chunk in sums:
            for finish, total in finishes:
                finish(total, False)
            started = self._start_sums(stage, tables, chunk, wire, tag)
            if previous is not None:
                yield previous
            previous = started, chunk
        if previous is not None:
            yield previous

    def reserve_reduce_scatter(self, full_numel: int, wire: torch.dtype, dtype: torch.dtype) -> None:
        """Reserve workspace for reduce-scatters of `full_numel` elements.

        The sums have `dtype`.
        """
        shard = full_numel // self._route.size
        chunks = routes.chunks_of(self._route, shard, wire.itemsize) if shard else []
        source = wire if len(self._transports) == 1 else dtype
        num_bytes = sum(
            self._sum_algorithms[0].reduce_scatter_scratch_bytes(end - start, source, wire) for start, end in chunks
        )
        self._workspace.reserve(num_bytes + self._sums_bytes(chunks, 1, (wire, dtype), wire))

    def all_reduce_plain(self, tensor: torch.Tensor, tag: int) -> Steps:
        """Sum `tensor` over all ranks with the backend's all-reduce, in its dtype."""
        yield
        self._transports[0].barrier(tag)
        self._transports[0].all_reduce(tensor).wait()

    def all_reduce(self, tensor: torch.Tensor, wire: torch.dtype, tag: int, residual: torch.Tensor | None) -> Steps:
        """Sum `tensor` over all ranks; see `Communicator.all_reduce`.

        1. Reduce-scatter each chunk over all but the slowest links; this rank keeps a slice.
        2. All-reduce the chunk over the slowest links: each rank sums a share of it, and sends the sum to the others.
        3. All-gather the slices over the faster links, never quantized again, so that all ranks have the same bits:
           between nodes as the encoded sums, inside them decoded.
        """
        slice_numel = routes.all_reduce_slice(self._route, tensor.numel())
        full = self._workspace.allocate(self._route.num_slices * slice_numel, tensor.dtype)
        full[: tensor.numel()].copy_(tensor)
        full[tensor.numel() :].zero_()
        chunks = routes.all_reduce_chunks(self._route, slice_numel, wire.itemsize)
        slices = PieceTable(full.view(self._route.num_slices, -1), chunks, self._route.hops[0].size)
        tables = [slices, *self._allocate_sums(chunks, full, slices.ranks_per_row), slices]
        tables = self._with_residuals(tables, residual)
        last = len(self._transports) - 1
        if last:
            sums: _Sums = [(self._start_sums(last, tables, chunk, wire, tag), chunk) for chunk in range(len(chunks))]
            yield
            for stage in reversed(range(1, last)):
                sums = self._sum_over(stage, sums, tables, wire, tag)
        else:
            sums = [([], chunk) for chunk in range(len(chunks))]
        shares = []
        for finishes, chunk in sums:
            for finish, total in finishes:
                finish(total, False)
            rows = list(tables[1].piece(0, chunk).view(slices.ranks_per_row, -1))
            part = tables[1].residual_piece(0, chunk)
            residuals = None if part is None else list(part.view(slices.ranks_per_row, -1))
            finish_share = self._sum_algorithms[0].start_reduce_scatter(rows, wire, tag, residuals)
            shares.append((finish_share, None if residuals is None else residuals[self._transports[0].index]))
        if not last:
            yield
        self._gather_shares(shares, slices, wire, tag)
        tensor.copy_(full[: tensor.numel()])

    def _gather_shares(
        self, shares: list[tuple[SumCompletion, torch.Tensor | None]], slices: PieceTable, wire: torch.dtype, tag: int
    ) -> None:
        """Send the sums of this rank's shares, one of each chunk, to all ranks.

        Each has its residual, None without feedback.
        """
        numels = [(end - start) // slices.ranks_per_row for start, end in slices.chunks]
        payloads = self._allocate_payloads(self._route.num_quantized_sums, numels)
        own = self.index // slices.ranks_per_row
        started: list[Completion] = []
        for chunk, ((finish, residual), numel) in enumerate(zip(shares, numels, strict=True)):
            total = self._workspace.allocate(numel, slices.values.dtype)
            finish(total, False)
            if payloads is not None:
                started.append(self._start_first(slices, payloads, chunk, total, tag, residual))
            else:
                rows = list(slices.piece(own, chunk).view(slices.ranks_per_row, -1))
                started.append(self._gather_algorithms[0].start_all_gather(rows, total, wire, tag))
        batches: _Batches = ((finish, [(own, chunk)]) for chunk, finish in enumerate(started))
        if payloads is not None:
            batches = self._first_batches(started, payloads)
        self._finish_gather(batches, payloads, slices, wire, tag)

    def reserve_all_reduce(self, numel: int, wire: torch.dtype, dtype: torch.dtype) -> None:
        """Reserve workspace for all-reduces of `numel` elements of `dtype`."""
        slice_numel, size = routes.all_reduce_slice(self._route, numel), self._route.hops[0].size
        chunks = routes.all_reduce_chunks(self._route, slice_numel, wire.itemsize)
        numels = [(end - start) // size for start, end in chunks]
        num_encoded = self._route.num_quantized_sums
        num_bytes = aligned_bytes((self._route.num_slices * slice_numel, dtype))
        num_bytes += self._sums_bytes(chunks, size, (dtype, dtype), wire) + self._payload_bytes(num_encoded, numels)
        for share in numels:
            num_bytes += self._sum_algorithms[0].reduce_scatter_scratch_bytes(share, dtype, wire)
            num_bytes += aligned_bytes((share, dtype))
            if not num_encoded:
                num_bytes += self._gather_algorithms[0].all_gather_scratch_bytes(share, dtype, wire)
        for stage in range(max(num_encoded, 1), len(self._transports)):
            algorithm, rows = self._gather_algorithms[stage], self._strides[stage] // size
            piece_bytes = sum(algorithm.all_gather_scratch_bytes(size * share, dtype, wire) for share in numels)
            num_bytes += rows * piece_bytes
        self._workspace.reserve(num_bytes)
