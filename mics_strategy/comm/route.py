"""Through which stages does a collective go, in which form, and how many bytes is that?

A collective over ranks of several nodes may go in two stages: over the fast links inside a node, and over the slow ones
between nodes. A gather goes over the slow links first, a reduction over the fast ones first. A rank's place inside its
node is the more significant digit of its index, so every stage moves a contiguous slice: nothing is re-arranged.

Of a tensor of M bytes over p ranks, k in a node, all ranks of a node together send M (p - k) / p to other nodes; in one
stage over all ranks it would be M (p - 1) / p at the best. Of a small tensor it is not bytes that take time but
messages that wait for one another, and one stage may be faster: a purpose has a route for each size.

Pure.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

import torch

from mics_strategy.comm.codecs.format import Codec
from mics_strategy.comm.traffic import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER

_MIN_CHUNK_BYTES = 64 * 1024
_MAX_CHUNKS = 8  # measured: 2 pieces leave a tenth of the overlap, 32 cost more in messages than they win


class Algorithm(enum.Enum):
    """How the numbers of one stage go from rank to rank, where they travel unencoded.

    Of one rank's numbers for the p - 1 others, DIRECT waits for one message, RING for p - 1 that follow one another,
    but leaves every node once. Where the backend moves tensors by itself, as NCCL does, both are the backend's own.
    """

    DEFAULT = "each piece straight to its rank; an all-reduce as the backend does it"
    RING = "from neighbour to neighbour, in the order of the nodes; an all-reduce as the backend does it"
    ALL_TO_ALL = "each piece straight to its rank; an all-reduce, too: the shares of a sum, then the sums"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """One stage: the ranks it connects, what its numbers are encoded with, and how they go."""

    axis: str
    size: int
    codec: Codec | None = None
    algorithm: Algorithm = Algorithm.DEFAULT


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The stages of one collective. `intra` is None where there is one stage only.

    Source:
        MiCS (arXiv:2205.00119) section 3.3; ZeRO++ (arXiv:2306.10209) section 3.3.
    """

    inter: Hop
    intra: Hop | None = None

    @property
    def size(self) -> int:
        """Ranks that take part."""
        return self.inter.size * self.ranks_per_node

    @property
    def ranks_per_node(self) -> int:
        """Ranks of the fast stage."""
        return self.intra.size if self.intra is not None else 1

    @property
    def all_gather_codec(self) -> Codec | None:
        """What a gather encodes with, once for all stages; None where it encodes for the slow ones only, or nothing."""
        return self.intra.codec if self.intra is not None else self.inter.codec

    @property
    def is_quantized(self) -> bool:
        """Whether anything is encoded."""
        return self.inter.codec is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedRoutes:
    """The routes of one purpose, by the size of what is sent.

    Attributes:
        hierarchical: Of tensors of `hierarchical_from_bytes` bytes or more; of all where there is no other.
        flat: Of smaller ones.
        hierarchical_from_bytes: Of the whole tensor, as it travels unencoded.
    """

    hierarchical: Route
    flat: Route | None = None
    hierarchical_from_bytes: int = 0

    def for_bytes(self, full_bytes: int) -> Route:
        """The route of a tensor of so many bytes."""
        return self.flat if self.flat is not None and full_bytes < self.hierarchical_from_bytes else self.hierarchical


@dataclass(frozen=True, slots=True)
class HopTraffic:
    """One stage of one collective as it is planned and counted; `full_bytes` of the whole tensor of the stage."""

    collective: str
    axis: str
    size: int
    dtype: torch.dtype
    full_bytes: int


def pipeline_chunks(numel: int, itemsize: int, multiple: int = 1) -> list[tuple[int, int]]:
    """Pieces of a slice that go through the stages one behind the other, so that both links are at work.

    Args:
        numel: Elements of the slice.
        itemsize: Bytes of one, as they travel unencoded.
        multiple: Every piece but the last is a multiple of it.

    Returns:
        Start and end of each piece.
    """
    count = max(1, min(_MAX_CHUNKS, numel * itemsize // _MIN_CHUNK_BYTES))
    step = max(1, math.ceil(numel / count / multiple)) * multiple
    return [(start, min(start + step, numel)) for start in range(0, numel, step)]


def chunks_of(route: Route, numel: int, itemsize: int, multiple: int = 1) -> list[tuple[int, int]]:
    """The pieces in which a slice of `numel` elements goes through the stages of `route`."""
    if route.intra is None and not route.is_quantized:
        return [(0, numel)]
    block = route.inter.codec.block_size if route.inter.codec is not None else 1
    return pipeline_chunks(numel, itemsize, math.lcm(multiple, min(block, 1 << 16)))


def all_gather_traffic(route: Route, full_numel: int, dtype: torch.dtype) -> list[HopTraffic]:
    """What a gather of `full_numel` elements sends, stage by stage."""
    shard = full_numel // route.size
    slow, fast, ranks = route.inter, route.intra, route.inter.size
    coded = route.all_gather_codec
    if coded is not None:
        num_bytes = coded.encoded_bytes(shard)
        messages = [HopTraffic(ALL_GATHER, slow.axis, ranks, torch.uint8, ranks * num_bytes)]
        if fast is not None:
            messages.append(HopTraffic(ALL_GATHER, fast.axis, fast.size, torch.uint8, route.size * num_bytes))
        return messages
    if slow.codec is not None:
        pieces = chunks_of(route, shard, dtype.itemsize)
        num_bytes = sum(slow.codec.encoded_bytes(end - start) for start, end in pieces)
        messages = [HopTraffic(ALL_GATHER, slow.axis, ranks, torch.uint8, ranks * num_bytes)]
    else:
        messages = [
            HopTraffic(ALL_GATHER, slow.axis, ranks, dtype, full_numel * dtype.itemsize // route.ranks_per_node)
        ]
    if fast is not None:
        messages.append(HopTraffic(ALL_GATHER, fast.axis, fast.size, dtype, full_numel * dtype.itemsize))
    return messages


def reduce_scatter_traffic(route: Route, full_numel: int, wire: torch.dtype) -> list[HopTraffic]:
    """What a reduction of `full_numel` elements sends, stage by stage."""
    shard = full_numel // route.size
    pieces = chunks_of(route, shard, wire.itemsize)
    messages = []
    if route.intra is not None:
        rows = [end - start for start, end in pieces] * route.inter.size
        rows = rows if len(pieces) > 1 else [shard * route.inter.size]
        messages.append(_reduction(route.intra, full_numel * wire.itemsize, rows, wire))
    over_slow = full_numel * wire.itemsize // route.ranks_per_node
    return [*messages, _reduction(route.inter, over_slow, [end - start for start, end in pieces], wire)]


def _reduction(hop: Hop, plain_bytes: int, numels: list[int], wire: torch.dtype) -> HopTraffic:
    """Of `plain_bytes`, or where they are encoded of pieces of which each rank gets one: their sizes are `numels`."""
    if hop.codec is None:
        return HopTraffic(REDUCE_SCATTER, hop.axis, hop.size, wire, plain_bytes)
    num_bytes = hop.size * sum(hop.codec.encoded_bytes(numel) for numel in numels)
    return HopTraffic(REDUCE_SCATTER, hop.axis, hop.size, torch.uint8, num_bytes)


def is_plain_all_reduce(route: Route, wire: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether an all-reduce is one of the transport's own: one stage, nothing encoded or rounded, not all direct."""
    return (
        route.intra is None
        and not route.is_quantized
        and wire == dtype
        and route.inter.algorithm is not Algorithm.ALL_TO_ALL
    )


def all_reduce_multiple(route: Route) -> int:
    """What a piece of an all-reduce is a multiple of: equal shares of the ranks, encoded in whole blocks."""
    codec = route.inter.codec
    return route.inter.size * (codec.bound_numel if codec is not None else 1)


def all_reduce_slice(route: Route, numel: int) -> int:
    """Elements, padding included, that one rank of a fast stage takes over the slow links."""
    multiple = all_reduce_multiple(route)
    return -(-numel // (route.ranks_per_node * multiple)) * multiple


def all_reduce_chunks(route: Route, slice_numel: int, itemsize: int) -> list[tuple[int, int]]:
    """The pieces in which such a slice goes; every rank's share of each begins with a block."""
    return chunks_of(route, slice_numel, itemsize, all_reduce_multiple(route))


def all_reduce_traffic(route: Route, numel: int, wire: torch.dtype, dtype: torch.dtype) -> list[HopTraffic]:
    """What an all-reduce of `numel` elements of `dtype` sends, stage by stage."""
    slow, fast = route.inter, route.intra
    if is_plain_all_reduce(route, wire, dtype):
        return [HopTraffic(ALL_REDUCE, slow.axis, slow.size, dtype, numel * dtype.itemsize)]
    slice_numel = all_reduce_slice(route, numel)
    numels = [end - start for start, end in all_reduce_chunks(route, slice_numel, wire.itemsize)]
    if slow.codec is None:
        over_slow = HopTraffic(ALL_REDUCE, slow.axis, slow.size, wire, slice_numel * wire.itemsize)
    else:
        num_bytes = slow.size * sum(slow.codec.encoded_bytes(n // slow.size) for n in numels)
        over_slow = HopTraffic(ALL_REDUCE, slow.axis, slow.size, torch.uint8, num_bytes)
    if fast is None:
        return [over_slow]
    back = HopTraffic(ALL_GATHER, fast.axis, fast.size, wire, fast.size * slice_numel * wire.itemsize)
    return [_reduction(fast, back.full_bytes, numels, wire), over_slow, back]
