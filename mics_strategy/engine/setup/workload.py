"""Inputs for choosing a preset: parameters by kind, and the memory of a rank."""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING

import torch

from mics_strategy.planner.cost import ParameterKind
from mics_strategy.planner.presets import Workload

if TYPE_CHECKING:
    from mics_strategy.config import ShardConfig
    from mics_strategy.engine.units import UnitSpec


def workload_from_units(modules: list[UnitSpec], config: ShardConfig, memory_bytes: int) -> Workload:
    """The workload of one rank: parameters by kind, slots and memory.

    Args:
        modules: Units with their parameters, the root first.
        config: Configuration with the dtypes and the number of prefetched units.
        memory_bytes: Memory of one rank.
    """
    numels: Counter[tuple[torch.dtype, bool]] = Counter()
    units_bytes = []
    for module in modules:
        unit_params = [(e.parameter.numel(), e.parameter.dtype, e.parameter.requires_grad) for e in module.parameters]
        for numel, dtype, is_trained in unit_params:
            numels[dtype, is_trained] += numel
        units_bytes.append(sum(numel * config.param_dtype_of(dtype).itemsize for numel, dtype, _ in unit_params))
    root, *layers = units_bytes
    return Workload(
        kinds=tuple(
            ParameterKind(
                numel=numel,
                master_bytes=dtype.itemsize,
                param_bytes=config.param_dtype_of(dtype).itemsize,
                wire_bytes=config.wire_dtype_of(dtype).itemsize,
                is_trained=is_trained,
            )
            for (dtype, is_trained), numel in numels.items()
        ),
        slots_bytes=root + min(config.prefetch + 1, len(layers)) * max(layers, default=0),
        memory_bytes=memory_bytes,
    )


def device_memory_bytes(device: torch.device, ranks_per_node: int) -> int:
    """Memory of one rank: all of its GPU, or its share of the machine's memory."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks_per_node
