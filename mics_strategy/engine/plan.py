"""In what order do units move in one step?

The plan of a training step is arithmetic: from the order of the units, the scopes and the slots follows every
collective, with its axis, dtype, bytes and moment. The engine never reads the plan; both follow the same
rules, and the tests compare what the engine issued with what is planned here. The simulator prices this same
plan.

Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from mics_strategy.comm.route import HopTraffic, all_gather_traffic, all_reduce_traffic, reduce_scatter_traffic
from mics_strategy.comm.traffic import ALL_REDUCE, ALL_TO_ALL, SENT_BYTES

if TYPE_CHECKING:
    from mics_strategy.engine.layout import BucketLayout
    from mics_strategy.engine.optimizer.owners import OwnerAssignment
    from mics_strategy.scopes import Scopes

USAGE_DTYPE = torch.int32


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketPlan:
    """What of a bucket matters for its traffic. `has_gradients` is False while all its parameters are frozen."""

    layout: BucketLayout
    param_dtype: torch.dtype
    wire_dtype: torch.dtype
    sum_dtype: torch.dtype
    trainable: bool
    has_gradients: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitPlan:
    """What of a unit matters for its traffic. Units with equal `slot` take turns in it."""

    name: str
    slot: int
    buckets: tuple[BucketPlan, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedPlan:
    """What of a bucket matters that has tensors which an optimizer updates whole, on the rank of shard `index`."""

    name: str
    assignment: OwnerAssignment
    index: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOrder:
    """What one optimizer step looks like.

    Attributes:
        forward: Units in the order in which a forward enters them.
        backward: Units in the order in which the backward needs their parameters.
        num_micro_steps: Forwards and backwards per step.
        second_hop_every_backward: Whether the second hop is not left to the step.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    num_micro_steps: int
    second_hop_every_backward: bool = False


@dataclass(frozen=True, slots=True)
class PlannedCollective:
    """One collective of a step. `phase` is forward, backward, second_hop or update; bytes are per rank."""

    collective: str
    axis: str
    size: int
    dtype: torch.dtype
    full_bytes: int
    sent_bytes: int
    unit: str
    phase: str
    micro_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Every collective of one optimizer step, in the order of its moment."""

    collectives: tuple[PlannedCollective, ...]
    num_micro_steps: int

    def sent_bytes(self, axis: str | None = None) -> int:
        """Bytes that one rank sends in the step, over one axis or all."""
        return sum(planned.sent_bytes for planned in self.collectives if axis in (None, planned.axis))

    def table(self) -> str:
        """The collectives grouped by moment, axis, kind and dtype, as text."""
        counts: Counter[tuple[str, str, str, str]] = Counter()
        sent: Counter[tuple[str, str, str, str]] = Counter()
        for planned in self.collectives:
            key = (planned.phase, planned.axis, planned.collective, str(planned.dtype).removeprefix("torch."))
            counts[key] += 1
            sent[key] += planned.sent_bytes
        rows = [("moment", "axis", "collective", "dtype", "count", "sent MB")]
        rows += [(*key, str(count), f"{sent[key] / 1e6:.3f}") for key, count in counts.items()]
        widths = [max(len(row[column]) for row in rows) for column in range(6)]
        return "\n".join(
            "  ".join(
                [cell.ljust(w) for cell, w in zip(row[:4], widths[:4], strict=True)]
                + [cell.rjust(w) for cell, w in zip(row[4:], widths[4:], strict=True)]
            )
            for row in rows
        )


def plan_step(units: tuple[UnitPlan, ...], scopes: Scopes, shape: StepOrder, whole: tuple[OwnedPlan, ...] = ()) -> Plan:
    """Plan one optimizer step in steady state: the step before has run the same way.

    What `hierarchical="auto"` has left open because no job has measured it is planned in two stages.

    Args:
        units: By index; the root is the first.
        scopes: Ranks and axes of every model state.
        shape: Orders and number of micro-steps.
        whole: Tensors that optimizers update whole.
    """
    planner = _Planner(units, scopes)
    for _ in range(2):  # the first leaves slots as a step leaves them
        planner.planned.clear()
        planner.begin_step()
        for micro_step in range(shape.num_micro_steps):
            planner.micro_step = micro_step
            planner.forward_and_backward(shape)
            if shape.second_hop_every_backward:
                planner.second_hop(shape.backward)
        if not shape.second_hop_every_backward:
            planner.second_hop(shape.backward)
        planner.update(whole)
    return Plan(collectives=tuple(planner.planned), num_micro_steps=shape.num_micro_steps)


@dataclass(slots=True)
class _Planner:
    """The state that decides whether a unit has to travel: who is in which slot, and what is up to date."""

    units: tuple[UnitPlan, ...]
    scopes: Scopes
    planned: list[PlannedCollective] = field(default_factory=list)
    micro_step: int = 0
    _tenants: dict[int, int] = field(default_factory=dict)
    _updated: set[BucketPlan] = field(default_factory=set)
    _secondary: set[BucketPlan] = field(default_factory=set)  # whose forward has left a copy for the backward

    def begin_step(self) -> None:
        """The optimizer has changed every bucket that has gradients."""
        self._updated = {bucket for bucket in self._updated if not (bucket.trainable and bucket.has_gradients)}
        self._secondary &= self._updated

    def forward_and_backward(self, shape: StepOrder) -> None:
        for index in shape.forward:
            self._unshard(index, "forward")
        for index in shape.backward:
            self._unshard(index, "backward")
        first_entered = [index for index in dict.fromkeys(shape.forward) if index in shape.backward]
        if self.scopes.params == 1:  # ranks may run different units, so all are reduced
            first_entered = list(range(len(self.units)))
        for index in reversed(first_entered):
            self._reduce(index)

    def _unshard(self, index: int, moment: str) -> None:
        unit, scopes = self.units[index], self.scopes
        if self._tenants.get(unit.slot) == index and self._updated.issuperset(unit.buckets):
            return
        self._tenants[unit.slot] = index
        for bucket in unit.buckets:
            if bucket not in self._updated:
                self._updated.add(bucket)
                self._gather("param_sync", bucket, bucket.layout.numel_at(scopes.params), unit.name, moment)
            from_secondary = moment == "backward" and bucket in self._secondary
            if scopes.secondary < scopes.params:
                self._secondary.add(bucket)
            purpose = "secondary_all_gather" if from_secondary else "param_all_gather"
            self._gather(purpose, bucket, bucket.layout.full_numel, unit.name, moment)

    def _gather(self, purpose: str, bucket: BucketPlan, numel: int, unit: str, moment: str) -> None:
        route = self.scopes.route(purpose, numel * bucket.param_dtype.itemsize)
        if route is not None:
            self._add(all_gather_traffic(route, numel, bucket.param_dtype), unit, moment)

    def _reduce(self, index: int) -> None:
        for bucket in self._reduced(index):
            messages = self._reduction("grad_reduce_scatter", bucket.layout.full_numel, bucket.wire_dtype)
            self._add(messages, self.units[index].name, "backward")

    def _reduction(self, purpose: str, numel: int, wire: torch.dtype) -> list[HopTraffic]:
        route = self.scopes.route(purpose, numel * wire.itemsize)
        return reduce_scatter_traffic(route, numel, wire) if route is not None else []

    def second_hop(self, needed: tuple[int, ...]) -> None:
        scopes = self.scopes
        world = scopes.span(1, scopes.world_size)
        num_parameters = sum(
            len(bucket.layout.param_slices) for index in range(len(self.units)) for bucket in self._trainable(index)
        )
        if num_parameters and world.size > 1:
            num_bytes = (num_parameters + 1) * USAGE_DTYPE.itemsize
            usage = HopTraffic(ALL_REDUCE, world.name, world.size, USAGE_DTYPE, num_bytes)
            self._add([usage], "(usage)", "second_hop")
        for index in sorted(set(needed), reverse=True):
            for bucket in self._reduced(index):
                layout, wire = bucket.layout, bucket.wire_dtype
                messages = self._reduction("second_hop_reduce_scatter", layout.numel_at(scopes.grads), wire)
                replicas = scopes.route("second_hop_all_reduce", layout.shard_numel * wire.itemsize)
                if replicas is not None:
                    messages += all_reduce_traffic(replicas, layout.shard_numel, wire, bucket.sum_dtype)
                self._add(messages, self.units[index].name, "second_hop")

    def update(self, whole: tuple[OwnedPlan, ...]) -> None:
        span = self.scopes.span(1, self.scopes.optimizer)
        for bucket in whole:
            rows, wholes = bucket.assignment.rows_numels(bucket.index), bucket.assignment.whole_numels(bucket.index)
            for pieces, num_bytes in ((rows, 2 * bucket.dtype.itemsize), (wholes, bucket.dtype.itemsize)):
                full = sum(pieces) * num_bytes  # values and gradients to the owners; new values back
                sent = full - pieces[bucket.index] * num_bytes
                self.planned.append(
                    PlannedCollective(
                        *(ALL_TO_ALL, span.name, span.size, bucket.dtype, full, sent, bucket.name, "update"),
                        self.micro_step,
                    )
                )

    def _reduced(self, index: int) -> Iterator[BucketPlan]:
        """Buckets that are reduced: where gradients are sharded, those of a unit together, with zeros where need be."""
        is_together = self.scopes.grads > 1 and any(bucket.has_gradients for bucket in self._trainable(index))
        return (bucket for bucket in self._trainable(index) if is_together or bucket.has_gradients)

    def _trainable(self, index: int) -> Iterator[BucketPlan]:
        return (bucket for bucket in self.units[index].buckets if bucket.trainable)

    def _add(self, messages: list[HopTraffic], unit: str, moment: str) -> None:
        for m in messages:
            sent = SENT_BYTES[m.collective](m.full_bytes, m.size)
            self.planned.append(
                PlannedCollective(
                    m.collective, m.axis, m.size, m.dtype, m.full_bytes, sent, unit, moment, self.micro_step
                )
            )
