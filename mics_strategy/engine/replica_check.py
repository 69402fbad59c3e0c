"""Are the replicas of a shard still equal, and have all ranks written the same?

Every rank adds up the words of its shards. Multiplied so that the sums of equal replicas add up to 0, the number goes
into the small all-reduce that an optimizer step has anyway (see `gradients.usage`). Only when it is not 0, ranks
exchange the digests of single units, to name the unit and the ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mics_strategy.comm.consensus import gather_objects
from mics_strategy.comm.placement import digest, digest_weight

if TYPE_CHECKING:
    from mics_strategy.comm.process_groups import ProcessGroups
    from mics_strategy.engine.bucket import Bucket

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
