"""Memory of a rank in a job that does not run: the plan of its engine's memory, added up.

It needs no weights, ranks or GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from mics_strategy.comm.scratch import COMMUNICATOR_BYTES
from mics_strategy.config import ShardConfig
from mics_strategy.engine.bucket_specs import NOTHING_TO_COALESCE, BucketRules, coalesced
from mics_strategy.engine.build import make_bucket_specs, plan_memory
from mics_strategy.engine.plan import Plan, StepOrder, UnitPlan, plan_step
from mics_strategy.engine.units import UnitRule, find_units
from mics_strategy.errors import ConfigError
from mics_strategy.scopes import Scopes, resolve_scopes
from mics_strategy.topology import Switches, Topology


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
    """Estimate the memory of each rank of a job on GPUs.

    Args:
        model: Model on the meta device.
        config: Configuration with explicit scopes, not ``"auto"``; `coalesce="auto"` counts as False. Of its topology
            only the switches count.
        num_nodes: Nodes of the job.
        ranks_per_node: Ranks of each node.
        units: Modules that form units, as for `shard`.

    Raises:
        ConfigError: The model has values, scopes are ``"auto"``, or `shard` would raise for this configuration.
    """
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
    modules = find_units(model, units)
    config.outer_round.check(sum(module.is_trained for module in modules))
    rules = BucketRules.of(scopes, is_stream_ordered=True)
    specs = make_bucket_specs(modules, config, rules)
    if config.coalesce is True:
        specs = [coalesced(of_unit, scopes) for of_unit in specs]
        if not any(spec.coalesce_all_gather or spec.coalesce_reduce_scatter for of_unit in specs for spec in of_unit):
            raise ConfigError(NOTHING_TO_COALESCE)
    plan = plan_memory(modules, specs, config, scopes)
    return MemoryEstimate(
        bytes_by_purpose=plan.bytes_by_purpose(),
        pending_grad_bytes=plan.pending_grad_bytes,
        num_communicators=plan.num_communicators,
        num_trained=plan.num_trained,
        scopes=scopes,
        num_units=len(modules),
        unit_plans=plan.unit_plans(),
    )
