"""What must collectives give, bit by bit? Plain versions: every rank's numbers in one process, no message.

Contributions come by the index of the rank: (place in the node, node of the switch, switch), the last running fastest.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mics_strategy.comm import route as routes
from mics_strategy.comm.codecs.format import Codec
from mics_strategy.comm.codecs.quantizer import Quantizer
from mics_strategy.comm.communicator import Communicator
from mics_strategy.comm.route import Algorithm, Route

CPU = torch.device("cpu")


def coded(values: Tensor, codec: Codec, dtype: torch.dtype) -> Tensor:
    """What arrives of `values` that were sent encoded."""
    coder, encoded = _coder(codec), torch.empty(codec.encoded_bytes(values.numel()), dtype=torch.uint8)
    out = torch.empty(values.numel(), dtype=dtype)
    coder.encode(values.contiguous(), encoded)
    coder.decode(encoded, out)
    return out


def received(values: Tensor, wire: torch.dtype, codec: Codec | None) -> Tensor:
    """What arrives of `values`, in their dtype."""
    return values.to(wire).to(values.dtype) if codec is None else coded(values, codec, values.dtype)


def summed(
    pieces: Sequence[Tensor],
    rank_index: int,
    wire: torch.dtype,
    codec: Codec | None,
    start: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """The sum at one rank in one stage: in the order of the ranks, what is encoded in fp32, this rank's piece exact.

    Args:
        pieces: [n] from each rank.
        rank_index: Index of this rank's piece.
        wire: Dtype on the wire of pieces that are not encoded.
        codec: Codec of all pieces but this rank's.
        start: [n], to which the sum is added.
        dtype: Dtype of the sum.
    """
    if codec is None:
        arrived = [each.to(wire).to(dtype) for each in pieces]
    else:
        arrived = [
            each.to(dtype) if index == rank_index else coded(each, codec, torch.float32).to(dtype)
            for index, each in enumerate(pieces)
        ]
        start = torch.zeros_like(arrived[0]) if start is None else start
    total = arrived.pop(0).clone() if start is None else start.clone()
    for each in arrived:
        total += each
    return total


def summed_on_ring(pieces: Sequence[Tensor], rank_index: int, ring: Sequence[int], start: Tensor | None) -> Tensor:
    """The sum at one rank, of which a part went round the ring from its right to its left, rounded at every rank.

    Args:
        pieces: [n] from each rank, in the wire dtype.
        rank_index: Index of this rank's piece.
        ring: The indices in the order of the ring, to the right.
        start: [n] in the dtype of the sum, to which it is added; zeros where it begins.
    """
    place = ring.index(rank_index)
    on_the_way = [pieces[ring[(place + step) % len(ring)]] for step in range(1, len(ring))]
    total = functools.reduce(torch.add, on_the_way)
    return (total.to(start.dtype) if not start.any() else start + total) + pieces[rank_index]


@dataclass(frozen=True, slots=True)
class Plain:
    """The collectives of one route, as seen from the rank of one index.

    `ring` has the indices in the order of the ring, where there is one.
    """

    route: Route
    index: int
    ring: tuple[int, ...] = ()

    @classmethod
    def of(cls, collective: Communicator) -> "Plain":
        """What `collective` must give."""
        slowest, transport = collective.route.hops[0], collective.transports[0]
        is_ring = slowest.algorithm is Algorithm.RING and slowest.codec is None and transport.blocks_host
        ranks = transport.fingerprint.ranks
        ring = tuple(sorted(range(len(ranks)), key=lambda index: ranks[index])) if is_ring else ()
        return cls(collective.route, collective.index, ring)

    def gather(self, shards: Sequence[Tensor]) -> Tensor:
        """All shards, each as it arrives."""
        full_codec, slow_codec = self.route.all_gather_codec, self.route.hops[0].codec
        if full_codec is not None:
            return torch.cat([coded(each, full_codec, each.dtype) for each in shards])
        if slow_codec is None:
            return torch.cat(list(shards))
        pieces = routes.chunks_of(self.route, shards[0].numel(), shards[0].itemsize)
        return torch.cat([coded(each[a:b], slow_codec, each.dtype) for each in shards for a, b in pieces])

    def reduce(self, fulls: Sequence[Tensor], dtype: torch.dtype, start: Tensor | None) -> Tensor:
        """The sum of this rank's slice, added to `start`; `fulls` are in the wire dtype."""
        route, wire, numel = self.route, fulls[0].dtype, fulls[0].numel() // self.route.size
        if self.ring:
            rows = [each.view(route.size, -1)[self.index] for each in fulls]
            zeros = torch.zeros(numel, dtype=dtype) if start is None else start
            return summed_on_ring(rows, self.index, self.ring, zeros)
        pieces = routes.chunks_of(route, numel, fulls[0].itemsize)
        held = {index: full for index, full in enumerate(fulls)}
        held = self._on_slowest(held, numel, pieces, 1, (wire, dtype))
        return self._summed_pieces(0, held, self.index, pieces, (wire, dtype), start)

    def _on_slowest(
        self,
        held: dict[int, Tensor],
        numel: int,
        pieces: list[tuple[int, int]],
        ranks_per_row: int,
        dtypes: tuple[torch.dtype, torch.dtype],
    ) -> dict[int, Tensor]:
        """What each rank holds before the slowest stage, of rows of `numel` elements that all ranks held."""
        for stage in reversed(range(1, len(self.route.hops))):
            rows = self.route.strides[stage] // ranks_per_row
            parts = [(row * numel + a, row * numel + b) for row in range(rows) for a, b in pieces]
            parts = [(0, rows * numel)] if len(pieces) == 1 else parts
            held = {index: self._summed_pieces(stage, held, index, parts, dtypes, None) for index in held}
        return held

    def _summed_pieces(
        self,
        stage: int,
        held: dict[int, Tensor],
        index: int,
        pieces: list[tuple[int, int]],
        dtypes: tuple[torch.dtype, torch.dtype],
        start: Tensor | None,
    ) -> Tensor:
        """The sum of one rank in one stage, piece by piece; every rank of the stage holds one table."""
        wire, dtype = dtypes
        members, place = self._members(stage, index)
        tables = [held[member].view(len(members), -1)[place] for member in members]
        codec = self.route.hops[stage].codec
        return torch.cat(
            [summed([t[a:b] for t in tables], place, wire, codec, _part(start, a, b), dtype) for a, b in pieces]
        )

    def _members(self, stage: int, index: int) -> tuple[list[int], int]:
        """The indices of the ranks of one stage, and the place of one of them."""
        size, stride = self.route.hops[stage].size, self.route.strides[stage]
        place = index // stride % size
        return [index + (other - place) * stride for other in range(size)], place

    def all_reduce(self, tensors: Sequence[Tensor], wire: torch.dtype) -> Tensor:
        """The sum at every rank; `tensors` are in the dtype of the sum."""
        route, dtype, numel = self.route, tensors[0].dtype, tensors[0].numel()
        ranks, slice_numel = route.hops[0].size, routes.all_reduce_slice(route, numel)
        padding = torch.zeros(route.num_slices * slice_numel - numel, dtype=dtype)
        held = {index: torch.cat([each, padding]) for index, each in enumerate(tensors)}
        pieces = routes.all_reduce_chunks(route, slice_numel, tensors[0].to(wire).itemsize)
        held = self._on_slowest(held, slice_numel, pieces, ranks, (wire, dtype))
        slices = [
            torch.cat(
                [self._all_reduced_piece([held[first + at][a:b] for at in range(ranks)], wire) for a, b in pieces]
            )
            for first in range(0, route.size, ranks)
        ]
        return torch.cat(slices)[:numel]

    def _all_reduced_piece(self, held: list[Tensor], wire: torch.dtype) -> Tensor:
        """One piece of a slice, of which every rank of the slowest stage holds a sum."""
        route, dtype, ranks = self.route, held[0].dtype, len(held)
        rows = [each.view(ranks, -1) for each in held]
        codec = route.hops[0].codec
        if self.ring:
            narrow, none = [r.to(wire) for r in rows], torch.zeros(rows[0].shape[1], dtype=dtype)
            totals = [summed_on_ring([r[own] for r in narrow], own, self.ring, none) for own in range(ranks)]
        else:
            totals = [summed([r[own] for r in rows], own, wire, codec, None, dtype) for own in range(ranks)]
        whole = torch.cat([received(total, wire, codec) for total in totals])
        return whole.to(wire).to(dtype) if len(route.hops) > max(1, route.num_quantized_sums) else whole


@functools.cache  # it allocates tiles; the tests of one process run one after the other
def _coder(codec: Codec) -> Quantizer:
    return Quantizer(codec, CPU)


def _part(start: Tensor | None, a: int, b: int) -> Tensor | None:
    return None if start is None else start[a:b]
