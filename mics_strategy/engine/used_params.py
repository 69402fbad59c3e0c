"""Which parameters has any rank used, and have all ranks gone the same way?

One small all-reduce per optimizer step answers both. The counts of users are read only where this rank must know. The
answer to the second question is read at once on the CPU; on a GPU, where reading stops the host, one step later, but in
the first steps, in which ranks that differ at all mostly begin to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mics_strategy.engine.lifecycle import AccumulatorState, GradFlag
from mics_strategy.errors import LifecycleError

if TYPE_CHECKING:
    from mics_strategy.comm.process_groups import ProcessGroups
    from mics_strategy.comm.work import Work
    from mics_strategy.engine.grad_bucket import GradBucket
    from mics_strategy.engine.replica_check import ReplicaCheck

READ_AT_ONCE = 3  # optimizer steps
_DUE = 1 << 16  # above the count of users: the number of ranks on which the bucket is still to be reduced


def usage_numel(num_parameters: int) -> int:
    """Elements that are sent, int32: one for each trainable parameter, one for this rank's way and values."""
    return num_parameters + 1


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
