"""The plan of a step: every collective, with its axis, dtype, bytes and phase.

The plan is arithmetic: it follows from the order of the units, the scopes and the slots. The engine does not read it.
Both ask the same rules (`schedule`) which collective is due, and tests compare what the engine issued with the plan.

Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from mics_strategy.comm.route import ALL_REDUCE, ALL_TO_ALL, Route
from mics_strategy.comm.traffic import StageTraffic, all_gather_traffic, all_reduce_traffic, reduce_scatter_traffic
from mics_strategy.engine.layout import BucketLayout, OwnerAssignment
from mics_strategy.engine.schedule import (
    NONE_REPEATED,
    USAGE_DTYPE,
    ParamVersions,
    RepeatedHops,
    first_hop_chunks,
    full_numel,
    needs_unshard,
    reduces_every_unit,
    reduction_order,
    second_hop_order,
    usage_numel,
)
from mics_strategy.scopes import Scopes
from mics_strategy.text_table import text_table

ROOT_NAME = "(root)"  # of the unit whose module is the model itself
USAGE, OWNERS = "usage", "owners"  # roles beside those of scopes: parameters in use, and tensors of their owners
_SCATTER, _ALL_REDUCE, _OUTER = "second_hop_reduce_scatter", "second_hop_all_reduce", "outer_all_reduce"


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketPlan:
    """Properties of a bucket that its traffic depends on.

    Attributes:
        layout: Layout of its parameters.
        param_dtype: Dtype of all-gathers.
        wire_dtype: Dtype of gradients on the wire.
        sum_dtype: Dtype of the sums over all ranks.
        trainable: Whether it has gradient memory.
        has_gradients: Whether any of its parameters requires a gradient now.
        num_first_hop_chunks: Reduce-scatters of its first hop.
    """

    layout: BucketLayout
    param_dtype: torch.dtype
    wire_dtype: torch.dtype
    sum_dtype: torch.dtype
    trainable: bool
    has_gradients: bool = True
    num_first_hop_chunks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitPlan:
    """Properties of a unit that its traffic depends on. Units with the same `slot` share its memory."""

    name: str
    slot: int
    buckets: tuple[BucketPlan, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedPlan:
    """Properties of a bucket with tensors that their owners update. This rank has the shard `index`."""

    name: str
    assignment: OwnerAssignment
    index: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOrder:
    """Order of units and number of micro-steps of one optimizer step.

    Attributes:
        forward: Units in the order in which a forward enters them.
        backward: Units in the order in which the backward needs their parameters.
        num_micro_steps: Forwards and backwards per step.
        second_hop_every_backward: Whether gradients are finished after every backward instead of before the step.
        repeated: Second hops that others followed, and their small all-reduces.
        outer_units: Units of which an outer step starts behind it.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    num_micro_steps: int
    second_hop_every_backward: bool = False
    repeated: RepeatedHops = NONE_REPEATED
    outer_units: tuple[int, ...] = ()


class PlannedCollective(NamedTuple):
    """One stage of a collective of a step. A planner makes millions of them, so equal stages share their traffic.

    Attributes:
        traffic: Kind, ranks and bytes of what is sent.
        unit: Name of the unit, or of the bucket with owners.
        phase: Phase of the step: "forward", "backward", "early_second_hop", "second_hop", "update" or
            "outer_step".
        micro_step: Index of the micro-step.
        role: Purpose: one of `scopes.ROLES`, `USAGE` or `OWNERS`.
        stage: Position among the stages of its collective; 0 begins the next collective.
    """

    traffic: StageTraffic
    unit: str
    phase: str
    micro_step: int
    role: str
    stage: int = 0

    @property
    def collective(self) -> str:
        """Name of the collective."""
        return self.traffic.collective

    @property
    def size(self) -> int:
        """Ranks that take part."""
        return self.traffic.size

    @property
    def dtype(self) -> torch.dtype:
        """Dtype on the wire."""
        return self.traffic.dtype

    @property
    def full_bytes(self) -> int:
        """Bytes of the full tensor of the stage."""
        return self.traffic.full_bytes

    @property
    def axis(self) -> str:
        """Names of the mesh axes that it spans."""
        return self.traffic.axis

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends."""
        return self.traffic.sent_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Every collective of one optimizer step, in the order in which they are issued."""

    collectives: tuple[PlannedCollective, ...]
    num_micro_steps: int

    def sent_bytes(self, axis: str | None = None) -> int:
        """Bytes that one rank sends in the step, over one axis or all."""
        return sum(planned.sent_bytes for planned in self.collectives if axis in (None, planned.axis))

    def table(self) -> str:
        """The collectives grouped by phase, axis, kind and dtype, as text."""
        counts: Counter[tuple[str, str, str, str]] = Counter()
        sent: Counter[tuple[str, str, str, str]] = Counter()
        for planned in self.collectives:
            key = (planned.phase, planned.axis, planned.collective, str(planned.dtype).removeprefix("torch."))
            counts[key] += 1
            sent[key] += planned.sent_bytes
        rows = [("phase", "axis", "collective", "dtype", "count", "sent MB")]
        rows += [(*key, str(count), f"{sent[key] / 1e6:.3f}") for key, count in counts.items()]
        return "\n".join(text_table(rows, num_left=4))


def plan_step(units: tuple[UnitPlan, ...], scopes: Scopes, shape: StepOrder, owned: tuple[OwnedPlan, ...] = ()) -> Plan:
    """Plan one optimizer step in steady state, after a step of the same order.

    Collectives with `hierarchical="auto"` that no job has measured yet are planned in several stages.

    Args:
        units: Units by index; the root is the first.
        scopes: Ranks and axes of every model state.
        shape: Orders and number of micro-steps.
        owned: Buckets with tensors that their owners update.
    """
    planner = _Planner(scopes, [_UnitState(unit, [_BucketState(b, scopes) for b in unit.buckets]) for unit in units])
    planner.begin_step()
    for index in (*shape.forward, *shape.backward):
        planner.take_gathers(index)  # leaves slots and versions as a step leaves them
    planner.begin_step()
    for micro_step in range(shape.num_micro_steps):
        planner.micro_step = micro_step
        planner.unshard_all(shape)
        planner.first_hops(shape)
        if shape.second_hop_every_backward:
            planner.second_hop(shape.backward)
        else:
            planner.repeated_hops(shape.repeated)
    if not shape.second_hop_every_backward:
        planner.second_hop(shape.backward)
    planner.update(owned)
    planner.outer_step(shape.outer_units)
    return Plan(collectives=tuple(planner.planned), num_micro_steps=shape.num_micro_steps)


class _BucketState:
    """Versions of one bucket during the planned steps."""

    def __init__(self, plan: BucketPlan, scopes: Scopes) -> None:
        self.plan = plan
        self.version = 0
        self.versions = ParamVersions(has_secondary=scopes.has_secondary)


@dataclass(slots=True)
class _UnitState:
    """One unit during the planned steps."""

    plan: UnitPlan
    buckets: list[_BucketState]

    @property
    def trainable(self) -> list[BucketPlan]:
        """Its buckets with gradient memory."""
        return [bucket for bucket in self.plan.buckets if bucket.trainable]


@dataclass(slots=True)
class _Planner:
    """The state that decides which collectives are due.

    It holds the resident unit of each slot, and the versions of each bucket.
    """

    scopes: Scopes
    units: list[_UnitState]
    planned: list[PlannedCollective] = field(default_factory=list)
    micro_step: int = 0
    _residents: dict[int, int] = field(default_factory=dict)
    _routes: dict[tuple[str, int], Route | None] = field(default_factory=dict)
    _messages: dict[tuple[str, int, torch.dtype], list[StageTraffic]] = field(default_factory=dict)
    _of_buckets: dict[tuple[str, int], list[list[StageTraffic]]] = field(default_factory=dict)

    def begin_step(self) -> None:
        """The optimizer has changed every bucket that has gradients."""
        for bucket in (bucket for unit in self.units for bucket in unit.buckets):
            bucket.version += bucket.plan.trainable and bucket.plan.has_gradients

    def unshard_all(self, shape: StepOrder) -> None:
        """The all-gathers of one micro-step."""
        for phase, order in (("forward", shape.forward), ("backward", shape.backward)):
            for index in order:
                for role, bucket in self.take_gathers(index):
                    for collective in self._of_bucket(role, bucket):
                        self._add(role, collective, self.units[index].plan.name, phase)

    def first_hops(self, shape: StepOrder) -> None:
        """The first hops of one micro-step's gradients."""
        forward_order: Iterable[int] = (index for index in shape.forward if index in shape.backward)
        if reduces_every_unit(self.scopes):
            forward_order = range(len(self.units))
        for index in reduction_order(forward_order):
            self._first_hops_of(index)
        for micro_step, index in shape.repeated.first_hops:
            if micro_step == self.micro_step:
                self._first_hops_of(index)

    def _first_hops_of(self, index: int) -> None:
        for bucket in self._reduced(index):
            for collective in self._of_bucket("grad_reduce_scatter", bucket):
                self._add("grad_reduce_scatter", collective, self.units[index].plan.name, "backward")

    def take_gathers(self, index: int) -> list[tuple[str, BucketPlan]]:
        """Roles and buckets of the all-gathers that a unit is due; they count as done."""
        unit, slot, due = self.units[index], self.units[index].plan.slot, list[tuple[str, BucketPlan]]()
        if not needs_unshard(unit.buckets, is_resident=self._residents.get(slot) == index):
            return due
        self._residents[slot] = index
        for bucket in unit.buckets:
            versions = bucket.versions
            if versions.needs_sync(bucket.version):
                versions.param_shard = bucket.version
                due.append(("param_sync", bucket.plan))
            due.append((versions.note_gather(), bucket.plan))
            if due[-1][0] == "param_all_gather":
                versions.keep_secondary()
        return due

    def _of_bucket(self, role: str, bucket: BucketPlan) -> list[list[StageTraffic]]:
        """Collectives of a bucket in a role: its all-gather, or its first hop's chunks."""
        key = (role, id(bucket))  # buckets live as long as the units
        if key not in self._of_buckets:
            is_first_hop = role == "grad_reduce_scatter"
            self._of_buckets[key] = [*self._first_hops(bucket)] if is_first_hop else [self._all_gather(role, bucket)]
        return self._of_buckets[key]

    def _all_gather(self, role: str, bucket: BucketPlan) -> list[StageTraffic]:
        numel, dtype = full_numel(role, bucket.layout, self.scopes), bucket.param_dtype
        if (role, numel, dtype) not in self._messages:
            route = self._route(role, numel * dtype.itemsize)
            self._messages[role, numel, dtype] = [] if route is None else all_gather_traffic(route, numel, dtype)
        return self._messages[role, numel, dtype]

    def _first_hops(self, bucket: BucketPlan) -> Iterator[list[StageTraffic]]:
        degree = self.scopes.grads
        for start, end in first_hop_chunks(bucket.layout.numel_at(degree), bucket.num_first_hop_chunks):
            yield self._reduce_scatter("grad_reduce_scatter", bucket, (end - start) * degree)

    def _reduce_scatter(self, role: str, bucket: BucketPlan, numel: int) -> list[StageTraffic]:
        wire = bucket.wire_dtype
        if (role, numel, wire) not in self._messages:
            route = self._route(role, numel * wire.itemsize)
            self._messages[role, numel, wire] = [] if route is None else reduce_scatter_traffic(route, numel, wire)
        return self._messages[role, numel, wire]

    def _all_reduce(self, role: str, bucket: BucketPlan) -> list[StageTraffic]:
        numel, wire = full_numel(role, bucket.layout, self.scopes), bucket.wire_dtype
        route = self._route(role, numel * wire.itemsize)
        return [] if route is None else all_reduce_traffic(route, numel, wire, bucket.sum_dtype)

    def second_hop(self, backward: tuple[int, ...]) -> None:
        """The small all-reduce, and the second hops of all units."""
        self._usage_reduction("second_hop")
        for index in second_hop_order(set(backward)):
            for bucket in self._reduced(index):
                self._second_hop(index, bucket, "second_hop")

    def repeated_hops(self, repeated: RepeatedHops) -> None:
        """Those of this micro-step that others of the same step followed."""
        for hop in repeated.hops:
            if hop.micro_step == self.micro_step:
                self._second_hop(hop.unit, self.units[hop.unit].trainable[hop.bucket], "early_second_hop")
        for _ in range(repeated.usage_reductions.count(self.micro_step)):
            self._usage_reduction("early_second_hop")

    def _usage_reduction(self, phase: str) -> None:
        world = self.scopes.span(1, self.scopes.world_size)
        num_parameters = sum(len(bucket.layout.param_slices) for unit in self.units for bucket in unit.trainable)
        if num_parameters and world.size > 1:
            num_bytes = usage_numel(num_parameters) * USAGE_DTYPE.itemsize
            usage = StageTraffic(ALL_REDUCE, world.name, world.size, USAGE_DTYPE, num_bytes)
            self._add(USAGE, [usage], "(usage)", phase)

    def _second_hop(self, index: int, bucket: BucketPlan, phase: str) -> None:
        name, numel = self.units[index].plan.name, full_numel(_SCATTER, bucket.layout, self.scopes)
        self._add(_SCATTER, self._reduce_scatter(_SCATTER, bucket, numel), name, phase)
        self._add(_ALL_REDUCE, self._all_reduce(_ALL_REDUCE, bucket), name, phase)

    def update(self, owned: tuple[OwnedPlan, ...]) -> None:
        span = self.scopes.span(1, self.scopes.optimizer)
        for bucket in owned:
            assignment, index, itemsize = bucket.assignment, bucket.index, bucket.dtype.itemsize
            for numels, _ in (assignment.to_owners_numels(index), assignment.to_shards_numels(index)):
                num_bytes = (sum(numels) * itemsize, numels[index] * itemsize)
                stage = StageTraffic(ALL_TO_ALL, span.name, span.size, bucket.dtype, *num_bytes)
                self._add(OWNERS, [stage], bucket.name, "update")

    def outer_step(self, units: Iterable[int]) -> None:
        """The all-reduces of an outer step: of the master shards of all trainable buckets of some units."""
        for unit in (self.units[index] for index in units):
            for bucket in unit.trainable:
                numel, dtype = bucket.layout.shard_numel, bucket.sum_dtype
                route = self._route(_OUTER, numel * dtype.itemsize)
                stages = [] if route is None else all_reduce_traffic(route, numel, dtype, dtype)
                self._add(_OUTER, stages, unit.plan.name, "outer_step")

    def _route(self, role: str, full_bytes: int) -> Route | None:
        """The route of a tensor, as of `Scopes.route`; asked once for each size."""
        if (role, full_bytes) not in self._routes:
            self._routes[role, full_bytes] = self.scopes.route(role, full_bytes)
        return self._routes[role, full_bytes]

    def _reduced(self, index: int) -> list[BucketPlan]:
        """Buckets that are reduced. Sharded gradients of a unit are reduced together, with zeros where none arrived."""
        buckets = self.units[index].trainable
        are_together = self.scopes.grads > 1 and any(bucket.has_gradients for bucket in buckets)
        return [bucket for bucket in buckets if are_together or bucket.has_gradients]

    def _add(self, role: str, stages: list[StageTraffic], unit: str, phase: str) -> None:
        for stage, traffic in enumerate(stages):
            self.planned.append(PlannedCollective(traffic, unit, phase, self.micro_step, role, stage))
