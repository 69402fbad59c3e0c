"""How much memory would a rank need, in a job that does not exist yet?

The engine allocates everything before training and accounts for it, so it is built as it would be, for the first of so
many ranks, on a device that holds nothing; no weights, ranks or GPUs are needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from mics_strategy.comm.process_groups import ProcessGroups
from mics_strategy.engine.build import (
    BuildContext,
    add_sharded_parameters,
    build_engine,
    build_units,
    make_bucket_specs,
)
from mics_strategy.engine.memory import MemoryTracker
from mics_strategy.engine.units import UnitRule, find_units
from mics_strategy.errors import ConfigError
from mics_strategy.scopes import Scopes, resolve_scopes
from mics_strategy.topology import Topology
from mics_strategy.tuning.coalesce import choose_coalescing

if TYPE_CHECKING:
    from mics_strategy.config import ShardConfig

_META = torch.device("meta")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """What every rank holds from the first step on.

    Attributes:
        bytes_by_purpose: Allocated by the engine, as `Sharded.memory` tells it of a real job, on GPUs.
        num_trained: Numbers that this rank's optimizer updates.
        scopes: Ranks and axes of each model state.
        num_units: How many units the model has; the parameters of a few are whole at a time.
    """

    bytes_by_purpose: Mapping[str, int]
    num_trained: int
    scopes: Scopes
    num_units: int

    def total_bytes(self, state_bytes_per_number: int = 8) -> int:
        """The engine's, and the optimizer's states: of Adam 8 bytes for each number. Activations come on top."""
        return sum(self.bytes_by_purpose.values()) + self.num_trained * state_bytes_per_number


def estimate_memory(
    model: nn.Module, config: ShardConfig, *, num_nodes: int, ranks_per_node: int, units: UnitRule = "auto"
) -> MemoryEstimate:
    """Build the engine over a model on the meta device, as the first rank of a job would. Not while a job runs.

    Args:
        model: On the meta device; of no use afterwards.
        config: With scopes; "auto" chooses by the memory of a real device.
        num_nodes: Of the job.
        ranks_per_node: Of the job.
        units: As `shard` takes it.

    Raises:
        ConfigError: What `shard` would refuse; a process group is there already; parameters with values.
    """
    if dist.is_initialized():
        raise ConfigError("Memory is estimated in a process of its own: this one has a process group. Use another one.")
    if any(not parameter.is_meta for parameter in model.parameters()):
        raise ConfigError("Memory is estimated of a model without values. Build it under `torch.device('meta')`.")
    if config.is_auto:
        raise ConfigError("Scopes that are 'auto' are chosen by the memory of a device that is there. Give a preset.")
    world_size = num_nodes * ranks_per_node
    topology = Topology(ranks_per_node=ranks_per_node)
    scopes = resolve_scopes(config.replace(topology=topology), topology, world_size)
    modules, memory = find_units(model, units), MemoryTracker()
    with _fake_process_group(world_size), torch.no_grad():
        context = BuildContext(config=config, groups=ProcessGroups(scopes, "cpu"), device=_META, memory=memory)
        specs = [make_bucket_specs(module, context) for module in modules]
        specs = choose_coalescing(specs, config, context.groups, context.device)
        built = build_units(modules, specs, context)
        add_sharded_parameters(built, modules, context)
        build_engine(built, modules, context)
        trained = [bucket for unit in built for bucket in unit.trainable]
        num_trained = sum(bucket.layout.shard_numel for bucket in trained)
    return MemoryEstimate(
        bytes_by_purpose=memory.bytes_by_purpose, num_trained=num_trained, scopes=scopes, num_units=len(modules)
    )


@contextmanager
def _fake_process_group(world_size: int) -> Iterator[None]:
    """A process group of which this is rank 0, and in which nobody answers."""
    dist.init_process_group("fake", rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
