"""Agreement of ranks, from one small all-reduce per optimizer step.

It carries three answers: which parameters any rank has used (`UsedParamMap`), whether all ranks have submitted the same
collectives (`DesyncCheck`), and whether replicas of a shard are equal (`ReplicaCheck`).

A rank reads the counts of users only if it has not used all parameters itself. The other two answers are one number,
0 while ranks agree. The CPU reads it at once. On a GPU reading would stop the host, so it is read one step later, but
at once in the first steps, in which ranks that differ at all mostly begin to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mics_strategy.comm.consensus import gather_objects
from mics_strategy.comm.placement import digest, digest_weight
from mics_strategy.engine.lifecycle import AccumulatorState, GradFlag
from mics_strategy.errors import LifecycleError

if TYPE_CHECKING:
    from mics_strategy.comm.process_groups import ProcessGroups
    from mics_strategy.comm.work import Work
    from mics_strategy.engine.bucket import Bucket
    from mics_strategy.engine.grad_bucket import GradBucket


READ_AT_ONCE = 3  # optimizer steps
_DUE = 1 << 16  # above the count of users: the number of ranks on which the bucket is still to be reduced


class UsedParamMap:
    """The exchange of one step.

    Args:
        counts: [usage_numel], int32; overwritten.
        gradients: Of all trainable buckets, in the same order on every rank.
        groups: Process groups.
        difference: Adds up to 0 over all ranks while their replicas are equal; None where it was not computed.
    """

    def __init__(
        self,
        counts: torch.Tensor,
        gradients: list[GradBucket],
        groups: ProcessGroups,
        difference: torch.Tensor | None = None,
    ) -> None:
        self._offsets: dict[GradBucket, int] = {}
        own: list[int] = []
        for gradient in gradients:
            self._offsets[gradient] = len(own)
            due = _DUE if gradient.state is AccumulatorState.PARTIAL else 0
            used = gradient.flags.having(GradFlag.USED)
            own += [due] * len(gradient.bucket.sharded_params)
            for position in used:
                own[self._offsets[gradient] + position] += 1
        own.append(groups.desync_digest)
        self._counts = counts
        self._everyone: list[int] | None = None
        self._handle: Work | None = None
        # Pinned memory, which torch's allocator lends to nobody else before the copy has ended: the host goes on.
        counts.copy_(torch.tensor(own, dtype=counts.dtype, pin_memory=counts.is_cuda), non_blocking=True)
        if groups.world_group is not None and gradients:
            if difference is not None:
                counts[-1:] += difference
            self._handle = groups.world_group.all_reduce(counts, "parameter usage")

    def wait(self) -> None:
        """End the exchange, read or not."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.wait()

    def _by_position(self, gradient: GradBucket) -> list[int]:
        if self._everyone is None:
            self.wait()
            self._everyone = self._counts.tolist()
        start = self._offsets[gradient]
        return self._everyone[start : start + len(gradient.bucket.sharded_params)]

    def is_pending_elsewhere(self, gradient: GradBucket) -> bool:
        """Whether another rank holds a part that is not reduced yet; ranks differ only without sharded gradients."""
        return not gradient.is_sharded and any(count >= _DUE for count in self._by_position(gradient))

    def positions(self, gradient: GradBucket) -> list[int]:
        """The parameters of the bucket that any rank has used."""
        if not gradient.flags.lacking(GradFlag.USED):
            return list(range(len(gradient.bucket.sharded_params)))
        return [position for position, count in enumerate(self._by_position(gradient)) if count % _DUE]


class DesyncCheck:
    """Sees that all ranks run the same units in the same order.

    Args:
        counts: Where `UsedParamMap` leaves its sums; the last one is that of the balances.
        groups: Process groups.
        replicas: Whether those of shards are equal; what it computes is added to the balances.
    """

    def __init__(self, counts: torch.Tensor, groups: ProcessGroups, replicas: ReplicaCheck) -> None:
        self.replicas = replicas
        self._digest = counts[-1:]
        self._groups = groups
        self._on_host = torch.zeros(1, dtype=counts.dtype, pin_memory=counts.is_cuda)
        self._copied: torch.cuda.Event | None = None
        self._num_noted = 0

    def raise_if_desynced(self) -> None:
        """Look at the last balance that has reached the host. On every rank alike.

        Raises:
            LifecycleError: Ranks have left the common way, so their parameters and gradients are mixed up; or they
                hold different values.
        """
        if self._copied is not None:
            self._copied.synchronize()
        if self._on_host.item() == 0:
            return
        if self._groups.is_in_sync():
            raise LifecycleError(self.replicas.describe())
        raise LifecycleError(
            f"Ranks ran different units, and their data is mixed up: {self._groups.first_mismatch()}. Go back to "
            "the last checkpoint, and let all ranks run the same units in the same order while parameters are "
            "sharded: no evaluation, `generate()` or other forward on some ranks only (`if rank == 0:`), and one "
            "seed for what chooses layers, as LayerDrop does. Or keep parameters whole with `params='none'`."
        )

    def record(self) -> None:
        """An exchange is complete: bring its balance to the host."""
        self._num_noted += 1
        self._on_host.copy_(self._digest, non_blocking=True)
        if self._digest.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()
        if not self._digest.is_cuda or self._num_noted <= READ_AT_ONCE:
            self.raise_if_desynced()


CHECKED_AT_START = 10  # optimizer steps


class ReplicaCheck:
    """The digests of one model's shards on one rank.

    Args:
        buckets: Of all units, in the same order on all ranks.
        groups: Says which ranks hold the same shards.
        every: Optimizer steps between two checks after the first steps; 0 for none; -1 for none at all.
    """

    def __init__(self, buckets: list[Bucket], groups: ProcessGroups, every: int) -> None:
        self._buckets = buckets
        self._groups = groups
        self._every = every
        self._num_steps = 0

    def difference(self) -> torch.Tensor | None:
        """A number of int32 that adds up to 0 over all ranks while they agree; None when it is not due.

        Cost:
            One read of the shards, when due; nothing waits for it.
        """
        self._num_steps += 1
        written, self._groups.write_digests = self._groups.write_digests, []
        weight = digest_weight(self._groups.rank, self._groups.scopes.world_size)
        found = [weight * each for each in written]
        is_periodic = self._every > 0 and self._num_steps % self._every == 0
        if self._every >= 0 and (self._num_steps <= CHECKED_AT_START or is_periodic):
            for place, bucket in enumerate(self._buckets):
                found.append((2 * place + 1) * digest_weight(*self._place(bucket)) * digest(bucket.master_shard))
        return torch.stack(found).sum().to(torch.int32) if found else None

    def _place(self, bucket: Bucket) -> tuple[int, int]:
        """Which replica of the bucket's shard this rank holds, and of how many."""
        scopes = self._groups.scopes
        span = scopes.span(bucket.placement.degree, scopes.world_size)
        return span.index(self._groups.rank), span.size

    def describe(self) -> str:
        """What differs, and what to do. Collective, on the default group."""
        own = [(bucket.placement.index, int(digest(bucket.master_shard))) for bucket in self._buckets]
        everyone = gather_objects(own)
        for place, bucket in enumerate(self._buckets):
            first: dict[int, tuple[int, int]] = {}  # rank and digest, by shard
            for rank, of_rank in enumerate(everyone):
                index, value = of_rank[place]
                known_rank, known = first.setdefault(index, (rank, value))
                if value != known:
                    return (
                        f"Unit `{bucket.spec.name}`: ranks {known_rank} and {rank} hold the same shard with different "
                        "values. Something has changed it on one of them alone: a write under `if rank == 0:`, or "
                        "random numbers that each rank drew for itself. Go back to the last checkpoint, and let all "
                        "ranks make the same change (draw through torch, into the parameter or inside of "
                        "`optimizer.step()`). Where GPUs of different kinds round differently, use "
                        "`replica_check='never'`."
                    )
        return (
            "A forward wrote different values into a parameter on different ranks, and each has kept its own rows. Go "
            "back to the last checkpoint, and let all ranks write the same, as of an all-reduced statistic, or keep it "
            "as a buffer."
        )
