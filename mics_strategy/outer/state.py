"""The state of outer steps, and their arithmetic.

It is sharded as the master shards are. Anchor and momentum are equal on all islands:

    anchor      [shard_numel], dtype of the masters: the parameters after the last outer step
    momentum    [shard_numel], fp32 or wider
    difference  [shard_numel], as the momentum: what is sent, and then its sum over islands

An outer step is Nesterov SGD of torch on the mean over islands of anchor - masters, bucket by bucket:

1. It starts: difference = anchor - masters, and its all-reduce over islands. All buckets are in flight at once.
2. It ends, now or some optimizer steps later: momentum = momentum * outer_momentum + mean; anchor -= outer_lr *
   (mean + outer_momentum * momentum).
3. Masters that have not stepped since become the anchor. Others become alpha * masters + (1 - alpha) * anchor. Their
   version grows, so that parameters are synced as after an optimizer's step.

Where islands wait for an outer step, nothing reads the masters meanwhile. The difference then has their memory, unless
they are narrower than fp32.

Source:
    DiLoCo (arXiv:2311.08105), algorithm 1; the delay and alpha of Streaming DiLoCo (arXiv:2501.18512), algorithm 2.
    The default alpha of 0 is torchft's, and ended lower than 0.5 in docs/lab-book.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from mics_strategy.comm.communicator import AnyCommunicator
from mics_strategy.engine.bucket import Bucket
from mics_strategy.engine.bucket_specs import OUTER_STATE, outer_pieces
from mics_strategy.engine.memory import MemoryTracker, arena
from mics_strategy.engine.streams import OpChain, OpStream
from mics_strategy.engine.unit import Unit
from mics_strategy.islands import Round


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterSGD:
    """Numbers of the outer optimizer.

    Attributes:
        lr: Learning rate.
        momentum: Nesterov momentum.
        alpha: Share of its own parameters that an island keeps where it has stepped since an outer step started.
    """

    lr: float
    momentum: float
    alpha: float


@dataclass(slots=True, kw_only=True, eq=False)
class OuterBucket:
    """The outer state of one trainable bucket.

    Attributes:
        bucket: The bucket.
        unit: Index of its unit.
        starts_behind: Step of a round behind which its outer step starts.
        anchor: See the module's docstring.
        momentum: See the module's docstring.
        difference: See the module's docstring.
        is_in_flight: Whether an outer step has started, and not ended.
        age: Optimizer steps since the last outer step started.
    """

    bucket: Bucket
    unit: int
    starts_behind: int
    anchor: torch.Tensor
    momentum: torch.Tensor
    difference: torch.Tensor
    is_in_flight: bool = False
    age: int = 0
    _sending: OpChain = field(default_factory=OpChain)

    @property
    def _masters(self) -> torch.Tensor:
        return self.bucket.master_shard.data  # without a version counter, which all parameters of the arena share

    def set_anchor(self) -> None:
        """Start a new round from the present parameters, without momentum."""
        self.anchor.copy_(self._masters)
        self.momentum.zero_()

    def start(self, comm: AnyCommunicator, stream: OpStream) -> None:
        """Start an outer step: send what the parameters have changed by since the last one."""
        masters, difference = self._masters, self.difference
        if difference.dtype == masters.dtype:
            torch.sub(self.anchor, masters, out=difference)
        else:
            difference.copy_(self.anchor).sub_(masters)
        name, num_bytes = self.bucket.spec.name, difference.numel() * difference.dtype.itemsize
        route = comm.for_bytes(num_bytes)
        self._sending = stream.launch([lambda: route.all_reduce(difference, difference.dtype, f"outer step of {name}")])
        self.is_in_flight, self.age = True, 0

    def resume(self, age: int) -> None:
        """Continue an outer step in flight, whose sum is going to be loaded into `difference`; zeros until then."""
        self.drop()
        self.difference.zero_()
        self.is_in_flight, self.age = True, age

    def wait(self) -> None:
        """Wait for the sum."""
        self._sending.wait()

    def drop(self) -> None:
        """Forget an outer step in flight."""
        self.wait()
        self.is_in_flight = False

    def finish(self, sgd: OuterSGD, num_islands: int) -> None:
        """End an outer step: wait for the sum, step on it, and set the masters."""
        self.wait()
        mean = self.difference.div_(num_islands)
        self.momentum.mul_(sgd.momentum).add_(mean)
        mean.add_(self.momentum, alpha=sgd.momentum)
        self.anchor.add_(mean.to(self.anchor.dtype) if mean.dtype != self.anchor.dtype else mean, alpha=-sgd.lr)
        if self.age:
            self._masters.lerp_(self.anchor, 1.0 - sgd.alpha)
        else:
            self._masters.copy_(self.anchor)
        self.bucket.writes.num += 1
        self.is_in_flight = False


def make_outer_buckets(
    units: Sequence[Unit], steps: Round, memory: MemoryTracker, device: torch.device
) -> list[OuterBucket]:
    """Allocate the outer state of all trainable buckets, in the order of units. The anchors are not set yet.

    Args:
        units: Units of the model.
        steps: When which of them take outer steps.
        memory: Counts what is allocated.
        device: Device of the masters.
    """
    trained = [unit for unit in units if unit.trainable_buckets]
    starts_behind = {unit.index: step for step, of_step in steps.deal(trained).items() for unit in of_step}
    buckets = [(unit.index, bucket) for unit in trained for bucket in unit.trainable_buckets]
    pieces = [outer_pieces(bucket.spec, is_delayed=steps.delay > 0) for _, bucket in buckets]
    anchors, momenta, own = (
        iter(arena(memory, purpose, [of_bucket[purpose] for of_bucket in pieces if purpose in of_bucket], device))
        for purpose in OUTER_STATE
    )
    return [
        OuterBucket(
            bucket=bucket,
            unit=unit,
            starts_behind=starts_behind[unit],
            anchor=next(anchors),
            momentum=next(momenta),
            difference=next(own) if len(of_bucket) == len(OUTER_STATE) else bucket.master_shard.data,
        )
        for (unit, bucket), of_bucket in zip(buckets, pieces, strict=True)
    ]
