"""Routes of collectives: stages, codecs, algorithms and chunks.

A collective over ranks of several nodes may go in stages, one for each kind of link that it crosses: inside the nodes,
between the nodes of a switch, between switches. An all-gather starts with the slowest links, a reduce-scatter with the
fastest. The local rank is the most significant digit of a rank's index, so every stage moves a contiguous slice, and
nothing is rearranged.

Of a tensor of M bytes over p ranks, k in a node, all ranks of a node together send M (p - k) / p to other nodes; one
stage over all ranks would send M (p - 1) / p at best. The same holds for the k ranks of a switch. The time of a small
tensor is not that of its bytes but that of messages that wait for one another, and one stage may be faster. So a role
has routes by size.

What a route sends: `traffic`.

Pure.
"""

from __future__ import annotations

import enum
import itertools
import math
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from mics_strategy.comm.codecs.format import Codec
    from mics_strategy.topology import Span

ALL_GATHER = "all_gather"
REDUCE_SCATTER = "reduce_scatter"
ALL_REDUCE = "all_reduce"
ALL_TO_ALL = "all_to_all"  # with pieces of any sizes: a rank sends what it holds for others
TunableCollective = tuple[str, "Span"]  # a collective over several kinds of links
_MIN_CHUNK_BYTES = 64 * 1024
_MIN_MESSAGE_BYTES = 128 * 1024  # of encoded values; the calls of a smaller message cost more than its codes
_MAX_CHUNKS = 8  # measured: 2 chunks leave a tenth of the overlap, 32 cost more in messages than they gain


class Algorithm(enum.Enum):
    """The order in which the unquantized messages of one stage are sent.

    ALL_TO_ALL sends one rank's data to the p - 1 others in messages that do not wait for one another. RING sends it in
    p - 1 messages, one after another, but each node sends it to other nodes only once. Where the backend has its own
    collectives, as NCCL has, both are those of the backend.
    """

    DEFAULT = "each piece directly to its rank; an all-reduce by the backend"
    RING = "from rank to rank in the order of the nodes; an all-reduce by the backend"
    ALL_TO_ALL = "each piece directly to its rank; an all-reduce as a reduce-scatter and an all-gather"


@dataclass(frozen=True, slots=True, kw_only=True)
class HierarchicalThreshold:
    """Size threshold of hierarchical collectives, bytes of the full tensor.

    Smaller ones are flat.

    Attributes:
        from_bytes: Threshold of collectives that are not in `measured`. 0: all are hierarchical.
        measured: Measured thresholds.
        is_untuned: Whether a job may measure thresholds that are missing.
    """

    from_bytes: int = 0
    measured: tuple[tuple[TunableCollective, int], ...] = ()
    is_untuned: bool = False

    def for_collective(self, collective: TunableCollective) -> int:
        """The threshold of one collective over one span, bytes."""
        return dict(self.measured).get(collective, self.from_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """One stage: the ranks that it connects, its codec and its algorithm."""

    axis: str
    size: int
    codec: Codec | None = None
    algorithm: Algorithm = Algorithm.DEFAULT

    @property
    def is_inside_node(self) -> bool:
        """Whether its ranks share a node."""
        return all(name.startswith("intra_node") for name in self.axis.split("+"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The stages of one collective.

    The index of a rank is ``sum(index in stage k * strides[k])``: that in the last stage is the most significant digit.

    Attributes:
        hops: Stages, slowest links first; at least one. Where some have a codec, the first ones have it.
        is_chunked: Whether tensors go through the stages in chunks. Backends that pipeline by themselves take them
            whole.

    Source:
        MiCS (arXiv:2205.00119) section 3.3; ZeRO++ (arXiv:2306.10209) section 3.3.
    """

    hops: tuple[Hop, ...]
    is_chunked: bool = True

    @property
    def size(self) -> int:
        """Ranks that take part."""
        return math.prod(hop.size for hop in self.hops)

    @property
    def strides(self) -> tuple[int, ...]:
        """Ranks of the stages before each stage, and at the end of all stages.

        They are the strides of the digits of an index.
        """
        return tuple(itertools.accumulate((hop.size for hop in self.hops), operator.mul, initial=1))

    @property
    def num_slices(self) -> int:
        """Slices of an all-reduce that go over the slowest links by themselves.

        There is one for each rank of all other stages.
        """
        return self.size // self.hops[0].size

    @property
    def num_quantized(self) -> int:
        """Leading stages with a codec: an all-gather encodes once for all of them."""
        return sum(hop.codec is not None for hop in self.hops)

    @property
    def num_quantized_sums(self) -> int:
        """Leading stages through which an all-reduce sends its encoded sums back.

        Inside a node it sends them decoded, unless there is no other stage.
        """
        return sum(hop.codec is not None and not (index and hop.is_inside_node) for index, hop in enumerate(self.hops))

    @property
    def all_gather_codec(self) -> Codec | None:
        """The codec of all stages of an all-gather, which encodes once.

        It is None where only the first stages have a codec.
        """
        return self.hops[-1].codec

    @property
    def is_quantized(self) -> bool:
        """Whether any stage is quantized."""
        return self.hops[0].codec is not None

    @property
    def has_feedback(self) -> bool:
        """Whether what an encoding of a sum loses is added to the next one."""
        codec = self.hops[0].codec
        return codec is not None and codec.feedback


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedRoutes:
    """The routes of one role, by the size of the tensor.

    Attributes:
        hierarchical: Route of tensors of `hierarchical_from_bytes` bytes or more; of all where `flat` is None.
        flat: Route of smaller tensors.
        hierarchical_from_bytes: Bytes of the full tensor, counted unquantized.
    """

    hierarchical: Route
    flat: Route | None = None
    hierarchical_from_bytes: int = 0

    def for_bytes(self, full_bytes: int) -> Route:
        """The route of a tensor of `full_bytes` bytes."""
        return self.flat if self.flat is not None and full_bytes < self.hierarchical_from_bytes else self.hierarchical


def pipeline_chunks(
    numel: int, itemsize: int, multiple: int = 1, min_chunk_bytes: int = _MIN_CHUNK_BYTES
) -> list[tuple[int, int]]:
    """Split a slice into chunks that are pipelined through the stages.

    So all links are busy.

    Args:
        numel: Elements of the slice.
        itemsize: Bytes of one element, counted unquantized.
        multiple: Divisor of the size of every chunk but the last.
        min_chunk_bytes: Bytes of a chunk at least, counted unquantized, unless it is the only one.

    Returns:
        Start and end of each chunk.
    """
    count = max(1, min(_MAX_CHUNKS, numel * itemsize // min_chunk_bytes))
    step = max(1, math.ceil(numel / count / multiple)) * multiple
    return [(start, min(start + step, numel)) for start in range(0, numel, step)]


def chunks_of(route: Route, numel: int, itemsize: int, multiple: int = 1, num_shares: int = 1) -> list[tuple[int, int]]:
    """The chunks in which a slice of `numel` elements goes through a route.

    Where the only stage is quantized, a chunk is large enough for messages of `_MIN_MESSAGE_BYTES`.

    Args:
        route: Route of the collective.
        numel: Elements of the slice.
        itemsize: Bytes of one element, counted unquantized.
        multiple: Divisor of the size of every chunk but the last.
        num_shares: Messages of a chunk, each for one rank.
    """
    codec = route.hops[0].codec
    if not route.is_chunked or (len(route.hops) == 1 and codec is None):
        return [(0, numel)]
    if codec is None:
        return pipeline_chunks(numel, itemsize, multiple)
    block = min(codec.block_size, 1 << 16)
    min_chunk_bytes = _MIN_CHUNK_BYTES
    if len(route.hops) == 1:
        values_per_byte = _MIN_MESSAGE_BYTES / codec.encoded_bytes(_MIN_MESSAGE_BYTES)
        min_chunk_bytes = math.ceil(num_shares * _MIN_MESSAGE_BYTES * values_per_byte) * itemsize
    return pipeline_chunks(numel, itemsize, math.lcm(multiple, block), min_chunk_bytes)


def num_all_gather_chunks(route: Route, full_numel: int, dtype: torch.dtype) -> int:
    """Chunks that an all-gather of `full_numel` elements pipelines."""
    shard, codec = full_numel // route.size, route.all_gather_codec
    if codec is not None:
        return len(chunks_of(route, codec.encoded_bytes(shard), 1))
    return len(chunks_of(route, shard, dtype.itemsize))


def piece_numels(chunks: list[tuple[int, int]], rows: int) -> list[int]:
    """Elements of each piece that a stage sums for each of its ranks.

    Args:
        chunks: Chunks of one row.
        rows: Rows of each rank. If they are one chunk, they are one piece, because they are adjacent.
    """
    if len(chunks) == 1:
        return [rows * (end - start) for start, end in chunks]
    return [end - start for start, end in chunks] * rows


def num_reduce_scatter_chunks(route: Route, full_numel: int, wire: torch.dtype) -> int:
    """Chunks that a reduce-scatter of `full_numel` elements pipelines."""
    return len(chunks_of(route, full_numel // route.size, wire.itemsize))


def is_plain_all_reduce(route: Route, wire: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether an all-reduce uses that of the backend.

    Such a route has one stage, is neither quantized nor rounded, and is not ALL_TO_ALL.
    """
    return (
        len(route.hops) == 1
        and not route.is_quantized
        and wire == dtype
        and route.hops[0].algorithm is not Algorithm.ALL_TO_ALL
    )


def all_reduce_multiple(route: Route) -> int:
    """The divisor of a chunk of an all-reduce.

    Ranks have equal shares of a chunk, in whole blocks of the codec.
    """
    codec = route.hops[0].codec
    return route.hops[0].size * (codec.bound_numel if codec is not None else 1)


def all_reduce_slice(route: Route, numel: int) -> int:
    """Elements, with padding, of one slice.

    A rank sends them over the slowest links.
    """
    multiple = all_reduce_multiple(route)
    return -(-numel // (route.num_slices * multiple)) * multiple


def all_reduce_chunks(route: Route, slice_numel: int, itemsize: int) -> list[tuple[int, int]]:
    """The chunks of such a slice; every rank's share of each begins with a block."""
    return chunks_of(route, slice_numel, itemsize, all_reduce_multiple(route), route.hops[0].size)


def num_all_reduce_chunks(route: Route, numel: int, wire: torch.dtype) -> int:
    """Chunks that an all-reduce of `numel` elements pipelines."""
    return len(all_reduce_chunks(route, all_reduce_slice(route, numel), wire.itemsize))
