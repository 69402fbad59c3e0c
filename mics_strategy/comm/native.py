"""Collectives of backends that pipeline by themselves, as NCCL does.

Tensors go whole, in one native collective a stage. A stage takes a table, one row for each rank, and runs on the
current stream. An all-gather of two stages is two native all-gathers, the second one in place; a reduce-scatter is two,
and an all-reduce three, however many nodes there are.

`make_table_algorithm` chooses the algorithm of a hop. All but `NativeAlgorithm` have the bits of their twins in
`algorithms`: sums in the order of the ranks, in fp32 or wider.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Protocol

import torch
from typing_extensions import override

from mics_strategy.comm import route as routes
from mics_strategy.comm.codecs.format import Summands
from mics_strategy.comm.codecs.quantizer import Quantizer
from mics_strategy.comm.route import Algorithm
from mics_strategy.comm.workspace import Workspace, aligned_bytes

if TYPE_CHECKING:
    from mics_strategy.comm.route import Hop, Route
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

        In place if it is its row. The dtypes are the same.
        """

    def reduce_scatter_scratch_bytes(self, numel: int, wire: torch.dtype) -> int:
        """Bytes of workspace for `reduce_scatter` of `numel` elements for each rank."""

    def reduce_scatter(self, out: torch.Tensor, table: torch.Tensor, wire: torch.dtype, accumulate: bool) -> Steps:
        """Sum the rows that all ranks have for this rank.

        Args:
            out: [n]; overwritten with the sum, or added to.
            table: [size * n], unchanged.
            wire: Dtype of unquantized payloads.
            accumulate: Whether to add to `out` instead of overwriting it.
        """

    def all_reduce_scratch_bytes(self, numel: int, wire: torch.dtype, dtype: torch.dtype) -> int:
        """Bytes of workspace for `all_reduce` of `numel` elements for each rank."""

    def all_reduce(self, table: torch.Tensor, wire: torch.dtype, dtype: torch.dtype) -> Steps:
        """Sum the tables of all ranks, in place; every rank ends with the same bits.

        Args:
            table: [size * n].
            wire: Dtype of unquantized payloads.
            dtype: Dtype of the sum, fp32 or wider, before it is sent.
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

    def reduce_scatter(self, out: torch.Tensor, table: torch.Tensor, wire: torch.dtype, accumulate: bool) -> Steps:
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
    def reduce_scatter(self, out: torch.Tensor, table: torch.Tensor, wire: torch.dtype, accumulate: bool) -> Steps:
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
        return aligned_bytes((self.transport.size * self._codec.encoded_bytes(numel), torch.uint8))

    def all_gather(self, table: torch.Tensor, shard: torch.Tensor) -> Steps:
        """See `TableAlgorithm.all_gather`."""
        payloads = self._allocate_payloads(shard.numel())
        self._quantizer.encode(shard, payloads[self.transport.index])
        yield
        self._gather_payloads(payloads, table)

    def _gather_payloads(self, payloads: torch.Tensor, table: torch.Tensor) -> None:
        """All-gather the payloads in place, and decode all of them."""
        self.transport.all_gather(payloads.view(-1), payloads[self.transport.index]).wait()
        self._quantizer.decode(payloads, table.view(self.transport.size, -1))

    def reduce_scatter_scratch_bytes(self, numel: int, wire: torch.dtype) -> int:
        """See `TableAlgorithm.reduce_scatter_scratch_bytes`."""
        return 2 * self.all_gather_scratch_bytes(numel) + aligned_bytes((numel, torch.float32))

    def reduce_scatter(self, out: torch.Tensor, table: torch.Tensor, wire: torch.dtype, accumulate: bool) -> Steps:
        """See `TableAlgorithm.reduce_scatter`."""
        summands = yield from self.exchange(table)
        self._quantizer.decode_sum(summands, out, accumulate=accumulate)

    def reduce_scatter_sums(self, out: torch.Tensor, table: Summands, accumulate: bool) -> None:
        """Reduce-scatter a table that is itself a sum, without storing it."""
        self._quantizer.decode_sum(self._exchange_sums(table), out, accumulate=accumulate)

    def exchange(self, table: torch.Tensor) -> Generator[None, None, Summands]:
        """Send every rank its row, and receive the contributions to this rank's sum."""
        rows = table.view(self.transport.size, -1)
        payloads = self._allocate_payloads(rows.shape[1])
        self._quantizer.encode(rows, payloads)
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

    def all_reduce(self, table: torch.Tensor, wire: torch.dtype, dtype: torch.dtype) -> Steps:
        """See `TableAlgorithm.all_reduce`."""
        summands = yield from self.exchange(table)
        self._sum_and_gather(summands, table, dtype)

    def all_reduce_sums(self, out: torch.Tensor, table: Summands) -> None:
        """All-reduce a table that is itself a sum, without storing it, into `out`."""
        self._sum_and_gather(self._exchange_sums(table), out, torch.float32)

    def _sum_and_gather(self, summands: Summands, table: torch.Tensor, dtype: torch.dtype) -> None:
        """Encode the sum of the contributions, and send it to all ranks.

        A sum in a wider dtype than fp32 is stored first.
        """
        payloads = self._allocate_payloads(summands.exact.numel())
        local_payload = payloads[self.transport.index]
        if dtype == torch.float32:
            self._quantizer.encode_sum(summands, local_payload[None])
        else:
            total = self._workspace.allocate(summands.exact.numel(), dtype)
            self._quantizer.decode_sum(summands, total, accumulate=False)
            self._quantizer.encode(total, local_payload)
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


class NativeStages:
    """Runs collectives over one or two stages of such a backend.

    See `stages.Stages`.

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
        self, route: Route, transports: list[BackendTransport], workspace: Workspace, device: torch.device
    ) -> None:
        inter, intra = transports[0], transports[1] if len(transports) > 1 else None
        self._route = route
        self._workspace = workspace
        self._inter_transport = inter
        self._is_flat = route.inter.algorithm is Algorithm.ALL_TO_ALL
        self._local_index = intra.index if intra is not None else 0
        self.index = self._local_index * inter.size + inter.index
        self._inter = make_table_algorithm(inter, route.inter, workspace, device)
        self._intra: TableAlgorithm | None = None
        if intra is not None and route.intra is not None:
            self._intra = make_table_algorithm(intra, route.intra, workspace, device)
        codec = route.all_gather_codec
        self.quantizer = Quantizer(codec, device, workspace.generator_for(codec, self.index)) if codec else None
        # An all-gather whose payloads are encoded once, and the last stage of an all-reduce, encode in no stage.
        self._plain_inter = NativeAlgorithm(inter, workspace) if self.quantizer is not None else self._inter
        self._plain_intra = NativeAlgorithm(intra, workspace) if intra is not None else None
        self._fused: tuple[QuantizedTableAlgorithm, QuantizedTableAlgorithm] | None = None
        if isinstance(self._intra, QuantizedTableAlgorithm) and isinstance(self._inter, QuantizedTableAlgorithm):
            self._fused = self._intra, self._inter

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor, tag: int) -> Steps:
        """Put every rank's `shard`, or payload, into `out`; see `Communicator.all_gather`.

        1. All-gather between nodes, into this rank's slice of `out`.
        2. All-gather the slices inside the node, in place: slices are contiguous.
        """
        if self._plain_intra is None:
            yield from self._plain_inter.all_gather(out, shard)
            return
        local_slice = out.view(self._route.ranks_per_node, -1)[self._local_index]
        yield from self._plain_inter.all_gather(local_slice, shard)
        yield from self._plain_intra.all_gather(out, local_slice)

    def all_gather_quantized(self, quantizer: Quantizer, out: torch.Tensor, shard: torch.Tensor, tag: int) -> Steps:
        """Encode once, gather the payloads over all stages, and decode all of them.

        This rank's own payload is decoded as well.
        """
        num_bytes = quantizer.codec.encoded_bytes(shard.numel())
        payloads = self._workspace.allocate(self._route.size * num_bytes, torch.uint8)
        rows = payloads.view(self._route.size, num_bytes)
        quantizer.encode(shard, rows[self.index])
        yield from self.all_gather(payloads, rows[self.index], tag)
        quantizer.decode(rows, out.view(self._route.size, -1))

    def reserve_all_gather(self, numel: int, dtype: torch.dtype) -> None:
        """Reserve workspace for all-gathers of shards of `numel` elements."""
        num_bytes = self._inter.all_gather_scratch_bytes(numel)
        if self.quantizer is not None:
            num_bytes = aligned_bytes((self._route.size * self.quantizer.codec.encoded_bytes(numel), torch.uint8))
        self._workspace.reserve(num_bytes)

    def reduce_scatter(self, out: torch.Tensor, full: torch.Tensor, accumulate: bool, tag: int) -> Steps:
        """Sum every `full` and keep this rank's slice; see `Communicator.reduce_scatter`.

        1. Reduce-scatter inside the node: this rank keeps one slice.
        2. Reduce-scatter the slice between nodes. Where both stages are quantized, the sums of the first one are
           encoded for the second one in the kernel that adds them.
        """
        if self._intra is None:
            yield from self._inter.reduce_scatter(out, full, full.dtype, accumulate)
        elif self._fused is not None and out.dtype == torch.float32:
            quantized_intra, quantized_inter = self._fused
            summands = yield from quantized_intra.exchange(full)
            quantized_inter.reduce_scatter_sums(out, summands, accumulate)
        else:
            numel = out.numel() * self._route.inter.size
            node_sums = self._workspace.allocate(numel, self._intra.sum_dtype(full.dtype, out.dtype))
            yield from self._intra.reduce_scatter(node_sums, full, full.dtype, False)
            yield from self._inter.reduce_scatter(out, node_sums, full.dtype, accumulate)

    def reserve_reduce_scatter(self, full_numel: int, wire: torch.dtype, dtype: torch.dtype) -> None:
        """Reserve workspace for reduce-scatters of `full_numel` elements.

        The sums have `dtype`.
        """
        numel = full_numel // self._route.size
        num_bytes = self._inter.reduce_scatter_scratch_bytes(numel, wire)
        if self._intra is not None:
            node_numel = numel * self._route.inter.size
            num_bytes += self._intra.reduce_scatter_scratch_bytes(node_numel, wire)
            num_bytes += aligned_bytes((node_numel, self._intra.sum_dtype(wire, dtype)))
        self._workspace.reserve(num_bytes)

    def all_reduce_plain(self, tensor: torch.Tensor, tag: int) -> Steps:
        """Sum `tensor` over all ranks with the backend's all-reduce, in its dtype."""
        yield
        self._inter_transport.all_reduce(tensor).wait()

    def all_reduce(self, tensor: torch.Tensor, wire: torch.dtype, tag: int) -> Steps:
        """Sum `tensor` over all ranks; see `Communicator.all_reduce`.

        1. Reduce-scatter inside the node; this rank keeps a slice.
        2. All-reduce the slice between nodes.
        3. All-gather the slices inside the node, never quantized again, so that all nodes have the same bits.
        """
        if self._is_flat and wire == tensor.dtype:
            yield from self.all_reduce_plain(tensor, tag)
            return
        dtype = (self._intra or self._inter).sum_dtype(wire, tensor.dtype)
        full = self._padded(tensor, dtype)
        if self._intra is None or self._plain_intra is None:
            yield from self._inter.all_reduce(full, wire, tensor.dtype)
        else:
            slice_numel = full.numel() // self._route.ranks_per_node
            local_slice = self._workspace.allocate(slice_numel, dtype)
            if self._fused is not None and dtype == torch.float32:
                quantized_intra, quantized_inter = self._fused
                summands = yield from quantized_intra.exchange(full)
                quantized_inter.all_reduce_sums(local_slice, summands)
            else:
                yield from self._intra.reduce_scatter(local_slice, full, wire, False)
                yield from self._inter.all_reduce(local_slice, wire, tensor.dtype)
            if wire != dtype:
                full = self._workspace.allocate(full.numel(), wire)
                local_slice = full.view(self._route.ranks_per_node, -1)[self._local_index].copy_(local_slice)
            yield from self._plain_intra.all_gather(full, local_slice)
        if full is not tensor:
            tensor.copy_(full[: tensor.numel()])

    def _padded(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """`tensor` in `dtype`, with zeros up to equal slices of all ranks.

        It is `tensor` itself where nothing changes.
        """
        numel = self._route.ranks_per_node * routes.all_reduce_slice(self._route, tensor.numel())
        if numel == tensor.numel() and dtype == tensor.dtype:
            return tensor
        full = self._workspace.allocate(numel, dtype)
        full[: tensor.numel()].copy_(tensor)
        full[tensor.numel() :].zero_()
        return full

    def reserve_all_reduce(self, numel: int, wire: torch.dtype, dtype: torch.dtype) -> None:
        """Reserve workspace for all-reduces of `numel` elements of `dtype`."""
        slice_numel = routes.all_reduce_slice(self._route, numel)
        full_numel, row_numel = self._route.ranks_per_node * slice_numel, slice_numel // self._route.inter.size
        sum_dtype = (self._intra or self._inter).sum_dtype(wire, dtype)
        num_bytes = self._inter.all_reduce_scratch_bytes(row_numel, wire, dtype)
        if full_numel != numel or sum_dtype != dtype:
            num_bytes += aligned_bytes((full_numel, sum_dtype))
        if self._intra is not None:
            num_bytes += self._intra.reduce_scatter_scratch_bytes(slice_numel, wire)
            num_bytes += aligned_bytes((slice_numel, sum_dtype))
            num_bytes += aligned_bytes((full_numel, wire)) if wire != sum_dtype else 0
        self._workspace.reserve(num_bytes)
