"""What must collectives give, bit by bit? Plain versions: every rank's numbers in one process, no message.

Contributions come by the index of the rank: (place in the node, node), the node running fastest.
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
        inter, transport = collective.route.inter, collective.transports[0]
        is_ring = inter.algorithm is Algorithm.RING and inter.codec is None and transport.blocks_host
        ranks = transport.fingerprint.ranks
        ring = tuple(sorted(range(len(ranks)), key=lambda index: ranks[index])) if is_ring else ()
        return cls(collective.route, collective.index, ring)

    @property
    def _intra_index(self) -> int:
        return self.index // self.route.inter.size

    @property
    def _inter_index(self) -> int:
        return self.index % self.route.inter.size

    def gather(self, shards: Sequence[Tensor]) -> Tensor:
        """All shards, each as it arrives."""
        full_codec, inter_codec = self.route.all_gather_codec, self.route.inter.codec
        if full_codec is not None:
            return torch.cat([coded(each, full_codec, each.dtype) for each in shards])
        if inter_codec is None:
            return torch.cat(list(shards))
        pieces = routes.chunks_of(self.route, shards[0].numel(), shards[0].itemsize)
        return torch.cat([coded(each[a:b], inter_codec, each.dtype) for each in shards for a, b in pieces])

    def reduce(self, fulls: Sequence[Tensor], dtype: torch.dtype, start: Tensor | None) -> Tensor:
        """The sum of this rank's slice, added to `start`; `fulls` are in the wire dtype."""
        route, wire, numel = self.route, fulls[0].dtype, fulls[0].numel() // self.route.size
        pieces = routes.chunks_of(route, numel, fulls[0].itemsize)
        inter, intra = route.inter, route.intra
        if intra is None:
            rows = [each.view(route.size, -1)[self.index] for each in fulls]
            if self.ring:
                return summed_on_ring(rows, self.index, self.ring, self._start(start, numel, dtype))
            return torch.cat(
                [
                    summed([r[a:b] for r in rows], self.index, wire, inter.codec, _part(start, a, b), dtype)
                    for a, b in pieces
                ]
            )
        # What each node of this rank's inter-node stage has, of its slice and of all their rows.
        nodes = [
            self._node_sums(fulls, node, numel, pieces, dtype).view(inter.size, -1)[self._inter_index]
            for node in range(inter.size)
        ]
        return torch.cat(
            [
                summed([n[a:b] for n in nodes], self._inter_index, wire, inter.codec, _part(start, a, b), dtype)
                for a, b in pieces
            ]
        )

    @staticmethod
    def _start(start: Tensor | None, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype) if start is None else start

    def _node_sums(
        self, fulls: Sequence[Tensor], node: int, numel: int, pieces: list[tuple[int, int]], dtype: torch.dtype
    ) -> Tensor:
        route = self.route
        assert route.intra is not None
        of_node = [fulls[local * route.inter.size + node] for local in range(route.intra.size)]
        slices = [each.view(route.intra.size, -1)[self._intra_index] for each in of_node]
        parts = [(row * numel + a, row * numel + b) for row in range(route.inter.size) for a, b in pieces]
        parts = [(0, route.inter.size * numel)] if len(pieces) == 1 else parts
        codec = route.intra.codec
        return torch.cat(
            [summed([s[a:b] for s in slices], self._intra_index, fulls[0].dtype, codec, None, dtype) for a, b in parts]
        )

    def all_reduce(self, tensors: Sequence[Tensor], wire: torch.dtype) -> Tensor:
        """The sum at every rank; `tensors` are in the dtype of the sum."""
        route, dtype, numel = self.route, tensors[0].dtype, tensors[0].numel()
        slice_numel = routes.all_reduce_slice(route, numel)
        padding = torch.zeros(route.ranks_per_node * slice_numel - numel, dtype=dtype)
        padded = [torch.cat([each, padding]).view(route.ranks_per_node, -1) for each in tensors]
        pieces = routes.all_reduce_chunks(route, slice_numel, tensors[0].to(wire).itemsize)
        slices = [
            torch.cat([self._all_reduced_piece([p[local][a:b] for p in padded], local, wire) for a, b in pieces])
            for local in range(route.ranks_per_node)
        ]
        return torch.cat(slices)[:numel]

    def _all_reduced_piece(self, rank_pieces: list[Tensor], local: int, wire: torch.dtype) -> Tensor:
        """One piece of the slice of which the ranks at `local` in their nodes take care."""
        route, dtype, ranks = self.route, rank_pieces[0].dtype, self.route.inter.size
        nodes = rank_pieces
        if route.intra is not None:
            by_node = [[rank_pieces[at * ranks + node] for at in range(route.intra.size)] for node in range(ranks)]
            nodes = [summed(each, local, wire, route.intra.codec, None, dtype) for each in by_node]
        rows = [each.view(ranks, -1) for each in nodes]
        if self.ring:
            narrow, none = [r.to(wire) for r in rows], self._start(None, rows[0].shape[1], dtype)
            totals = [summed_on_ring([r[own] for r in narrow], own, self.ring, none) for own in range(ranks)]
        else:
            totals = [summed([r[own] for r in rows], own, wire, route.inter.codec, None, dtype) for own in range(ranks)]
        whole = torch.cat([received(total, wire, route.inter.codec) for total in totals])
        return whole if route.intra is None else whole.to(wire).to(dtype)


@functools.cache  # it allocates tiles; the tests of one process run one after the other
def _coder(codec: Codec) -> Quantizer:
    return Quantizer(codec, CPU)


def _part(start: Tensor | None, a: int, b: int) -> Tensor | None:
    return None if start is None else start[a:b]
