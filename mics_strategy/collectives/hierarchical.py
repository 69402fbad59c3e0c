"""How is a group that spans nodes served in two stages?

A rank of such a group has a place on the fast links (which of its node's ranks) and one on the slow links (which node),
and the fast place is the more significant digit of its index. So what one stage brings is a contiguous slice of what
the next one completes: no stage re-arranges anything, and a gather needs no memory beside its output.

Of a tensor of M bytes over n nodes of g ranks, all ranks of a node together send M (n - 1) / n to other nodes, in a
gather as in a reduction; a ring over all ranks in the order of their index would send g times as much.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mics_strategy.collectives.ops import Collective, Handle
from mics_strategy.collectives.trail import Trail


class Hierarchical:
    """Two collectives over groups that cross one another: all pairs of their places are the ranks of this one.

    Args:
        fast: Over the more significant digit of the index, as a rule inside a node.
        slow: Over the less significant one.

    Source:
        MiCS (arXiv:2205.00119) section 3.3, hierarchical communication; its re-arrangement of chunks is not needed in
        this order of ranks.
    """

    def __init__(self, fast: Collective, slow: Collective) -> None:
        self._fast = fast
        self._slow = slow
        self.size = fast.size * slow.size
        self.index = fast.index * slow.size + slow.index

    @property
    def trails(self) -> Iterator[tuple[str, Trail]]:
        """Of both stages."""
        yield from self._fast.trails
        yield from self._slow.trails

    def gather(self, out: torch.Tensor, shard: torch.Tensor, what: str) -> Handle:
        """See `Collective.gather`.

        1. Gather over the slow links, into this rank's slice of `out`.
        2. Gather the slices over the fast links, in place.

        Cost:
            Sent: (n - 1) * s over the slow links, (g - 1) * n * s over the fast ones (s bytes of `shard`).
        """
        mine = out.view(self._fast.size, -1)[self._fast.index]
        return self._slow.gather(mine, shard, what).then(lambda: self._fast.gather(out, mine, what).wait())

    def reduce(
        self, out: torch.Tensor, full: torch.Tensor, scratch: torch.Tensor, accumulate: bool, what: str
    ) -> Handle:
        """See `Collective.reduce`; `full` is overwritten.

        1. Sum over the fast links; keep this rank's slice, in the dtype of the sums.
        2. Sum the slices over the slow links, rounded once more where the wire is narrower.

        Cost:
            Sent: (g - 1) * n * s over the fast links, (n - 1) * s over the slow ones (s bytes of a slice, on the wire).
        """
        numel = full.numel() // self._fast.size
        is_narrow = full.dtype != out.dtype
        part = _as_fp32(full, numel) if is_narrow else full[:numel]

        def over_slow_links() -> None:
            wire, spare = (scratch[:numel].copy_(part), full[:numel]) if is_narrow else (part, scratch[:numel])
            self._slow.reduce(out, wire, spare, accumulate, what).wait()

        return self._fast.reduce(part, full, scratch, False, what).then(over_slow_links)

    def all_reduce(self, tensor: torch.Tensor, scratch: torch.Tensor, what: str) -> Handle:
        """See `Collective.all_reduce`.

        1. Reduce over the fast links; this rank keeps a slice, in the front of `tensor`, whose values have left.
        2. All-reduce the slice over the slow links.
        3. Gather the slices over the fast links.

        Cost:
            Sent: 2 * (g - 1) / g * m over the fast links, 2 * (n - 1) / n * m / g over the slow ones (m bytes).
        """
        numel = -(-tensor.numel() // self._fast.size)
        padded_numel = numel * self._fast.size
        full, received, rest = (
            scratch[:padded_numel],
            scratch[padded_numel : 2 * padded_numel],
            scratch[2 * padded_numel :],
        )
        full[: tensor.numel()].copy_(tensor)
        full[tensor.numel() :].zero_()
        part = tensor[:numel]

        def over_slow_links_and_back() -> None:
            self._slow.all_reduce(part, rest, what).wait()
            self._fast.gather(full, received[:numel].copy_(part), what).wait()
            tensor.copy_(full[: tensor.numel()])

        return self._fast.reduce(part, full, received, False, what).then(over_slow_links_and_back)

    def all_reduce_scratch_numel(self, numel: int, *, is_narrow: bool) -> int:
        """See `Collective.all_reduce_scratch_numel`."""
        slice_numel = -(-numel // self._fast.size)
        of_slow = self._slow.all_reduce_scratch_numel(slice_numel, is_narrow=is_narrow)
        return 2 * slice_numel * self._fast.size + of_slow


def _as_fp32(buffer: torch.Tensor, numel: int) -> torch.Tensor:
    """The first bytes of a buffer of two-byte elements, whose content has left, as `numel` fp32."""
    return buffer.view(torch.uint8)[: 4 * numel].view(torch.float32)
