"""All-gather, reduce-scatter and all-reduce of one tensor over one or two stages.

Two stages are pipelined: a slice goes through them in chunks. While one chunk is on the inter-node links, the previous
one is on the intra-node links, so that a collective takes about as long as the slower of its stages, not as long as
both.

A collective is a task of a queue (see `queue`). On the CPU it makes progress while nothing waits for it; on a GPU it is
on the stream when the call returns. The workspace belongs to the queue, so that two tasks never use it at the same
time.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING

import torch

from mics_strategy.comm import route as routes
from mics_strategy.comm.algorithms import Completion, GroupAlgorithm, PlainAlgorithm, QuantizedAlgorithm, SumCompletion
from mics_strategy.comm.coalesced import CoalescedCommunicator
from mics_strategy.comm.codecs.quantizer import Quantizer
from mics_strategy.comm.peer_memory.communicator import PeerMemoryCommunicator
from mics_strategy.comm.queue import CollectiveQueue, RouteBinding, make_algorithm
from mics_strategy.comm.route import Algorithm
from mics_strategy.comm.work import Work, check_shapes
from mics_strategy.comm.workspace import Workspace, aligned_bytes

if TYPE_CHECKING:
    from mics_strategy.comm.transport import Transport


class Communicator:
    """Collectives over one route.

    Inputs and outputs are flat, contiguous and on one device.

    Args:
        binding: Route and transports.
        queue: Queue that runs the tasks.
        workspace: Scratch memory of the queue's tasks.
        device: Device of the tensors.

    Attributes:
        route: Stages, with their codecs.
        transports: Transports of the inter-node stage and, where there is one, of the intra-node stage.
        size: Ranks that take part.
        index: Index of this rank among them.
        peer_memory: The same collectives on scattered tensors; None unless the ranks read one another's memory.
        coalesced: The same collectives on several tensors in one launch; None unless the backend supports it.
    """

    def __init__(
        self,
        binding: RouteBinding,
        queue: CollectiveQueue,
        workspace: Workspace,
        device: torch.device,
    ) -> None:
        self.route = route = binding.route
        self.transports = binding.transports
        self.size = route.size
        inter, *intra = binding.transports
        self._num_nodes = inter.size
        self._ranks_per_node = intra[0].size if intra else 1
        self._local_index = intra[0].index if intra else 0
        self.index = self._local_index * inter.size + inter.index
        self._queue = queue
        self._workspace = workspace
        self._inter = make_algorithm(inter, route.inter, workspace, device)
        self._intra = (
            make_algorithm(intra[0], route.intra, workspace, device) if intra and route.intra is not None else None
        )
        self._stages = [self._inter, *([self._intra] if self._intra is not None else [])]
        self._unquantized = [PlainAlgorithm(transport, workspace) for transport in binding.transports]
        codec = route.all_gather_codec
        self._uses_backend_all_reduce = route.inter.algorithm is Algorithm.ALL_TO_ALL and not inter.is_point_to_point
        self._quantizer = Quantizer(codec, device, workspace.generator_for(codec, self.index)) if codec else None
        self.peer_memory: PeerMemoryCommunicator | None = None
        if inter.has_peer_memory and not intra and not route.is_quantized:
            self.peer_memory = PeerMemoryCommunicator(route, inter, self._queue, workspace)
        self.coalesced: CoalescedCommunicator | None = None
        if not inter.is_point_to_point and not route.is_quantized:
            self.coalesced = CoalescedCommunicator(route, binding.transports, self._queue, workspace)

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor, label: str) -> Work:
        """Put every rank's `shard` into `out`, in the order of the ranks' index.

        Args:
            out: [size * n], same dtype as `shard`; overwritten.
            shard: [n]; must stay unchanged until the work has been waited for.
            label: Label of the payload in errors.

        Returns:
            The work; `out` is valid after `wait()`.

        Cost:
            Sent: `route.all_gather_traffic`.
        """
        check_shapes(out.numel() == shard.numel() * self.size and out.dtype == shard.dtype, label, out, shard)
        op = self._queue.next_op("All-gather", label, out.numel(), shard.dtype)
        self._queue.log(routes.all_gather_traffic(self.route, out.numel(), out.dtype))
        quantizer = self._quantizer
        if quantizer is None:
            return self._queue.submit(op, partial(self._all_gather, self._stages, out, shard, op.tag))
        return self._queue.submit(op, partial(self._all_gather_quantized, quantizer, out, shard, op.tag))

    def for_bytes(self, full_bytes: int) -> Communicator:
        """This communicator, which serves full tensors of every size; see `SizeDispatch.for_bytes`."""
        return self

    def reserve_all_gather(self, numel: int, dtype: torch.dtype) -> None:
        """Reserve workspace for all-gathers of shards of `numel` elements."""
        if self._quantizer is not None:
            num_bytes = self._quantizer.codec.encoded_bytes(numel)
            self._workspace.reserve(aligned_bytes((self.size * num_bytes, torch.uint8)))
        elif numel:
            chunks = routes.chunks_of(self.route, numel, dtype.itemsize)
            self._workspace.reserve(
                sum(self._inter.all_gather_scratch_bytes(end - start, dtype, dtype) for start, end in chunks)
            )

    def _all_gather(self, stages: list[GroupAlgorithm], out: torch.Tensor, shard: torch.Tensor, tag: int) -> None:
        """Gather.

        1. All-gather each chunk between nodes, into this rank's slice of `out`.
        2. All-gather each chunk inside the node as soon as it has arrived, while the next one is on the inter-node
           links. The chunks of this rank's own shard need no first step and go first.
        """
        inter, *intras = stages
        slices = out.view(self._ranks_per_node, self._num_nodes, -1)
        local_slice, local_row = slices[self._local_index], inter.transport.index
        chunks = routes.chunks_of(self.route, shard.numel(), shard.itemsize)
        inter_completions = [
            inter.start_all_gather([row[start:end] for row in local_slice], shard[start:end], shard.dtype, tag)
            for start, end in chunks
        ]

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

    def _all_gather_quantized(self, quantizer: Quantizer, out: torch.Tensor, shard: torch.Tensor, tag: int) -> None:
        """Encode once, gather the payloads over all stages, and decode all of them.

        This rank's own payload is decoded as well.
        """
        if not shard.numel():
            return
        num_bytes = quantizer.codec.encoded_bytes(shard.numel())
        payloads = self._workspace.allocate(self.size * num_bytes, torch.uint8)
        rows = payloads.view(self.size, num_bytes)
        quantizer.encode(shard, rows[self.index])
        self._all_gather(list(self._unquantized), payloads, rows[self.index], tag)
        for row, slice_ in zip(rows, out.view(self.size, -1), strict=True):
            quantizer.decode(row, slice_)

    def reduce_scatter(self, out: torch.Tensor, full: torch.Tensor, accumulate: bool, label: str) -> Work:
        """Sum every rank's `full` and keep this rank's slice.

        Args:
            out: [n], fp32 or wider; overwritten with the sum, or added to.
            full: [size * n], the wire dtype; must stay unchanged until the work has been waited for.
            accumulate: Whether to add to `out` instead of overwriting it.
            label: Label of the payload in errors.

        Returns:
            The work; `out` is valid after `wait()`.

        Cost:
            Sent: `route.reduce_scatter_traffic`. In two stages a narrow wire dtype rounds once per stage.
        """
        check_shapes(full.numel() == out.numel() * self.size, label, out, full)
        op = self._queue.next_op("Reduce-scatter", label, full.numel(), full.dtype)
        self._queue.log(routes.reduce_scatter_traffic(self.route, full.numel(), full.dtype))
        return self._queue.submit(op, partial(self._reduce_scatter, out, full, accumulate, op.tag))

    def reserve_reduce_scatter(self, full_numel: int, wire: torch.dtype, dtype: torch.dtype) -> None:
        """Reserve workspace for reduce-scatters of `full_numel` elements.

        The sums have `dtype`.
        """
        shard = full_numel // self.size
        chunks = routes.chunks_of(self.route, shard, wire.itemsize) if shard else []
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

    def _reduce_scatter(self, out: torch.Tensor, full: torch.Tensor, accumulate: bool, tag: int) -> None:
        """Reduce and scatter.

        1. Reduce-scatter each chunk inside the node: this rank keeps one slice, in the dtype of the sum.
        2. Reduce-scatter each chunk of the slice between nodes as soon as it is summed.
        """
        numel, wire = out.numel(), full.dtype
        chunks = routes.chunks_of(self.route, numel, wire.itemsize)
        if self._intra is None:
            rows = list(full.view(self.size, -1).unbind())
            if len(chunks) == 1:
                self._inter.start_reduce_scatter(rows, wire, tag)(out, accumulate)
                return
            completions = [
                self._inter.start_reduce_scatter([row[start:end] for row in rows], wire, tag) for start, end in chunks
            ]
            for finish, (start, end) in zip(completions, chunks, strict=True):
                finish(out[start:end], accumulate)
            return
        node_sums = self._workspace.allocate(self._num_nodes * numel, out.dtype)
        slices, sum_rows = full.view(self._ranks_per_node, self._num_nodes, -1), node_sums.view(self._num_nodes, -1)
        intra = self._intra
        if len(chunks) == 1:
            rows = list(full.view(self._ranks_per_node, -1))
            intra_completions = [[(intra.start_reduce_scatter(rows, wire, tag), node_sums)]]
        else:
            intra_completions = [
                [
                    (
                        intra.start_reduce_scatter([rank_slice[row][start:end] for rank_slice in slices], wire, tag),
                        sum_rows[row][start:end],
                    )
                    for row in range(self._num_nodes)
                ]
                for start, end in chunks
            ]
        inter_completions = []
        for row_completions, (start, end) in zip(intra_completions, chunks, strict=True):
            for finish, node_sum in row_completions:
                finish(node_sum, False)
            rows = [sum_row[start:end] for sum_row in sum_rows]
            inter_completions.append(self._inter.start_reduce_scatter(rows, wire, tag))
        for finish, (start, end) in zip(inter_completions, chunks, strict=True):
            finish(out[start:end], accumulate)

    def all_reduce(self, tensor: torch.Tensor, wire: torch.dtype, label: str) -> Work:
        """Sum `tensor` over the ranks, in place; every rank ends with the same bits.

        Args:
            tensor: [n], fp32 or wider.
            wire: Dtype of unquantized payloads.
            label: Label of the payload in errors.

        Returns:
            The work; `tensor` is valid after `wait()`.

        Cost:
            Sent: `route.all_reduce_traffic`. A narrow wire dtype or a codec rounds once in each stage of the sum, and
            once when the sum is sent back.
        """
        op = self._queue.next_op("All-reduce", label, tensor.numel(), wire)
        self._queue.log(routes.all_reduce_traffic(self.route, tensor.numel(), wire, tensor.dtype))
        if routes.is_plain_all_reduce(self.route, wire, tensor.dtype):
            return self._queue.submit(op, partial(self._all_reduce_plain, tensor, op.tag))
        return self._queue.submit(op, partial(self._all_reduce, tensor, wire, op.tag))

    def _all_reduce_plain(self, tensor: torch.Tensor, tag: int) -> None:
        """Use the backend's all-reduce."""
        self.transports[0].barrier(tag)
        self.transports[0].all_reduce(tensor).wait()

    def reserve_all_reduce(self, numel: int, wire: torch.dtype, dtype: torch.dtype) -> None:
        """Reserve workspace for all-reduces of `numel` elements of `dtype`."""
        if not numel or routes.is_plain_all_reduce(self.route, wire, dtype):
            return
        slice_numel = routes.all_reduce_slice(self.route, numel)
        full = self._ranks_per_node * slice_numel
        num_bytes = aligned_bytes((full, dtype), (slice_numel, dtype))
        for start, end in routes.all_reduce_chunks(self.route, slice_numel, wire.itemsize):
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

    def _all_reduce(self, tensor: torch.Tensor, wire: torch.dtype, tag: int) -> None:
        """Sum over all ranks.

        1. Reduce-scatter each chunk inside the node; this rank keeps a slice.
        2. All-reduce the chunk between nodes: each rank sums a share of it, and sends the sum to the others.
        3. All-gather the slices inside the node, never quantized again, so that all nodes have the same bits.
        """
        slice_numel = routes.all_reduce_slice(self.route, tensor.numel())
        full = self._workspace.allocate(self._ranks_per_node * slice_numel, tensor.dtype)
        full[: tensor.numel()].copy_(tensor)
        full[tensor.numel() :].zero_()
        if self._uses_backend_all_reduce and wire == tensor.dtype:
            self.transports[0].all_reduce(full).wait()
            tensor.copy_(full[: tensor.numel()])
            return
        slices = full.view(self._ranks_per_node, -1)
        local_slice = self._workspace.allocate(slice_numel, tensor.dtype) if self._intra is not None else full
        chunks = routes.all_reduce_chunks(self.route, slice_numel, wire.itemsize)
        intra_sums: list[SumCompletion] = []
        if self._intra is not None:
            for start, end in chunks:
                rows = [rank_slice[start:end] for rank_slice in slices]
                intra_sums.append(self._intra.start_reduce_scatter(rows, wire, tag))
        inter_sums = []
        for index, (start, end) in enumerate(chunks):
            if intra_sums:
                intra_sums[index](local_slice[start:end], False)
            rows = list(local_slice[start:end].view(self._num_nodes, -1))
            inter_sums.append((self._inter.start_reduce_scatter(rows, wire, tag), rows))
        inter_gathers = []
        for finish_sum, rows in inter_sums:
            total = self._workspace.allocate(rows[0].numel(), tensor.dtype)
            finish_sum(total, False)
            inter_gathers.append(self._inter.start_all_gather(rows, total, wire, tag))
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


def _nothing() -> None:
    """The completion of data that is there already."""


class SizeDispatch:
    """Collectives over the same ranks that use one of two routes, by size.

    Used like one `Communicator`.

    Shards have the same order on both routes. Both have the same queue and workspace, so the order in which collectives
    are submitted is also kept between them.

    Args:
        flat: Communicator for full tensors of fewer than `from_bytes` bytes, counted unquantized.
        hierarchical: Communicator for the others.
        from_bytes: Size threshold, the same on all ranks.
    """

    def __init__(self, flat: Communicator, hierarchical: Communicator, from_bytes: int) -> None:
        self.flat = flat
        self.hierarchical = hierarchical
        self.size = hierarchical.size
        self.index = hierarchical.index
        self._from_bytes = from_bytes

    @property
    def transports(self) -> list[Transport]:
        """Transports of both routes."""
        return [*self.hierarchical.transports, *self.flat.transports]

    def for_bytes(self, full_bytes: int) -> Communicator:
        """The communicator for a full tensor of this size."""
        return self.flat if full_bytes < self._from_bytes else self.hierarchical

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor, label: str) -> Work:
        """See `Communicator.all_gather`."""
        return self.for_bytes(out.numel() * out.itemsize).all_gather(out, shard, label)

    def reserve_all_gather(self, numel: int, dtype: torch.dtype) -> None:
        """See `Communicator.reserve_all_gather`."""
        self.for_bytes(self.size * numel * dtype.itemsize).reserve_all_gather(numel, dtype)

    def reduce_scatter(self, out: torch.Tensor, full: torch.Tensor, accumulate: bool, label: str) -> Work:
        """See `Communicator.reduce_scatter`."""
        return self.for_bytes(full.numel() * full.itemsize).reduce_scatter(out, full, accumulate, label)

    def reserve_reduce_scatter(self, full_numel: int, wire: torch.dtype, dtype: torch.dtype) -> None:
        """See `Communicator.reserve_reduce_scatter`."""
        self.for_bytes(full_numel * wire.itemsize).reserve_reduce_scatter(full_numel, wire, dtype)

    def all_reduce(self, tensor: torch.Tensor, wire: torch.dtype, label: str) -> Work:
        """See `Communicator.all_reduce`."""
        return self.for_bytes(tensor.numel() * wire.itemsize).all_reduce(tensor, wire, label)

    def reserve_all_reduce(self, numel: int, wire: torch.dtype, dtype: torch.dtype) -> None:
        """See `Communicator.reserve_all_reduce`."""
        self.for_bytes(numel * wire.itemsize).reserve_all_reduce(numel, wire, dtype)


AnyCommunicator = Communicator | SizeDispatch
