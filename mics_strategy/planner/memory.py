"""Memory of one rank, by purpose, from a description of its model.

The engine allocates all its memory before training, as its `MemoryPlan` says, which needs no modules, tensors or
groups, so that a planner can ask thousands of times. Here come what the engine does not allocate: activations, states
of the optimizer, and what stands outside torch's allocator.

Activations grow linearly with the micro-batch. With recomputation the inputs of all layers are kept, and one layer's
activations at a time; embeddings and head are not recomputed.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from mics_strategy.comm.scratch import COMMUNICATOR_BYTES
from mics_strategy.config import ShardConfig
from mics_strategy.engine.memory_plan import MemoryPlan
from mics_strategy.errors import ConfigError
from mics_strategy.planner.engine_memory import engine_memory
from mics_strategy.planner.model import ModelDescription, UnitModel
from mics_strategy.planner.recompute import Recompute, kept_and_made_bytes, recomputed_units
from mics_strategy.scopes import Scopes

# Context of CUDA, and the workspace of cuBLAS. Assumed.
CONTEXT_BYTES = 600_000_000
# Of what torch's allocator allocates in a step: activations and gradients of autograd. Assumed.
FRAGMENTATION_SHARE = 0.05
NOT_STATES = (  # purposes that depend on a batch, or are assumed
    *("activations of layers", "activations outside layers", "temporary activations"),
    *("communicators", "context", "fragmentation"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """What one forward and backward computes.

    Attributes:
        samples: Samples of the micro-batch.
        recomputes: Which activations of layers are recomputed in the backward.
    """

    samples: int = 1
    recomputes: Recompute = False

    def __post_init__(self) -> None:
        if isinstance(self.samples, bool) or not isinstance(self.samples, int) or self.samples < 1:
            raise ConfigError(f"`samples={self.samples!r}` of a micro-batch is not a number. Use 1 or more.")


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFormat:
    """Dtypes of model states.

    Attributes:
        parameter_dtype: Dtype of the parameters that the optimizer updates.
        optimizer_bytes: Bytes of optimizer states for each element; ``"adam"`` is two moments in the dtype of each
            parameter, 8 bytes in fp32.
    """

    parameter_dtype: torch.dtype = torch.float32
    optimizer_bytes: int | str = "adam"


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """Memory of a GPU that neither torch nor the engine allocates.

    Attributes:
        communicator_bytes: Bytes of each communicator of NCCL.
        context_bytes: Bytes of the CUDA context.
    """

    communicator_bytes: int = COMMUNICATOR_BYTES
    context_bytes: int = CONTEXT_BYTES

    @classmethod
    def of(cls, backend: str, communicator_bytes: int = COMMUNICATOR_BYTES) -> Overheads:
        """Those of a backend of collectives, "nccl", or "gloo", which has none."""
        is_gpu = backend == "nccl"
        return cls(communicator_bytes=communicator_bytes) if is_gpu else cls(communicator_bytes=0, context_bytes=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Memory of one rank.

    Attributes:
        by_kind: Bytes by purpose. Those of the engine have the names in `Sharded.memory`.
    """

    by_kind: Mapping[str, int]

    @property
    def states_bytes(self) -> int:
        """Bytes of model states and of the engine's buffers, without assumed ones."""
        return sum(num_bytes for kind, num_bytes in self.by_kind.items() if kind not in NOT_STATES)

    @property
    def total_bytes(self) -> int:
        """Bytes of everything."""
        return sum(self.by_kind.values())


def rank_memory(
    model: ModelDescription,
    config: ShardConfig,
    scopes: Scopes,
    batch: MicroBatch,
    states: StateFormat | None = None,
    overheads: Overheads | None = None,
) -> RankMemory:
    """Memory of every rank of a job, from the first step on.

    Args:
        model: Description of the model.
        config: Configuration, for dtypes, prefetch, overlap and coalescing; `coalesce="auto"` counts as False.
        scopes: Degrees and codecs.
        batch: Micro-batch.
        states: Dtypes of model states; by default fp32 with Adam.
        overheads: Memory outside torch's allocator; by default that of a GPU.
    """
    states = states or StateFormat()
    buffers = engine_memory(model, config, scopes, states.parameter_dtype)
    return rank_memories(buffers, [activation_bytes(model.units, batch)], states, overheads)[0]


def rank_memories(
    buffers: MemoryPlan,
    activations_by_batch: Iterable[dict[str, int]],
    states: StateFormat,
    overheads: Overheads | None = None,
) -> list[RankMemory]:
    """As `rank_memory`, for several micro-batches.

    What does not depend on them is computed once.

    Args:
        buffers: Buffers of the engine in one configuration.
        activations_by_batch: Results of `activation_bytes`, one for each micro-batch.
        states: Dtypes of model states, with which the buffers were made.
        overheads: See `rank_memory`.
    """
    fixed = buffers.bytes_by_purpose()
    fixed["gradients of autograd"] = buffers.pending_grad_bytes
    element_bytes = states.optimizer_bytes
    fixed["optimizer states"] = (
        buffers.num_trained * element_bytes if isinstance(element_bytes, int) else buffers.moments_bytes
    )
    overheads = overheads or Overheads()
    fixed["communicators"] = buffers.num_communicators * overheads.communicator_bytes
    fixed["context"] = overheads.context_bytes
    memories = []
    for activations in activations_by_batch:
        dynamic = fixed["gradients of autograd"] + sum(activations.values())
        by_kind = fixed | activations | {"fragmentation": round(FRAGMENTATION_SHARE * dynamic)}
        memories.append(RankMemory(by_kind=MappingProxyType(by_kind)))
    return memories


def activation_bytes(units: Iterable[UnitModel], batch: MicroBatch) -> dict[str, int]:
    """Bytes of activations where a backward needs most of them.

    That is in the loss and the head, while everything is kept, or in the layer that needs most, when those of loss and
    head are freed. Others count as kept until the end.

    Args:
        units: Units of the model, the root first.
        batch: Micro-batch.
    """
    layers_kept = outside = freed = outside_working = layer_peak = 0
    units = tuple(units)
    for unit, is_recomputed in zip(units, recomputed_units(units, batch.recomputes), strict=True):
        if unit.is_layer:
            kept, made = kept_and_made_bytes(unit, batch.recomputes) if is_recomputed else (unit.saved_bytes, 0)
            layers_kept += kept
            layer_peak = max(layer_peak, made + unit.working_bytes)
        else:
            outside += unit.saved_bytes
            freed += unit.freed_bytes
            outside_working = max(outside_working, unit.working_bytes)
    temporary = max(outside_working, layer_peak - freed)
    sizes = {"layers": layers_kept, "outside": outside, "temporary": temporary}
    sizes = {name: batch.samples * num_bytes for name, num_bytes in sizes.items()}
    return {
        "activations of layers": sizes["layers"],
        "activations outside layers": sizes["outside"],
        "temporary activations": sizes["temporary"],
    }
