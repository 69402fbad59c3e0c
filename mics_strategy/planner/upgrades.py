"""What to buy next: the same training, planned again on larger clusters.

They have a faster network, more memory, or more nodes.

Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from mics_strategy.errors import ConfigError, NoFeasiblePlan
from mics_strategy.planner.choice import Choice, plan
from mics_strategy.planner.cluster import Cluster
from mics_strategy.planner.space import Space
from mics_strategy.planner.workload import Workload

FACTOR = 2  # by which each of the three grows


@dataclass(frozen=True, slots=True, kw_only=True)
class Upgrade:
    """One change of the cluster, with the answer for it.

    Attributes:
        name: Name of the change.
        choice: Answer of the planner; None where there is none.
        reason: Reason why there is none; empty where there is one.
    """

    name: str
    choice: Choice | None = None
    reason: str = ""

    def speedup(self, before: Choice) -> float | None:
        """Samples per second in times of those before; None where nothing fits."""
        return None if self.choice is None else self.choice.step.samples_per_s / before.step.samples_per_s


def upgrades(workload: Workload, cluster: Cluster, space: Space) -> tuple[Upgrade, ...]:
    """The answers for each change alone. The batch stays the same.

    Cost:
        Time: that of `plan` for each change.
    """
    return tuple(_upgrade(name, workload, change, space) for name, change in _changes(cluster))


def _changes(cluster: Cluster) -> Iterator[tuple[str, Callable[[], Cluster]]]:
    def faster(link: Any) -> Any:
        return dataclasses.replace(link, bytes_per_s=FACTOR * link.bytes_per_s)

    if cluster.num_nodes > 1:
        switch = None if cluster.inter_switch is None else faster(cluster.inter_switch)
        links = {"inter_node": faster(cluster.inter_node), "inter_switch": switch, "measured_stages": ()}
        yield f"inter-node links {FACTOR} times as fast", partial(dataclasses.replace, cluster, **links)
    device = dataclasses.replace(cluster.device, memory_bytes=FACTOR * cluster.device.memory_bytes)
    yield f"{FACTOR} times the memory", partial(dataclasses.replace, cluster, device=device)
    yield f"{FACTOR} times the nodes", partial(cluster.with_nodes, FACTOR * cluster.num_nodes)


def _upgrade(name: str, workload: Workload, change: Callable[[], Cluster], space: Space) -> Upgrade:
    try:
        return Upgrade(name=name, choice=plan(workload, change(), space))
    except (ConfigError, NoFeasiblePlan) as error:  # the answer for this change
        return Upgrade(name=name, reason=str(error))
