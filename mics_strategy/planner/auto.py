"""Resolution of ``"auto"`` when a job starts: its scopes, or its partition.

Scopes are chosen from the solver's space (`space`) by its memory model (`memory`) and its times of collectives
(`role_times`). What a model computes is unknown when it is sharded. So nothing counts as hidden by computation: of the
scopes that fit, those with the shortest collectives and update are chosen, one after another.

A partition is the fewest ranks whose states and buffers fit.

Activations are unknown as well; a stated or an assumed part of the memory is left to them.

Pure. All results are equal on ranks with equal arguments.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mics_strategy.config import ShardConfig
from mics_strategy.errors import ConfigError, NoFeasiblePlan
from mics_strategy.mesh_axis import allowed_degrees
from mics_strategy.planner.calibration import check_calibration
from mics_strategy.planner.cluster import Cluster
from mics_strategy.planner.engine_memory import engine_memory
from mics_strategy.planner.memory import MicroBatch, Overheads, RankMemory, rank_memory
from mics_strategy.planner.model import ModelDescription
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
from mics_strategy.scopes import Scopes, resolve_scopes
from mics_strategy.text_table import text_table
from mics_strategy.topology import Topology

DEFAULT_CLUSTER = "p4d.24xlarge"  # whose links count where none are stated
ACTIVATIONS_SHARE = 0.25  # of a rank's memory, where `activation_bytes` does not state them. Assumed.
ASSUMED_MICRO_STEPS = 2  # of an optimizer step, where none are stated
_MASTER_DTYPE = torch.float32  # of parameters without a dtype of their own
_NUM_FASTEST = 4  # candidates that are printed, beside the published systems


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoJob:
    """What is known of a job when its model is sharded.

    Attributes:
        model: Parameters of each unit. What the units compute is not used, and their activations are left out.
        topology: Ranks of a node, and nodes of a switch.
        world_size: Ranks of the job.
        memory_bytes: Bytes of memory for the training on each rank, the smallest of all ranks.
        backend: Backend of collectives, "nccl" for GPUs or "gloo" for CPUs.
    """

    model: ModelDescription
    topology: Topology
    world_size: int
    memory_bytes: int
    backend: str = "nccl"

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", self.model.without_activations())

    @property
    def trained_numel(self) -> int:
        """Elements of the trained parameters."""
        return sum(p.numel for unit in self.model.units for p in unit.parameters if p.is_trained)

    def limit_bytes(self, config: ShardConfig) -> int:
        """Bytes of memory without those that are left to activations."""
        stated = config.activation_bytes
        activations = stated if isinstance(stated, int) else round(ACTIVATIONS_SHARE * self.memory_bytes)
        return self.memory_bytes - activations


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Scopes with their price.

    Attributes:
        scoped: Configuration, and its ranks and axes.
        memory: Memory of a rank without activations.
        seconds: Seconds of a step's collectives and of the update, one after another.
    """

    scoped: ScopedConfig
    memory: RankMemory
    seconds: float

    @property
    def scopes(self) -> Scopes:
        """Ranks and axes."""
        return self.scoped.scopes


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoChoice:
    """A configuration without ``"auto"`` scopes or partition.

    Attributes:
        config: Configuration.
        summary: Choice and its reason in one sentence, after "chose"; empty where nothing was ``"auto"``.
        reasons: Reasons as text; empty where nothing was ``"auto"``, or a partition is a node.
    """

    config: ShardConfig
    summary: str = ""
    reasons: str = ""


def choose(config: ShardConfig, job: AutoJob) -> AutoChoice:
    """Choose the scopes or the size of a partition, whichever is ``"auto"``.

    A configuration without ``"auto"`` is its own answer, without reasons.
    """
    if config.is_auto:
        return choose_scopes(config, job, job_cluster(config, job))
    return choose_partition(config, job) if config.has_auto_partition else AutoChoice(config=config)


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
        _check_states(candidates, job)
        chosen = min(candidates, key=lambda candidate: candidate.memory.total_bytes)
    scopes = chosen.scopes
    resolved = config.replace(
        params=scopes.params,
        grads=scopes.grads,
        optimizer=scopes.optimizer,
        secondary_params=chosen.scoped.config.secondary_params,
        **_without_hints(config),
    )
    summary = f"the fastest scopes that fit: {_needs(chosen)}, of {_budget(config, job)}."
    if not fitting:
        summary = f"the smallest scopes: {_needs(chosen)}, more than {_budget(config, job)}."
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
    update_s = links.device.adam_seconds(job.trained_numel, config.param_dtype_of(_MASTER_DTYPE).itemsize)
    for scoped in scoped_configs(space, links):
        memory = rank_memory(job.model, scoped.config, scoped.scopes, MicroBatch(), overheads=overheads)
        comm_s = comm_seconds(scoped, job, num_micro_steps=_micro_steps(config), times=times)
        seconds = comm_s + update_s / scoped.scopes.optimizer
        candidates.append(Candidate(scoped=scoped, memory=memory, seconds=seconds))
    if not candidates:
        resolve_scopes(base.replace(params="world", grads="world", optimizer="world"), job.topology, job.world_size)
    return candidates


def comm_seconds(scoped: ScopedConfig, job: AutoJob, *, num_micro_steps: int, times: RoleTimes) -> float:
    """Seconds of the collectives of a step, one after another.

    Every unit is gathered for the forward and for the backward. The last ones of a forward stay in their slots, which
    is not counted.
    """
    buffers = engine_memory(job.model, scoped.config, scoped.scopes, _MASTER_DTYPE)
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


def choose_partition(config: ShardConfig, job: AutoJob) -> AutoChoice:
    """Choose the fewest ranks of a partition with which a rank's states fit.

    On CPUs, whose memory the ranks of a node share, a partition is a node or more. If no size leaves enough memory for
    activations, the one with the least memory is chosen.

    Args:
        config: Configuration with ``partition_size="auto"``.
        job: Model, ranks and memory.

    Raises:
        ConfigError: The engine refuses the configuration with a node as partition.
        NoFeasiblePlan: States and buffers do not fit into the memory with any size.
    """
    node, limit_bytes = job.topology.ranks_per_node, job.limit_bytes(config)
    resolve_scopes(config, job.topology, job.world_size)  # with a node
    fewest = 1 if job.backend == "nccl" else node
    candidates: list[Candidate] = []
    for ranks in (degree for degree in allowed_degrees(job.topology, job.world_size) if degree >= fewest):
        sized = config.replace(partition_size=ranks)
        try:
            scopes = resolve_scopes(sized, job.topology, job.world_size)
        except ConfigError:  # not a size of this configuration: here, scopes that do not nest, or an idle codec
            continue
        memory = rank_memory(job.model, sized, scopes, MicroBatch(), overheads=Overheads.of(job.backend))
        candidates.append(Candidate(scoped=ScopedConfig(config=sized, scopes=scopes), memory=memory, seconds=0.0))
        if memory.total_bytes <= limit_bytes:
            break
    chosen = candidates[-1]
    if chosen.memory.total_bytes > limit_bytes:
        _check_states(candidates, job)
        chosen = min(candidates, key=lambda candidate: candidate.memory.total_bytes)
    sized = chosen.scoped.config
    summary = f"partition_size={sized.partition_size}: {_needs(chosen)}, of {_budget(config, job)}."
    if chosen.memory.total_bytes > limit_bytes:
        summary += " No size leaves as much to activations."
    reasons = "" if sized.partition_size == node else f"mics_strategy chose {summary}"
    return AutoChoice(config=sized, summary=summary, reasons=reasons)


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


def _check_states(candidates: Sequence[Candidate], job: AutoJob) -> None:
    """Raise `NoFeasiblePlan` where not even states and buffers fit."""
    smallest = min(candidates, key=lambda candidate: candidate.memory.states_bytes)
    over_bytes = smallest.memory.states_bytes - job.memory_bytes
    if over_bytes > 0:
        scopes, param_dtype = smallest.scopes, smallest.scoped.config.param_dtype_of(_MASTER_DTYPE)
        narrower = ", or `param_dtype='bfloat16'`" if param_dtype == _MASTER_DTYPE else ""
        raise NoFeasiblePlan(
            f"The model does not fit into the {job.memory_bytes / 1e9:.3g} GB of a rank: the smallest scopes, "
            f"{scopes.phrase} of {job.world_size} ranks, need {smallest.memory.states_bytes / 1e9:.3g} GB for states "
            f"and buffers, {over_bytes / 1e9:.3g} GB too many. Use more nodes{narrower}; or state numbers of ranks, to "
            "try nevertheless."
        )


def _needs(candidate: Candidate) -> str:
    return f"states, buffers and communicators need {candidate.memory.total_bytes / 1e9:.3g} GB"


def _budget(config: ShardConfig, job: AutoJob) -> str:
    """The memory of a rank as text."""
    limit_bytes = job.limit_bytes(config)
    activations = (job.memory_bytes - limit_bytes) / 1e9
    origin = "stated" if isinstance(config.activation_bytes, int) else f"{ACTIVATIONS_SHARE:.0%} is assumed"
    return (
        f"{limit_bytes / 1e9:.3g} GB ({job.memory_bytes / 1e9:.3g} GB of a rank, less {activations:.3g} GB for "
        f"activations: {origin})"
    )


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
        f"Memory: {_needs(chosen)}, of {_budget(config, job)}.",
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
