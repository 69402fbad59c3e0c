"""Agreement of ranks, from one small all-reduce per optimizer step.

It carries five answers: which parameters any rank has used (`UsedParamMap`), whether all ranks have run as many
backwards of the same units (`AccumulationBoundary`), whether they have started the same second hops inside of them
(`SecondHops`), whether they have submitted the same other collectives (`DesyncCheck`), and whether replicas of a shard
are equal (`ReplicaCheck`).

A rank reads the counts of users only if it has not used all parameters itself. The second answer is one number, as is
the third, and so are the last two, 0 while ranks agree. The CPU reads them at once. On a GPU reading would stop the
host, so they are read one step later, but at once in the first steps, in which ranks that differ at all mostly begin
to.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mics_strategy.comm.desync import zero_sum
from mics_strategy.comm.placement import digest, digest_weight
from mics_strategy.comm.process_groups import ProcessGroups
from mics_strategy.comm.work import Work
from mics_strategy.engine.bucket import Bucket
from mics_strategy.engine.grad_bucket import GradBucket
from mics_strategy.engine.lifecycle import GradFlag
from mics_strategy.errors import LifecycleError

READ_AT_ONCE = 3  # optimizer steps
CHECKED_AT_START = 10  # optimizer steps
_DUE = 1 << 16  # above the count of users: the number of ranks on which the bucket is still to be reduced


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgress:
    """What this rank has done since the last optimizer step.

    Attributes:
        due: Gradients of which it holds sums that no second hop has taken.
        hop_digest: Number of the second hops that it has started.
        window_digest: Number of its backwards, and of the units that it has reduced in them.
    """

    due: set[GradBucket]
    hop_digest: int
    window_digest: int


class UsedParamMap:
    """The number of ranks that have used each parameter, in one optimizer step.

    Args:
        counts: [usage_numel], int32; overwritten.
        grad_buckets: Gradients of all trainable buckets, in the same order on every rank.
        groups: Process groups.
        progress: Progress of this rank since the last step.
        difference: Number of this rank, 0 in sum over all ranks whose replicas are equal; None if it was not computed.
    """

    def __init__(
        self,
        counts: torch.Tensor,
        grad_buckets: list[GradBucket],
        groups: ProcessGroups,
        progress: RankProgress,
        difference: torch.Tensor | None = None,
    ) -> None:
        self._offsets: dict[GradBucket, int] = {}
        self._counts = counts
        local_counts: list[int] = []
        for grad_bucket in grad_buckets:
            offset = self._offsets[grad_bucket] = len(local_counts)
            local_counts += [_DUE if grad_bucket in progress.due else 0] * len(grad_bucket.bucket.sharded_params)
            for position in grad_bucket.flags.positions_with(GradFlag.USED):
                local_counts[offset + position] += 1
        is_exchanged = groups.world_group is not None and bool(grad_buckets)
        for value in (progress.window_digest, progress.hop_digest):
            local_counts.append(zero_sum(value, groups.island.index, groups.scopes.world_size) if is_exchanged else 0)
        local_counts.append(groups.desync_digest)
        self._totals: list[int] | None = None
        self._work: Work | None = None
        # Torch's allocator reuses pinned memory only after the copy has ended, so the host does not wait for it.
        pinned = torch.tensor(local_counts, dtype=counts.dtype, pin_memory=counts.is_cuda)
        counts.copy_(pinned, non_blocking=True)
        if groups.world_group is not None and grad_buckets:
            if difference is not None:
                counts[-1:] += difference
            self._work = groups.world_group.all_reduce(counts, "used parameters")

    def wait(self) -> None:
        """Wait for the all-reduce, whether its result was read or not."""
        work, self._work = self._work, None
        if work is not None:
            work.wait()

    def _by_position(self, grad_bucket: GradBucket) -> list[int]:
        start = self._offsets[grad_bucket]
        return self._all_totals()[start : start + len(grad_bucket.bucket.sharded_params)]

    def _all_totals(self) -> list[int]:
        if self._totals is None:
            self.wait()
            self._totals = self._counts.tolist()
        return self._totals

    def is_pending_elsewhere(self, grad_bucket: GradBucket) -> bool:
        """Whether another rank has a sum that is not reduced yet; never where gradients are sharded."""
        is_sharded = grad_bucket.bucket.groups.grad_comm is not None
        return not is_sharded and any(count >= _DUE for count in self._by_position(grad_bucket))

    def positions(self, grad_bucket: GradBucket) -> list[int]:
        """Positions of the parameters of the bucket that any rank has used."""
        if not grad_bucket.flags.positions_without(GradFlag.USED):
            return list(range(len(grad_bucket.bucket.sharded_params)))
        return [position for position, count in enumerate(self._by_position(grad_bucket)) if count % _DUE]


class DesyncCheck:
    """Check that all ranks submit the same collectives and that replicas are equal.

    Args:
        counts: Totals of `UsedParamMap`; the last two are 0 while ranks agree.
        groups: Process groups.
        replicas: Check of replicas, whose number is part of that last total.

    Attributes:
        agreed_units: Indices of the units that all ranks reduced, in as many backwards, before the last totals that the
            host has read; None where ranks differed.
    """

    def __init__(self, counts: torch.Tensor, groups: ProcessGroups, replicas: ReplicaCheck) -> None:
        self.replicas = replicas
        self.agreed_units: list[int] | None = None
        self._units: list[int] | None = None  # of the last totals
        self._digests = counts[-3:]
        self._groups = groups
        self._on_host = torch.zeros(3, dtype=counts.dtype, pin_memory=counts.is_cuda)
        self._copied: torch.cuda.Event | None = None
        self._num_recorded = 0

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
            raise LifecycleError(self.replicas.describe())
        raise LifecycleError(
            f"Ranks ran different units or operations, and their data is mixed up: {self._groups.first_mismatch()}. Go "
            "back to the last checkpoint, and let all ranks run the same units in the same order while parameters are "
            "sharded: no evaluation, `generate()` or other forward on some ranks only (`if rank == 0:`), one seed for "
            "what chooses layers, as LayerDrop does, and equal numbers in optimizers and in operations on parameters "
            "and gradients (with a number of each rank, compute on `parameter.full_tensor()`). Or keep parameters "
            "whole (`params='replicate'`), where checkpoints of units that ranks skip must take `use_reentrant=False`."
        )

    def record(self, units: list[int]) -> None:
        """Copy the totals of a completed all-reduce to the host.

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
