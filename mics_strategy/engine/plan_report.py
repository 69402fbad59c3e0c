"""What was planned for the units as they are, and how does what was sent compare?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mics_strategy.engine.plan import BucketPlan, Plan, UnitPlan

if TYPE_CHECKING:
    from mics_strategy.comm.traffic import IssuedCollective
    from mics_strategy.engine.grad_bucket import GradBucket
    from mics_strategy.engine.unit import Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficRow:
    """One kind of collective over one axis in one optimizer step; bytes are those that this rank sends."""

    axis: str
    collective: str
    planned_count: int
    count: int
    planned_bytes: int
    sent_bytes: int


def compare(plan: Plan, sent: Counter[IssuedCollective]) -> tuple[TrafficRow, ...]:
    """Planned and sent side by side, by axis and collective.

    Args:
        plan: Of the step.
        sent: The collectives that were issued in it, with their number.
    """
    planned_count: Counter[tuple[str, str]] = Counter()
    planned_bytes: Counter[tuple[str, str]] = Counter()
    for planned in plan.collectives:
        planned_count[planned.axis, planned.collective] += 1
        planned_bytes[planned.axis, planned.collective] += planned.sent_bytes
    count: Counter[tuple[str, str]] = Counter()
    sent_bytes: Counter[tuple[str, str]] = Counter()
    for entry, times in sent.items():
        count[entry.axis, entry.collective] += times
        sent_bytes[entry.axis, entry.collective] += times * entry.sent_bytes
    keys = dict.fromkeys([*planned_count, *count])
    return tuple(
        TrafficRow(
            axis=axis,
            collective=collective,
            planned_count=planned_count[axis, collective],
            count=count[axis, collective],
            planned_bytes=planned_bytes[axis, collective],
            sent_bytes=sent_bytes[axis, collective],
        )
        for axis, collective in keys
    )


def unit_plan_of(unit: Unit, gradients: Sequence[GradBucket], slot: int) -> UnitPlan:
    """What the plan must know of a unit.

    Args:
        unit: As it is now; what is frozen has no gradients.
        gradients: Of its buckets.
        slot: The unit after which its memory for gathered parameters is named.
    """
    wires = {gradient.bucket: gradient for gradient in gradients}
    buckets = []
    for bucket in unit.buckets:
        gradient = wires.get(bucket)
        buckets.append(
            BucketPlan(
                layout=bucket.layout,
                param_dtype=bucket.spec.param_dtype,
                wire_dtype=bucket.spec.param_dtype if gradient is None else gradient.wire_dtype,
                sum_dtype=bucket.spec.param_dtype if gradient is None else gradient.accumulator.dtype,
                trainable=bucket.spec.trainable,
                has_gradients=any(sharded.requires_grad for sharded in bucket.sharded_params),
            )
        )
    return UnitPlan(name=unit.name, slot=slot, buckets=tuple(buckets))
