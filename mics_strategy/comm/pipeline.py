"""Collectives over the stages of a route in chunks, point to point.

A slice goes through the stages in chunks. While one chunk is on the inter-node links, the previous one is on the
intra-node links, so that a collective takes about as long as the slowest of its stages, not as long as all of them.

A full tensor is a table with one row for each rank, by its index. The ranks of one stage have rows at a distance of
`Route.strides`, and before stage k of an all-gather a rank has `strides[k]` adjacent rows, of the stages before it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from mics_strategy.comm import route as routes
from mics_strategy.comm.algorithms import (
    Completion,
    PlainAlgorithm,
    QuantizedAlgorithm,
    SumCompletion,
    make_algorithm,
)
from mics_strategy.comm.codecs.quantizer import Quantizer
from mics_strategy.comm.workspace import Workspace, aligned_bytes

if TYPE_CHECKING:
    from mics_strategy.comm.route import Route
    from mics_strategy.comm.transport import GlooTransport
    from mics_strategy.comm.work import Steps

_Batches = Iterable[tuple[Completion, list[tuple[int, int]]]]  # after the completion, these pieces are in place
_Sums = Iterable[tuple[list[tuple[SumCompletion, torch.Tensor]], int]]  # of one chunk, each with its output


@dataclass(frozen=True, slots=True)
class _Table:
    """Adjacent rows, all cut into the same chunks. A piece is one chunk of one row.

    Attributes:
        values: [rows, n], contiguous.
        chunks: Start and end of each chunk in a row.
        ranks_per_row: Ranks that have a share of each row.
    """

    values: torch.Tensor
    chunks: list[tuple[int, int]]
    ranks_per_row: int = 1

    def piece(self, row: int, chunk: int) -> torch.Tensor:
        """The piece as a view."""
        start, end = self.chunks[chunk]
        return self.values[row, start:end]

    def pieces_of(self, row: int) -> list[tuple[int, int]]:
        """All pieces of one row."""
        return [(row, chunk) for chunk in range(len(self.chunks))]


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
        full = _Table(out.view(self._route.size, -1), chunks)
        num_encoded = self._route.num_quantized if self.quantizer is None else 0
        payloads = self._allocate_payloads(num_encoded, [end - start for start, end in chunks])
        started = [
            self._start_first(full, payloads, chunk, shard[start:end], tag) for chunk, (start, end) in enumerate(chunks)
        ]
        yield
        self._finish_gather(self._first_batches(started, payloads or full), payloads, full, shard.dtype, tag)

    def _allocate_payloads(self, num_stages: int, numels: list[int]) -> _Table | None:
        """Payloads of all ranks of the first stages, for chunks of `numels` elements.

        None for no stage.
        """
        codec = self._route.hops[0].codec
        if not num_stages or codec is None:
            return None
        num_bytes = [codec.encoded_bytes(numel) for numel in numels]
        values = self._workspace.allocate(self._strides[num_stages] * sum(num_bytes), torch.uint8)
        ends = list(itertools.accumulate(num_bytes))
        return _Table(values.view(self._strides[num_stages], -1), list(zip([0, *ends], ends, strict=False)))

    def _payload_bytes(self, num_stages: int, numels: list[int]) -> int:
        """Bytes of workspace for `_allocate_payloads`."""
        codec = self._route.hops[0].codec
        num_bytes = sum(codec.encoded_bytes(numel) for numel in numels) if codec is not None else 0
        return aligned_bytes((self._strides[num_stages] * num_bytes, torch.uint8)) if num_stages else 0

    def _start_first(
        self, full: _Table, payloads: _Table | None, chunk: int, shard: torch.Tensor, tag: int
    ) -> Completion:
        """Start the first stage of an all-gather with one chunk of this rank's shard.

        The chunk is encoded if there are payloads.
        """
        table, own = full, self.index
        first = self._sum_algorithms[0]
        if payloads is not None and isinstance(first, QuantizedAlgorithm):
            table, own = payloads, self.index % len(payloads.values)
            first.gather_quantizer.encode(shard, payloads.piece(own, chunk))
            shard = payloads.piece(own, chunk)
        rows = [table.piece(row, chunk) for row in self._members(0, own, table)]
        return self._gather_algorithms[0].start_all_gather(rows, shard, shard.dtype, tag)

    def _first_batches(self, started: list[Completion], table: _Table) -> _Batches:
        """The pieces of the first stage: those of this rank first."""
        own = self.index % len(table.values)
        yield _nothing, table.pieces_of(own)
        for chunk, finish in enumerate(started):
            yield finish, [(row, chunk) for row in self._members(0, own, table) if row != own]

    def _members(self, stage: int, row: int, table: _Table) -> range:
        """The rows of the ranks of one stage that have `row` on one of them."""
        transport, stride = self._transports[stage], self._strides[stage] // table.ranks_per_row
        first = row - transport.index * stride
        return range(first, first + transport.size * stride, stride)

    def _finish_gather(
        self, batches: _Batches, payloads: _Table | None, full: _Table, wire: torch.dtype, tag: int
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

    def _gather_over(self, stage: int, batches: _Batches, table: _Table, wire: torch.dtype, tag: int) -> _Batches:
        """All-gather each piece over one stage as soon as it is in place.

        What has arrived is passed on. A batch is waited for when the next one has been started.
        """
        algorithm = self._gather_algorithms[stage]
        is_rounded = wire != table.values.dtype  # then own pieces as well
        previous: tuple[Completion, list[tuple[int, int]]] = (_nothing, [])
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
                yield _nothing, pieces
            yield previous
            previous = partial(_finish_all, started), arriving
        yield previous

    def _decode(self, batches: _Batches, payloads: _Table, full: _Table) -> _Batches:
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
                    first.quantizer.decode(payloads.piece(payload_row, chunk), target)
                counts[row, chunk] += 1
                if counts[row, chunk] == ranks_per_row:
                    complete.append((row, chunk))
            yield _nothing, complete

    def all_gather_quantized(self, quantizer: Quantizer, out: torch.Tensor, shard: torch.Tensor, tag: int) -> Steps:
        """Encode once, gather the payloads over all stages, and decode all of them.

        This rank's own payload is decoded as well.
        """
        if not shard.numel():
            return
        num_bytes = quantizer.codec.encoded_bytes(shard.numel())
        payloads = self._workspace.allocate(self._route.size * num_bytes, torch.uint8)
        rows = payloads.view(self._route.size, num_bytes)
        quantizer.encode(shard, rows[self.index])
        yield from self.all_gather(payloads, rows[self.index], tag)
        for row, slice_ in zip(rows, out.view(self._route.size, -1), strict=True):
            quantizer.decode(row, slice_)

    def reserve_all_gather(self, numel: int, dtype: torch.dtype) -> None:
        """Reserve workspace for all-gathers of shards of `numel` elements."""
        if self.quantizer is not None:
            num_bytes = self.quantizer.codec.encoded_bytes(numel)
            self._workspace.reserve(aligned_bytes((self._route.size * num_bytes, torch.uint8)))
        elif numel:
            numels = [end - start for start, end in routes.chunks_of(self._route, numel, dtype.itemsize)]
            self._workspace.reserve(self._payload_bytes(self._route.num_quantized, numels))

    def reduce_scatter(self, out: torch.Tensor, full: torch.Tensor, accumulate: bool, tag: int) -> Steps:
        """Sum every `full` and keep this rank's slice; see `Communicator.reduce_scatter`.

        1. Reduce-scatter each chunk over the fastest links: this rank keeps one slice, in the dtype of the sum.
        2. Reduce-scatter each chunk of the slice over the next slower links as soon as it is summed.
        """
        wire = full.dtype
        chunks = routes.chunks_of(self._route, out.numel(), wire.itemsize)
        tables = [_Table(out.view(1, -1), chunks), *self._allocate_sums(chunks, out, 1)]
        tables.append(_Table(full.view(self._route.size, -1), chunks))
        last = len(self._transports) - 1
        sums: _Sums = [(self._start_sums(last, tables, chunk, wire, tag), chunk) for chunk in range(len(chunks))]
        yield
        for stage in reversed(range(last)):
            sums = self._sum_over(stage, sums, tables, wire, tag)
        for finishes, _ in list(sums):
            for finish, total in finishes:
                finish(total, accumulate)

    def _allocate_sums(self, chunks: list[tuple[int, int]], like: torch.Tensor, ranks_per_row: int) -> list[_Table]:
        """Tables of the sums for each stage but the last and fastest.

        They have the dtype of `like`.
        """
        numel = sum(end - start for start, end in chunks)
        tables = []
        for stride in self._strides[1:-1]:
            rows = stride // ranks_per_row
            values = self._workspace.allocate(rows * numel, like.dtype)
            tables.append(_Table(values.view(rows, -1), chunks, ranks_per_row))
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
        self, stage: int, tables: list[_Table], chunk: int, wire: torch.dtype, tag: int
    ) -> list[tuple[SumCompletion, torch.Tensor]]:
        """Start one stage of a reduce-scatter for one chunk of all rows.

        Each is returned with its output.

        The rows of a single chunk are adjacent, and go as one.
        """
        algorithm, source, target = self._sum_algorithms[stage], tables[stage + 1], tables[stage]
        size, rows = algorithm.transport.size, len(target.values)
        if len(source.chunks) == 1:
            pieces = list(source.values.view(size, -1))
            return [(algorithm.start_reduce_scatter(pieces, wire, tag), target.values.view(-1))]
        return [
            (
                algorithm.start_reduce_scatter(
                    [source.piece(member * rows + row, chunk) for member in range(size)], wire, tag
                ),
                target.piece(row, chunk),
            )
            for row in range(rows)
        ]

    def _sum_over(self, stage: int, sums: _Sums, tables: list[_Table], wire: torch.dtype, tag: int) -> _Sums:
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

    def all_reduce(self, tensor: torch.Tensor, wire: torch.dtype, tag: int) -> Steps:
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
        slices = _Table(full.view(self._route.num_slices, -1), chunks, self._route.hops[0].size)
        tables = [slices, *self._allocate_sums(chunks, full, slices.ranks_per_row), slices]
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
            shares.append(self._sum_algorithms[0].start_reduce_scatter(rows, wire, tag))
        if not last:
            yield
        self._gather_shares(shares, slices, wire, tag)
        tensor.copy_(full[: tensor.numel()])

    def _gather_shares(self, shares: list[SumCompletion], slices: _Table, wire: torch.dtype, tag: int) -> None:
        """Send the sums of this rank's shares, one of each chunk, to all ranks."""
        numels = [(end - start) // slices.ranks_per_row for start, end in slices.chunks]
        payloads = self._allocate_payloads(self._route.num_quantized_sums, numels)
        own = self.index // slices.ranks_per_row
        started: list[Completion] = []
        for chunk, (finish, numel) in enumerate(zip(shares, numels, strict=True)):
            total = self._workspace.allocate(numel, slices.values.dtype)
            finish(total, False)
            if payloads is not None:
                started.append(self._start_first(slices, payloads, chunk, total, tag))
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


def _nothing() -> None:
    """The completion of data that is there already."""


def _finish_all(started: list[Completion]) -> None:
    """The completion of several stages."""
    for finish in started:
        finish()
