"""Collectives of backends that pipeline by themselves, as NCCL does.

Tensors go whole, in one native collective a stage (see `table_algorithms`). An all-gather of two stages is two native
all-gathers, the second one in place; a reduce-scatter is two, and an all-reduce three, however many nodes there are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mics_strategy.comm import route as routes
from mics_strategy.comm.codecs.quantizer import Quantizer
from mics_strategy.comm.route import Algorithm, StageResiduals
from mics_strategy.comm.table_algorithms import (
    NativeAlgorithm,
    QuantizedTableAlgorithm,
    TableAlgorithm,
    make_table_algorithm,
)
from mics_strategy.comm.workspace import Workspace, aligned_bytes

if TYPE_CHECKING:
    from mics_strategy.comm.route import Route
    from mics_strategy.comm.transport import BackendTransport
    from mics_strategy.comm.work import Steps


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
        rows, slices = payloads.view(self._route.size, num_bytes), out.view(self._route.size, -1)
        if not quantizer.codec.differences:
            quantizer.encode(shard, rows[self.index])
            yield from self.all_gather(payloads, rows[self.index], tag)
            quantizer.decode(rows, slices)
            return
        scratch = self._workspace.allocate(shard.numel(), torch.float32)
        quantizer.encode_difference(shard, slices[self.index], rows[self.index], scratch)
        yield from self.all_gather(payloads, rows[self.index], tag)
        for row, slice_ in zip(rows, slices, strict=True):
            quantizer.decode_difference(row, slice_, scratch)

    def reserve_all_gather(self, numel: int, dtype: torch.dtype) -> None:
        """Reserve workspace for all-gathers of shards of `numel` elements."""
        num_bytes = self._inter.all_gather_scratch_bytes(numel)
        if self.quantizer is not None:
            num_bytes = aligned_bytes((self._route.size * self.quantizer.codec.encoded_bytes(numel), torch.uint8))
            num_bytes += aligned_bytes((numel, torch.float32)) if self.quantizer.codec.differences else 0
        self._workspace.reserve(num_bytes)

    def reduce_scatter(
        self, out: torch.Tensor, full: torch.Tensor, accumulate: bool, tag: int, residual: torch.Tensor | None
    ) -> Steps:
        """Sum every `full` and keep this rank's slice; see `Communicator.reduce_scatter`.

        1. Reduce-scatter inside the node: this rank keeps one slice.
        2. Reduce-scatter the slice between nodes. Where both stages are quantized, without feedback, the sums of the
           first one are encoded for the second one in the kernel that adds them.
        """
        lost = StageResiduals(residual, self._route, self._local_index)
        if self._intra is None:
            yield from self._inter.reduce_scatter(out, full, full.dtype, accumulate, lost.local)
        elif self._fused is not None and out.dtype == torch.float32 and residual is None:
            quantized_intra, quantized_inter = self._fused
            summands = yield from quantized_intra.exchange(full)
            quantized_inter.reduce_scatter_sums(out, summands, accumulate)
        else:
            numel = out.numel() * self._route.inter.size
            node_sums = self._workspace.allocate(numel, self._intra.sum_dtype(full.dtype, out.dtype))
            yield from self._intra.reduce_scatter(node_sums, full, full.dtype, False, lost.full)
            yield from self._inter.reduce_scatter(out, node_sums, full.dtype, accumulate, lost.local)

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

    def all_reduce(self, tensor: torch.Tensor, wire: torch.dtype, tag: int, residual: torch.Tensor | None) -> Steps:
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
        lost = StageResiduals(residual, self._route, self._local_index)
        if self._intra is None or self._plain_intra is None:
            yield from self._inter.all_reduce(full, wire, tensor.dtype, lost.local)
        else:
            slice_numel = full.numel() // self._route.ranks_per_node
            local_slice = self._workspace.allocate(slice_numel, dtype)
            if self._fused is not None and dtype == torch.float32 and residual is None:
                quantized_intra, quantized_inter = self._fused
                summands = yield from quantized_intra.exchange(full)
                quantized_inter.all_reduce_sums(local_slice, summands)
            else:
                yield from self._intra.reduce_scatter(local_slice, full, wire, False, lost.full)
                yield from self._inter.all_reduce(local_slice, wire, tensor.dtype, lost.local)
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
