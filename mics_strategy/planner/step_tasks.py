"""Tasks of one optimizer step: compute, collectives, and what each waits for.

The collectives are those of `engine.plan.Plan`, in its order; nothing else is priced. What waits for what follows the
engine's rules (`engine.step`, `engine.reducer`):

- A unit's gather starts when the unit `prefetch` places ahead of it starts to compute, and precedes its own forward or
  backward. Without the overlap it starts when the unit before has ended.
- A unit's first hop follows its backward; the unit after the next waits for it. Without the overlap, the next one does.
- In the last micro-step, a unit's second hop follows its first hop; without the overlap, all follow the whole backward.
- Where the device is the host's CPU, a unit computes longer by the calls of its collectives (`CommTime.call_s`).
- The optimizer waits for everything. Stepped parameters are synchronized by the next step's forward, unit by unit;
  without the overlap, all before it.

Collectives of one kind run on one stream, one after the other, and so do the stages of one; streams share the links.

Pure.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from mics_strategy.comm.route import ALL_GATHER
from mics_strategy.config import ShardConfig
from mics_strategy.engine.plan import Plan, PlannedCollective, StepOrder
from mics_strategy.errors import ConfigError
from mics_strategy.planner.comm_time import CommTime
from mics_strategy.planner.event_queue import DEVICE, Task

# Streams. The small all-reduce of the parameters in use has a group of its own, CONTROL.
COMPUTE, GATHER, FIRST_HOP, SECOND_HOP, CONTROL = "compute", "all_gather", "first_hop", "second_hop", "control"
FORWARD, BACKWARD, RECOMPUTE, OPTIMIZER = "forward", "backward", "recompute", "step"  # names of compute


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitTime:
    """Seconds of one unit on the device, for one micro-step.

    Attributes:
        name: Name of the unit.
        forward_s: Forward.
        recompute_s: Second forward, in front of the backward; 0 for none.
        backward_s: Backward.
    """

    name: str
    forward_s: float
    recompute_s: float
    backward_s: float


class Label(NamedTuple):
    """Meaning of a task: its name, unit, and the collective that it is a stage of."""

    name: str
    unit: str
    stage: PlannedCollective | None = None


@dataclass(frozen=True, slots=True)
class StepTasks:
    """Tasks of one step.

    Attributes:
        tasks: Tasks of the simulation.
        labels: Meaning of each.
        micro_step_ends: Last compute of each micro-step, by index.
    """

    tasks: list[Task]
    labels: list[Label]
    micro_step_ends: list[int]


def step_tasks(
    plan: Plan, order: StepOrder, units: tuple[UnitTime, ...], optimizer_s: float, rules: StepRules
) -> StepTasks:
    """The tasks of one optimizer step.

    Args:
        plan: Collectives of the step.
        order: Orders of units, with which the plan was made.
        units: Seconds of each unit, by index; the root is the first.
        optimizer_s: Seconds of the optimizer.
        rules: Overlaps, and times of collectives.

    Raises:
        ConfigError: The plan has collectives of other units.
    """
    builder = _Builder(plan, order, units, rules)
    for micro_step in range(order.num_micro_steps):
        builder.forward(micro_step)
        builder.backward(micro_step, is_last=micro_step == order.num_micro_steps - 1)
    builder.optimizer(optimizer_s)
    if builder.unplayed:
        raise ConfigError(
            f"Collectives of {', '.join(map(repr, sorted(builder.unplayed)))} are planned, and times are given of "
            f"{', '.join(repr(unit.name) for unit in units)}. Give the times of the planned units."
        )
    return StepTasks(builder.tasks, builder.labels, builder.micro_step_ends)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRules:
    """What may overlap, and what collectives take.

    Attributes:
        overlap: Overlaps of `ShardConfig`.
        prefetch: Units gathered ahead.
        sync_axes: Names of the axes over which stepped parameters are synchronized.
        comm_time: Times of collectives.
    """

    overlap: frozenset[str]
    prefetch: int
    sync_axes: frozenset[str]
    comm_time: CommTime

    @classmethod
    def of(cls, config: ShardConfig, sync_axes: frozenset[str], comm_time: CommTime) -> StepRules:
        """The rules of a configuration."""
        overlap = frozenset(config.overlap) if not isinstance(config.overlap, str) else frozenset()
        return cls(overlap=overlap, prefetch=config.prefetch, sync_axes=sync_axes, comm_time=comm_time)


@dataclass(slots=True)
class _Builder:
    """Tasks of a step so far."""

    plan: Plan
    order: StepOrder
    units: tuple[UnitTime, ...]
    rules: StepRules
    tasks: list[Task] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)
    micro_step_ends: list[int] = field(default_factory=list)
    _collectives: dict[tuple[int, str, str, bool], list[list[PlannedCollective]]] = field(default_factory=dict)
    _calls: Counter[tuple[int, str, str]] = field(default_factory=Counter)  # stages by what the host computes then
    _last_compute: int | None = None
    _last_of_unit: dict[str, int] = field(default_factory=dict)  # first hop, or backward where there is none
    _ends: list[int] = field(default_factory=list)  # what the optimizer waits for

    def __post_init__(self) -> None:
        counts_calls = self.rules.comm_time.call_s > 0
        for planned in self.plan.collectives:
            is_gather = planned.collective == ALL_GATHER and planned.phase in (FORWARD, BACKWARD)
            key = (planned.micro_step, planned.phase, planned.unit, is_gather)
            collectives = self._collectives.setdefault(key, [])
            if planned.stage:
                collectives[-1].append(planned)
            else:
                collectives.append([planned])
            if counts_calls:
                phase = FORWARD if planned.phase == FORWARD else BACKWARD
                self._calls[planned.micro_step, phase, planned.unit] += 1

    @property
    def unplayed(self) -> set[str]:
        """Units with planned collectives that have no task yet."""
        return {unit for (_, _, unit, _), collectives in self._collectives.items() if collectives}

    def forward(self, micro_step: int) -> None:
        """Gathers and forwards. The root, whose forward surrounds the others, computes last."""
        first = self._last_compute
        order = [self.units[index] for index in self.order.forward]
        if "update" not in self.rules.overlap and micro_step == 0:
            first = self._sync_all(order)
        computed: list[int | None] = []
        gathered: dict[str, int | None] = {}
        for position, unit in enumerate(order):
            trigger = self._trigger(computed, position, first)
            gathered[unit.name] = self._gather(micro_step, FORWARD, unit.name, trigger)
            if position:
                self._compute(micro_step, FORWARD, unit, (first, gathered[unit.name]))
                computed.append(self._last_compute)
            else:
                computed.append(first)
        self._compute(micro_step, FORWARD, order[0], (gathered[order[0].name],))

    def backward(self, micro_step: int, *, is_last: bool) -> None:
        """Gathers, backwards and first hops. The root is entered first, and its gradients are reduced last."""
        begin = self._last_compute
        order = [self.units[index] for index in self.order.backward]
        computed: list[int | None] = []
        first_hops: list[int | None] = []
        reduced_behind = 2 if "reduce" in self.rules.overlap else 1
        for position, unit in enumerate(order):
            gathered = self._gather(micro_step, BACKWARD, unit.name, self._trigger(computed, position, begin))
            waits = (gathered, first_hops[position - reduced_behind] if position > reduced_behind else None)
            if unit.recompute_s:
                self._compute(micro_step, RECOMPUTE, unit, waits)
            self._compute(micro_step, BACKWARD, unit, waits)
            computed.append(self._last_compute)
            first_hops.append(self._first_hop(micro_step, unit.name) if position else None)
        root = order[0].name
        self._first_hop(micro_step, root)
        self.micro_step_ends.append(len(self.tasks) if self._last_compute is None else self._last_compute)
        if is_last or self.order.second_hop_every_backward:
            self._second_hops(micro_step, [unit.name for unit in order[1:]] + [root])

    def optimizer(self, seconds: float) -> None:
        """The optimizer's update, behind everything."""
        self._add(Label(OPTIMIZER, ""), Task(COMPUTE, DEVICE, seconds, self._after(*self._ends)))

    def _trigger(self, computed: list[int | None], position: int, begin: int | None) -> int | None:
        """The compute that has ended when the gather of the unit at `position` may start."""
        ahead = self.rules.prefetch if "gather" in self.rules.overlap else 0
        return computed[position - ahead - 1] if position > ahead else begin

    def _gather(self, micro_step: int, phase: str, unit: str, trigger: int | None) -> int | None:
        return self._chain(GATHER, self._collectives.pop((micro_step, phase, unit, True), []), trigger)

    def _sync_all(self, order: list[UnitTime]) -> int | None:
        """All synchronizations of stepped parameters, in front of the first forward."""
        last = None
        for unit in order:
            by_is_sync: tuple[list[list[PlannedCollective]], ...] = ([], [])
            for stages in self._collectives.get((0, FORWARD, unit.name, True), []):
                by_is_sync[stages[0].axis in self.rules.sync_axes].append(stages)
            self._collectives[0, FORWARD, unit.name, True] = by_is_sync[False]
            last = self._chain(GATHER, by_is_sync[True], last)
        return last

    def _first_hop(self, micro_step: int, unit: str) -> int | None:
        collectives = self._collectives.pop((micro_step, BACKWARD, unit, False), [])
        last = self._chain(FIRST_HOP, collectives, self._last_compute)
        end = last if last is not None else self._last_compute
        if end is not None:
            self._last_of_unit[unit] = end
            self._ends.append(end)
        return last

    def _second_hops(self, micro_step: int, names: list[str]) -> None:
        behind_all = [*self._last_of_unit.values()] if "second_hop" not in self.rules.overlap else []
        for unit in names:
            collectives = self._collectives.pop((micro_step, "second_hop", unit, False), [])
            waits = (*behind_all, self._last_of_unit.get(unit), self._last_compute if behind_all else None)
            last = self._chain(SECOND_HOP, collectives, *waits)
            if last is not None:
                self._ends.append(last)
        usage = self._chain(
            CONTROL, self._collectives.pop((micro_step, "second_hop", "(usage)", False), []), self._last_compute
        )
        if usage is not None:
            self._ends.append(usage)
        if self.order.second_hop_every_backward:
            self._last_compute = self._add(
                Label("second_hop", ""), Task(COMPUTE, DEVICE, 0.0, self._after(*self._ends, self._last_compute))
            )

    def _chain(self, stream: str, collectives: list[list[PlannedCollective]], *after: int | None) -> int | None:
        """Add collectives, each of which is its stages; return the last task. One collective follows the other."""
        last: int | None = None
        for stages in collectives:
            last = self._collective(stream, stages, self._after(*after) if last is None else (last,))
        return last

    def _collective(self, stream: str, stages: list[PlannedCollective], after: tuple[int, ...]) -> int:
        """Add the stages of one collective; return the last task."""
        last = -1
        for stage in stages:
            last = self._stage(stream, stage, after)
            after = (last,)
        return last

    def _stage(self, stream: str, stage: PlannedCollective, after: tuple[int, ...]) -> int:
        """Add one stage, with its encoding and decoding on the device."""
        time, label = self.rules.comm_time.of(stage.traffic), Label(stage.collective, stage.unit, stage)
        if time.encode_seconds:
            after = (self._add(label, Task(stream, DEVICE, time.encode_seconds, after)),)
        last = self._add(label, Task(stream, time.link, time.seconds, after))
        if time.decode_seconds:
            last = self._add(label, Task(stream, DEVICE, time.decode_seconds, (last,)))
        return last

    def _compute(self, micro_step: int, name: str, unit: UnitTime, after: tuple[int | None, ...]) -> None:
        seconds = {FORWARD: unit.forward_s, RECOMPUTE: unit.recompute_s, BACKWARD: unit.backward_s}[name]
        seconds += self._calls[micro_step, name, unit.name] * self.rules.comm_time.call_s
        self._last_compute = self._add(
            Label(name, unit.name), Task(COMPUTE, DEVICE, seconds, self._after(*after, self._last_compute))
        )

    def _after(self, *indices: int | None) -> tuple[int, ...]:
        return tuple({index for index in indices if index is not None})

    def _add(self, label: Label, task: Task) -> int:
        self.tasks.append(task)
        self.labels.append(label)
        return len(self.tasks) - 1
