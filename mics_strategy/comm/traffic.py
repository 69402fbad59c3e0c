"""Traffic of collectives: what a rank sends in each stage, and what it encodes.

Plans are priced with closed formulas of the bytes that one rank sends. Every collective of the training loop is
recorded in a `TrafficLog` when it is submitted, from the tensors that were really passed, with one entry for each
stage. Tests compare the two.

Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from mics_strategy.comm.codecs.format import Codec
from mics_strategy.comm.route import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    Route,
    Stage,
    all_reduce_slice,
    is_plain_all_reduce,
)


def all_gather_bytes(full_bytes: int, size: int) -> int:
    """Bytes sent per rank by an all-gather of `full_bytes` over `size` ranks.

    Source:
        MiCS (arXiv:2205.00119) section 3.3, ``(p - 1) M / p``.
    """
    return full_bytes // size * (size - 1)


def reduce_scatter_bytes(full_bytes: int, size: int) -> int:
    """Bytes sent per rank by a reduce-scatter of `full_bytes` over `size` ranks.

    Source:
        MiCS (arXiv:2205.00119) section 3.4, ``(p - 1) M / p``.
    """
    return full_bytes // size * (size - 1)


def all_reduce_bytes(full_bytes: int, size: int) -> int:
    """Bytes sent per rank by a ring all-reduce of `full_bytes`, rounded down.

    Source:
        AMSP (arXiv:2311.00257), cost of a ring all-reduce, ``2 (p - 1) v / p``.
    """
    return 2 * full_bytes * (size - 1) // size


SENT_BYTES = {ALL_GATHER: all_gather_bytes, REDUCE_SCATTER: reduce_scatter_bytes, ALL_REDUCE: all_reduce_bytes}


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecWork:
    """Values that one rank encodes before a stage, and decodes behind it.

    What feedback decodes of its own payloads counts as decoded.
    """

    codec: Codec
    encoded_numel: int
    decoded_numel: int


@dataclass(frozen=True, slots=True)
class StageTraffic:
    """One stage of one collective, as planned and counted.

    Attributes:
        collective: Name of the collective: "all_gather", "reduce_scatter", "all_reduce" or "all_to_all".
        axis: Names of the mesh axes that it spans.
        size: Ranks that take part.
        dtype: Dtype on the wire.
        full_bytes: Bytes of the full tensor of the stage.
        kept_bytes: Bytes of an all-to-all that stay on this rank; 0 for other collectives.
        codec_work: Values that a rank encodes and decodes, as planned; None where there are none. Not compared.
    """

    collective: str
    axis: str
    size: int
    dtype: torch.dtype
    full_bytes: int
    kept_bytes: int = 0
    codec_work: CodecWork | None = field(default=None, compare=False, kw_only=True)

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends."""
        if self.collective == ALL_TO_ALL:
            return self.full_bytes - self.kept_bytes
        return SENT_BYTES[self.collective](self.full_bytes, self.size)


@dataclass(slots=True)
class TrafficLog:
    """The collectives issued since the log was last drained, with their counts."""

    entries: Counter[StageTraffic] = field(default_factory=Counter)

    def record(self, stages: Iterable[StageTraffic]) -> None:
        """Record the stages of one collective."""
        self.entries.update(stages)

    def record_all_to_all(self, axis: str, size: int, full: torch.Tensor, kept_numel: int) -> None:
        """Record an all-to-all of `full`, of which this rank keeps `kept_numel` elements."""
        full_bytes, kept_bytes = full.numel() * full.itemsize, kept_numel * full.itemsize
        self.entries[StageTraffic(ALL_TO_ALL, axis, size, full.dtype, full_bytes, kept_bytes)] += 1

    def drain(self) -> Counter[StageTraffic]:
        """Return the entries so far, and empty the log."""
        entries, self.entries = self.entries, Counter()
        return entries


def all_gather_traffic(route: Route, full_numel: int, dtype: torch.dtype) -> list[StageTraffic]:
    """The traffic of an all-gather of `full_numel` elements, stage by stage."""
    shard, codec = full_numel // route.size, route.stages[0].codec
    encoded_bytes = 0 if codec is None else codec.encoded_bytes(shard)
    stages = []
    for index, (stage, rows) in enumerate(zip(route.stages, route.strides[1:], strict=True), start=1):
        wire, num_bytes, work = dtype, full_numel * dtype.itemsize * rows // route.size, None
        if stage.codec is not None:
            wire, num_bytes = torch.uint8, rows * encoded_bytes
            decoded_numel = rows * shard if index == route.num_quantized else 0
            work = _codec_work(stage.codec, shard if index == 1 else 0, decoded_numel)
        stages.append(StageTraffic(ALL_GATHER, stage.axis, stage.size, wire, num_bytes, codec_work=work))
    return stages


def _codec_work(codec: Codec, encoded_numel: int, decoded_numel: int) -> CodecWork | None:
    if not (encoded_numel or decoded_numel):
        return None
    return CodecWork(codec=codec, encoded_numel=encoded_numel, decoded_numel=decoded_numel)


def reduce_scatter_traffic(route: Route, full_numel: int, wire: torch.dtype) -> list[StageTraffic]:
    """The traffic of a reduce-scatter of `full_numel` elements, stage by stage."""
    stages = []
    for stage, rows in reversed([*zip(route.stages, route.strides, strict=False)]):
        unquantized_bytes = full_numel * wire.itemsize * rows * stage.size // route.size
        stages.append(_reduce_scatter_stage(stage, unquantized_bytes, rows * full_numel // route.size, wire))
    return stages


def _reduce_scatter_stage(stage: Stage, unquantized_bytes: int, numel: int, wire: torch.dtype) -> StageTraffic:
    """The traffic of one stage. A quantized one encodes rows of `numel` elements, one for each rank."""
    if stage.codec is None:
        return StageTraffic(REDUCE_SCATTER, stage.axis, stage.size, wire, unquantized_bytes)
    num_bytes = stage.size * stage.codec.encoded_bytes(numel)
    work = _sum_work(stage.codec, (stage.size - 1) * numel)
    return StageTraffic(REDUCE_SCATTER, stage.axis, stage.size, torch.uint8, num_bytes, codec_work=work)


def _sum_work(codec: Codec, numel: int, num_own: int = 0, num_gathered: int = 0) -> CodecWork | None:
    """What a rank encodes and decodes for a sum.

    Args:
        codec: Codec of the payloads.
        numel: Elements that it sends to others, and as many that it receives.
        num_own: Elements of its sums that it encodes for an all-gather.
        num_gathered: Elements that it decodes of this all-gather.
    """
    encoded_numel = numel + num_own
    return _codec_work(codec, encoded_numel, numel + num_gathered + (encoded_numel if codec.feedback else 0))


def all_reduce_traffic(route: Route, numel: int, wire: torch.dtype, dtype: torch.dtype) -> list[StageTraffic]:
    """The traffic of an all-reduce of `numel` elements of `dtype`, stage by stage."""
    slowest, *others = route.stages
    if is_plain_all_reduce(route, wire, dtype):
        return [StageTraffic(ALL_REDUCE, slowest.axis, slowest.size, dtype, numel * dtype.itemsize)]
    slice_numel = all_reduce_slice(route, numel)
    slice_bytes, encoded_bytes = slice_numel * wire.itemsize, 0
    if slowest.codec is not None:
        encoded_bytes = slowest.size * slowest.codec.encoded_bytes(slice_numel // slowest.size)
    reduce_stages, gather_stages = [], []
    for index, (stage, stride) in enumerate(zip(others, route.strides[1:-1], strict=True), start=1):
        rows = stride // slowest.size
        reduce_stages.append(_reduce_scatter_stage(stage, rows * stage.size * slice_bytes, rows * slice_numel, wire))
        is_encoded, is_last = index < route.num_quantized_sums, index == route.num_quantized_sums - 1
        num_slices = rows * stage.size
        num_bytes = num_slices * (encoded_bytes if is_encoded else slice_bytes)
        work = None if stage.codec is None or not is_last else _codec_work(stage.codec, 0, num_slices * slice_numel)
        gather_wire = torch.uint8 if is_encoded else wire
        gather_stages.append(StageTraffic(ALL_GATHER, stage.axis, stage.size, gather_wire, num_bytes, codec_work=work))
    full_bytes, sum_wire, work = slice_bytes, wire, None
    if slowest.codec is not None:
        full_bytes, sum_wire, share = encoded_bytes, torch.uint8, slice_numel // slowest.size
        num_gathered = slice_numel if route.num_quantized_sums == 1 else 0
        work = _sum_work(slowest.codec, slice_numel - share, share, num_gathered)
    slowest_stage = StageTraffic(ALL_REDUCE, slowest.axis, slowest.size, sum_wire, full_bytes, codec_work=work)
    return [*reduce_stages[::-1], slowest_stage, *gather_stages]
