"""How does one group gather and reduce? The only file that names torch's collective primitives.

A reduction on gloo moves its slices with an all-to-all and adds them in rank order in the dtype of the
result. Sent bytes are those of a reduce-scatter, a low-precision wire costs one rounding per contribution
instead of one per hop, every rank adds in the same order, and gloo is spared its own reduce-scatter, which
sends twice as much (it is an all-reduce). NCCL has a good reduce-scatter, which is used.

Every collective is written into a `Ledger`, from the tensors that were really passed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.distributed.nn  # DTensor imports it later, and then its default arguments keep the default group alive

from mics_strategy.collectives import traffic
from mics_strategy.collectives.ops import Handle
from mics_strategy.collectives.trail import Trail
from mics_strategy.errors import ShapeError

T = TypeVar("T")
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, slots=True)
class Sent:
    """One issued collective: what, over which axis, in which dtype, and the bytes that this rank sends."""

    collective: str
    axis: str
    ranks: int
    dtype: torch.dtype
    full_bytes: int
    sent_bytes: int


@dataclass(slots=True)
class Ledger:
    """The collectives issued since it was last emptied, with their number."""

    entries: Counter[Sent] = field(default_factory=Counter)

    def write(self, collective: str, group: FlatCollective, tensor: torch.Tensor) -> None:
        """Record one collective whose full tensor is `tensor`."""
        full_bytes = tensor.numel() * tensor.element_size()
        self._add(collective, group, tensor, traffic.SENT_BYTES[collective](full_bytes, group.size))

    def write_exchange(self, group: FlatCollective, tensor: torch.Tensor, kept_numel: int) -> None:
        """Record an all-to-all of `tensor`, of which this rank keeps `kept_numel` elements."""
        self._add(traffic.ALL_TO_ALL, group, tensor, (tensor.numel() - kept_numel) * tensor.element_size())

    def _add(self, collective: str, group: FlatCollective, tensor: torch.Tensor, sent_bytes: int) -> None:
        full_bytes = tensor.numel() * tensor.element_size()
        self.entries[Sent(collective, group.axis, group.size, tensor.dtype, full_bytes, sent_bytes)] += 1

    def take(self) -> Counter[Sent]:
        """The entries so far; the ledger starts again empty."""
        entries, self.entries = self.entries, Counter()
        return entries


class FlatCollective:
    """Collectives over one process group, in one stage.

    Args:
        group: Ranks in the order of their shard index.
        axis: Names of the axes that the group spans.
        ledger: Receives every collective.
    """

    def __init__(self, group: dist.ProcessGroup, axis: str, ledger: Ledger) -> None:
        self.group = group
        self.size = group.size()
        self.index = group.rank()
        self.axis = axis
        ranks = dist.get_process_group_ranks(group)
        self._where = f"{axis} (ranks {', '.join(map(str, ranks[:8]))}{', ...' if len(ranks) > 8 else ''})"
        self._ledger = ledger
        self.trail = Trail(ranks=tuple(ranks), index=self.index)

    @property
    def trails(self) -> Iterator[tuple[str, Trail]]:
        """Its own."""
        yield self.axis, self.trail

    def gather(self, out: torch.Tensor, shard: torch.Tensor, what: str) -> Handle:
        """See `Collective.gather`. Cost: (size - 1) * n sent."""
        _check(out.numel() == shard.numel() * self.size and out.dtype == shard.dtype, what, out, shard)
        self.trail.note(what)
        self._ledger.write(traffic.GATHER, self, out)
        return Handle(
            f"Gather of {what} over {self._where}", [_all_gather(out, shard, group=self.group, async_op=True)]
        )

    def reduce(
        self, out: torch.Tensor, full: torch.Tensor, scratch: torch.Tensor, accumulate: bool, what: str
    ) -> Handle:
        """See `Collective.reduce`. Cost: (size - 1) * n sent, size * n of scratch."""
        _check(full.numel() == out.numel() * self.size and full.dtype == scratch.dtype, what, out, full)
        self.trail.note(what)
        self._ledger.write(traffic.REDUCE_SCATTER, self, full)
        if full.is_cuda:
            total = scratch[: out.numel()]
            work = _reduce_scatter(total, full, group=self.group, async_op=True)
            return Handle(
                f"Reduction of {what} over {self._where}",
                [work],
                lambda: _sum_slices(out, total[None], accumulate),
            )
        received = scratch[: full.numel()]
        work = dist.all_to_all_single(received, full, group=self.group, async_op=True)

        def add_in_rank_order() -> None:
            _sum_slices(out, received.view(self.size, -1), accumulate)

        return Handle(f"Reduction of {what} over {self._where}", [work], add_in_rank_order)

    def all_reduce(self, tensor: torch.Tensor, scratch: torch.Tensor, what: str) -> Handle:
        """See `Collective.all_reduce`. Cost: 2 (size - 1) / size * n sent."""
        if scratch.dtype != tensor.dtype:
            return self._all_reduce_narrow(tensor, scratch, what)
        self._ledger.write(traffic.ALL_REDUCE, self, tensor)
        return Handle(
            f"All-reduce of {what} over {self._where}",
            [dist.all_reduce(tensor, group=self.group, async_op=True)],
        )

    def exchange(
        self, out: torch.Tensor, out_numels: list[int], full: torch.Tensor, full_numels: list[int], what: str
    ) -> Handle:
        """Give every rank its piece of `full`, and put what the ranks give into `out`, in the order of their index.

        Args:
            out: [sum of `out_numels`], same dtype as `full`; overwritten.
            out_numels: Elements that each rank gives.
            full: [sum of `full_numels`]; must stay unchanged until the handle has been waited for.
            full_numels: Elements that each rank gets.
            what: Names the caller in errors.

        Cost:
            All of `full` sent but the own piece.
        """
        fits = (out.numel(), full.numel(), out.dtype) == (sum(out_numels), sum(full_numels), full.dtype)
        _check(fits, what, out, full)
        self.trail.note(what)
        self._ledger.write_exchange(self, full, full_numels[self.index])
        work = dist.all_to_all_single(out, full, out_numels, full_numels, group=self.group, async_op=True)
        return Handle(f"Exchange of {what} over {self._where}", [work])

    def broadcast(self, tensor: torch.Tensor, what: str, source: int = 0) -> None:
        """Copy the tensor of one rank to all, in place. For starting values, buffers and states; no plan has it."""
        Handle(
            f"Broadcast of {what} over {self._where}",
            [dist.broadcast(tensor, group=self.group, group_src=source, async_op=True)],
        ).wait()

    def share(self, value: T, source: int) -> T:
        """The object of one rank, on all. For states; no plan has it."""
        values = [value]
        dist.broadcast_object_list(values, group=self.group, group_src=source)
        return values[0]

    def combine(self, value: torch.Tensor, *, is_max: bool) -> torch.Tensor:
        """The sum or the maximum of a small tensor over the ranks, in place. For norms; not part of a step's plan."""
        op = dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM
        Handle(
            f"All-reduce of a norm over {self._where}",
            [dist.all_reduce(value, op=op, group=self.group, async_op=True)],
        ).wait()
        return value

    def all_reduce_scratch_numel(self, numel: int, *, is_narrow: bool) -> int:
        """See `Collective.all_reduce_scratch_numel`."""
        return 3 * self.size * -(-numel // self.size) if is_narrow else 0

    def _all_reduce_narrow(self, tensor: torch.Tensor, scratch: torch.Tensor, what: str) -> Handle:
        """Sum in the dtype of `tensor`, travel in the dtype of `scratch`.

        1. Round this rank's tensor once and exchange slices (all-to-all).
        2. Add them in rank order in the wide dtype (into `tensor`, whose values have left); round the sum
           once.
        3. Gather the sums.
        """
        slice_numel = -(-tensor.numel() // self.size)
        padded_numel = slice_numel * self.size
        outgoing, received, sums = scratch[: 3 * padded_numel].view(3, padded_numel)
        outgoing[: tensor.numel()].copy_(tensor)
        outgoing[tensor.numel() :].zero_()
        self._ledger.write(traffic.ALL_REDUCE, self, outgoing)
        work = dist.all_to_all_single(received, outgoing, group=self.group, async_op=True)

        def add_and_gather() -> None:
            _sum_slices(tensor[:slice_numel], received.view(self.size, slice_numel), accumulate=False)
            outgoing[:slice_numel].copy_(tensor[:slice_numel])
            Handle(what, [_all_gather(sums, outgoing[:slice_numel], group=self.group, async_op=True)]).wait()
            tensor.copy_(sums[: tensor.numel()])

        return Handle(f"All-reduce of {what} over {self._where}", [work], add_and_gather)


def _sum_slices(out: torch.Tensor, slices: torch.Tensor, accumulate: bool) -> None:
    """Add the rows of `slices` to `out` from the first to the last, in the dtype of `out`."""
    if not accumulate:
        out.copy_(slices[0])
    for row in slices if accumulate else slices[1:]:
        out.add_(row)


def _check(fits: bool, what: str, small: torch.Tensor, large: torch.Tensor) -> None:
    if not fits:
        raise ShapeError(
            f"{what}: buffers of {small.numel()} {small.dtype} and {large.numel()} {large.dtype} do not belong to one "
            "collective. This is a defect of the layout; please report it."
        )
