"""The real engine of the first rank of a job on GPUs, on the meta device: it allocates, and needs no memory."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from mics_strategy import ShardConfig, Topology
from mics_strategy.comm.process_groups import ProcessGroups
from mics_strategy.comm.resources import CommResources
from mics_strategy.engine.bucket_specs import BucketRules
from mics_strategy.engine.build import (
    BuildContext,
    add_sharded_parameters,
    build_engine,
    build_units,
    make_bucket_specs,
    plan_memory,
)
from mics_strategy.engine.memory import MemoryTracker
from mics_strategy.engine.plan import UnitPlan
from mics_strategy.engine.unit import unit_plan_of
from mics_strategy.engine.units import UnitRule, find_units
from mics_strategy.outer.state import make_outer_buckets
from mics_strategy.scopes import resolve_scopes
from mics_strategy.tuning.coalesce import choose_coalescing


def allocate(
    model: nn.Module, config: ShardConfig, *, num_nodes: int, ranks_per_node: int, units: UnitRule = "auto"
) -> tuple[dict[str, int], int, tuple[UnitPlan, ...]]:
    """What the engine allocates by purpose, its communicators, and what the plan of its step depends on."""
    world_size, modules, memory = num_nodes * ranks_per_node, find_units(model, units), MemoryTracker()
    nodes_per_switch = getattr(config.topology, "nodes_per_switch", 0)
    topology = Topology(ranks_per_node=ranks_per_node, nodes_per_switch=nodes_per_switch)
    scopes = resolve_scopes(config.replace(topology=topology), topology, world_size)
    with _fake_process_group(world_size), torch.no_grad():
        groups = ProcessGroups(scopes, CommResources(world_size, "cuda"), seed=0)
        context = BuildContext(config=config, groups=groups, device=torch.device("meta"), memory=memory)
        specs = make_bucket_specs(modules, config, BucketRules.of(scopes, is_stream_ordered=groups.is_stream_ordered))
        specs = choose_coalescing(specs, config, groups, context.device)
        plan = plan_memory(modules, specs, config, scopes, is_stream_ordered=groups.is_stream_ordered)
        built = build_units(modules, plan, context)
        add_sharded_parameters(built, modules, context)
        build_engine(built, plan, context)
        if config.outer_every:
            make_outer_buckets(built, config.outer_round, memory, context.device)
        unit_plans = [unit_plan_of(unit, slot) for unit, slot in zip(built, plan.slots, strict=True)]
        return memory.bytes_by_purpose, groups.resources.num_groups, tuple(unit_plans)


@contextmanager
def _fake_process_group(world_size: int) -> Iterator[None]:
    """A process group of `world_size` ranks with this process as rank 0."""
    dist.init_process_group("fake", rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
