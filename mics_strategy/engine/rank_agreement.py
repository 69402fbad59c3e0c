"""What ranks must agree on: orders, which backward is the last, and what one small all-reduce says.

- `GlobalOrder` is one order of all units, for ranks that may run different ones. `Turns` starts hops in one order,
  whatever order the gradients of a rank arrive in.
- `AccumulationWindow` declares or predicts the last backward in front of an optimizer step.
- `RankAgreement` is the small all-reduce of a step.

The all-reduce carries five answers: which parameters any rank has used, whether all ranks have run as many backwards of
the same units (`AccumulationWindow`), whether they have started the same second hops inside of them (`SecondHops`),
whether they have submitted the same other collectives (`ProcessGroups.desync_digest`), and whether replicas of a shard
are equal (`ReplicaCheck`).

A rank reads the counts of users only if it has not used all parameters itself. The second answer is one number, as is
the third, and so are the last two, 0 while ranks agree. The CPU reads them at once. On a GPU reading would stop the
host, so they are read one step later, but at once in the first steps, in which ranks that differ at all mostly begin
to.
"""

from __future__ import annotations

import zlib
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator
from itertools import takewhile
from typing import Generic, TypeVar

import torch

from mics_strategy.comm.desync import zero_sum
from mics_strategy.comm.placement import digest, digest_weight
from mics_strategy.comm.process_groups import ProcessGroups
from mics_strategy.engine.bucket import Bucket
from mics_strategy.engine.grad_bucket import GradBucket
from mics_strategy.engine.lifecycle import GradFlag
from mics_strategy.engine.schedule import RepeatedHop, RepeatedHops
from mics_strategy.engine.unit import Unit
from mics_strategy.errors import LifecycleError

T = TypeVar("T")
READ_AT_ONCE = 3  # optimizer steps
CHECKED_AT_START = 10  # optimizer steps
_DUE = 1 << 16  # above the count of users: the number of ranks on which the bucket is still to be reduced


class GlobalOrder:
    """One order of all units, the same on all ranks, whichever units this rank runs.

    Where parameters or gradients are kept whole, ranks may run different units, and collectives follow this order.

    Args:
        units: Units by index.

    Attributes:
        units: Units in the order.
        is_agreed: Whether the order follows recorded forwards.
    """

    def __init__(self, units: list[Unit]) -> None:
        self.units = list(units)
        self.is_agreed = False
        self._positions = {unit.index: position for position, unit in enumerate(units)}
        self._num_taken = 0

    def agree(self, forward_orders: list[list[int]]) -> None:
        """Merge the forward orders of all ranks.

        A unit that no rank ran stays next to its neighbor.

        Args:
            forward_orders: Indices of units in the forward order of every rank, the same on all ranks.
        """
        merged: list[int] = []
        for order in (*forward_orders, sorted(self._positions)):
            position = 0
            for index in order:
                if index not in merged:
                    merged.insert(position, index)
                position = merged.index(index) + 1
        by_index = {unit.index: unit for unit in self.units}
        self.units = [by_index[index] for index in merged]
        self._positions = {index: position for position, index in enumerate(merged)}
        self.is_agreed = True

    def restart(self) -> None:
        """Make every unit due again, after parameters have changed."""
        self._num_taken = 0

    def take_until(self, unit: Unit) -> list[Unit]:
        """Take the units up to and including `unit` that were not taken since `restart`."""
        start, self._num_taken = self._num_taken, max(self._num_taken, self._positions[unit.index] + 1)
        return self.units[start : self._num_taken]

    def take_rest(self) -> list[Unit]:
        """Take all units that were not taken since `restart`."""
        return self.take_until(self.units[-1])


class Turns(Generic[T]):
    """Hops that start in one order, the same on all ranks: each when it is ready, and all before it have started."""

    def __init__(self) -> None:
        self._waiting: deque[T] = deque()
        self._ready: set[T] = set()

    def begin(self, order: Iterable[T], ready: Iterable[T] = ()) -> None:
        """A backward begins.

        Args:
            order: Items that may start in it, first to start first.
            ready: Items that are ready at once, such as a unit without gradients on this rank.
        """
        self._waiting, self._ready = deque(order), {*ready}

    def __contains__(self, item: T) -> bool:
        """Whether its turn is still to come."""
        return item in self._waiting

    def take(self, *ready: T) -> Iterator[T]:
        """Mark as ready; remove and yield what starts now."""
        self._ready.update(ready)
        while self._waiting and self._waiting[0] in self._ready:
            yield self._waiting.popleft()

    def take_rest(self) -> Iterator[T]:
        """Remove and yield all."""
        return self.take(*self._waiting)

    def take_until(self, item: T) -> list[T]:
        """Remove and return `item` and all before it, ready or not."""
        return [self._waiting.popleft() for _ in range(self._waiting.index(item) + 1)]

    def unready_before(self, item: T) -> list[T]:
        """What is not ready and comes before `item`; nothing where that has started."""
        before = takewhile(lambda other: other != item, self._waiting if item in self._waiting else ())
        return [other for other in before if other not in self._ready]


class AccumulationWindow:
    """The backwards since the last optimizer step, and what this rank has reduced in them.

    The loop declares which one is the last, or it is predicted. If the last two steps used n backwards each, of the
    same units on all ranks, the n-th backward since then counts as the last one. A wrong prediction changes no sum. If
    another backward follows, finished means become sums again, and its gradients get a second hop of their own. If
    fewer follow, gradients are finished in the step.

    All ranks predict the same, also where nodes then run other numbers of backwards. Where gradients are not sharded,
    ranks may skip backwards, and nothing is predicted.

    Args:
        predicts: Whether to predict where nothing is declared.

    Attributes:
        declared: Declaration of the loop; None for none.
        is_last: Whether the present backward counts as the last one.
        num_backwards: Number of backwards.
        number: Number of the present or last backward, from 1, since the last step or since gradients were cleared.
    """

    def __init__(self, *, predicts: bool) -> None:
        self.declared: bool | None = None
        self.is_last = False
        self.num_backwards = 0
        self.number = 0
        self._predicts = predicts
        self._lengths = (0, 0)  # backwards of the last two steps; 0 where ranks differ
        self._reduced: set[int] = set()  # units, since the last small all-reduce
        self._in_backward: set[int] = set()  # units reduced in the present backward
        self._repeated: list[tuple[int, int]] = []  # micro-step and unit of first hops that followed another one
        self._second_hops = defaultdict[tuple[int, int], list[int]](list)  # micro-steps, by unit and bucket
        self._usage_reductions: list[int] = []  # micro-steps

    def begin_backward(self, *, adds: bool) -> None:
        """A backward begins.

        Args:
            adds: Whether it adds to gradients of the one before.
        """
        self.num_backwards += 1
        self.number = self.number + 1 if adds else 1
        is_predicted = self._predicts and self._lengths == (self.number, self.number)
        self.is_last = is_predicted if self.declared is None else self.declared
        self._in_backward.clear()

    def record_first_hop(self, unit: int) -> bool:
        """A first hop of a unit starts. Returns whether it is another one in the present backward."""
        is_another = unit in self._in_backward
        if is_another:
            self._repeated.append((self.num_backwards - 1, unit))
        self._in_backward.add(unit)
        self._reduced.add(unit)
        return is_another

    def record_second_hop(self, unit: int, bucket: int) -> None:
        """A second hop starts, of one of a unit's trainable buckets."""
        self._second_hops[unit, bucket].append(self.num_backwards - 1)

    def take_reduced(self) -> list[int]:
        """The small all-reduce starts. Returns the units that had first hops since the last one, in order."""
        self._usage_reductions.append(self.num_backwards - 1)
        reduced = sorted(self._reduced)
        self._reduced.clear()
        return reduced

    def end_step(self, *, is_equal_on_all_ranks: bool) -> RepeatedHops:
        """An optimizer has used the gradients. Returns what was sent more than once.

        Args:
            is_equal_on_all_ranks: Whether all ranks have run as many backwards, of the same units.
        """
        if self.number:
            self._lengths = (self._lengths[1], self.number if is_equal_on_all_ranks else 0)
        hops = [
            RepeatedHop(micro_step=micro_step, unit=unit, bucket=bucket)
            for (unit, bucket), micro_steps in self._second_hops.items()
            for micro_step in micro_steps[:-1]
        ]
        repeated = RepeatedHops(
            first_hops=tuple(self._repeated), hops=tuple(hops), usage_reductions=tuple(self._usage_reductions[:-1])
        )
        self.is_last, self.num_backwards, self.number = False, 0, 0
        self._repeated, self._usage_reductions = [], []
        self._second_hops.clear()
        return repeated


class RankAgreement:
    """The small all-reduce of an optimizer step, and what it has told this rank.

    Args:
        counts: [usage_numel], int32; overwritten in each step. The last three are 0 in sum while ranks agree.
        grad_buckets: Gradients of all trainable buckets, in the same order on every rank.
        groups: Process groups.
        replicas: Check of replicas, whose number is part of the last one.

    Attributes:
        agreed_units: Indices of the units that all ranks reduced, in as many backwards, before the last totals that the
            host has read; None where ranks differed.
    """

    def __init__(
        self, counts: torch.Tensor, grad_buckets: list[GradBucket], groups: ProcessGroups, replicas: ReplicaCheck
    ) -> None:
        self.agreed_units: list[int] | None = None
        self._replicas = replicas
        self._counts = counts
        self._groups = groups
        self._offsets: dict[GradBucket, int] = {}
        num_parameters = 0
        for grad_bucket in grad_buckets:
            self._offsets[grad_bucket] = num_parameters
            num_parameters += len(grad_bucket.bucket.sharded_params)
        self._totals: list[int] | None = None  # of all counts, once the host has read them
        self._units: list[int] | None = None  # of the last totals
        self._digests = counts[-3:]
        self._on_host = torch.zeros(3, dtype=counts.dtype, pin_memory=counts.is_cuda)
        self._copied: torch.cuda.Event | None = None
        self._num_recorded = 0

    def reduce(self, due: Collection[GradBucket], hop_digest: int, window: AccumulationWindow) -> None:
        """Count users, and compare ranks. Collective.

        Args:
            due: Gradients of which this rank holds sums that no second hop has taken.
            hop_digest: Number of the second hops that it has started.
            window: Its backwards, and the units that it has reduced in them.

        Raises:
            LifecycleError: See `raise_if_desynced`.
        """
        counts, groups = self._counts, self._groups
        difference, units = self._replicas.difference(), window.take_reduced()
        is_exchanged = groups.world_group is not None and bool(self._offsets)
        digests = zlib.crc32(f"{window.number} {units}".encode()), hop_digest
        local_counts: list[int] = []
        for grad_bucket, offset in self._offsets.items():
            local_counts += [_DUE if grad_bucket in due else 0] * len(grad_bucket.bucket.sharded_params)
            for position in grad_bucket.flags.positions_with(GradFlag.USED):
                local_counts[offset + position] += 1
        for value in digests:
            local_counts.append(zero_sum(value, groups.island.index, groups.scopes.world_size) if is_exchanged else 0)
        local_counts.append(groups.desync_digest)
        # Torch's allocator reuses pinned memory only after the copy has ended, so the host does not wait for it.
        pinned = torch.tensor(local_counts, dtype=counts.dtype, pin_memory=counts.is_cuda)
        counts.copy_(pinned, non_blocking=True)
        self._totals = None
        if groups.world_group is not None and self._offsets:
            if difference is not None:
                counts[-1:] += difference
            groups.world_group.all_reduce(counts, "used parameters").wait()
        self.record(units)  # before second hops that ranks which differ would wait for without end

    def record(self, units: list[int]) -> None:
        """Copy the digests of a completed all-reduce to the host.

        Args:
            units: Indices of the units that this rank has reduced since the last one.
        """
        self._units = units
        self._num_recorded += 1
        self._on_host.copy_(self._digests, non_blocking=True)
        if self._digests.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()
        if not self._digests.is_cuda or self._num_recorded <= READ_AT_ONCE:
            self.raise_if_desynced()

    def _by_position(self, grad_bucket: GradBucket) -> list[int]:
        if self._totals is None:
            self._totals = self._counts.tolist()
        start = self._offsets[grad_bucket]
        return self._totals[start : start + len(grad_bucket.bucket.sharded_params)]

    def is_pending_elsewhere(self, grad_bucket: GradBucket) -> bool:
        """Whether another rank has a sum that is not reduced yet; never where gradients are sharded."""
        is_sharded = grad_bucket.bucket.groups.grad_comm is not None
        return not is_sharded and any(count >= _DUE for count in self._by_position(grad_bucket))

    def used_positions(self, grad_bucket: GradBucket) -> list[int]:
        """Positions of the parameters of the bucket that any rank has used."""
        if not grad_bucket.flags.positions_without(GradFlag.USED):
            return list(range(len(grad_bucket.bucket.sharded_params)))
        return [position for position, count in enumerate(self._by_position(grad_bucket)) if count % _DUE]

    def raise_if_desynced(self) -> None:
        """Raise, on all ranks, if the last totals on the host are not 0.

        Raises:
            LifecycleError: Ranks have submitted different collectives, so their parameters and gradients are mixed up;
                or they hold different values.
        """
        if self._copied is not None:
            self._copied.synchronize()
        windows, hops, others = self._on_host.tolist()
        self.agreed_units = self._units if windows == 0 else None
        if hops != 0:
            raise LifecycleError(
                "Ranks ran different numbers of backwards, or other units, before an optimizer step, or some of them "
                "cleared gradients, which are mixed up now. Go back to the last checkpoint. Where windows differ "
                "between ranks, declare the last micro-step (`micro_step(index, of=...)`), or leave `second_hop` out "
                "of `overlap`; all ranks must train the same units in a step. Clear gradients on all ranks or on none."
            )
        if others == 0:
            return
        if self._groups.is_in_sync():
            raise LifecycleError(self._replicas.describe())
        raise LifecycleError(
            f"Ranks ran different units or operations, and their data is mixed up: {self._groups.first_mismatch()}. Go "
            "back to the last checkpoint, and let all ranks run the same units in the same order while parameters are "
            "sharded: no evaluation, `generate()` or other forward on some ranks only (`if rank == 0:`), one seed for "
            "what chooses layers, as LayerDrop does, and equal numbers in optimizers and in operations on parameters "
            "and gradients (with a number of each rank, compute on `parameter.full_tensor()`). Or keep parameters "
            "whole (`params='replicate'`), where checkpoints of units that ranks skip must take `use_reentrant=False`."
        )


class ReplicaCheck:
    """Check that ranks with the same shard hold, and wrote in forwards, equal values.

    Each rank adds up the words of its shards, multiplied such that the sums of equal replicas add up to 0. Only when
    the total is not 0, ranks exchange the digests of single units, to name the unit and the ranks.

    Args:
        buckets: Buckets of all units, in the same order on all ranks.
        groups: Process groups.
        every: Optimizer steps between two checks after the first steps; 0 for none after them; -1 for none at all.
    """

    def __init__(self, buckets: list[Bucket], groups: ProcessGroups, every: int) -> None:
        self._buckets = buckets
        self._groups = groups
        self._every = every
        self._num_steps = 0

    def difference(self) -> torch.Tensor | None:
        """The number of this rank, int32; None when no check is due.

        The numbers of ranks that agree add up to 0.

        Cost:
            One read of the shards when a check is due. The host does not wait for it.
        """
        self._num_steps += 1
        common = self._groups.resources.call_watch.records.take_common()
        weight = digest_weight(self._groups.island.index, self._groups.scopes.world_size)
        terms = [] if common is None else [weight * common.to(self._groups.device)]  # perhaps another model's
        is_periodic = self._every > 0 and self._num_steps % self._every == 0
        if self._every >= 0 and (self._num_steps <= CHECKED_AT_START or is_periodic):
            for index, bucket in enumerate(self._buckets):
                terms.append((2 * index + 1) * digest_weight(*self._replica(bucket)) * digest(bucket.master_shard))
        return torch.stack(terms).sum().to(torch.int32) if terms else None

    def _replica(self, bucket: Bucket) -> tuple[int, int]:
        """Index of this rank among the replicas of the bucket's shard, and their number."""
        scopes = self._groups.scopes
        span = scopes.span(bucket.placement.degree, scopes.world_size)
        return span.index(self._groups.rank), span.size

    def describe(self) -> str:
        """The error message: which values differ, and what to do. Collective."""
        local_digests = [(bucket.placement.index, int(digest(bucket.master_shard))) for bucket in self._buckets]
        digests_by_rank = self._groups.island.gather_objects(local_digests, "digests of shards")
        for bucket_index, bucket in enumerate(self._buckets):
            first: dict[int, tuple[int, int]] = {}  # rank and digest, by shard
            for rank, digests in zip(self._groups.island.ranks, digests_by_rank, strict=True):
                shard, value = digests[bucket_index]
                known_rank, known_value = first.setdefault(shard, (rank, value))
                if value != known_value:
                    return (
                        f"Unit `{bucket.spec.name}`: ranks {known_rank} and {rank} hold the same shard with different "
                        "values. Something has changed it on one of them alone: a write under `if rank == 0:`, or "
                        "random numbers that each rank drew for itself. Go back to the last checkpoint, and let all "
                        "ranks make the same change (draw through torch, into the parameter or inside of "
                        "`optimizer.step()`). Where GPUs of different kinds round differently, use "
                        "`replica_check='never'`."
                    )
        return (
            "Ranks wrote different values into sharded tensors, or in a forward into a parameter, or computed with "
            "different plain scalars on them, and each has its own rows of the result; or a buffer was written to "
            "after a step. Go back to the last checkpoint, and let all ranks use the same values (an all-reduced "
            "statistic, or a buffer that is written to before `optimizer.step()`), or compute on "
            "`parameter.full_tensor()`."
        )
