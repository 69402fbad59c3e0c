"""Memory of a rank in a job that does not run.

The engine allocates everything before training and tracks the bytes. So the estimate builds the real engine for the
first rank of the job on the meta device. It needs no weights, ranks or GPUs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from mics_strategy.comm.process_groups import ProcessGroups
from mics_strategy.comm.resources import CommResources
from mics_strategy.comm.scratch import COMMUNICATOR_BYTES
from mics_strategy.config import ShardConfig
from mics_strategy.engine.build import (
    BuildContext,
    add_sharded_parameters,
    build_engine,
    build_units,
    make_bucket_specs,
)
from mics_strategy.engine.memory import MemoryTracker
from mics_strategy.engine.plan import Plan, StepOrder, UnitPlan, plan_step
from mics_strategy.engine.unit import Unit, unit_plan_of
from mics_strategy.engine.units import UnitRule, find_units
from mics_strategy.errors import ConfigError
from mics_strategy.scopes import Scopes, resolve_scopes
from mics_strategy.topology import Switches, Topology
from mics_strategy.tuning.coalesce import choose_coalescing

_META = torch.device("meta")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Memory of every rank from the first step on.

    Attributes:
        bytes_by_purpose: Bytes that the engine allocates, as in `Sharded.memory` of a real job on GPUs.
        pending_grad_bytes: Most bytes of gradients that wait for their first hop where autograd has stored them: those
            of the root and of two units in a row.
        num_communicators: Communicators of NCCL, one for each process group of the rank.
        num_trained: Elements that this rank's optimizer updates.
        scopes: Degrees and mesh axes of each model state.
        num_units: Number of units in the model. The parameters of a few are unsharded at a time.
        unit_plans: Units of the first rank, with what its traffic depends on.
    """

    bytes_by_purpose: Mapping[str, int]
    pending_grad_bytes: int
    num_communicators: int
    num_trained: int
    scopes: Scopes
    num_units: int
    unit_plans: tuple[UnitPlan, ...]

    def plan(self, num_micro_steps: int) -> Plan:
        """Every collective of the first rank in one optimizer step.

        Units are in the order of the model, as before the first step of a real job.

        Args:
            num_micro_steps: Forwards and backwards of the step.
        """
        order = tuple(range(self.num_units))
        step_order = StepOrder(forward=order, backward=(0, *reversed(order[1:])), num_micro_steps=num_micro_steps)
        return plan_step(self.unit_plans, self.scopes, step_order)

    def total_bytes(self, state_bytes_per_number: int = 8) -> int:
        """Bytes of the engine, gradients, states and communicators, not of activations.

        Args:
            state_bytes_per_number: Bytes of optimizer states for each element; 8 for Adam in fp32.
        """
        states_bytes = self.num_trained * state_bytes_per_number
        return sum(self.bytes_by_purpose.values()) + self.pending_grad_bytes + self.communicator_bytes + states_bytes

    @property
    def communicator_bytes(self) -> int:
        """Bytes of NCCL's communicators, outside torch's allocator; a rough figure."""
        return self.num_communicators * COMMUNICATOR_BYTES


def estimate_memory(
    model: nn.Module, config: ShardConfig, *, num_nodes: int, ranks_per_node: int, units: UnitRule = "auto"
) -> MemoryEstimate:
    """Estimate the memory of each rank of a job: build its engine on the meta device.

    Args:
        model: Model on the meta device. It cannot be used afterwards.
        config: Configuration with explicit scopes, not ``"auto"``. Of its topology only the switches count.
        num_nodes: Nodes of the job.
        ranks_per_node: Ranks of each node.
        units: Modules that form units, as for `shard`.

    Raises:
        ConfigError: The process has a process group, the model has values, scopes are ``"auto"``, or `shard` would
            raise for this configuration.
    """
    if dist.is_initialized():
        raise ConfigError(
            "`estimate_memory()` was called in a process with a process group. Call it in a separate process."
        )
    if any(not parameter.is_meta for parameter in model.parameters()):
        raise ConfigError(
            "`estimate_memory()` needs a model without values, but this one has parameters on a real device. Build it "
            "under `torch.device('meta')`."
        )
    if config.is_auto:
        raise ConfigError(
            "The scopes are 'auto', which depends on the memory of a real device. Give a preset, or name the scopes."
        )
    world_size = num_nodes * ranks_per_node
    stated = config.topology
    nodes_per_switch = stated.nodes_per_switch if isinstance(stated, (Topology, Switches)) else 0
    topology = Topology(ranks_per_node=ranks_per_node, nodes_per_switch=nodes_per_switch)
    scopes = resolve_scopes(config.replace(topology=topology), topology, world_size)
    modules, memory = find_units(model, units), MemoryTracker()
    with _fake_process_group(world_size), torch.no_grad():
        groups = ProcessGroups(scopes, CommResources(world_size, "cuda"), seed=0)
        context = BuildContext(config=config, groups=groups, device=_META, memory=memory)
        specs = [make_bucket_specs(module, context) for module in modules]
        specs = choose_coalescing(specs, config, groups, _META)
        built_units = build_units(modules, specs, context)
        add_sharded_parameters(built_units, modules, context)
        engine = build_engine(built_units, modules, context)
        gradients, slots = engine.reducer.gradients, {id(unit.slot): unit.index for unit in reversed(built_units)}
        unit_plans = [unit_plan_of(u, gradients.get(u.index, []), slots[id(u.slot)]) for u in built_units]
        trained = [bucket for unit in built_units for bucket in unit.trainable_buckets]
        num_trained = sum(bucket.layout.shard_numel for bucket in trained)
        num_communicators = groups.resources.num_groups
    return MemoryEstimate(
        bytes_by_purpose=memory.bytes_by_purpose,
        pending_grad_bytes=_pending_grad_bytes(built_units),
        num_communicators=num_communicators,
        num_trained=num_trained,
        scopes=groups.scopes,
        num_units=len(modules),
        unit_plans=tuple(unit_plans),
    )


def _pending_grad_bytes(units: list[Unit]) -> int:
    """Bytes of the gradients of the root, and of two units in a row."""
    root, *others = [
        sum(view.numel() * view.itemsize for bucket in unit.trainable_buckets for view in bucket.unsharded.views)
        for unit in units
    ]
    return root + max(map(sum, itertools.pairwise([*others, 0])), default=0)


@contextmanager
def _fake_process_group(world_size: int) -> Iterator[None]:
    """Open a fake process group of `world_size` ranks with this process as rank 0."""
    dist.init_process_group("fake", rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
