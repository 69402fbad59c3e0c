"""The stages of one route, and the work of one collective over them.

On gloo two stages are pipelined: a slice goes through them in chunks. While one chunk is on the inter-node links, the
previous one is on the intra-node links, so that a collective takes about as long as the slower of its stages, not as
long as both. Other backends pipeline by themselves; see `native`.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Protocol

import torch

from mics_strategy.comm import route as routes
from mics_strategy.comm.algorithms import (
    Completion,
    GroupAlgorithm,
    PlainAlgorithm,
    QuantizedAlgorithm,
    SumCompletion,
    make_algorithm,
)
from mics_strategy.comm.codecs.quantizer import Quantizer
from mics_strategy.comm.route import StageResiduals
from mics_strategy.comm.workspace import Workspace, aligned_bytes

if TYPE_CHECKING:
    from mics_strategy.comm.route import Route
    from mics_strategy.comm.transport import GlooTransport
    from mics_strategy.comm.work import Steps


class Stages(Protocol):
    """Runs collectives over one or two stages.

    Each collective is a task of a queue (see `queue`): a generator that waits for no rank before its first `yield`, and
    has a part of the workspace for itself.

    Attributes:
        index: Index of this rank among those of the route.
        quantizer: Quantizer of shards that are encoded once for all stages of an all-gather; None where they are not.
    """

    index: int
    quantizer: Quantizer | None

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor, tag: int) -> Steps:
        """Put every rank's `shard`, or payload, into `out`; see `Communicator.all_gather`."""

    def all_gather_quantized(self, quantizer: Quantizer, out: torch.Tensor, shard: torch.Tensor, tag: int) -> Steps:
        """Encode once, gather the payloads over all stages, and decode all of them."""

    def reserve_all_gather(self, numel: int, dtype: torch.dtype) -> None:
        """Reserve workspace for all-gathers of shards of `numel` elements."""

    def reduce_scatter(
        self, out: torch.Tensor, full: torch.Tensor, accumulate: bool, tag: int, residual: torch.Tensor | None
    ) -> Steps:
        """Sum every `full` and keep this rank's slice; see `Communicator.reduce_scatter`."""

    def reserve_reduce_scatter(self, full_numel: int, wire: torch.dtype, dtype: torch.dtype) -> None:
        """Reserve workspace for reduce-scatters of `full_numel` elements to `dtype`."""

    def all_reduce_plain(self, tensor: torch.Tensor, tag: int) -> Steps:
        """Sum `tensor` over all ranks with the backend's all-reduce, in its dtype."""

    def all_reduce(self, tensor: torch.Tensor, wire: torch.dtype, tag: int, residual: torch.Tensor | None) -> Steps:
        """Sum `tensor` over all ranks; see `Communicator.all_reduce`."""

    def reserve_all_reduce(self, numel: int, wire: torch.dtype, dtype: torch.dtype) -> None:
        """Reserve workspace for all-reduces of `numel` elements of `dtype`."""


class StagePipeline:
    """Runs collectives over one or two stages in chunks, point to point; see `Stages`.

    Args:
        route: Stages, with their codecs.
        transports: Transports of the inter-node stage and, where there is one, of the intra-node stage.
        workspace: Scratch memory.
        device: Device of the tensors.

    Attributes:
        index: Index of this rank among those of the route.
        quantizer: Quantizer of shards that are encoded once for all stages of an all-gather; None where they are not.
    """

    def __init__(
        self, route: Route, transports: list[GlooTransport], workspace: Workspace, device: torch.device
    ) -> None:
        inter, *intra = transports
        self._route = route
        self._workspace = workspace
        self._num_nodes = inter.size
        self._ranks_per_node = intra[0].size if intra else 1
        self._local_index = intra[0].index if intra else 0
        self.index = self._local_index * inter.size + inter.index
        self._inter = make_algorithm(inter, route.inter, workspace, device)
        self._intra = (
            make_algorithm(intra[0], route.intra, workspace, device) if intra and route.intra is not None else None
        )
        self._unquantized: list[GroupAlgorithm] = [PlainAlgorithm(transport, workspace) for transport in transports]
        codec, stages = route.all_gather_codec, [self._inter, *([self._intra] if self._intra is not None else [])]
        self.quantizer = Quantizer(codec, device, workspace.generator_for(codec, self.index)) if codec else None
        self._gather_algorithms = stages if self.quantizer is None else self._unquantized

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor, tag: int) -> Steps:
        """Put every rank's `shard`, or payload, into `out`; see `Communicator.all_gather`.

        1. All-gather each chunk between nodes, into this rank's slice of `out`.
        2. All-gather each chunk inside the node as soon as it has arrived, while the next one is on the inter-node
           links. The chunks of this rank's own shard need no first step and go first.
        """
        inter, *intras = self._gather_algorithms
        slices = out.view(self._ranks_per_node, self._num_nodes, -1)
        local_slice, local_row = slices[self._local_index], inter.transport.index
        chunks = routes.chunks_of(self._route, shard.numel(), shard.itemsize)
        inter_completions = [
            inter.start_all_gather([row[start:end] for row in local_slice], shard[start:end], shard.dtype, tag)
            for start, end in chunks
        ]
        yield
        is_local_row_final = not isinstance(inter, QuantizedAlgorithm)
        steps = [(_nothing, [(local_row, *chunk) for chunk in chunks if is_local_row_final])]
        for finish, chunk in zip(inter_completions, chunks, strict=True):
            others = [row for row in range(self._num_nodes) if row != local_row or not is_local_row_final]
            steps.append((finish, [(row, *chunk) for row in others]))
        previous: list[Completion] = []
        for finish_inter, pieces in steps:
            finish_inter()
            started: list[Completion] = []
            for (row, start, end), intra in itertools.product(pieces, intras):
                rows = [rank_slice[row][start:end] for rank_slice in slices]
                started.append(intra.start_all_gather(rows, local_slice[row][start:end], shard.dtype, tag))
            for finish in previous:
                finish()
            previous = started
        for finish in previous:
            finish()

    def all_gather_quantized(self, quantizer: Quantizer, out: torch.Tensor, shard: torch.Tensor, tag: int) -> Steps:
        """Encode once, gather the payloads over all stages, and decode all of them.

        This rank's own payload is decoded as well.
        """
        if not shard.numel():
            return
        num_bytes = quantizer.codec.encoded_bytes(shard.numel())
        payloads = self._workspace.allocate(self._route.size * num_bytes, torch.uint8)
        rows, slices = payloads.view(self._route.size, num_bytes), out.view(self._route.size, -1)
        if not quantizer.codec.differences:
            quantizer.encode(shard, rows[self.index])
            yield from self.all_gather(payloads, rows[self.index], tag)
            for row, slice_ in zip(rows, slices, strict=True):
                quantizer.decode(row, slice_)
            return
        scratch = self._workspace.allocate(shard.numel(), torch.float32)
        quantizer.encode_difference(shard, slices[self.index], rows[self.index], scratch)
        yield from self.all_gather(payloads, rows[self.index], tag)
        for row, slice_ in zip(rows, slices, strict=True):
            quantizer.decode_difference(row, slice_, scratch)

    def reserve_all_gather(self, numel: int, dtype: torch.dtype) -> None:
        """Reserve workspace for all-gathers of shards of `numel` elements."""
        if self.quantizer is not None:
            num_bytes = self.quantizer.codec.encoded_bytes(numel)
            scratch = [(numel, torch.float32)] if self.quantizer.codec.differences else []
            self._workspace.reserve(aligned_bytes((self._route.size * num_bytes, torch.uint8), *scratch))
        elif numel:
            chunks = routes.chunks_of(self._route, numel, dtype.itemsize)
            self._workspace.reserve(
                sum(self._inter.all_gather_scratch_bytes(end - start, dtype, dtype) for start, end in chunks)
            )

    def reduce_scatter(
        self, out: torch.Tensor, full: torch.Tensor, accumulate: bool, tag: int, residual: torch.Tensor | None
    ) -> Steps:
        """Sum every `full` and keep this rank's slice; see `Communicator.reduce_scatter`.

        1. Reduce-scatter each chunk inside the node: this rank keeps one slice, in the dtype of the sum.
        2. Reduce-scatter each chunk of the slice between nodes as soon as it is summed.
        """
        numel, wire = out.numel(), full.dtype
        chunks = routes.chunks_of(self._route, numel, wire.itemsize)
        lost = StageResiduals(residual, self._route, self._local_index)
        if self._intra is None:
            rows = list(full.view(self._route.size, -1).unbind())
            completions = [
                self._inter.start_reduce_scatter([row[start:end] for row in rows], wire, tag, lost.of_inter(start, end))
                for start, end in chunks
            ]
            yield
            for finish, (start, end) in zip(completions, chunks, strict=True):
                finish(out[start:end], accumulate)
            return
        node_sums = self._workspace.allocate(self._num_nodes * numel, out.dtype)
        slices, sum_rows = full.view(self._ranks_per_node, self._num_nodes, -1), node_sums.view(self._num_nodes, -1)
        intra = self._intra
        if len(chunks) == 1:
            rows, start, end = list(full.view(self._ranks_per_node, -1)), 0, full.numel() // self._ranks_per_node
            intra_completions = [[(intra.start_reduce_scatter(rows, wire, tag, lost.of_intra(start, end)), node_sums)]]
        else:
            intra_completions = [
                [
                    (
                        intra.start_reduce_scatter(
                            [rank_slice[row][start:end] for rank_slice in slices],
                            wire,
                            tag,
                            lost.of_intra(row * numel + start, row * numel + end),
                        ),
                        sum_rows[row][start:end],
                    )
                    for row in range(self._num_nodes)
                ]
                for start, end in chunks
            ]
        yield
        inter_completions = []
        for row_completions, (start, end) in zip(intra_completions, chunks, strict=True):
            for finish, node_sum in row_completions:
                finish(node_sum, False)
            rows = [sum_row[start:end] for sum_row in sum_rows]
            inter_completions.append(self._inter.start_reduce_scatter(rows, wire, tag, lost.of_inter(start, end)))
        for finish, (start, end) in zip(inter_completions, chunks, strict=True):
            finish(out[start:end], accumulate)

    def reserve_reduce_scatter(self, full_numel: int, wire: torch.dtype, dtype: torch.dtype) -> None:
        """Reserve workspace for reduce-scatters of `full_numel` elements.

        The sums have `dtype`.
        """
        shard = full_numel // self._route.size
        chunks = routes.chunks_of(self._route, shard, wire.itemsize) if shard else []
        if self._intra is None:
            self._workspace.reserve(
                sum(self._inter.reduce_scatter_scratch_bytes(end - start, wire, wire) for start, end in chunks)
            )
            return
        rows = 1 if len(chunks) == 1 else self._num_nodes
        numels = [(end - start) * self._num_nodes // rows for start, end in chunks]
        intra_bytes = sum(rows * self._intra.reduce_scatter_scratch_bytes(numel, wire, wire) for numel in numels)
        inter_bytes = sum(self._inter.reduce_scatter_scratch_bytes(end - start, dtype, wire) for start, end in chunks)
        self._workspace.reserve(intra_bytes + inter_bytes + aligned_bytes((self._num_nodes * shard, dtype)))

    def all_reduce_plain(self, tensor: torch.Tensor, tag: int) -> Steps:
        """Sum `tensor` over all ranks with the backend's all-reduce, in its dtype."""
        yield
        self._inter.transport.barrier(tag)
        self._inter.transport.all_reduce(tensor).wait()

    def all_reduce(self, tensor: torch.Tensor, wire: torch.dtype, tag: int, residual: torch.Tensor | None) -> Steps:
        """Sum `tensor` over all ranks; see `Communicator.all_reduce`.

        1. Reduce-scatter each chunk inside the node; this rank keeps a slice.
        2. All-reduce the chunk between nodes: each rank sums a share of it, and sends the sum to the others.
        3. All-gather the slices inside the node, never quantized again, so that all nodes have the same bits.
        """
        slice_numel = routes.all_reduce_slice(self._route, tensor.numel())
        full = self._workspace.allocate(self._ranks_per_node * slice_numel, tensor.dtype)
        full[: tensor.numel()].copy_(tensor)
        full[tensor.numel() :].zero_()
        slices = full.view(self._ranks_per_node, -1)
        local_slice = self._workspace.allocate(slice_numel, tensor.dtype) if self._intra is not None else full
        chunks = routes.all_reduce_chunks(self._route, slice_numel, wire.itemsize)
        lost = StageResiduals(residual, self._route, self._local_index)
        intra_sums: list[SumCompletion] = []
        if self._intra is not None:
            for start, end in chunks:
                rows = [rank_slice[start:end] for rank_slice in slices]
                intra_sums.append(self._intra.start_reduce_scatter(rows, wire, tag, lost.of_intra(start, end)))
            yield
        inter_sums = []
        for index, (start, end) in enumerate(chunks):
            if intra_sums:
                intra_sums[index](local_slice[start:end], False)
            rows, lost_rows = list(local_slice[start:end].view(self._num_nodes, -1)), lost.of_chunk(start, end)
            inter_sums.append((self._inter.start_reduce_scatter(rows, wire, tag, lost_rows), rows, lost_rows))
        if self._intra is None:
            yield
        inter_gathers = []
        for finish_sum, rows, lost_rows in inter_sums:
            total = self._workspace.allocate(rows[0].numel(), tensor.dtype)
            finish_sum(total, False)
            local_residual = None if lost_rows is None else lost_rows[self._inter.transport.index]
            inter_gathers.append(self._inter.start_all_gather(rows, total, wire, tag, local_residual))
        intra_gathers: list[Completion] = []
        for finish, (start, end) in zip(inter_gathers, chunks, strict=True):
            finish()
            previous, intra_gathers = intra_gathers, []
            for intra in self._unquantized[1:]:
                rows = [rank_slice[start:end] for rank_slice in slices]
                intra_gathers.append(intra.start_all_gather(rows, local_slice[start:end], wire, tag))
            for finish_intra in previous:
                finish_intra()
        for finish in intra_gathers:
            finish()
        tensor.copy_(full[: tensor.numel()])

    def reserve_all_reduce(self, numel: int, wire: torch.dtype, dtype: torch.dtype) -> None:
        """Reserve workspace for all-reduces of `numel` elements of `dtype`."""
        slice_numel = routes.all_reduce_slice(self._route, numel)
        full = self._ranks_per_node * slice_numel
        num_bytes = aligned_bytes((full, dtype), (slice_numel, dtype))
        for start, end in routes.all_reduce_chunks(self._route, slice_numel, wire.itemsize):
            row = (end - start) // self._num_nodes
            num_bytes += self._inter.reduce_scatter_scratch_bytes(
                row, dtype, wire
            ) + self._inter.all_gather_scratch_bytes(row, dtype, wire)
            num_bytes += aligned_bytes((row, dtype))
            if self._intra is not None:
                num_bytes += self._intra.reduce_scatter_scratch_bytes(end - start, dtype, wire) + self._unquantized[
                    1
                ].all_gather_scratch_bytes(end - start, dtype, wire)
        self._workspace.reserve(num_bytes)


def _nothing() -> None:
    """The completion of data that is there already."""
