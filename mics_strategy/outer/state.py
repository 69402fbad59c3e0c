"""The state of outer steps, and their arithmetic.

It is sharded as the master shards are, and equal on all islands:

    anchor      [shard_numel], dtype of the masters: the parameters after the last outer step
    momentum    [shard_numel], fp32 or wider

An outer step is Nesterov SGD of torch on the mean over islands of anchor - masters, bucket by bucket:

1. The difference replaces the masters, which are not read until step 4; masters narrower than fp32 have a buffer of
   their own for it.
2. All-reduce over islands; all buckets are in flight at once.
3. momentum = momentum * outer_momentum + mean; anchor -= outer_lr * (mean + outer_momentum * momentum).
4. The masters become the anchor. Their version grows, so that parameters are synced as after an optimizer's step.

Source:
    DiLoCo (arXiv:2311.08105), algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mics_strategy.comm.communicator import AnyCommunicator
from mics_strategy.comm.work import Work
from mics_strategy.engine.bucket import Bucket
from mics_strategy.engine.bucket_specs import OUTER_STATE, outer_pieces
from mics_strategy.engine.memory import MemoryTracker, arena
from mics_strategy.engine.unit import Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterSGD:
    """Numbers of the outer optimizer."""

    lr: float
    momentum: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterBucket:
    """The outer state of one trainable bucket.

    Attributes:
        bucket: The bucket.
        anchor: See the module's docstring.
        momentum: See the module's docstring.
        difference: [shard_numel], dtype of `momentum`; the memory of the masters where they have that dtype.
    """

    bucket: Bucket
    anchor: torch.Tensor
    momentum: torch.Tensor
    difference: torch.Tensor

    @property
    def _masters(self) -> torch.Tensor:
        return self.bucket.master_shard.data  # without a version counter, which all parameters of the arena share

    def set_anchor(self) -> None:
        """Start a new round from the present parameters, without momentum."""
        self.anchor.copy_(self._masters)
        self.momentum.zero_()

    def start(self, comm: AnyCommunicator) -> Work:
        """Start the sum over islands of what the parameters have changed by."""
        masters = self._masters
        if self.difference.data_ptr() == masters.data_ptr():
            torch.sub(self.anchor, masters, out=self.difference)
        else:
            self.difference.copy_(self.anchor).sub_(masters)
        dtype = self.difference.dtype
        return comm.for_bytes(masters.numel() * dtype.itemsize).all_reduce(
            self.difference, dtype, f"outer step of {self.bucket.spec.name}"
        )

    def finish(self, sgd: OuterSGD, num_islands: int) -> None:
        """Step on the sum, and set the masters."""
        mean = self.difference.div_(num_islands)
        self.momentum.mul_(sgd.momentum).add_(mean)
        mean.add_(self.momentum, alpha=sgd.momentum)
        self.anchor.add_(mean.to(self.anchor.dtype) if mean.dtype != self.anchor.dtype else mean, alpha=-sgd.lr)
        self._masters.copy_(self.anchor)
        self.bucket.writes.num += 1


def make_outer_buckets(units: Sequence[Unit], memory: MemoryTracker, device: torch.device) -> list[OuterBucket]:
    """Allocate the outer state of all trainable buckets, in the order of units. The anchors are not set yet."""
    buckets = [bucket for unit in units for bucket in unit.trainable_buckets]
    pieces = [outer_pieces(bucket.spec) for bucket in buckets]
    anchors, momenta, own = (
        iter(arena(memory, purpose, [of_bucket[purpose] for of_bucket in pieces if purpose in of_bucket], device))
        for purpose in OUTER_STATE
    )
    return [
        OuterBucket(
            bucket=bucket,
            anchor=next(anchors),
            momentum=next(momenta),
            difference=next(own) if len(of_bucket) == len(OUTER_STATE) else bucket.master_shard.data,
        )
        for bucket, of_bucket in zip(buckets, pieces, strict=True)
    ]
