"""What to buy next, and what to give up: the same training, planned again.

Larger clusters have a faster network, more memory, or more nodes. What is given up is exactness: of sums, of what is
sent, of optimizer states.

Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from mics_strategy.comm.codecs.format import Codec
from mics_strategy.errors import ConfigError, NoFeasiblePlan
from mics_strategy.planner.choice import Choice, fastest_of_systems, plan
from mics_strategy.planner.cluster import Cluster
from mics_strategy.planner.space import Space
from mics_strategy.planner.workload import Workload

FACTOR = 2  # by which each of the three grows
_INT8_STATE_BYTES = 2  # of an element: two moments of Adam in 8 bits each


@dataclass(frozen=True, slots=True, kw_only=True)
class Upgrade:
    """One change of the cluster or of the arithmetic, with the answer for it.

    Attributes:
        name: Name of the change.
        setting: Option of `ShardConfig`, or optimizer, that makes it; empty for a change of the cluster.
        choice: Answer of the planner; None where there is none.
        reason: Reason why there is none; empty where there is one.
    """

    name: str
    setting: str = ""
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


def concessions(choice: Choice, space: Space) -> tuple[Upgrade, ...]:
    """Changes of the arithmetic that make a step faster by more than predictions are unsure, fastest first.

    They are looked for among the chosen scopes and those of the published systems.

    Args:
        choice: Answer without them.
        space: Configurations that it was chosen from.

    Cost:
        Time: nothing where the step is as short as its computation, as far as predictions are sure; otherwise about
        half of that of `plan`.
    """
    job, step = choice.step.job, choice.step
    least_factor = 1 + step.certainty.interval
    points = (*choice.solution.fitting, *choice.solution.too_large)
    if step.step_s < least_factor * min((p.bound_s for p in points if p.bound_by == "compute"), default=0.0):
        return ()
    scopes = [job.scopes, *(point.job.scopes for _, point in fastest_of_systems(choice))]
    degrees = frozenset((s.params, s.grads, s.optimizer) for s in scopes)
    found = []
    for name, setting, changes, codecs in _concessions(choice, space):
        workload = dataclasses.replace(job.workload, **changes)
        tried = dataclasses.replace(space, codecs=codecs, degrees=degrees)
        try:
            brief = plan(workload, job.cluster, tried, is_brief=True)
            found.append(Upgrade(name=name, setting=setting, choice=brief))
        except NoFeasiblePlan:  # the chosen scopes fit, but for a codec's buffers
            continue
    helpful = [upgrade for upgrade in found if (upgrade.speedup(choice) or 0.0) > least_factor]
    return tuple(sorted(helpful, key=lambda upgrade: -(upgrade.speedup(choice) or 0.0)))


_Codecs = tuple[tuple[str | Codec, str | Codec], ...]


def _concessions(choice: Choice, space: Space) -> Iterator[tuple[str, str, dict[str, Any], _Codecs]]:
    """Names, settings, changes of the workload, and pairs of codecs."""
    workload = choice.step.job.workload
    if space.codecs == (("none", "none"),):
        yield "gradients sent in INT8", 'grad_codec="int8"', {}, (("none", "int8"),)
        both = "parameters and gradients sent in INT8"
        yield both, 'weight_codec="int8", grad_codec="int8"', {}, (("int8", "int8"),)
    if workload.reduce_dtype == "float32":
        changes: dict[str, Any] = {"reduce_dtype": "bfloat16"}
        yield "gradients sent and added in bfloat16", 'reduce_dtype="bfloat16"', changes, space.codecs
    if workload.optimizer_state_bytes > _INT8_STATE_BYTES:
        changes = {"optimizer_state_bytes": _INT8_STATE_BYTES}
        yield "Adam with states of 8 bits", "torchao.optim.AdamW8bit", changes, space.codecs


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
