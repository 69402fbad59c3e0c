"""How do the first values get into the shards?

A model with values: ranks compare a fingerprint of every parameter and take rank 0's where they differ, as
plain data parallel training does. A model on the meta device: one unit at a time is given memory and
initialised, with one random seed on all ranks, and only this rank's shards are kept, so no rank ever holds
more than one whole unit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from mics_strategy.comm.consensus import gather_objects
from mics_strategy.engine.setup.initialize import (
    Initializer,
    check_initialized,
    describe_initializer,
    empty_sentinel_like,
    find_initializer,
)

if TYPE_CHECKING:
    from mics_strategy.comm.process_groups import ProcessGroups
    from mics_strategy.engine.bucket import Bucket
    from mics_strategy.engine.unit import Unit
    from mics_strategy.engine.units import UnitSpec

_WORDS = 1 << 24  # looked at together


def materialize(
    model: nn.Module,
    units: list[tuple[UnitSpec, Unit]],
    groups: ProcessGroups,
    initializer: Initializer | str,
    device: torch.device,
) -> None:
    """Put the first values of all units into their shards, inner units before outer ones.

    Args:
        model: The whole model, asked how it initialises itself when something of it is on the meta device.
        units: Modules and what was built for them.
        groups: For rank 0's values and random seed.
        initializer: As given to `shard`.
        device: Where the model trains.
    """
    is_meta = any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    is_auto = isinstance(initializer, str)
    initialize = find_initializer(model) if isinstance(initializer, str) else initializer
    if is_meta and is_auto and groups.rank == 0:
        print(describe_initializer(model), flush=True)
    seed = shared_seed() if is_meta else 0
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else [], enabled=is_meta):
        if is_meta:
            torch.manual_seed(seed)
        for module, unit in sorted(units, key=lambda pair: -pair[0].depth):
            values = {entry.name: entry.parameter.detach() for entry in module.parameters}
            values.update(initialized_values(module, initialize, device))
            if is_auto:  # else whoever gave the initializer may load the rest
                check_initialized(modules_of(module))
            _load_shards(values, unit.buckets, groups, device)
            _put_parameters(module, {entry.name: entry.parameter for entry in module.parameters})


def _load_shards(
    values: dict[str, torch.Tensor], buckets: list[Bucket], groups: ProcessGroups, device: torch.device
) -> None:
    """Shard whole values, rank 0's where ranks disagree.

    Cost: one small object gather, and a broadcast of every parameter that differs.
    """
    everyone = gather_objects({name: fingerprint(value) for name, value in values.items()})
    for bucket in buckets:
        for position, region in enumerate(bucket.layout.param_slices):
            value = values[region.name].to(device)
            if groups.world_group is not None and any(
                other[region.name] != everyone[0][region.name] for other in everyone
            ):
                value = value.clone()
                groups.world_group.broadcast(value, region.name)
            bucket.load(position, value)


def fingerprint(value: torch.Tensor) -> tuple[int, int]:
    """Two numbers that differ when tensors differ, except by a rare coincidence: sums of words, modulo 2**64.

    Cost:
        Memory: 256 MiB, whatever the tensor's size. The device is waited for once.
    """
    flat = value.detach().reshape(-1)
    words = flat.view({1: torch.uint8, 2: torch.int16}.get(flat.element_size(), torch.int32))
    sums = torch.zeros(2, dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), _WORDS):
        part = words[start : start + _WORDS].to(torch.int64)
        sums[0] += part.sum()
        sums[1] += part.mul_(torch.arange(start + 1, start + 1 + part.numel(), device=words.device)).sum()
    plain, weighted = sums.tolist()
    return plain, weighted


def initialized_values(unit: UnitSpec, initializer: Initializer, device: torch.device) -> dict[str, torch.Tensor]:
    """Give what is on the meta device of one unit memory and values; whole parameters, by name.

    The random generators must have the same state on all ranks. Modules that have values keep them.
    """
    modules = modules_of(unit)
    missing = [entry for entry in unit.parameters if entry.parameter.is_meta]
    with_values = {module for entry in unit.parameters if not entry.parameter.is_meta for module, _ in entry.locations}
    unfilled = [module for module in modules if any(b is not None and b.is_meta for b in module._buffers.values())]
    if not missing and not unfilled:
        return {}
    values = {entry.name: empty_sentinel_like(entry.parameter, device) for entry in missing}
    _put_parameters(unit, {name: nn.Parameter(value, requires_grad=False) for name, value in values.items()})
    for module in unfilled:
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = empty_sentinel_like(buffer, device)
    for module in reversed(modules):
        if module not in with_values:
            initializer(module)
    return values


def _put_parameters(unit: UnitSpec, parameters: dict[str, nn.Parameter]) -> None:
    for entry in unit.parameters:
        if entry.name in parameters:
            for module, attribute in entry.locations:
                module._parameters[attribute] = parameters[entry.name]


def modules_of(unit: UnitSpec) -> list[nn.Module]:
    """Modules whose parameters or buffers belong to the unit, in module order; without those of inner units."""
    from_parameters = {module for entry in unit.parameters for module, _ in entry.locations}
    inner = {module for child in unit.inner for module in child.modules()}
    return [module for module in unit.module.modules() if module in from_parameters or module not in inner]


def shared_seed() -> int:
    """Rank 0's next random seed, on every rank."""
    return gather_objects(int(torch.randint(0, 2**62, ()).item()))[0]
