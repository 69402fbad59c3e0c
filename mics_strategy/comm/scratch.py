"""Memory that collectives need: scratch memory of their stages, and communicators of NCCL.

Pure.
"""

from __future__ import annotations

import torch

from mics_strategy.comm.route import Route, Stage, all_reduce_slice, is_plain_all_reduce
from mics_strategy.comm.workspace import aligned_bytes

# 0.5 to 0.7 GB on four A100 (NVIDIA/nccl#964). Not measured by this project.
COMMUNICATOR_BYTES = 600_000_000


def all_gather_scratch_bytes(route: Route, numel: int) -> int:
    """Bytes for an all-gather of shards of `numel` elements: all ranks' payloads."""
    codec = route.stages[0].codec
    has_differences = codec is not None and codec.differences
    difference = [(numel, torch.float32)] if has_differences else []
    return _payload_bytes(route, route.num_quantized, numel) + aligned_bytes(*difference)


def reduce_scatter_scratch_bytes(
    route: Route, full_numel: int, wire: torch.dtype, dtype: torch.dtype, *, sums_natively: bool
) -> int:
    """Bytes for a reduce-scatter of `full_numel` elements.

    Args:
        route: Route of the collective.
        full_numel: Elements of the full tensor.
        wire: Dtype of unquantized payloads.
        dtype: Dtype of the sums.
        sums_natively: Whether the backend adds; see `Transport`.
    """
    return _StageBytes(route, wire, dtype, sums_natively).reduce_scatter(full_numel // route.size, wire)


def all_reduce_scratch_bytes(
    route: Route, numel: int, wire: torch.dtype, dtype: torch.dtype, *, sums_natively: bool
) -> int:
    """Bytes for an all-reduce of `numel` elements; see `reduce_scatter_scratch_bytes`."""
    if not numel or is_plain_all_reduce(route, wire, dtype):
        return 0
    sums = _StageBytes(route, wire, dtype, sums_natively)
    full_numel = route.num_slices * all_reduce_slice(route, numel)
    row_numel, sum_dtype = full_numel // route.size, sums.sum_dtype(route.stages[-1])
    num_bytes = sums.partial_sums(row_numel, sum_dtype)
    num_bytes += _payload_bytes(route, route.num_quantized_sums, row_numel)
    if route.is_quantized or not sums_natively:
        source = sum_dtype if len(route.stages) == 1 else sums.sum_dtype(route.stages[1])
        num_bytes += sums.sum_of(route.stages[0], row_numel, source) + aligned_bytes((row_numel, dtype))
        if not route.is_quantized and source != wire:
            num_bytes += aligned_bytes((route.stages[0].size * row_numel, wire))
    if full_numel != numel or sum_dtype != dtype:
        num_bytes += aligned_bytes((full_numel, sum_dtype))
    if len(route.stages) > 1 and wire != sum_dtype:
        num_bytes += aligned_bytes((full_numel, wire))
    return num_bytes


def _payload_bytes(route: Route, num_stages: int, numel: int) -> int:
    """Bytes of the payloads of all ranks of the first stages. It is 0 where they are not quantized."""
    codec = route.stages[0].codec
    return 0 if codec is None else aligned_bytes((route.strides[num_stages] * codec.encoded_bytes(numel), torch.uint8))


class _StageBytes:
    """Scratch memory of the stages of one sum; for arguments see `reduce_scatter_scratch_bytes`."""

    def __init__(self, route: Route, wire: torch.dtype, dtype: torch.dtype, sums_natively: bool) -> None:
        self._route = route
        self._wire = wire
        self._dtype = dtype
        self._sums_natively = sums_natively

    def sum_dtype(self, stage: Stage) -> torch.dtype:
        """Dtype in which the sums of one stage go on to the next."""
        return self._wire if stage.codec is None and self._sums_natively else self._dtype

    def reduce_scatter(self, numel: int, source: torch.dtype) -> int:
        """Bytes for all stages of a reduce-scatter.

        Args:
            numel: Elements of each rank's sum.
            source: Dtype of the full tensor.
        """
        if len(self._route.stages) > 1:
            return self.partial_sums(numel, source) + self.sum_of(
                self._route.stages[0], numel, self.sum_dtype(self._route.stages[1])
            )
        return self.sum_of(self._route.stages[0], numel, source)

    def partial_sums(self, numel: int, source: torch.dtype) -> int:
        """Bytes for the sums of all stages but the slowest; for arguments see `reduce_scatter`."""
        num_bytes = 0
        for stage, rows in reversed([*zip(self._route.stages, self._route.strides, strict=False)][1:]):
            num_bytes += self.sum_of(stage, rows * numel, source)
            source = self.sum_dtype(stage)
            num_bytes += aligned_bytes((rows * numel, source))
        return num_bytes

    def sum_of(self, stage: Stage, numel: int, source: torch.dtype) -> int:
        """Bytes for one stage that sums tables of `source`, with rows of `numel` elements."""
        if stage.codec is not None:
            return 2 * aligned_bytes((stage.size * stage.codec.encoded_bytes(numel), torch.uint8))
        if self._sums_natively:
            return aligned_bytes((numel, self._wire))
        return (1 if source == self._wire else 2) * aligned_bytes((stage.size * numel, self._wire))
