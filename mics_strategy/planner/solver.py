"""The fastest sharding that fits into memory.

The solver walks the whole space (`space`). Points that do not fit are rejected by the memory model, and every other
point has a lower bound of its time: the device must compute, and each link must carry what the step sends over it. In
the order of their bounds, points are simulated until the next bound is no faster than the fastest step so far, or until
enough have been. The answer states by how much a point that was left out could still be faster.

Times that differ by less than `_EQUAL` count as equal. Of equal points, that with the fewest mesh axes is chosen.

Deterministic: equal points are taken in the order of the space.

Pure.

Source:
    AMSP (arXiv:2311.00257) section V-B solves the same kind of program by brute force after filters, with a sum of
    communication times as objective in place of a simulated step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from mics_strategy.comm.route import HopTraffic, all_gather_traffic, all_reduce_traffic, reduce_scatter_traffic
from mics_strategy.engine.schedule import full_numel
from mics_strategy.errors import NoFeasiblePlan
from mics_strategy.planner.comm_time import CommTime
from mics_strategy.planner.memory import MicroBatch, RankMemory, rank_memory
from mics_strategy.planner.simulator import Job, compute_seconds, step_seconds
from mics_strategy.planner.space import ScopedConfig, Space, scoped_configs
from mics_strategy.planner.unit_plans import unit_plans

if TYPE_CHECKING:
    from mics_strategy.engine.plan import UnitPlan
    from mics_strategy.planner.cluster import Cluster
    from mics_strategy.planner.workload import Workload
    from mics_strategy.scopes import Scopes


_EQUAL = 0.005  # share of a step by which times count as equal; the models are far less exact
# Shares of the memory for which the fastest point is sought, and points that are simulated for each at most.
_LEVELS = ((1.0, 60), (0.75, 12), (0.5, 12), (0.35, 12), (0.25, 12), (0.15, 12))


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One configuration, micro-batch and recomputation, with its price.

    Attributes:
        job: The configuration in this job.
        memory: Memory of a rank.
        bound_s: Seconds that the step takes at least.
        bound_by: What takes them: "compute", or a link.
        links_s: Seconds in which links carry the step's collectives, all added up.
        step_s: Seconds of the simulated step; None where the bound alone rejects the point.
    """

    job: Job
    memory: RankMemory
    bound_s: float
    bound_by: str
    links_s: float
    step_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """All points of the space.

    Attributes:
        frontier: Points of which each is the fastest below some amount of memory, fastest first.
        fitting: All points that fit; those that were simulated have a `step_s`.
        too_large: Points that do not fit, smallest first.
        limit_bytes: Memory of a rank.
        gap: Share of its time by which a point that was not simulated could still be faster than the fastest one.
    """

    frontier: tuple[Point, ...]
    fitting: tuple[Point, ...]
    too_large: tuple[Point, ...]
    limit_bytes: int
    gap: float


def solve(workload: Workload, cluster: Cluster, space: Space) -> Solution:
    """Find the fastest point that fits, and the fastest ones in less memory.

    Raises:
        ConfigError: The ranks do not divide the batch.
        NoFeasiblePlan: No point fits.

    Cost:
        Time: about 1 ms for each point of the space, and 10 ms for each of at most `_MAX_SIMULATED` simulated ones.
    """
    limit_bytes = cluster.device.memory_bytes
    points = _priced(workload, cluster, space)
    too_large = sorted((p for p in points if p.memory.total_bytes > limit_bytes), key=lambda p: p.memory.total_bytes)
    fitting = sorted((p for p in points if p.memory.total_bytes <= limit_bytes), key=_promise)
    if not fitting:
        raise NoFeasiblePlan(_nothing_fits(too_large[0], limit_bytes))
    search = _Search(fitting)
    frontier: list[Point] = []
    gap = 0.0
    for share, max_simulated in _LEVELS:
        found = search.fastest(share * limit_bytes, max_simulated)
        if found is None:
            break
        best, level_gap = found
        gap = level_gap if not frontier else gap
        if best.step_s is not None and all(best.memory.total_bytes < p.memory.total_bytes for p in frontier):
            frontier.append(best)
    return Solution(
        frontier=tuple(frontier),
        fitting=tuple(search.points),
        too_large=tuple(too_large),
        limit_bytes=limit_bytes,
        gap=gap,
    )


def _promise(point: Point) -> tuple[float, float, int]:
    """Order of simulation: by bound, roughly; then by the time that links carry; then by memory."""
    return round(math.log(point.bound_s) / _EQUAL), point.links_s, point.memory.total_bytes


@dataclass(slots=True)
class _Search:
    """Points in the order of their promise, and those of them that have been simulated."""

    points: list[Point]

    def fastest(self, limit_bytes: float, max_simulated: int) -> tuple[Point, float] | None:
        """The fastest point in so much memory, and the share by which another could be faster; None if none fits."""
        best: Point | None = None
        missed_s = math.inf  # least bound of a point that was not simulated
        num_simulated = 0
        for index, point in enumerate(self.points):
            if point.memory.total_bytes > limit_bytes:
                continue
            if point.step_s is None and (
                num_simulated == max_simulated or (best is not None and point.bound_s >= _seconds(best))
            ):
                missed_s = min(missed_s, point.bound_s)
                continue
            if point.step_s is None:
                point = dataclasses.replace(point, step_s=step_seconds(point.job))
                self.points[index] = point
                num_simulated += 1
            if best is None or _preference(point) < _preference(best):
                best = point
        if best is None:
            return None
        return self._simplest(best, limit_bytes), max(0.0, 1 - missed_s / _seconds(best))

    def _simplest(self, best: Point, limit_bytes: float) -> Point:
        """The simulated point with the fewest axes, then the least memory, of those as fast as the fastest."""
        equal = [
            point
            for point in self.points
            if point.step_s is not None
            and point.memory.total_bytes <= limit_bytes
            and point.step_s <= _seconds(best) * (1 + _EQUAL)
        ]
        return min(equal, key=lambda p: (len(p.job.scopes.axes), p.job.scopes.has_secondary, p.memory.total_bytes))


def _seconds(point: Point) -> float:
    return math.inf if point.step_s is None else point.step_s


def _preference(point: Point) -> tuple[float, int]:
    return _seconds(point), point.memory.total_bytes


def _priced(workload: Workload, cluster: Cluster, space: Space) -> list[Point]:
    micro_batches = workload.micro_batches(cluster.world_size)
    recomputes = (False, True) if workload.recompute == "auto" else (bool(workload.recompute),)
    points = []
    bounds = _LinkBounds(workload, cluster)
    for scoped in scoped_configs(space, workload, cluster):
        units = unit_plans(workload.model, scoped.config, scoped.scopes, workload.master)
        for micro_batch in micro_batches:
            for recompute in recomputes:
                job = Job(
                    workload=workload,
                    cluster=cluster,
                    config=scoped.config,
                    scopes=scoped.scopes,
                    micro_batch=micro_batch,
                    recompute=recompute,
                )
                batch = MicroBatch(samples=micro_batch, recomputes=recompute)
                memory = rank_memory(workload.model, scoped.config, scoped.scopes, batch)
                bound_by, bound_s, links_s = bounds.of(job, scoped, units)
                points.append(
                    Point(job=job, memory=memory, bound_s=bound_s, bound_by=bound_by, links_s=links_s)
                )
    return points


@dataclass(slots=True)
class _LinkBounds:
    """Seconds that each link carries the traffic of a step, by role, for the space of one job."""

    workload: Workload
    cluster: Cluster
    _seconds: dict[object, dict[str, float]] = field(default_factory=dict)

    def of(self, job: Job, scoped: ScopedConfig, units: Sequence[UnitPlan]) -> tuple[str, float, float]:
        """What a step takes most of its least time for, that time, and the time of all links.

        Nothing computes before the first unit has been gathered, and the optimizer waits for the gradients of the last
        one.
        """
        compute_s = compute_seconds(job)
        seconds: dict[str, float] = {}
        first, last = units[1:2], units[1:2]
        for role in ("param_sync", "param_all_gather"):
            compute_s += sum(self._of_role(role, scoped, first, "first").values())
        for role in ("grad_reduce_scatter", "second_hop_reduce_scatter", "second_hop_all_reduce"):
            compute_s += sum(self._of_role(role, scoped, last, "last").values())
        for role, count in _counts(scoped.scopes, job.num_micro_steps).items():
            for link, link_s in self._of_role(role, scoped, units, "all").items():
                seconds[link] = seconds.get(link, 0.0) + count * link_s
        links_s = sum(seconds.values())
        seconds["compute"] = compute_s
        bound_by = max(seconds, key=lambda name: seconds[name])
        return bound_by, seconds[bound_by], links_s

    def _of_role(self, role: str, scoped: ScopedConfig, units: Sequence[UnitPlan], which: str) -> dict[str, float]:
        scopes = scoped.scopes
        key = (which, role, scopes.degrees_of(role), scopes.optimizer, scopes.axes, scopes.codecs.for_role(role))
        if key not in self._seconds:
            found: dict[str, float] = {}
            comm_time = CommTime(self.cluster, scopes.axes)
            for unit in units:
                for stage in _stages(role, unit, scopes):
                    time = comm_time.of(stage)
                    found[time.link] = found.get(time.link, 0.0) + time.seconds
            self._seconds[key] = found
        return self._seconds[key]


def _counts(scopes: Scopes, num_micro_steps: int) -> dict[str, float]:
    """Collectives of each role in a step, at least; a unit that stays in its slot is not gathered for the backward."""
    gathers = num_micro_steps
    counts: dict[str, float] = {"param_sync": 1, "second_hop_reduce_scatter": 1, "second_hop_all_reduce": 1}
    counts["grad_reduce_scatter"] = num_micro_steps
    if scopes.has_secondary:
        return counts | {"param_all_gather": 1, "secondary_all_gather": gathers - 1}
    return counts | {"param_all_gather": gathers}


def _stages(role: str, unit: UnitPlan, scopes: Scopes) -> list[HopTraffic]:
    stages: list[HopTraffic] = []
    for bucket in unit.buckets:
        is_gather = role in ("param_all_gather", "secondary_all_gather", "param_sync")
        if not is_gather and not bucket.trainable:
            continue
        dtype: torch.dtype = bucket.param_dtype if is_gather else bucket.wire_dtype
        numel = full_numel(role, bucket.layout, scopes)
        route = scopes.route(role, numel * dtype.itemsize)
        if route is None:
            continue
        if is_gather:
            stages += all_gather_traffic(route, numel, dtype)
        elif role == "second_hop_all_reduce":
            stages += all_reduce_traffic(route, numel, dtype, bucket.sum_dtype)
        else:
            stages += reduce_scatter_traffic(route, numel, dtype)
    return stages


def _nothing_fits(smallest: Point, limit_bytes: int) -> str:
    job, memory = smallest.job, smallest.memory
    over_gb = (memory.total_bytes - limit_bytes) / 1e9
    activations = memory.by_kind.get("activations", 0)
    do = [f"use {_factor(memory.total_bytes, limit_bytes)} times as many nodes", "a device with more memory"]
    if job.micro_batch > 1:
        do.insert(0, "lower `micro_batch`")
    if not job.recompute:
        do.insert(0, "set `recompute=True`")
    return (
        f"No plan fits {limit_bytes / 1e9:.1f} GB on a rank of {job.cluster.world_size}: the smallest, parameters over "
        f"{job.scopes.params}, gradients over {job.scopes.grads}, optimizer states over {job.scopes.optimizer} ranks, "
        f"with micro-batches of {job.micro_batch}{' and recomputation' if job.recompute else ''}, needs "
        f"{memory.total_bytes / 1e9:.1f} GB, of which {activations / 1e9:.1f} GB are activations: {over_gb:.1f} GB too "
        f"many. To fit, {', '.join(do[:-1])}, or take {do[-1]}."
    )


def _factor(needed_bytes: int, limit_bytes: int) -> int:
    return max(2, -(-needed_bytes // limit_bytes))
