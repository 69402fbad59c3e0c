"""Memory that collectives need on a backend with streams.

The numbers of scratch memory are those that `native` reserves on NCCL, where sums are the backend's own.

Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mics_strategy.comm.route import all_reduce_slice, is_plain_all_reduce
from mics_strategy.comm.workspace import aligned_bytes

if TYPE_CHECKING:
    from mics_strategy.comm.route import Hop, Route

# 0.5 to 0.7 GB on four A100 (NVIDIA/nccl#964). Not measured by this project.
COMMUNICATOR_BYTES = 600_000_000


def all_gather_scratch_bytes(route: Route, numel: int) -> int:
    """Bytes for an all-gather of shards of `numel` elements: all ranks' payloads."""
    if route.all_gather_codec is not None:
        return aligned_bytes((route.size * route.all_gather_codec.encoded_bytes(numel), torch.uint8))
    return _payload_bytes(route.inter, numel)


def reduce_scatter_scratch_bytes(route: Route, full_numel: int, wire: torch.dtype, dtype: torch.dtype) -> int:
    """Bytes for a reduce-scatter of `full_numel` elements.

    Args:
        route: Route of the collective.
        full_numel: Elements of the full tensor.
        wire: Dtype of unquantized payloads.
        dtype: Dtype of the sums.
    """
    numel = full_numel // route.size
    num_bytes = _sum_bytes(route.inter, numel, wire)
    if route.intra is not None:
        node_numel = numel * route.inter.size
        sum_dtype = wire if route.intra.codec is None else dtype
        num_bytes += _sum_bytes(route.intra, node_numel, wire) + aligned_bytes((node_numel, sum_dtype))
    return num_bytes


def all_reduce_scratch_bytes(route: Route, numel: int, wire: torch.dtype, dtype: torch.dtype) -> int:
    """Bytes for an all-reduce of `numel` elements; see `reduce_scatter_scratch_bytes`."""
    if not numel or is_plain_all_reduce(route, wire, dtype):
        return 0
    slice_numel = all_reduce_slice(route, numel)
    full_numel, row_numel = route.ranks_per_node * slice_numel, slice_numel // route.inter.size
    sum_dtype = wire if (route.intra or route.inter).codec is None else dtype
    num_bytes = 0
    if route.inter.codec is not None:
        num_bytes += _sum_bytes(route.inter, row_numel, wire) + _payload_bytes(route.inter, row_numel)
        num_bytes += aligned_bytes((row_numel, dtype))
    if full_numel != numel or sum_dtype != dtype:
        num_bytes += aligned_bytes((full_numel, sum_dtype))
    if route.intra is not None:
        num_bytes += _sum_bytes(route.intra, slice_numel, wire) + aligned_bytes((slice_numel, sum_dtype))
        num_bytes += aligned_bytes((full_numel, wire)) if wire != sum_dtype else 0
    return num_bytes


def _payload_bytes(hop: Hop, numel: int) -> int:
    """Bytes of the payloads of all ranks of a stage; 0 where it is not quantized."""
    return 0 if hop.codec is None else aligned_bytes((hop.size * hop.codec.encoded_bytes(numel), torch.uint8))


def _sum_bytes(hop: Hop, numel: int, wire: torch.dtype) -> int:
    """Bytes for one stage of a reduce-scatter, of `numel` elements for each rank."""
    if hop.codec is None:
        return aligned_bytes((numel, wire))
    return 2 * _payload_bytes(hop, numel) + aligned_bytes((numel, torch.float32))
