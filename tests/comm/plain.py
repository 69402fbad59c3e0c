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
from mics_strategy.comm.route import Route

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


@dataclass(frozen=True, slots=True)
class Plain:
    """The collectives of one route, as seen from the rank of one index."""

    route: Route
    index: int

    @classmethod
    def of(cls, collective: Communicator) -> "Plain":
        """What `collective` must give."""
        return cls(collective.route, collective.index)

    def gather(self, shards: Sequence[Tensor]) -> Tensor:
        """All shards, each as it arrives."""
        codec = self.route.stages[0].codec
        return torch.cat([each if codec is None else coded(each, codec, each.dtype) for each in shards])

    def reduce(self, fulls: Sequence[Tensor], dtype: torch.dtype, start: Tensor | None) -> Tensor:
        """The sum of this rank's slice, added to `start`; `fulls` are in the wire dtype."""
        dtypes = (fulls[0].dtype, dtype)
        held = self._on_slowest(dict(enumerate(fulls)), dtypes)
        return self._summed(0, held, self.index, dtypes, start)

    def _on_slowest(self, held: dict[int, Tensor], dtypes: tuple[torch.dtype, torch.dtype]) -> dict[int, Tensor]:
        """What each rank holds before the slowest stage."""
        for stage in reversed(range(1, len(self.route.stages))):
            held = {index: self._summed(stage, held, index, dtypes, None) for index in held}
        return held

    def _summed(
        self,
        stage: int,
        held: dict[int, Tensor],
        index: int,
        dtypes: tuple[torch.dtype, torch.dtype],
        start: Tensor | None,
    ) -> Tensor:
        """The sum of one rank in one stage; every rank of the stage holds one table."""
        wire, dtype = dtypes
        members, place = self._members(stage, index)
        tables = [held[member].view(len(members), -1)[place] for member in members]
        return summed(tables, place, wire, self.route.stages[stage].codec, start, dtype)

    def _members(self, stage: int, index: int) -> tuple[list[int], int]:
        """The indices of the ranks of one stage, and the place of one of them."""
        size, stride = self.route.stages[stage].size, self.route.strides[stage]
        place = index // stride % size
        return [index + (other - place) * stride for other in range(size)], place

    def all_reduce(self, tensors: Sequence[Tensor], wire: torch.dtype) -> Tensor:
        """The sum at every rank; `tensors` are in the dtype of the sum."""
        route, dtype, numel = self.route, tensors[0].dtype, tensors[0].numel()
        ranks, slice_numel = route.stages[0].size, routes.all_reduce_slice(route, numel)
        padding = torch.zeros(route.num_slices * slice_numel - numel, dtype=dtype)
        held = self._on_slowest({i: torch.cat([each, padding]) for i, each in enumerate(tensors)}, (wire, dtype))
        slices = [
            self._all_reduced([held[first + at] for at in range(ranks)], wire) for first in range(0, route.size, ranks)
        ]
        return torch.cat(slices)[:numel]

    def _all_reduced(self, held: list[Tensor], wire: torch.dtype) -> Tensor:
        """A slice, of which every rank of the slowest stage holds a sum."""
        route, dtype, ranks = self.route, held[0].dtype, len(held)
        rows = [each.view(ranks, -1) for each in held]
        codec = route.stages[0].codec
        totals = [summed([r[own] for r in rows], own, wire, codec, None, dtype) for own in range(ranks)]
        whole = torch.cat([received(total, wire, codec) for total in totals])
        return whole.to(wire).to(dtype) if len(route.stages) > max(1, route.num_quantized_sums) else whole


@functools.cache  # it allocates tiles; the tests of one process run one after the other
def _coder(codec: Codec) -> Quantizer:
    return Quantizer(codec, CPU)
