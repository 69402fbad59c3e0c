"""Simulation of one optimizer step in a job that does not run.

The plan of the step is the engine's (`engine.plan`); the simulator gives each of its collectives a time and lets them
overlap with the compute as the engine does (`step_tasks`). So a feature of the engine is priced as soon as it is
planned.

A step is simulated in steady state: its forwards synchronize what the step before has updated.

Pure.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from mics_strategy.config import ShardConfig
from mics_strategy.engine.plan import ROOT_NAME, USAGE, Plan, PlannedCollective, StepOrder, plan_step
from mics_strategy.errors import ConfigError
from mics_strategy.planner.cluster import Cluster, Device
from mics_strategy.planner.comm_time import CommTime
from mics_strategy.planner.engine_memory import engine_memory
from mics_strategy.planner.event_queue import Slowdown, Times, run
from mics_strategy.planner.measured import MeasuredCompute, MeasuredUnit
from mics_strategy.planner.model import UnitModel
from mics_strategy.planner.recompute import ATTENTION, Recompute, recomputed_units
from mics_strategy.planner.step_tasks import COMPUTE, OPTIMIZER, StepRules, StepTasks, UnitTime, step_tasks
from mics_strategy.planner.workload import Workload
from mics_strategy.scopes import COLLECTIVES, Scopes
from mics_strategy.timeline import COMPUTE_ROW, Category, Interval, PartKey, Row, Timeline

_PLAYED = 3  # micro-steps that differ: the first synchronizes parameters, the last reduces beyond the gradient scope
# Passes over the saved activations, for the operations that are no matrix products: each is read and written in the
# forward; in the backward, both it and its gradient are.
_FORWARD_PASSES, _BACKWARD_PASSES = 2, 4
# Elements of the inner dimension that filling the pipeline of a matrix product costs; fitted on the half of the public
# runs that docs/planner-leaderboard.md names.
_PIPELINE_WIDTH = 80
_NODE_SPREAD = 0.01  # of the time of equal nodes, one standard deviation; fitted as above
ATTENTION_BACKWARD = 2.5  # five products for the forward's two: FlashAttention-2 (arXiv:2307.08691), section 4.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One training in one configuration on one cluster.

    Attributes:
        workload: Training.
        cluster: Cluster.
        config: Configuration, whose scopes and dtypes apply.
        scopes: Its ranks and axes in this job.
        micro_batch: Samples of one forward on a rank.
        recompute: Which activations of layers are recomputed in the backward.
    """

    workload: Workload
    cluster: Cluster
    config: ShardConfig
    scopes: Scopes
    micro_batch: int
    recompute: Recompute

    @property
    def num_micro_steps(self) -> int:
        """Forwards and backwards of a step on each rank."""
        return self.workload.global_batch // (self.micro_batch * self.cluster.world_size)

    def order(self, num_micro_steps: int) -> StepOrder:
        """Orders of the units, as before the first step of a real job."""
        units = self.workload.model.units
        return StepOrder(
            forward=tuple(range(len(units))),
            backward=(0, *(index for index in range(len(units) - 1, 0, -1) if units[index].has_backward)),
            num_micro_steps=num_micro_steps,
            second_hop_every_backward=self.config.second_hop == "micro_step",
        )

    def plan(self, num_micro_steps: int) -> Plan:
        """Every collective of a step."""
        units = engine_memory(self.workload.model, self.config, self.scopes, self.workload.master).unit_plans()
        return plan_step(units, self.scopes, self.order(num_micro_steps))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedStep:
    """The simulated tasks of a step, with their times."""

    tasks: StepTasks
    times: Times

    @property
    def seconds(self) -> float:
        """Length of the step."""
        return max(self.times.end_s, default=0.0)


def play(job: Job, num_micro_steps: int) -> PlayedStep:
    """Simulate a step of so many micro-steps."""
    comm_time = CommTime(job.cluster, job.scopes.axes)
    sync_axes = frozenset(axis.name for axis in job.scopes.span_of("param_sync").axes)
    rules = StepRules.of(job.config, sync_axes | {job.scopes.span_of("param_sync").name}, comm_time)
    tasks = step_tasks(
        job.plan(num_micro_steps), job.order(num_micro_steps), unit_times(job), optimizer_seconds(job), rules
    )
    links = {
        overlap.link: Slowdown(device=overlap.compute, link=overlap.collective)
        for overlap in job.cluster.measured_overlaps
    }
    return PlayedStep(tasks=tasks, times=run(tasks.tasks, job.cluster.overlap_slowdown, links))


def step_seconds(job: Job) -> float:
    """Length of one step.

    Micro-steps between the first and the last are alike, so that three are simulated for any number.
    """
    if job.num_micro_steps <= _PLAYED:
        return play(job, job.num_micro_steps).seconds
    played = play(job, _PLAYED)
    first, middle, *_ = (played.times.end_s[index] for index in played.tasks.micro_step_ends)
    return played.seconds + (job.num_micro_steps - _PLAYED) * (middle - first)


def sent_bytes(job: Job) -> dict[str, int]:
    """Bytes that one rank sends in a step, by axis."""
    num_planned = min(job.num_micro_steps, _PLAYED)
    sent: Counter[str] = Counter()
    for planned in job.plan(num_planned).collectives:
        num_alike = job.num_micro_steps - _PLAYED + 1 if planned.micro_step == 1 and num_planned == _PLAYED else 1
        sent[planned.axis] += num_alike * planned.sent_bytes
    return dict(sent)


def unit_times(job: Job) -> tuple[UnitTime, ...]:
    """Seconds of each unit on the slowest device of the job, for one micro-step."""
    if job.workload.measured is not None:
        return _measured_times(job, job.workload.measured)
    times = []
    units = job.workload.model.units
    for unit, is_recomputed in zip(units, recomputed_units(units, job.recompute), strict=True):
        forward_s, backward_s = compute_times(unit, job.micro_batch, job.cluster.device)
        recompute_s = recompute_seconds(unit, job.micro_batch, job.cluster.device, job.recompute)
        measured = job.cluster.slowest_node_factor
        slowest = measured if measured > 1 else straggler_factor(job.cluster.num_nodes)
        forward_s, recompute_s, backward_s = (s * slowest for s in (forward_s, recompute_s, backward_s))
        times.append(
            UnitTime(
                name=unit.name or ROOT_NAME,
                forward_s=forward_s,
                recompute_s=recompute_s if is_recomputed else 0.0,
                backward_s=backward_s,
            )
        )
    return tuple(times)


def compute_times(unit: UnitModel, samples: int, device: Device) -> tuple[float, float]:
    """Seconds of the forward and the backward of one unit for so many samples."""
    matmul_s = (unit.forward_flop - unit.attention_flop) * samples / matmul_flop_per_s(unit, device)
    attention_s = _attention_seconds(unit, samples, device)
    pass_s = unit.saved_bytes * samples / device.sustained_bytes_per_s
    forward_s = matmul_s + attention_s + _FORWARD_PASSES * pass_s
    if not unit.has_backward:
        return forward_s, 0.0
    backward_s = (1 + unit.weight_grad_share) * matmul_s  # a frozen weight needs no gradient
    return forward_s, backward_s + ATTENTION_BACKWARD * attention_s + _BACKWARD_PASSES * pass_s


def _attention_seconds(unit: UnitModel, samples: int, device: Device) -> float:
    flop_per_s = device.sustained_flop_per_s * device.attention_share * unit.attention.speed
    return unit.attention_flop * samples / flop_per_s


def straggler_factor(num_nodes: int) -> float:
    """Time of the slowest of equal nodes over that of an average one.

    Source:
        Expected maximum of so many normal variates, for large numbers sqrt(2 ln n) deviations above the mean.
    """
    return 1 + _NODE_SPREAD * math.sqrt(2 * math.log(num_nodes))


def matmul_flop_per_s(unit: UnitModel, device: Device) -> float:
    """FLOP per second of a unit's matrix products; each fills and drains the device's pipeline once."""
    if not unit.width:
        return device.sustained_flop_per_s
    return device.sustained_flop_per_s * unit.width / (unit.width + _PIPELINE_WIDTH)


def recompute_seconds(unit: UnitModel, samples: int, device: Device, recompute: Recompute = True) -> float:
    """Seconds of the second forward of one unit, or of its attention.

    It ends where the last kept activation is there.

    Source:
        torch.utils.checkpoint.set_checkpoint_early_stop, which is on for checkpoints that are not reentrant.
    """
    if recompute == ATTENTION:
        inputs_s = unit.attention.inputs_flop * samples / matmul_flop_per_s(unit, device)
        pass_s = unit.attention.saved_bytes * samples / device.sustained_bytes_per_s
        return inputs_s + _attention_seconds(unit, samples, device) + _FORWARD_PASSES * pass_s
    forward_s, _ = compute_times(unit, samples, device)
    return forward_s - unit.tail_flop * samples / matmul_flop_per_s(unit, device)


def _measured_times(job: Job, measured: MeasuredCompute) -> tuple[UnitTime, ...]:
    """Measured seconds of each unit.

    Raises:
        ConfigError: Other units, or another micro-batch, were measured.
    """
    units = job.workload.model.units
    measured_names, names = [unit.name for unit in measured.units], [unit.name for unit in units]
    if measured_names != names:
        raise ConfigError(f"Units {measured_names} were measured, and the model has {names}. Measure its own units.")
    if measured.micro_batch != job.micro_batch:
        raise ConfigError(
            f"`micro_batch={job.micro_batch}` was asked for, and {measured.micro_batch} was measured. Measure it, too."
        )
    if job.recompute == ATTENTION:
        raise ConfigError("`recompute='attention'` was asked for, and whole units were measured. Use True or False.")
    is_recomputed = recomputed_units(units, job.recompute)
    return tuple(
        UnitTime(
            name=unit.name or ROOT_NAME,
            forward_s=times.forward_s,
            recompute_s=_recomputed(times) if again else 0.0,
            backward_s=times.backward_s,
        )
        for unit, times, again in zip(units, measured.units, is_recomputed, strict=True)
    )


def _recomputed(times: MeasuredUnit) -> float:
    return times.forward_s if times.recompute_s is None else times.recompute_s


def optimizer_seconds(job: Job) -> float:
    """Seconds of Adam's update of one rank's shards."""
    numel = sum(
        parameter.numel for unit in job.workload.model.units for parameter in unit.parameters if parameter.is_trained
    )
    if job.workload.measured is not None:
        return numel / job.scopes.optimizer * job.workload.measured.optimizer_s_per_numel
    return job.cluster.device.adam_seconds(numel / job.scopes.optimizer, job.workload.param.itemsize)


def micro_step_seconds(job: Job) -> float:
    """Seconds of a micro-step in which the device computes."""
    return sum(time.forward_s + time.recompute_s + time.backward_s for time in unit_times(job))


def compute_seconds(job: Job) -> float:
    """Seconds of a step in which the device computes, the optimizer included."""
    return job.num_micro_steps * micro_step_seconds(job) + optimizer_seconds(job)


def planned_timeline(played: PlayedStep, scopes: Scopes) -> Timeline:
    """The simulated step as a timeline of rank 0.

    A collective is one interval, from the start of its first stage to the end of its last one. A wait of the device
    belongs to the collective that it has waited for last.

    Args:
        played: Simulated tasks.
        scopes: Ranks and axes of every model state.
    """
    rows: dict[str, list[Interval]] = defaultdict(list)
    compute: list[Interval] = []
    tasks, labels, times = played.tasks.tasks, played.tasks.labels, played.times
    now_s = 0.0
    for index, (task, label) in enumerate(zip(tasks, labels, strict=True)):
        start_s, end_s = times.start_s[index], times.end_s[index]
        if task.stream != COMPUTE:
            continue
        if start_s > now_s:
            blocker = labels[max(task.after, key=lambda before: times.end_s[before])]
            key = PartKey(category=Category.WAIT, name="wait")
            if blocker.stage is not None:
                key = collective_key(blocker.stage, scopes, Category.WAIT)
            compute.append(Interval(key=key, start_s=now_s, end_s=start_s))
        if end_s > start_s:
            category = Category.OPTIMIZER if label.name == OPTIMIZER else Category.COMPUTE
            key = PartKey(category=category, name=label.name, unit=label.unit)
            compute.append(Interval(key=key, start_s=start_s, end_s=end_s))
        now_s = end_s
    for indices, stages in _collectives(played.tasks):
        key = collective_key(stages[0], scopes, Category.COLLECTIVE)
        start_s, end_s = min(times.start_s[i] for i in indices), max(times.end_s[i] for i in indices)
        sent_bytes = sum(stage.sent_bytes for stage in stages)
        rows[tasks[indices[0]].stream].append(Interval(key=key, start_s=start_s, end_s=end_s, sent_bytes=sent_bytes))
    collectives = [Row(rank=0, resource=stream, intervals=tuple(found)) for stream, found in rows.items()]
    return Timeline(
        source="planned",
        num_steps=1,
        rows=(Row(rank=0, resource=COMPUTE_ROW, intervals=tuple(compute)), *collectives),
    )


def collective_key(stage: PlannedCollective, scopes: Scopes, category: Category) -> PartKey:
    """Identity of a stage's collective: its name, and all axes that it spans."""
    if stage.role == USAGE:
        return PartKey(category=category, name=stage.collective, unit="used parameters", axis=stage.axis)
    return PartKey(
        category=category, name=COLLECTIVES[stage.role], unit=stage.unit, axis=scopes.span_of(stage.role).name
    )


def _collectives(tasks: StepTasks) -> Iterator[tuple[list[int], list[PlannedCollective]]]:
    """Tasks of each collective, by index, and its stages.

    Those of its codec surround the task of a stage. A collective never has two stages of one kind over one axis.
    """
    indices: list[int] = []
    stages: list[PlannedCollective] = []
    first: PlannedCollective | None = None
    for index, label in enumerate(tasks.labels):
        stage = label.stage
        continues = (
            first is not None
            and stage is not None
            and (first.role, first.unit) == (stage.role, stage.unit)
            and all(s is stage or (s.collective, s.axis) != (stage.collective, stage.axis) for s in stages)
        )
        if not continues:
            if indices:
                yield indices, stages
            indices, stages, first = [], [], stage
        if stage is not None:
            indices.append(index)
            if all(s is not stage for s in stages):
                stages.append(stage)
    if indices:
        yield indices, stages
