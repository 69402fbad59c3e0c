"""Resolution of ``"auto"`` scopes when a job starts.

Scopes are chosen from the solver's space (`space`) by its memory model (`memory`) and its times of collectives
(`role_times`). What a model computes is unknown when it is sharded. So nothing counts as hidden by computation: of the
scopes that fit, those with the shortest collectives and update are chosen, one after another.

Pure. All results are equal on ranks with equal arguments.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from mics_strategy.config import ShardConfig
from mics_strategy.errors import ConfigError
from mics_strategy.planner.auto import MASTER_DTYPE, AutoChoice, AutoJob, Candidate, budget, check_states, needs
from mics_strategy.planner.calibration import check_calibration
from mics_strategy.planner.cluster import Cluster
from mics_strategy.planner.engine_memory import engine_memory
from mics_strategy.planner.memory import MicroBatch, Overheads, rank_memory
from mics_strategy.planner.role_times import RoleTimes, bucket_counts
from mics_strategy.planner.space import (
    EQUAL,
    SYSTEM_PRESETS,
    ScopedConfig,
    Space,
    complexity,
    preset_of,
    scoped_configs,
)
from mics_strategy.scopes import resolve_scopes
from mics_strategy.text_table import text_table

DEFAULT_CLUSTER = "p4d.24xlarge"  # whose links count where none are stated
ASSUMED_MICRO_STEPS = 2  # of an optimizer step, where none are stated
_NUM_FASTEST = 4  # candidates that are printed, beside the published systems


def choose_scopes(config: ShardConfig, job: AutoJob, links: Cluster) -> AutoChoice:
    """Choose the scopes whose collectives take the shortest time of those that fit.

    Times within 1 % count as equal; of equal scopes, those with the fewest mesh axes are chosen, then those with the
    least memory, where 1 % of a rank's counts as equal, and gradients over fewer ranks win. If no scopes leave enough
    memory for activations, the smallest are chosen.

    Args:
        config: Configuration with ``"auto"`` scopes; its other fields apply.
        job: Model, ranks and memory.
        links: Cluster whose links count; see `job_cluster`.

    Raises:
        ConfigError: The engine refuses the configuration with any scopes.
        NoFeasiblePlan: States and buffers do not fit into the memory with any scopes.

    Cost:
        Time: about 1 ms for each point of the space, of which there are about 100 for 4 nodes of 8.
    """
    candidates = price(config, job, links)
    limit_bytes = job.limit_bytes(config)
    fitting = [candidate for candidate in candidates if candidate.memory.total_bytes <= limit_bytes]
    if fitting:
        least_s = min(candidate.seconds for candidate in fitting)
        equal = [candidate for candidate in fitting if candidate.seconds <= (1 + EQUAL) * least_s]
        chosen = _plainest(equal, job.memory_bytes)
    else:
        check_states(candidates, job)
        chosen = min(candidates, key=lambda candidate: candidate.memory.total_bytes)
    scopes = chosen.scopes
    resolved = config.replace(
        params=scopes.params,
        grads=scopes.grads,
        optimizer=scopes.optimizer,
        secondary_params=chosen.config.secondary_params,
        **_without_hints(config),
    )
    summary = f"the fastest scopes that fit: {needs(chosen)}, of {budget(config, job)}."
    if not fitting:
        summary = f"the smallest scopes: {needs(chosen)}, more than {budget(config, job)}."
    return AutoChoice(config=resolved, summary=summary, reasons=_explain(chosen, candidates, config, job, links))


def _plainest(equal: Sequence[Candidate], memory_bytes: int) -> Candidate:
    """The candidate of equally fast ones with the fewest mesh axes, then with little memory and whole gradients.

    Memory that differs by less than `EQUAL` of a rank's decides nothing: sharding the few gradients of adapters saves
    less, and sends them in every micro-step.

    Source:
        Principle 3 of PaRO (arXiv:2310.06003): few trained parameters are better not sharded.
    """
    fewest = min(complexity(candidate.scopes) for candidate in equal)
    simple = [candidate for candidate in equal if complexity(candidate.scopes) == fewest]
    least_bytes = min(candidate.memory.total_bytes for candidate in simple)
    small = [c for c in simple if c.memory.total_bytes <= least_bytes + EQUAL * memory_bytes]
    return min(small, key=lambda c: (c.scopes.grads, c.memory.total_bytes))


def price(config: ShardConfig, job: AutoJob, links: Cluster) -> list[Candidate]:
    """All scopes that the engine accepts for a configuration, with their prices.

    Raises:
        ConfigError: It accepts none.
    """
    base = config.replace(secondary_params="none", params=1, grads=1, optimizer=1, **_without_hints(config))
    codecs = ((config.codec_of("weight_codec") or "none", config.codec_of("grad_codec") or "none"),)
    space = Space(codecs=codecs, has_secondary=config.secondary_params == "auto", base=base)
    times, candidates = RoleTimes(links), []
    overheads = Overheads.of(job.backend, links.device.communicator_bytes)
    update_s = links.device.adam_seconds(job.trained_numel, config.param_dtype_of(MASTER_DTYPE).itemsize)
    for scoped in scoped_configs(space, links):
        memory = rank_memory(job.model, scoped.config, scoped.scopes, MicroBatch(), overheads=overheads)
        comm_s = comm_seconds(scoped, job, num_micro_steps=_micro_steps(config), times=times)
        seconds = comm_s + update_s / scoped.scopes.optimizer
        candidates.append(Candidate(config=scoped.config, scopes=scoped.scopes, memory=memory, seconds=seconds))
    if not candidates:
        resolve_scopes(base.replace(params="world", grads="world", optimizer="world"), job.topology, job.world_size)
    return candidates


def comm_seconds(scoped: ScopedConfig, job: AutoJob, *, num_micro_steps: int, times: RoleTimes) -> float:
    """Seconds of the collectives of a step, one after another.

    Every unit is gathered for the forward and for the backward. The last ones of a forward stay in their slots, which
    is not counted.
    """
    buffers = engine_memory(job.model, scoped.config, scoped.scopes, MASTER_DTYPE)
    buckets = buffers.bucket_plans()
    counts_of_units = bucket_counts([unit.kind for unit in job.model.units], buckets)
    num_gathers = 2 * num_micro_steps
    num_first = 1 if scoped.scopes.has_secondary else num_gathers
    num_second_hops = num_micro_steps if scoped.config.second_hop == "micro_step" else 1
    counts = {
        "param_all_gather": num_first,
        "secondary_all_gather": num_gathers - num_first,
        "param_sync": 1,
        "grad_reduce_scatter": num_micro_steps,
        "second_hop_reduce_scatter": num_second_hops,
        "second_hop_all_reduce": num_second_hops,
    }
    return sum(
        count * sum(times.of_all(role, scoped.scopes, counts_of_units).values())
        for role, count in counts.items()
        if count
    )


def stated_cluster(config: ShardConfig) -> Cluster:
    """The cluster of a configuration: the stated one, or the default one.

    Raises:
        ConfigError: It does not exist, or its file states a field wrongly.
    """
    return Cluster.of(DEFAULT_CLUSTER if config.cluster == "auto" else config.cluster)


def job_cluster(config: ShardConfig, job: AutoJob) -> Cluster:
    """The stated or the default cluster, with the job's nodes, ranks and switches.

    The ranks of a node share its links to others. Where no links between switches are stated, they count as fast as
    those between nodes.

    Raises:
        ConfigError: The cluster does not exist, was calibrated as another job, or has other switches.
    """
    cluster, topology = stated_cluster(config), job.topology
    check_calibration(cluster, ranks_per_node=topology.ranks_per_node, backend=job.backend)
    num_nodes = job.world_size // topology.ranks_per_node
    switches = {count if count < num_nodes else 0 for count in (cluster.nodes_per_switch, topology.nodes_per_switch)}
    if cluster.nodes_per_switch and len(switches) > 1:
        raise ConfigError(
            f"`cluster={config.cluster!r}` has {cluster.nodes_per_switch} nodes under a switch, and the topology of "
            f"the job {topology.nodes_per_switch or 'no switches'}. Set "
            f"`topology={{'nodes_per_switch': {cluster.nodes_per_switch}}}`, or use another cluster."
        )
    share = cluster.ranks_per_node / topology.ranks_per_node
    slow = {
        name: dataclasses.replace(link, bytes_per_s=link.bytes_per_s * share)
        for name, link in (("inter_node", cluster.inter_node), ("inter_switch", cluster.inter_switch))
        if link is not None
    }
    return dataclasses.replace(
        cluster,
        ranks_per_node=topology.ranks_per_node,
        num_nodes=num_nodes,
        nodes_per_switch=topology.nodes_per_switch,
        inter_node=slow["inter_node"],
        inter_switch=slow.get("inter_switch", slow["inter_node"]) if topology.nodes_per_switch else None,
        backend=job.backend,
    )


def _micro_steps(config: ShardConfig) -> int:
    return config.micro_steps if isinstance(config.micro_steps, int) else ASSUMED_MICRO_STEPS


def _without_hints(config: ShardConfig) -> dict[str, str]:
    """Changes for a configuration whose scopes are chosen."""
    defaults = {"cluster": "auto", "micro_steps": "unknown"}
    return {name: default for name, default in defaults.items() if getattr(config, name) != default}


def _explain(
    chosen: Candidate, candidates: Sequence[Candidate], config: ShardConfig, job: AutoJob, links: Cluster
) -> str:
    scopes, limit_bytes = chosen.scopes, job.limit_bytes(config)
    numel = job.model.numel
    copy = f", a secondary copy over {scopes.secondary}" if scopes.has_secondary else ""
    stated = "" if isinstance(config.micro_steps, int) else ", which is assumed"
    origin = " (assumed: `cluster` states others)" if config.cluster == "auto" else ""
    fits = chosen.memory.total_bytes <= limit_bytes
    lines = [
        f"mics_strategy chose {scopes.phrase} ranks{copy}: {job.trained_numel / max(1, numel):.2%} of {numel:,} "
        f"parameters are trained, on {links.num_nodes} nodes of {links.ranks_per_node} ranks.",
        f"Memory: {needs(chosen)}, of {budget(config, job)}.",
        f"Time: collectives and Adam's update, one after another, for {_micro_steps(config)} micro-steps{stated}, on "
        f"the links of {links.name}{origin}."
        + ("" if fits else " No scopes leave as much memory to activations; these are the smallest."),
    ]
    rows = [("preset", "P/G/OS", "copy", "seconds", "GB", "")]
    for candidate in _printed(chosen, candidates, limit_bytes):
        found = candidate.scopes
        rows.append(
            (
                preset_of(found) or "",
                found.short,
                str(found.secondary) if found.has_secondary else "",
                f"{candidate.seconds:.3g}",
                f"{candidate.memory.total_bytes / 1e9:.3g}",
                "chosen" if candidate is chosen else _reason_against(candidate, chosen, limit_bytes),
            )
        )
    return "\n".join([*lines, *text_table(rows, num_left=3)])


def _printed(chosen: Candidate, candidates: Sequence[Candidate], limit_bytes: int) -> list[Candidate]:
    """The chosen scopes, the fastest that fit, and published systems, fastest first."""
    ordered = sorted(candidates, key=lambda candidate: (candidate.seconds, candidate.memory.total_bytes))
    fastest = [candidate for candidate in ordered if candidate.memory.total_bytes <= limit_bytes][:_NUM_FASTEST]
    printed = {id(candidate) for candidate in (chosen, *fastest)}
    return [c for c in ordered if id(c) in printed or preset_of(c.scopes) in SYSTEM_PRESETS]


def _reason_against(candidate: Candidate, chosen: Candidate, limit_bytes: int) -> str:
    over_bytes = candidate.memory.total_bytes - limit_bytes
    if over_bytes > 0:
        return f"{over_bytes / 1e9:.2g} GB too large"
    if candidate.seconds > (1 + EQUAL) * chosen.seconds:
        return f"{candidate.seconds / chosen.seconds:.2f} times as long" if chosen.seconds else "longer"
    if complexity(candidate.scopes) > complexity(chosen.scopes):
        return "as fast, but its ranks form more kinds of groups"
    more_bytes = candidate.memory.total_bytes - chosen.memory.total_bytes
    return f"as fast, but needs {more_bytes / 1e9:.2g} GB more" if more_bytes > 0 else "as fast, but sends more"
