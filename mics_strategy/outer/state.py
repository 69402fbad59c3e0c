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
from mics_strategy.config import sum_dtype_of
from mics_strategy.engine.bucket import Bucket
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
    dtypes = [(bucket.spec.master_dtype, sum_dtype_of(bucket.spec.master_dtype)) for bucket in buckets]
    numels = [bucket.layout.shard_numel for bucket in buckets]
    anchor_sizes = [(numel, master) for numel, (master, _) in zip(numels, dtypes, strict=True)]
    momentum_sizes = [(numel, wide) for numel, (_, wide) in zip(numels, dtypes, strict=True)]
    narrow = [index for index, (master, wide) in enumerate(dtypes) if master != wide]
    anchors = arena(memory, "outer anchors", anchor_sizes, device)
    momenta = arena(memory, "outer momentum", momentum_sizes, device)
    own = arena(memory, "outer differences", [momentum_sizes[index] for index in narrow], device)
    differences = dict(zip(narrow, own, strict=True))
    return [
        OuterBucket(
            bucket=bucket,
            anchor=anchor,
            momentum=momentum,
            difference=differences.get(index, bucket.master_shard.data),
        )
        for index, (bucket, anchor, momentum) in enumerate(zip(buckets, anchors, momenta, strict=True))
    ]
