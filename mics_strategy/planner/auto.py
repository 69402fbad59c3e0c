"""Resolution of ``"auto"`` when a job starts: its scopes, or its partition.

A partition is the fewest ranks whose states and buffers fit; scopes are those of `scope_search`.

Activations are unknown when a model is sharded; a stated or an assumed part of the memory is left to them.

Pure. All results are equal on ranks with equal arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mics_strategy.config import ShardConfig
from mics_strategy.errors import ConfigError, NoFeasiblePlan
from mics_strategy.mesh_axis import allowed_degrees
from mics_strategy.planner.memory import MicroBatch, Overheads, RankMemory, rank_memory
from mics_strategy.planner.model import ModelDescription
from mics_strategy.scopes import Scopes, resolve_scopes
from mics_strategy.topology import Topology

ACTIVATIONS_SHARE = 0.25  # of a rank's memory, where `activation_bytes` does not state them. Assumed.
MASTER_DTYPE = torch.float32  # of parameters without a dtype of their own


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
    """A configuration with its price.

    Attributes:
        config: Configuration without ``"auto"`` scopes or partition.
        scopes: Its ranks and axes.
        memory: Memory of a rank without activations.
        seconds: Seconds of a step's collectives and of the update, one after another; 0 where nobody asks.
    """

    config: ShardConfig
    scopes: Scopes
    memory: RankMemory
    seconds: float = 0.0


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
        # Loaded where scopes are chosen alone, with clusters and times of collectives.
        from mics_strategy.planner.scope_search import choose_scopes, job_cluster

        return choose_scopes(config, job, job_cluster(config, job))
    return choose_partition(config, job) if config.has_auto_partition else AutoChoice(config=config)


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
        candidates.append(Candidate(config=sized, scopes=scopes, memory=memory))
        if memory.total_bytes <= limit_bytes:
            break
    chosen = candidates[-1]
    if chosen.memory.total_bytes > limit_bytes:
        check_states(candidates, job)
        chosen = min(candidates, key=lambda candidate: candidate.memory.total_bytes)
    sized = chosen.config
    summary = f"partition_size={sized.partition_size}: {needs(chosen)}, of {budget(config, job)}."
    if chosen.memory.total_bytes > limit_bytes:
        summary += " No size leaves as much to activations."
    reasons = "" if sized.partition_size == node else f"mics_strategy chose {summary}"
    return AutoChoice(config=sized, summary=summary, reasons=reasons)


def check_states(candidates: Sequence[Candidate], job: AutoJob) -> None:
    """Raise `NoFeasiblePlan` where not even states and buffers fit."""
    smallest = min(candidates, key=lambda candidate: candidate.memory.states_bytes)
    over_bytes = smallest.memory.states_bytes - job.memory_bytes
    if over_bytes > 0:
        scopes, param_dtype = smallest.scopes, smallest.config.param_dtype_of(MASTER_DTYPE)
        narrower = ", or `param_dtype='bfloat16'`" if param_dtype == MASTER_DTYPE else ""
        raise NoFeasiblePlan(
            f"The model does not fit into the {job.memory_bytes / 1e9:.3g} GB of a rank: the smallest scopes, "
            f"{scopes.phrase} of {job.world_size} ranks, need {smallest.memory.states_bytes / 1e9:.3g} GB for states "
            f"and buffers, {over_bytes / 1e9:.3g} GB too many. Use more nodes{narrower}; or state numbers of ranks, to "
            "try nevertheless."
        )


def needs(candidate: Candidate) -> str:
    """What a candidate needs, as text."""
    return f"states, buffers and communicators need {candidate.memory.total_bytes / 1e9:.3g} GB"


def budget(config: ShardConfig, job: AutoJob) -> str:
    """The memory of a rank as text."""
    limit_bytes = job.limit_bytes(config)
    activations = (job.memory_bytes - limit_bytes) / 1e9
    origin = "stated" if isinstance(config.activation_bytes, int) else f"{ACTIVATIONS_SHARE:.0%} is assumed"
    return (
        f"{limit_bytes / 1e9:.3g} GB ({job.memory_bytes / 1e9:.3g} GB of a rank, less {activations:.3g} GB for "
        f"activations: {origin})"
    )
