"""Time of the collectives of one role, of all units together.

Sharded states of many scopes share collectives: two configurations whose optimizer states have the same scope send the
same reductions. So times are kept by role and ranks, and a solver can ask for thousands of configurations.

Pure.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence

import torch

from mics_strategy.comm.route import SizedRoutes
from mics_strategy.comm.traffic import StageTraffic, all_gather_traffic, all_reduce_traffic, reduce_scatter_traffic
from mics_strategy.engine.plan import BucketPlan
from mics_strategy.engine.schedule import full_numel
from mics_strategy.planner.cluster import Cluster
from mics_strategy.planner.comm_time import CommTime
from mics_strategy.scopes import GATHERS, Scopes

Buckets = tuple[BucketPlan, ...]  # of one unit


class RoleTimes:
    """Seconds that each link carries the collectives of one of `scopes.ROLES`.

    Every answer holds for one model and its dtypes; a second model needs an object of its own.

    Args:
        cluster: Links.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._seconds: dict[object, dict[str, float]] = {}

    def of_all(self, role: str, scopes: Scopes, counts: Mapping[Buckets, int]) -> dict[str, float]:
        """Seconds by link of the collectives of all units, each once; see `bucket_counts`."""
        return self._of(role, scopes, counts, "all")

    def of_one(self, role: str, scopes: Scopes, counts: Mapping[Buckets, int]) -> dict[str, float]:
        """As `of_all`, for the one unit that nothing can hide."""
        return self._of(role, scopes, counts, "one")

    def _of(self, role: str, scopes: Scopes, counts: Mapping[Buckets, int], which: str) -> dict[str, float]:
        axes = tuple((axis.size, axis.stride) for axis in scopes.span_of(role).axes)
        if not axes:
            return {}
        key = (which, role, axes, scopes.optimizer, scopes.grads > 1, scopes.codecs, scopes.has_secondary)
        if key not in self._seconds:
            seconds: dict[str, float] = {}
            comm_time = CommTime(self._cluster, scopes.axes)
            if (routes := scopes.routes(role)) is not None:
                for buckets, count in counts.items():
                    for stage in _stages(role, buckets, scopes, routes):
                        time = comm_time.of(stage)
                        seconds[time.link] = seconds.get(time.link, 0.0) + count * time.seconds
            self._seconds[key] = seconds
        return self._seconds[key]


def bucket_counts(kinds: Sequence[str], buckets_by_kind: Mapping[str, Buckets]) -> collections.Counter[Buckets]:
    """Number of units with the same buckets.

    Args:
        kinds: Kind of each unit.
        buckets_by_kind: Buckets of each kind.
    """
    counts: collections.Counter[Buckets] = collections.Counter()
    for kind, count in collections.Counter(kinds).items():
        counts[buckets_by_kind[kind]] += count
    return counts


def _stages(role: str, buckets: Sequence[BucketPlan], scopes: Scopes, routes: SizedRoutes) -> list[StageTraffic]:
    """Stages of the collectives of a role, in a step that is not the first."""
    stages: list[StageTraffic] = []
    for bucket in buckets:
        if not bucket.trainable and not _gathers_frozen(role, scopes):
            continue
        dtype: torch.dtype = bucket.param_dtype if role in GATHERS else bucket.wire_dtype
        numel = full_numel(role, bucket.layout, scopes)
        route = routes.for_bytes(numel * dtype.itemsize)
        if role in GATHERS:
            stages += all_gather_traffic(route, numel, dtype)
        elif role == "second_hop_all_reduce":
            stages += all_reduce_traffic(route, numel, dtype, bucket.sum_dtype)
        else:
            stages += reduce_scatter_traffic(route, numel, dtype)
    return stages


def _gathers_frozen(role: str, scopes: Scopes) -> bool:
    """Whether a role gathers parameters that no step changes.

    Once the secondary copy holds them, they are gathered from it alone.
    """
    return role == "secondary_all_gather" or (role == "param_all_gather" and not scopes.has_secondary)
