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


def travelled(values: Tensor, wire: torch.dtype, codec: Codec | None) -> Tensor:
    """What arrives of `values`, in their dtype."""
    return values.to(wire).to(values.dtype) if codec is None else coded(values, codec, values.dtype)


def summed(
    given: Sequence[Tensor], own: int, wire: torch.dtype, codec: Codec | None, start: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The sum at one rank in one stage: in the order of the ranks, what is encoded in fp32, the own share exact.

    Args:
        given: [n] from each rank.
        own: Which of them is the rank's own.
        wire: Dtype in which unencoded numbers travel.
        codec: What all but the own share are encoded with.
        start: [n]; what it is added to.
        dtype: Of the sum.
    """
    if codec is None:
        arrived = [each.to(wire).to(dtype) for each in given]
    else:
        arrived = [
            each.to(dtype) if index == own else coded(each, codec, torch.float32).to(dtype)
            for index, each in enumerate(given)
        ]
        start = torch.zeros_like(arrived[0]) if start is None else start
    total = arrived.pop(0).clone() if start is None else start.clone()
    for each in arrived:
        total += each
    return total


def summed_on_ring(given: Sequence[Tensor], own: int, ring: Sequence[int], start: Tensor | None) -> Tensor:
    """The sum at one rank, of which a part went round the ring from its right to its left, rounded at every rank.

    Args:
        given: [n] from each rank, in the wire dtype.
        own: Which of them is the rank's own.
        ring: The indices in the order of the ring, to the right.
        start: [n] in the dtype of the sum; what it is added to, zeros where it begins.
    """
    place = ring.index(own)
    on_the_way = [given[ring[(place + step) % len(ring)]] for step in range(1, len(ring))]
    total = functools.reduce(torch.add, on_the_way)
    return (total.to(start.dtype) if not start.any() else start + total) + given[own]


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
        slow, transport = collective.route.inter, collective.transports[0]
        is_ring = slow.algorithm is Algorithm.RING and slow.codec is None and transport.blocks_host
        ranks = transport.fingerprint.ranks
        ring = tuple(sorted(range(len(ranks)), key=lambda index: ranks[index])) if is_ring else ()
        return cls(collective.route, collective.index, ring)

    @property
    def _at_fast(self) -> int:
        return self.index // self.route.inter.size

    @property
    def _at_slow(self) -> int:
        return self.index % self.route.inter.size

    def gather(self, given: Sequence[Tensor]) -> Tensor:
        """All shards, each as it arrives."""
        whole, slow = self.route.all_gather_codec, self.route.inter.codec
        if whole is not None:
            return torch.cat([coded(each, whole, each.dtype) for each in given])
        if slow is None:
            return torch.cat(list(given))
        pieces = routes.chunks_of(self.route, given[0].numel(), given[0].itemsize)
        return torch.cat([coded(each[a:b], slow, each.dtype) for each in given for a, b in pieces])

    def reduce(self, given: Sequence[Tensor], dtype: torch.dtype, start: Tensor | None) -> Tensor:
        """The sum of this rank's slice, added to `start`; `given` are in the wire dtype."""
        route, wire, numel = self.route, given[0].dtype, given[0].numel() // self.route.size
        pieces = routes.chunks_of(route, numel, given[0].itemsize)
        slow, fast = route.inter, route.intra
        if fast is None:
            rows = [each.view(route.size, -1)[self.index] for each in given]
            if self.ring:
                return summed_on_ring(rows, self.index, self.ring, self._start(start, numel, dtype))
            return torch.cat(
                [
                    summed([r[a:b] for r in rows], self.index, wire, slow.codec, _part(start, a, b), dtype)
                    for a, b in pieces
                ]
            )
        # What each node of this rank's slow stage has, of its slice and of all their rows.
        nodes = [
            self._node_sums(given, node, numel, pieces, dtype).view(slow.size, -1)[self._at_slow]
            for node in range(slow.size)
        ]
        return torch.cat(
            [
                summed([n[a:b] for n in nodes], self._at_slow, wire, slow.codec, _part(start, a, b), dtype)
                for a, b in pieces
            ]
        )

    @staticmethod
    def _start(start: Tensor | None, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype) if start is None else start

    def _node_sums(
        self, given: Sequence[Tensor], node: int, numel: int, pieces: list[tuple[int, int]], dtype: torch.dtype
    ) -> Tensor:
        route = self.route
        assert route.intra is not None
        of_node = [given[local * route.inter.size + node] for local in range(route.intra.size)]
        slices = [each.view(route.intra.size, -1)[self._at_fast] for each in of_node]
        parts = [(row * numel + a, row * numel + b) for row in range(route.inter.size) for a, b in pieces]
        parts = [(0, route.inter.size * numel)] if len(pieces) == 1 else parts
        codec = route.intra.codec
        return torch.cat(
            [summed([s[a:b] for s in slices], self._at_fast, given[0].dtype, codec, None, dtype) for a, b in parts]
        )

    def all_reduce(self, given: Sequence[Tensor], wire: torch.dtype) -> Tensor:
        """The sum at every rank; `given` are in the dtype of the sum."""
        route, dtype, numel = self.route, given[0].dtype, given[0].numel()
        slice_numel = routes.all_reduce_slice(route, numel)
        padding = torch.zeros(route.ranks_per_node * slice_numel - numel, dtype=dtype)
        padded = [torch.cat([each, padding]).view(route.ranks_per_node, -1) for each in given]
        pieces = routes.all_reduce_chunks(route, slice_numel, given[0].to(wire).itemsize)
        slices = [
            torch.cat([self._all_reduced_piece([p[local][a:b] for p in padded], local, wire) for a, b in pieces])
            for local in range(route.ranks_per_node)
        ]
        return torch.cat(slices)[:numel]

    def _all_reduced_piece(self, given: list[Tensor], local: int, wire: torch.dtype) -> Tensor:
        """One piece of the slice of which the ranks at `local` in their nodes take care."""
        route, dtype, ranks = self.route, given[0].dtype, self.route.inter.size
        nodes = given
        if route.intra is not None:
            by_node = [[given[at * ranks + node] for at in range(route.intra.size)] for node in range(ranks)]
            nodes = [summed(each, local, wire, route.intra.codec, None, dtype) for each in by_node]
        rows = [each.view(ranks, -1) for each in nodes]
        if self.ring:
            narrow, none = [r.to(wire) for r in rows], self._start(None, rows[0].shape[1], dtype)
            totals = [summed_on_ring([r[own] for r in narrow], own, self.ring, none) for own in range(ranks)]
        else:
            totals = [summed([r[own] for r in rows], own, wire, route.inter.codec, None, dtype) for own in range(ranks)]
        whole = torch.cat([travelled(total, wire, route.inter.codec) for total in totals])
        return whole if route.intra is None else whole.to(wire).to(dtype)


@functools.cache  # it allocates tiles; the tests of one process run one after the other
def _coder(codec: Codec) -> Quantizer:
    return Quantizer(codec, CPU)


def _part(start: Tensor | None, a: int, b: int) -> Tensor | None:
    return None if start is None else start[a:b]
