"""Whether the answer would be another one with links of another latency.

Datasheets state bandwidths, not latencies; those of the catalog are NCCL's own, and collectives over hundreds of ranks
hang on them.

Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from mics_strategy.planner.choice import Choice, fastest_of_systems
from mics_strategy.planner.cluster import Cluster
from mics_strategy.planner.simulator import step_seconds
from mics_strategy.planner.solver import Point
from mics_strategy.planner.space import EQUAL

LATENCY_FACTORS = (0.5, 2.0)  # a plausible range. Assumed.
_NUM_FASTEST = 12  # scopes that are simulated again, beside those of the published systems


def flips(choice: Choice) -> Iterator[str]:
    """The latencies with which another choice would be faster by more than counts as equal, a sentence each.

    None where stages of collectives were measured.

    Cost:
        Time: 10 ms for each of about 50 simulations.
    """
    cluster = choice.step.job.cluster
    if cluster.measured_stages:
        return
    chosen, contenders = choice.solution.frontier[0], _contenders(choice)
    for factor in LATENCY_FACTORS:
        changed = _with_latency(cluster, factor)
        chosen_s, *others = (_seconds(point, changed) for point in (chosen, *contenders))
        best_s, index = min((seconds, index) for index, seconds in enumerate(others))
        if best_s * (1 + EQUAL) < chosen_s:
            yield (
                f"With {factor:g} times the latency ({changed.inter_node.latency_s * 1e6:.3g} us between nodes), "
                f"{_name(contenders[index])} would be {1 - best_s / chosen_s:.1%} faster than this choice. Measure it "
                "with `mics calibrate`."
            )


def _name(point: Point) -> str:
    scopes = point.job.scopes
    return f"{scopes.params}/{scopes.grads}/{scopes.optimizer} with micro-batches of {point.job.micro_batch}"


def _contenders(choice: Choice) -> list[Point]:
    """The fastest point of each of the fastest scopes, and of the published systems."""
    fitting = [point for point in choice.solution.fitting if point.step_s is not None]
    fastest: dict[object, Point] = {}
    for point in sorted(fitting, key=lambda point: point.step_s or 0.0):
        scopes = point.job.scopes
        fastest.setdefault((scopes.params, scopes.grads, scopes.optimizer, scopes.secondary), point)
    systems = [point for _, point in fastest_of_systems(choice) if point.step_s is not None]
    return list({id(point): point for point in (*[*fastest.values()][:_NUM_FASTEST], *systems)}.values())


def _seconds(point: Point, cluster: Cluster) -> float:
    return step_seconds(dataclasses.replace(point.job, cluster=cluster))


def _with_latency(cluster: Cluster, factor: float) -> Cluster:
    links = {
        name: dataclasses.replace(link, latency_s=factor * link.latency_s)
        for name in ("intra_node", "inter_node", "inter_switch")
        if (link := getattr(cluster, name)) is not None
    }
    return dataclasses.replace(cluster, **links)
