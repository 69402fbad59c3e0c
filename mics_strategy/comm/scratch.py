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
    codec = route.hops[0].codec
    has_differences = codec is not None and codec.differences
    difference = [(numel, torch.float32)] if has_differences else []
    return _payload_bytes(route, route.num_quantized, numel) + aligned_bytes(*difference)


def reduce_scatter_scratch_bytes(route: Route, full_numel: int, wire: torch.dtype, dtype: torch.dtype) -> int:
    """Bytes for a reduce-scatter of `full_numel` elements.

    Args:
        route: Route of the collective.
        full_numel: Elements of the full tensor.
        wire: Dtype of unquantized payloads.
        dtype: Dtype of the sums.
    """
    numel = full_numel // route.size
    return _sum_bytes(route.hops[0], numel, wire) + _partial_sums_bytes(route, numel, wire, dtype)


def all_reduce_scratch_bytes(route: Route, numel: int, wire: torch.dtype, dtype: torch.dtype) -> int:
    """Bytes for an all-reduce of `numel` elements; see `reduce_scatter_scratch_bytes`."""
    if not numel or is_plain_all_reduce(route, wire, dtype):
        return 0
    full_numel = route.num_slices * all_reduce_slice(route, numel)
    row_numel, sum_dtype = full_numel // route.size, wire if route.hops[-1].codec is None else dtype
    num_bytes = _partial_sums_bytes(route, row_numel, wire, dtype)
    num_bytes += _payload_bytes(route, route.num_quantized_sums, row_numel)
    if route.is_quantized:
        num_bytes += _sum_bytes(route.hops[0], row_numel, wire) + aligned_bytes((row_numel, dtype))
    if full_numel != numel or sum_dtype != dtype:
        num_bytes += aligned_bytes((full_numel, sum_dtype))
    if len(route.hops) > 1 and wire != sum_dtype:
        num_bytes += aligned_bytes((full_numel, wire))
    return num_bytes


def _payload_bytes(route: Route, num_stages: int, numel: int) -> int:
    """Bytes of the payloads of all ranks of the first stages.

    It is 0 where they are not quantized.
    """
    codec = route.hops[0].codec
    return 0 if codec is None else aligned_bytes((route.strides[num_stages] * codec.encoded_bytes(numel), torch.uint8))


def _partial_sums_bytes(route: Route, numel: int, wire: torch.dtype, dtype: torch.dtype) -> int:
    """Bytes for the sums of all stages but the slowest.

    Each rank has `numel` elements.
    """
    num_bytes = 0
    for hop, rows in zip(route.hops[1:], route.strides[1:], strict=False):
        sum_dtype = wire if hop.codec is None else dtype
        num_bytes += _sum_bytes(hop, rows * numel, wire) + aligned_bytes((rows * numel, sum_dtype))
    return num_bytes


def _sum_bytes(hop: Hop, numel: int, wire: torch.dtype) -> int:
    """Bytes for one stage of a reduce-scatter, of `numel` elements for each rank."""
    if hop.codec is None:
        return aligned_bytes((numel, wire))
    return 2 * aligned_bytes((hop.size * hop.codec.encoded_bytes(numel), torch.uint8))
