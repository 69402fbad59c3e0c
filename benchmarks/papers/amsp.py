"""The planner of AMSP: the cheapest sharding factors that fit into memory.

The cost is the sum of all communication times.
This project's solver (`planner.solver`) simulates steps instead; both are compared with the published choices.
Memory: ``2 F/s_p + 2 F/s_g + 12 F/s_os`` and activations, for F parameters with factors s. Objective:

- T_p: every module is gathered twice and reduced once in each micro-step, over s_p ranks.
- T_g: where s_g > s_p, buckets are reduced over s_g/s_p ranks in every micro-step but the last.
- T_os0: buckets are reduced over the ranks with the same parameters.
- T_os1: stepped parameters are broadcast among the s_os/s_p ranks that have updated them.

Pure.

Source:
    AMSP (arXiv:2311.00257v2), formulas A1 to A13 and constraints (2) to (7) of section V-B.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mics_strategy.comm.route import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from mics_strategy.comm.traffic import StageTraffic
from mics_strategy.errors import ConfigError, NoFeasiblePlan
from mics_strategy.planner.comm_time import INTER_NODE, INTRA_NODE, CommTime
from mics_strategy.planner.memory import MicroBatch, activation_bytes
from mics_strategy.planner.space import Space, scoped_configs
from mics_strategy.topology import Axis

if TYPE_CHECKING:
    from mics_strategy.planner.cluster import Cluster
    from mics_strategy.planner.workload import Workload

BUCKET_BYTES = 512 * 2**20  # of InternEvo, AMSP's engine: reduce_bucket_size
_EQUAL = 0.01  # share by which costs count as equal; the model of links is far less exact
_MIN_MODULE_NUMEL = 100_000  # smaller parameters belong to the module before them


@dataclass(frozen=True, slots=True, kw_only=True)
class AmspPoint:
    """Sharding factors with their price.

    Attributes:
        params: Ranks of the parameters.
        grads: Ranks of the gradients.
        optimizer: Ranks of the optimizer states.
        comm_s: Seconds of all collectives of a step, one after the other.
        memory_bytes: Bytes of a rank.
    """

    params: int
    grads: int
    optimizer: int
    comm_s: float
    memory_bytes: float


def amsp_factors(cluster: Cluster) -> Iterator[tuple[int, int, int]]:
    """Factors of parameters, gradients and optimizer states.

    They ascend, and that of gradients is one of the others, by formulas 3 and 4 and section IV-C3. `allowed_degrees`
    keeps the rules of formulas 5 to 7.
    """
    for scoped in scoped_configs(Space(has_secondary=False), cluster):
        params, grads, optimizer = scoped.scopes.params, scoped.scopes.grads, scoped.scopes.optimizer
        if params <= grads <= optimizer and grads in (params, optimizer):
            yield params, grads, optimizer


def amsp_points(workload: Workload, cluster: Cluster) -> list[AmspPoint]:
    """All factors that AMSP's constraints (3) to (7) allow, cheapest first.

    Args:
        workload: Training with a stated micro-batch and recomputation.
        cluster: Cluster.

    Raises:
        ConfigError: The micro-batch or the recomputation is left to the planner.
    """
    if isinstance(workload.micro_batch, str) or isinstance(workload.recompute, str):
        raise ConfigError(
            f"`micro_batch={workload.micro_batch!r}` and `recompute={workload.recompute!r}`: AMSP's planner takes both "
            "as given. State them."
        )
    num_micro_steps = workload.global_batch // (workload.micro_batch * cluster.world_size)
    batch = MicroBatch(samples=workload.micro_batch, recomputes=workload.recompute)
    activations = sum(activation_bytes(workload.model.units, batch).values())
    modules = [p.numel for u in workload.model.units for p in u.parameters if p.numel >= _MIN_MODULE_NUMEL]
    points = []
    for factors in amsp_factors(cluster):
        states = workload.model.numel * (2 / factors[0] + 2 / factors[1] + 12 / factors[2])
        points.append(
            AmspPoint(
                params=factors[0],
                grads=factors[1],
                optimizer=factors[2],
                comm_s=_comm_seconds(factors, modules, num_micro_steps, cluster),
                memory_bytes=states + activations,
            )
        )
    return sorted(points, key=lambda point: (round(point.comm_s, 6), point.memory_bytes))


def amsp_choice(workload: Workload, cluster: Cluster) -> AmspPoint:
    """The cheapest factors that fit.

    Of those that cost as much within `_EQUAL`, the one with the least memory.

    Raises:
        ConfigError: The micro-batch or the recomputation is left to the planner.
        NoFeasiblePlan: Nothing fits.
    """
    points = amsp_points(workload, cluster)
    fitting = [point for point in points if point.memory_bytes <= cluster.device.memory_bytes]
    if fitting:
        equal = [point for point in fitting if point.comm_s <= fitting[0].comm_s * (1 + _EQUAL)]
        return min(equal, key=lambda point: point.memory_bytes)
    smallest = min(points, key=lambda point: point.memory_bytes)
    raise NoFeasiblePlan(
        f"No factors fit {cluster.device.memory_bytes / 1e9:.1f} GB on a rank: the smallest need "
        f"{smallest.memory_bytes / 1e9:.1f} GB. Use more nodes, a smaller micro-batch, or recomputation."
    )


def _comm_seconds(factors: tuple[int, int, int], modules: list[int], num_micro_steps: int, cluster: Cluster) -> float:
    """The objective: T_p + T_g + T_os0 + T_os1."""
    params, grads, optimizer = factors
    model_bytes = 2 * sum(modules)
    total_s = 0.0
    if params > 1:
        group = _Group(cluster, 1, params)
        total_s += num_micro_steps * sum(
            2 * group.seconds(ALL_GATHER, 2 * numel) + group.seconds(REDUCE_SCATTER, 2 * numel) for numel in modules
        )
    num_buckets = model_bytes / (BUCKET_BYTES * params)
    if grads > params:
        all_reduce_s = _Group(cluster, params, grads).seconds(ALL_REDUCE, BUCKET_BYTES)
        total_s += (num_micro_steps - 1) * num_buckets * all_reduce_s
    if cluster.world_size > params:
        total_s += num_buckets * _Group(cluster, params, cluster.world_size).seconds(ALL_REDUCE, BUCKET_BYTES)
    if optimizer > params:
        ranks = optimizer // params
        # A broadcast sends its bytes once over each link, as an all-gather of p / (p - 1) times as many does.
        full_bytes = round(model_bytes / optimizer * ranks / (ranks - 1))
        total_s += ranks * _Group(cluster, params, optimizer).seconds(ALL_GATHER, full_bytes)
    return total_s


class _Group:
    """The ranks that a scope of `outer` ranks has beyond one of `inner`.

    Args:
        cluster: Cluster.
        inner: Ranks of the smaller scope.
        outer: Ranks of the larger one.
    """

    def __init__(self, cluster: Cluster, inner: int, outer: int) -> None:
        per_node = cluster.ranks_per_node
        in_node = min(outer, per_node) // min(inner, per_node)
        nodes = max(1, outer // per_node) // max(1, inner // per_node)
        axes = (Axis(name=INTRA_NODE, size=in_node, stride=1), Axis(name=INTER_NODE, size=nodes, stride=in_node))
        self._size = in_node * nodes
        self._name = "+".join(axis.name for axis in axes if axis.size > 1)
        self._comm_time = CommTime(cluster, axes)

    def seconds(self, collective: str, full_bytes: int) -> float:
        """Seconds of a collective in one stage."""
        return self._comm_time.of(StageTraffic(collective, self._name, self._size, torch.bfloat16, full_bytes)).seconds
