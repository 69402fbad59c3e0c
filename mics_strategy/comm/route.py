"""Routes of collectives: stages, codecs, algorithms, and bytes sent.

A collective over ranks of several nodes may go in two stages: over the intra-node links and over the inter-node links.
An all-gather starts with the inter-node stage, a reduce-scatter with the intra-node stage. The local rank is the more
significant digit of a rank's index, so every stage moves a contiguous slice, and nothing is rearranged.

Of a tensor of M bytes over p ranks, k in a node, all ranks of a node together send M (p - k) / p to other nodes; one
stage over all ranks would send M (p - 1) / p at best. The time of a small tensor is not that of its bytes but that of
messages that wait for one another, and one stage may be faster. So a role has routes by size.

Plans are priced with closed formulas of the bytes that one rank sends. Every collective of the training loop is
recorded in a `TrafficLog` when it is submitted, from the tensors that were really passed, with one entry for each
stage. Tests compare the two.

Pure.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from mics_strategy.comm.codecs.format import Codec
    from mics_strategy.topology import Span

ALL_GATHER = "all_gather"
REDUCE_SCATTER = "reduce_scatter"
ALL_REDUCE = "all_reduce"
ALL_TO_ALL = "all_to_all"  # with pieces of any sizes: a rank sends what it holds for others
TunableCollective = tuple[str, "Span"]  # a collective over ranks of several nodes, several of them in a node
_MIN_CHUNK_BYTES = 64 * 1024
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The stages of one collective. `intra` is None where there is only one stage.

    Attributes:
        inter: Inter-node stage, or the only one.
        intra: Intra-node stage.
        is_chunked: Whether tensors go through the stages in chunks. Backends that pipeline by themselves take them
            whole.

    Source:
        MiCS (arXiv:2205.00119) section 3.3; ZeRO++ (arXiv:2306.10209) section 3.3.
    """

    inter: Hop
    intra: Hop | None = None
    is_chunked: bool = True

    @property
    def size(self) -> int:
        """Ranks that take part."""
        return self.inter.size * self.ranks_per_node

    @property
    def ranks_per_node(self) -> int:
        """Ranks of the intra-node stage."""
        return self.intra.size if self.intra is not None else 1

    @property
    def all_gather_codec(self) -> Codec | None:
        """The codec of all stages of an all-gather, which encodes once.

        It is None where only the inter-node stage has a codec.
        """
        return self.intra.codec if self.intra is not None else self.inter.codec

    @property
    def is_quantized(self) -> bool:
        """Whether any stage is quantized."""
        return self.inter.codec is not None


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


@dataclass(frozen=True, slots=True)
class HopTraffic:
    """One stage of one collective, as planned and counted.

    Attributes:
        collective: Name of the collective: "all_gather", "reduce_scatter", "all_reduce" or "all_to_all".
        axis: Names of the mesh axes that it spans.
        size: Ranks that take part.
        dtype: Dtype on the wire.
        full_bytes: Bytes of the full tensor of the stage.
    """

    collective: str
    axis: str
    size: int
    dtype: torch.dtype
    full_bytes: int


@dataclass(frozen=True, slots=True)
class CollectiveTraffic(HopTraffic):
    """One stage of a collective, and the bytes that this rank sends in it."""

    sent_bytes: int


@dataclass(slots=True)
class TrafficLog:
    """The collectives issued since the log was last drained, with their counts."""

    entries: Counter[CollectiveTraffic] = field(default_factory=Counter)

    def record(self, collective: str, axis: str, size: int, dtype: torch.dtype, full_bytes: int) -> None:
        """Record one collective whose full tensor has `full_bytes`."""
        sent_bytes = SENT_BYTES[collective](full_bytes, size)
        self.entries[CollectiveTraffic(collective, axis, size, dtype, full_bytes, sent_bytes)] += 1

    def record_all_to_all(self, axis: str, size: int, full: torch.Tensor, kept_numel: int) -> None:
        """Record an all-to-all of `full`, of which this rank keeps `kept_numel` elements."""
        full_bytes, sent_bytes = full.numel() * full.itemsize, (full.numel() - kept_numel) * full.itemsize
        self.entries[CollectiveTraffic(ALL_TO_ALL, axis, size, full.dtype, full_bytes, sent_bytes)] += 1

    def drain(self) -> Counter[CollectiveTraffic]:
        """Return the entries so far, and empty the log."""
        entries, self.entries = self.entries, Counter()
        return entries


def pipeline_chunks(numel: int, itemsize: int, multiple: int = 1) -> list[tuple[int, int]]:
    """Split a slice into chunks that are pipelined through the stages.

    So both links are busy.

    Args:
        numel: Elements of the slice.
        itemsize: Bytes of one element, counted unquantized.
        multiple: Divisor of the size of every chunk but the last.

    Returns:
        Start and end of each chunk.
    """
    count = max(1, min(_MAX_CHUNKS, numel * itemsize // _MIN_CHUNK_BYTES))
    step = max(1, math.ceil(numel / count / multiple)) * multiple
    return [(start, min(start + step, numel)) for start in range(0, numel, step)]


def chunks_of(route: Route, numel: int, itemsize: int, multiple: int = 1) -> list[tuple[int, int]]:
    """The chunks in which a slice of `numel` elements goes through a route."""
    if not route.is_chunked or (route.intra is None and not route.is_quantized):
        return [(0, numel)]
    block = route.inter.codec.block_size if route.inter.codec is not None else 1
    return pipeline_chunks(numel, itemsize, math.lcm(multiple, min(block, 1 << 16)))


def all_gather_traffic(route: Route, full_numel: int, dtype: torch.dtype) -> list[HopTraffic]:
    """The traffic of an all-gather of `full_numel` elements, stage by stage."""
    shard = full_numel // route.size
    inter, intra, num_nodes = route.inter, route.intra, route.inter.size
    codec = route.all_gather_codec
    if codec is not None:
        num_bytes = codec.encoded_bytes(shard)
        hops = [HopTraffic(ALL_GATHER, inter.axis, num_nodes, torch.uint8, num_nodes * num_bytes)]
        if intra is not None:
            hops.append(HopTraffic(ALL_GATHER, intra.axis, intra.size, torch.uint8, route.size * num_bytes))
        return hops
    if inter.codec is not None:
        chunks = chunks_of(route, shard, dtype.itemsize)
        num_bytes = sum(inter.codec.encoded_bytes(end - start) for start, end in chunks)
        hops = [HopTraffic(ALL_GATHER, inter.axis, num_nodes, torch.uint8, num_nodes * num_bytes)]
    else:
        hops = [
            HopTraffic(ALL_GATHER, inter.axis, num_nodes, dtype, full_numel * dtype.itemsize // route.ranks_per_node)
        ]
    if intra is not None:
        hops.append(HopTraffic(ALL_GATHER, intra.axis, intra.size, dtype, full_numel * dtype.itemsize))
    return hops


def num_all_gather_chunks(route: Route, full_numel: int, dtype: torch.dtype) -> int:
    """Chunks that an all-gather of `full_numel` elements pipelines."""
    shard, codec = full_numel // route.size, route.all_gather_codec
    if codec is not None:
        return len(chunks_of(route, codec.encoded_bytes(shard), 1))
    return len(chunks_of(route, shard, dtype.itemsize))


def reduce_scatter_traffic(route: Route, full_numel: int, wire: torch.dtype) -> list[HopTraffic]:
    """The traffic of a reduce-scatter of `full_numel` elements, stage by stage."""
    shard = full_numel // route.size
    chunks = chunks_of(route, shard, wire.itemsize)
    hops = []
    if route.intra is not None:
        rows = [end - start for start, end in chunks] * route.inter.size
        rows = rows if len(chunks) > 1 else [shard * route.inter.size]
        hops.append(_reduce_scatter_hop(route.intra, full_numel * wire.itemsize, rows, wire))
    inter_bytes = full_numel * wire.itemsize // route.ranks_per_node
    return [*hops, _reduce_scatter_hop(route.inter, inter_bytes, [end - start for start, end in chunks], wire)]


def num_reduce_scatter_chunks(route: Route, full_numel: int, wire: torch.dtype) -> int:
    """Chunks that a reduce-scatter of `full_numel` elements pipelines."""
    return len(chunks_of(route, full_numel // route.size, wire.itemsize))


def _reduce_scatter_hop(hop: Hop, unquantized_bytes: int, numels: list[int], wire: torch.dtype) -> HopTraffic:
    """The traffic of one stage.

    A quantized one sends pieces of `numels` elements, one of each size to each rank.
    """
    if hop.codec is None:
        return HopTraffic(REDUCE_SCATTER, hop.axis, hop.size, wire, unquantized_bytes)
    num_bytes = hop.size * sum(hop.codec.encoded_bytes(numel) for numel in numels)
    return HopTraffic(REDUCE_SCATTER, hop.axis, hop.size, torch.uint8, num_bytes)


def is_plain_all_reduce(route: Route, wire: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether an all-reduce uses that of the backend.

    Such a route has one stage, is neither quantized nor rounded, and is not ALL_TO_ALL.
    """
    return (
        route.intra is None
        and not route.is_quantized
        and wire == dtype
        and route.inter.algorithm is not Algorithm.ALL_TO_ALL
    )


def all_reduce_multiple(route: Route) -> int:
    """The divisor of a chunk of an all-reduce.

    Ranks have equal shares of a chunk, in whole blocks of the codec.
    """
    codec = route.inter.codec
    return route.inter.size * (codec.bound_numel if codec is not None else 1)


def all_reduce_slice(route: Route, numel: int) -> int:
    """Elements, with padding, of one rank of the intra-node stage.

    The rank sends them over the inter-node links.
    """
    multiple = all_reduce_multiple(route)
    return -(-numel // (route.ranks_per_node * multiple)) * multiple


def all_reduce_chunks(route: Route, slice_numel: int, itemsize: int) -> list[tuple[int, int]]:
    """The chunks of such a slice; every rank's share of each begins with a block."""
    return chunks_of(route, slice_numel, itemsize, all_reduce_multiple(route))


def all_reduce_traffic(route: Route, numel: int, wire: torch.dtype, dtype: torch.dtype) -> list[HopTraffic]:
    """The traffic of an all-reduce of `numel` elements of `dtype`, stage by stage."""
    inter, intra = route.inter, route.intra
    if is_plain_all_reduce(route, wire, dtype):
        return [HopTraffic(ALL_REDUCE, inter.axis, inter.size, dtype, numel * dtype.itemsize)]
    slice_numel = all_reduce_slice(route, numel)
    numels = [end - start for start, end in all_reduce_chunks(route, slice_numel, wire.itemsize)]
    if inter.codec is None:
        inter_hop = HopTraffic(ALL_REDUCE, inter.axis, inter.size, wire, slice_numel * wire.itemsize)
    else:
        num_bytes = inter.size * sum(inter.codec.encoded_bytes(numel // inter.size) for numel in numels)
        inter_hop = HopTraffic(ALL_REDUCE, inter.axis, inter.size, torch.uint8, num_bytes)
    if intra is None:
        return [inter_hop]
    gather_hop = HopTraffic(ALL_GATHER, intra.axis, intra.size, wire, intra.size * slice_numel * wire.itemsize)
    return [_reduce_scatter_hop(intra, gather_hop.full_bytes, numels, wire), inter_hop, gather_hop]


def num_all_reduce_chunks(route: Route, numel: int, wire: torch.dtype) -> int:
    """Chunks that an all-reduce of `numel` elements pipelines."""
    return len(all_reduce_chunks(route, all_reduce_slice(route, numel), wire.itemsize))
