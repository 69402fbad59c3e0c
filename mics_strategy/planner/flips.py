"""Whether the answer hangs on a figure that is not known well: latency of links, memory of communicators.

Datasheets state bandwidths, not latencies; those of the catalog are NCCL's own, and collectives over hundreds of ranks
hang on them. Memory of communicators depends on the topology and on the version of NCCL.

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
_NUM_FASTEST = 8  # scopes that are simulated again, beside those of the published systems


def flips(choice: Choice) -> Iterator[str]:
    """The latencies with which another choice would be faster by more than counts as equal, a sentence each.

    None where stages of collectives were measured.

    Cost:
        Time: 10 ms for each of about 30 simulations.
    """
    cluster = choice.step.job.cluster
    if cluster.measured_stages:
        return
    chosen, contenders = choice.solution.frontier[0], _contenders(choice)
    for factor in LATENCY_FACTORS:
        changed = _with_latency(cluster, factor)
        chosen_s = _seconds(chosen, changed)
        # With a greater latency no point becomes faster; with half of it, few do by more than a quarter.
        limit_s = max(chosen_s, 1.25 * choice.step.step_s if factor < 1 else 0.0)
        timed = [(_seconds(p, changed), n) for n, p in enumerate(contenders) if (p.step_s or limit_s) < limit_s]
        best_s, index = min(timed, default=(chosen_s, 0))
        if best_s * (1 + EQUAL) < chosen_s:
            yield (
                f"With {factor:g} times the latency ({changed.inter_node.latency_s * 1e6:.3g} us between nodes), "
                f"{_name(contenders[index])} would be {1 - best_s / chosen_s:.1%} faster than this choice. Measure it "
                "with `mics calibrate`."
            )


def communicators_decide(choice: Choice) -> Iterator[str]:
    """The fastest point that only the memory of communicators keeps out, if it beats the chosen one, as a sentence."""
    chosen, limit_bytes = choice.solution.frontier[0], choice.solution.limit_bytes
    chosen_s = choice.step.step_s
    kept_out = [
        point
        for point in choice.solution.too_large
        if point.bound_s * (1 + EQUAL) < chosen_s
        and point.memory.total_bytes - point.memory.by_kind["communicators"] <= limit_bytes
    ]
    kept_out = sorted(kept_out, key=lambda point: (point.bound_s, point.memory.total_bytes))[:_NUM_FASTEST]
    timed = [(step_seconds(point.job), index) for index, point in enumerate(kept_out)]
    best_s, index = min(timed, default=(chosen_s, 0))
    if best_s * (1 + EQUAL) < chosen_s:
        point = kept_out[index]
        over_gb = (point.memory.total_bytes - limit_bytes) / 1e9
        each_mb = chosen.job.cluster.device.communicator_bytes / 1e6
        yield (
            f"{_name(point)} would take {best_s:.4g} s, and is {over_gb:.1f} GB too large only because each "
            f"communicator counts with {each_mb:.0f} MB. Measure that with nvidia-smi, and state "
            "`--communicator-memory`."
        )


def _name(point: Point) -> str:
    return f"{point.job.scopes.short} with micro-batches of {point.job.micro_batch}"


def _contenders(choice: Choice) -> list[Point]:
    """The fastest point of each of the fastest scopes, and of the published systems."""
    fitting = [point for point in choice.solution.fitting if point.step_s is not None]
    fastest: dict[object, Point] = {}
    for point in sorted(fitting, key=lambda point: point.step_s or 0.0):
        scopes = point.job.scopes
        fastest.setdefault((scopes.short, scopes.secondary), point)
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
