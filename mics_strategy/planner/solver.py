"""The fastest sharding that fits into memory.

The solver walks the whole space (`space`). Points that do not fit are rejected by the memory model, and every other
point has a lower bound of its time: the device must compute, and each link must carry what the step sends over it. In
the order of their bounds, points are simulated until the next bound is no faster than the fastest step so far, or until
enough have been. The answer states by how much a point that was left out could still be faster.

Times that differ by less than `EQUAL` count as equal; `TieOrder` has what decides between equal points.

Deterministic: equal points are taken in the order of the space.

Pure.

Source:
    AMSP (arXiv:2311.00257) section V-B solves the same kind of program by brute force after filters, with a sum of
    communication times as objective in place of a simulated step.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import gc
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from mics_strategy.config import ShardConfig
from mics_strategy.engine.plan import BucketPlan
from mics_strategy.errors import NoFeasiblePlan
from mics_strategy.planner.cluster import Cluster
from mics_strategy.planner.engine_memory import engine_memory
from mics_strategy.planner.memory import MicroBatch, RankMemory, activation_bytes, rank_memories, rank_memory
from mics_strategy.planner.recompute import Recompute
from mics_strategy.planner.role_times import RoleTimes, bucket_counts
from mics_strategy.planner.simulator import Job, micro_step_seconds, optimizer_seconds, step_seconds
from mics_strategy.planner.space import (
    EQUAL,
    Space,
    TieOrder,
    complexity,
    overheads_of,
    preset_of,
    scoped_configs,
    topology_of,
)
from mics_strategy.planner.workload import Workload
from mics_strategy.scopes import ROLES, Scopes, resolve_scopes

Buckets = tuple[BucketPlan, ...]  # of one unit

_PLANNED_STEPS = 3  # micro-steps whose traffic is compared: a first, a middle and a last one
_Sent = dict[tuple[ShardConfig, int], int]  # bytes between nodes by configuration and micro-steps
_MAX_DOUBLINGS = 12  # of nodes, when nothing fits
# Shares of the memory for which the fastest point is sought, and points that are simulated for each at most.
_LEVELS = ((1.0, 30), (0.75, 8), (0.5, 8), (0.35, 8), (0.25, 8), (0.15, 8))
_BRIEF = ((1.0, 4),)
_OF_PRESET = 2  # simulated points of a published system


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


def solve(workload: Workload, cluster: Cluster, space: Space, *, is_brief: bool = False) -> Solution:
    """Find the fastest point that fits, and the fastest ones in less memory.

    Args:
        workload: Training.
        cluster: Cluster.
        space: Configurations to choose from.
        is_brief: Whether to simulate the few most promising points alone, for one amount of memory.

    Raises:
        ConfigError: The ranks do not divide the batch.
        NoFeasiblePlan: No point fits.

    Cost:
        Time: below 1 ms for each point of the space, and 10 ms for each simulated one, about a hundred at most.
    """
    with paused_collector():
        return _solve(workload, cluster, space, is_brief=is_brief)


@contextlib.contextmanager
def paused_collector() -> Iterator[None]:
    """Pause the collector of reference cycles.

    Simulations make many objects and no cycles. Looking for some would take a third of the solver's time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _solve(workload: Workload, cluster: Cluster, space: Space, *, is_brief: bool) -> Solution:
    limit_bytes = cluster.device.memory_bytes
    points = _priced(workload, cluster, space)
    too_large = sorted((p for p in points if p.memory.total_bytes > limit_bytes), key=lambda p: p.memory.total_bytes)
    fitting = sorted((p for p in points if p.memory.total_bytes <= limit_bytes), key=_promise)
    if not fitting:
        raise NoFeasiblePlan(_nothing_fits(too_large[0], limit_bytes))
    search = _Search(fitting)
    if not is_brief:
        search.simulate_presets()
    frontier: list[Point] = []
    gap = 0.0
    for share, max_simulated in _BRIEF if is_brief else _LEVELS:
        found = search.fastest(share * limit_bytes, max_simulated)
        if found is None:
            break
        best, level_gap = found
        gap = level_gap if not frontier else gap
        if best.step_s is not None and all(best.memory.total_bytes < p.memory.total_bytes for p in frontier):
            frontier.append(best)
    fastest = [
        point
        for index, point in enumerate(frontier)
        if not index or all(_seconds(point) < _seconds(smaller) for smaller in frontier[index + 1 :])
    ]
    return Solution(
        frontier=tuple(fastest),
        fitting=tuple(search.points),
        too_large=tuple(too_large),
        limit_bytes=limit_bytes,
        gap=gap,
    )


def _promise(point: Point) -> tuple[float, int, float, int]:
    """Order of simulation. Points are ordered by bound, roughly, then by mesh axes, traffic and memory."""
    bound = round(math.log(point.bound_s) / EQUAL)
    return bound, complexity(point.job.scopes), point.links_s, point.memory.total_bytes


@dataclass(slots=True)
class _Search:
    """Points in the order of their promise; some have been simulated."""

    points: list[Point]
    sent: _Sent = field(default_factory=dict)

    def simulate_presets(self) -> None:
        """Simulate the most promising points of each published system, until no other can be faster."""
        simulated: defaultdict[object, list[float]] = defaultdict(list)
        for index, point in enumerate(self.points):
            name, config = preset_of(point.job.scopes), point.job.config
            steps_s = simulated[name, config.weight_codec, config.grad_codec]
            if name is not None and len(steps_s) < _OF_PRESET and point.bound_s < min(steps_s, default=math.inf):
                steps_s.append(_seconds(self._simulate(index)))

    def _simulate(self, index: int) -> Point:
        point = self.points[index]
        self.points[index] = dataclasses.replace(point, step_s=step_seconds(point.job))
        return self.points[index]

    def fastest(self, limit_bytes: float, max_simulated: int) -> tuple[Point, float] | None:
        """The fastest point in so much memory; None if none fits.

        With it comes the share of its time by which another could be faster.
        """
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
                point = self._simulate(index)
                num_simulated += 1
            if best is None or _preference(point) < _preference(best):
                best = point
        if best is None:
            return None
        return self._simplest(best, limit_bytes), max(0.0, 1 - missed_s / _seconds(best))

    def _simplest(self, best: Point, limit_bytes: float) -> Point:
        """The point with least traffic between nodes of those that are as fast as the fastest, or else the simplest."""
        equal = [
            point
            for point in self.points
            if point.step_s is not None
            and point.memory.total_bytes <= limit_bytes
            and point.step_s <= _seconds(best) * (1 + EQUAL)
        ]
        least_bytes = min(point.memory.total_bytes for point in equal)
        return min(equal, key=lambda point: tie_order(point, least_bytes, self.sent))


def tie_order(point: Point, least_bytes: int, sent: _Sent) -> TieOrder:
    """The place of a point among equally fast ones.

    Args:
        point: The point.
        least_bytes: Memory of the smallest of them.
        sent: Keeps what points with the same scopes send.
    """
    job, steps = point.job, min(point.job.num_micro_steps, _PLANNED_STEPS)
    sent_bytes = _inter_node_bytes(job, steps, sent)
    if job.num_micro_steps > steps:  # a micro-step in the middle is like any other
        sent_bytes += (job.num_micro_steps - steps) * (sent_bytes - _inter_node_bytes(job, steps - 1, sent))
    more_bytes = point.memory.total_bytes - least_bytes
    memory_share = int(more_bytes / (EQUAL * job.cluster.device.memory_bytes))
    order = TieOrder.of(job.scopes, sent_bytes, point.memory.total_bytes, memory_share)
    return order if job.workload.model.trained_share < 1 else dataclasses.replace(order, grads=0)


def _inter_node_bytes(job: Job, num_micro_steps: int, sent: _Sent) -> int:
    key = (job.config, num_micro_steps)
    if key not in sent:
        inside = {axis.name for axis in job.scopes.axes if axis.is_inside_node}
        collectives = job.plan(num_micro_steps).collectives
        sent[key] = sum(p.sent_bytes for p in collectives if not inside.issuperset(p.axis.split("+")))
    return sent[key]


def _seconds(point: Point) -> float:
    return math.inf if point.step_s is None else point.step_s


def _preference(point: Point) -> tuple[float, int]:
    return _seconds(point), point.memory.total_bytes


def _priced(workload: Workload, cluster: Cluster, space: Space) -> list[Point]:
    recomputes = (False, True) if workload.recompute == "auto" else (workload.recompute,)
    batches = [
        MicroBatch(samples=samples, recomputes=recompute)
        for samples in workload.micro_batches(cluster.world_size)
        for recompute in recomputes
    ]
    bounds = _Bounds(workload, RoleTimes(cluster))
    activations = {batch: activation_bytes(workload.model.units, batch) for batch in batches}
    base = space.base.replace(param_dtype=workload.param_dtype, reduce_dtype=workload.reduce_dtype)
    points = []
    for scoped in scoped_configs(dataclasses.replace(space, base=base), cluster):
        buffers = engine_memory(workload.model, scoped.config, scoped.scopes, workload.master)
        memories = rank_memories(buffers, activations.values(), workload.states, overheads_of(cluster))
        links = bounds.of_links(scoped.scopes, buffers.bucket_plans())
        for batch, memory in zip(batches, memories, strict=True):
            job = Job(
                workload=workload,
                cluster=cluster,
                config=scoped.config,
                scopes=scoped.scopes,
                micro_batch=batch.samples,
                recompute=batch.recomputes,
            )
            points.append(bounds.point(job, memory, links))
    return points


@dataclass(frozen=True, slots=True)
class _LinkTimes:
    """Seconds of the collectives of one configuration.

    Attributes:
        exposed_s: Seconds of the first gather and the last reductions, which nothing can hide.
        by_role: Seconds that each link carries all collectives of a role once.
    """

    exposed_s: float
    by_role: dict[str, dict[str, float]]


@dataclass(slots=True)
class _Bounds:
    """Least times of the points of one space."""

    workload: Workload
    times: RoleTimes
    _micro_steps: dict[tuple[int, Recompute], float] = field(default_factory=dict)
    _optimizers: dict[int, float] = field(default_factory=dict)

    def of_links(self, scopes: Scopes, buckets_by_kind: Mapping[str, Buckets]) -> _LinkTimes:
        """What the collectives of one configuration take, whatever the micro-batch."""
        kinds = [unit.kind for unit in self.workload.model.units]
        counts = bucket_counts(kinds, buckets_by_kind)
        end = bucket_counts(kinds[1:2], buckets_by_kind)
        end_roles = (role for role in ROLES if role != "secondary_all_gather")
        return _LinkTimes(
            exposed_s=sum(sum(self.times.of_one(role, scopes, end).values()) for role in end_roles),
            by_role={role: self.times.of_all(role, scopes, counts) for role in ROLES},
        )

    def point(self, job: Job, memory: RankMemory, links: _LinkTimes) -> Point:
        """The point of a job that has not been simulated.

        Nothing computes before the first unit has been gathered, and the optimizer waits for the gradients of the last
        one.
        """
        compute_s = self._compute_seconds(job) + links.exposed_s
        seconds: dict[str, float] = {}
        for role, count in _counts(job.scopes, job.num_micro_steps).items():
            for link, link_s in links.by_role[role].items():
                seconds[link] = seconds.get(link, 0.0) + count * link_s
        links_s = sum(seconds.values())
        seconds["compute"] = compute_s
        bound_by = max(seconds, key=lambda name: seconds[name])
        return Point(job=job, memory=memory, bound_s=seconds[bound_by], bound_by=bound_by, links_s=links_s)

    def _compute_seconds(self, job: Job) -> float:
        """As `simulator.compute_seconds`; its parts depend on few of the job's fields."""
        key, optimizer = (job.micro_batch, job.recompute), job.scopes.optimizer
        if key not in self._micro_steps:
            self._micro_steps[key] = micro_step_seconds(job)
        if optimizer not in self._optimizers:
            self._optimizers[optimizer] = optimizer_seconds(job)
        return job.num_micro_steps * self._micro_steps[key] + self._optimizers[optimizer]


def _counts(scopes: Scopes, num_micro_steps: int) -> dict[str, float]:
    """Collectives of each role in a step, at least.

    Units that stay in their slots are not gathered for the backward.
    """
    gathers = num_micro_steps
    counts: dict[str, float] = {"param_sync": 1, "second_hop_reduce_scatter": 1, "second_hop_all_reduce": 1}
    counts["grad_reduce_scatter"] = num_micro_steps
    if scopes.has_secondary:
        return counts | {"param_all_gather": 1, "secondary_all_gather": gathers - 1}
    return counts | {"param_all_gather": gathers}


def _nothing_fits(smallest: Point, limit_bytes: int) -> str:
    job, memory = smallest.job, smallest.memory
    over_gb = (memory.total_bytes - limit_bytes) / 1e9
    activations = sum(num_bytes for kind, num_bytes in memory.by_kind.items() if "activations" in kind)
    device = f"{job.cluster.device.name}{', which this file was calibrated on' if job.cluster.origin else ''}"
    do = [_nodes_to_use(job, limit_bytes), f"a device with {memory.total_bytes / 1e9:.1f} GB instead of {device}"]
    if job.micro_batch > 1:
        do.insert(0, "lower `micro_batch`")
    if job.recompute != 1:
        do.insert(0, "set `recompute=True`")
    communicators = memory.by_kind["communicators"]
    if memory.total_bytes - limit_bytes <= communicators:
        do.insert(0, f"measure the communicators, which count with {communicators / 1e9:.1f} GB, and state that")
    return (
        f"No plan fits {limit_bytes / 1e9:.1f} GB on a rank of {job.cluster.world_size}: the smallest, "
        f"{job.scopes.phrase} ranks, with micro-batches of {job.micro_batch}"
        f"{' and recomputation' if job.recompute else ''}, needs {memory.total_bytes / 1e9:.1f} GB, of which "
        f"{activations / 1e9:.1f} GB are activations: {over_gb:.1f} GB too many. To fit, {', '.join(do[:-1])}, or take "
        f"{do[-1]}."
    )


def _nodes_to_use(job: Job, limit_bytes: int) -> str:
    """Advice on the number of nodes with which the job would fit.

    Every state is sharded over all ranks. Memory needs no links, so that they need not be stated.
    """
    topology = topology_of(job.cluster)

    def fits(num_nodes: int) -> bool:
        size = num_nodes * job.cluster.ranks_per_node
        config = job.config.replace(
            params=size,
            grads=size,
            optimizer=size,
            secondary_params="none",
            world_size=size,
            topology=topology,
        )
        scopes = resolve_scopes(config, topology, size)
        batch = MicroBatch(samples=job.micro_batch, recomputes=job.recompute)
        memory = rank_memory(job.workload.model, config, scopes, batch, job.workload.states, overheads_of(job.cluster))
        return memory.total_bytes <= limit_bytes

    doubled = (job.cluster.num_nodes << doublings for doublings in range(1, _MAX_DOUBLINGS + 1))
    found = next((num_nodes for num_nodes in doubled if fits(num_nodes)), None)
    if found is None:
        return "shorten the samples, as more nodes do not help"
    least = found
    if not job.cluster.nodes_per_switch:  # which other numbers may not be a multiple of
        least = bisect.bisect_left(range(found), True, lo=found // 2 + 1, key=fits)
    samples = job.cluster.ranks_per_node * job.micro_batch
    for num_nodes in range(least, found + 1):
        if job.workload.global_batch % (num_nodes * samples) == 0:
            return f"use {num_nodes} nodes"
    return f"use {least} nodes with a multiple of {least * samples} samples a step"
