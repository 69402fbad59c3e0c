"""Choice of a preset for `auto`, by trained parameters, memory and traffic.

PaRO's rules for the share of trained parameters leave a set of presets, as far as the rules follow from PaRO's own
principles. Of those that fit into memory, the preset with the shortest communication time is chosen, on links of one
typical ratio of speeds. A planner that knows the cluster's own speeds can do better.

Pure.

Source:
    PaRO (arXiv:2310.06003) section 3.1.3 and table 1. Where its table marks a triple that its principles exclude (ING,
    GNG and GIG with many trained parameters), or omits one that they allow (III), the principles count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mics_strategy.config import ShardConfig
from mics_strategy.planner.buffers import EngineBuffers
from mics_strategy.planner.cost import ParameterKind, StepTraffic, step_traffic
from mics_strategy.scopes import Scopes, resolve_scopes
from mics_strategy.text_table import text_table

if TYPE_CHECKING:
    from mics_strategy.planner.model import ModelDescription, ParameterShape
    from mics_strategy.topology import Topology

NUM_MICRO_STEPS = 2  # so that the traffic of every micro-step counts more than that of a step
STATES_SHARE = 0.6  # of a rank's memory; the rest is for activations
MANY_TRAINED = 1 / 6  # Adam's 12 bytes per trained parameter are then at least the 2 bytes per parameter
FEW_TRAINED = 1 / 32  # unsharded fp32 gradients take at most a sixteenth of the unsharded bf16 parameters
INSIDE_SPEED = 6  # of a rank's link inside its node over all links that leave the node: p4d.24xlarge, 300 and 50 GB/s

_TRIPLES = tuple(name.removeprefix("paro-") for name in ShardConfig.PRESETS if name.startswith("paro-"))
_ORDER = "nig"
_DEFAULT_DTYPE = torch.float32  # of parameters without one


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The model, and the memory for it.

    Attributes:
        model: Units with their parameters; what they compute is not used.
        memory_bytes: Bytes of memory of one rank.
    """

    model: ModelDescription
    memory_bytes: int

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters."""
        return self.model.numel

    @property
    def trained_share(self) -> float:
        """Share of trained parameters among all parameters, 0 to 1."""
        trained = sum(p.numel for unit in self.model.units for p in unit.parameters if p.is_trained)
        return trained / max(1, self.model.numel)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One preset with its traffic and memory.

    Attributes:
        preset: Name of the preset.
        scopes: Scopes of the preset in this job.
        traffic: Traffic of one optimizer step.
        states_bytes: Bytes of one rank's model states and of the engine's buffers.
    """

    preset: str
    scopes: Scopes
    traffic: StepTraffic
    states_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PresetChoice:
    """The chosen preset, and the reasons as text."""

    preset: str
    reasons: str


def candidate_presets(trained_share: float) -> tuple[tuple[str, ...], str]:
    """The scopes that PaRO's principles allow, and the reason.

    Each is a triple of letters for parameters, gradients and optimizer states.

    Args:
        trained_share: Share of trained parameters among all parameters, 0 to 1.
    """
    if trained_share <= FEW_TRAINED:
        return tuple(t for t in _TRIPLES if t[1] == "n"), "few parameters are trained: gradients are not sharded"
    if trained_share >= MANY_TRAINED:
        nested = tuple(t for t in _TRIPLES if _ORDER.index(t[0]) <= _ORDER.index(t[1]) <= _ORDER.index(t[2]))
        return nested, "many parameters are trained: parameters are sharded no finer than gradients"
    return _TRIPLES, "some parameters are trained: any order of scopes may be the fastest"


def choose_preset(config: ShardConfig, workload: Workload, topology: Topology, world_size: int) -> PresetChoice:
    """Choose the preset with the shortest communication time that fits into memory.

    Args:
        config: Configuration whose scopes are to be chosen; its other fields apply.
        workload: Model, and memory of a rank.
        topology: Ranks of a node.
        world_size: Ranks of the job.
    """
    triples, reason = candidate_presets(workload.trained_share)
    candidates: dict[tuple[int, int, int], Candidate] = {}
    for triple in triples:
        candidate = _price(f"paro-{triple}", config, workload, topology, world_size)
        scopes = candidate.scopes
        candidates.setdefault((scopes.params, scopes.grads, scopes.optimizer), candidate)
    limit = round(STATES_SHARE * workload.memory_bytes)
    fitting = [candidate for candidate in candidates.values() if candidate.states_bytes <= limit]
    chosen = (
        min(fitting, key=_cost) if fitting else min(candidates.values(), key=lambda candidate: candidate.states_bytes)
    )
    return PresetChoice(
        preset=chosen.preset, reasons=_explain(chosen, [*candidates.values()], workload, topology, reason)
    )


def _price(preset: str, config: ShardConfig, workload: Workload, topology: Topology, world_size: int) -> Candidate:
    scopes = resolve_scopes(with_scopes_of(preset, config), topology, world_size)
    return Candidate(
        preset=preset,
        scopes=scopes,
        traffic=step_traffic(parameter_kinds(workload.model, config), scopes, NUM_MICRO_STEPS),
        states_bytes=states_bytes(workload.model, config, scopes),
    )


def parameter_kinds(model: ModelDescription, config: ShardConfig) -> tuple[ParameterKind, ...]:
    """Parameters by dtype and whether they are trained."""
    numels: Counter[tuple[torch.dtype, bool]] = Counter()
    for parameter in (parameter for unit in model.units for parameter in unit.parameters):
        numels[_dtype_of(parameter), parameter.is_trained] += parameter.numel
    return tuple(
        ParameterKind(
            numel=numel,
            master_bytes=dtype.itemsize,
            param_bytes=config.param_dtype_of(dtype).itemsize,
            wire_bytes=config.wire_dtype_of(dtype).itemsize,
            is_trained=is_trained,
        )
        for (dtype, is_trained), numel in numels.items()
    )


def states_bytes(model: ModelDescription, config: ShardConfig, scopes: Scopes) -> int:
    """Bytes of one rank's model states with Adam, and of the engine's buffers.

    All that is not counted are activations and communicators.
    """
    buffers = EngineBuffers(model, config, scopes, _DEFAULT_DTYPE)
    return sum(buffers.bytes_by_purpose().values()) + buffers.pending_grad_bytes + buffers.moments_bytes


def _dtype_of(parameter: ParameterShape) -> torch.dtype:
    return parameter.dtype if isinstance(parameter.dtype, torch.dtype) else _DEFAULT_DTYPE


def with_scopes_of(preset: str, config: ShardConfig) -> ShardConfig:
    """`config` with the scopes of a preset."""
    scopes = ShardConfig.preset(preset)
    return config.replace(params=scopes.params, grads=scopes.grads, optimizer=scopes.optimizer)


def _cost(candidate: Candidate) -> tuple[float, int]:
    """Time of the traffic, in bytes on inter-node links; then memory, for equal times."""
    traffic = candidate.traffic
    return traffic.between_nodes_bytes + traffic.inside_node_bytes / INSIDE_SPEED, candidate.states_bytes


def _explain(
    chosen: Candidate, candidates: Sequence[Candidate], workload: Workload, topology: Topology, reason: str
) -> str:
    limit = STATES_SHARE * workload.memory_bytes
    world_size = chosen.scopes.world_size
    lines = [
        f"mics_strategy chose the scopes of `{chosen.preset}`: {workload.trained_share:.2%} of "
        f"{workload.num_parameters:,} parameters are trained, on {world_size // topology.ranks_per_node} nodes of "
        f"{topology.ranks_per_node} ranks.",
        f"{reason[0].upper()}{reason[1:]}. Of the presets whose states and buffers take at most {limit / 1e9:.3g} GB "
        f"({STATES_SHARE:.0%} of a rank's {workload.memory_bytes / 1e9:.3g} GB), it has the shortest communication "
        f"time per step of {NUM_MICRO_STEPS} micro-steps, if a rank's link inside its node is {INSIDE_SPEED} times as "
        "fast as all links that leave the node.",
    ]
    rows = [("preset", "P/G/OS", "GB between nodes", "GB inside, per rank", "GB of states, per rank", "")]
    for candidate in candidates:
        scopes, traffic = candidate.scopes, candidate.traffic
        rows.append(
            (
                candidate.preset,
                f"{scopes.params}/{scopes.grads}/{scopes.optimizer}",
                f"{traffic.between_nodes_bytes / 1e9:.3g}",
                f"{traffic.inside_node_bytes / 1e9:.3g}",
                f"{candidate.states_bytes / 1e9:.3g}",
                _mark(is_chosen=candidate is chosen, is_too_large=candidate.states_bytes > limit),
            )
        )
    lines += text_table(rows, num_left=len(rows[0]))
    return "\n".join(lines)


def _mark(*, is_chosen: bool, is_too_large: bool) -> str:
    if is_chosen:
        return "chosen: the smallest, though too large" if is_too_large else "chosen"
    return "too large" if is_too_large else ""
