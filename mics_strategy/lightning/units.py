"""Units of a LightningModule.

The engine all-gathers a module's parameters when its forward is called. With automatic optimization, a whole step runs
inside the forward of the LightningModule, so the parameters outside of units are gathered there. With manual
optimization, a step contains backwards and optimizer steps and cannot be one forward. Therefore every child of the
LightningModule (generator, discriminator, ...) is a unit, which is gathered only when it is called.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from mics_strategy import ConfigError

UnitRule = str | int | type[nn.Module] | Iterable[type[nn.Module] | str] | Callable[[nn.Module], bool]


def unit_rule_for(module: nn.Module, units: UnitRule, *, every_child: bool) -> Any:
    """Convert the strategy's `units` to those of `shard`.

    Args:
        module: LightningModule.
        units: Units, as in `shard`.
        every_child: Whether every child of `module` that has parameters is also a unit.

    Raises:
        ConfigError: No module has a class of that name.
    """
    if not every_child or isinstance(units, int):
        return units
    entries = [units] if isinstance(units, str) and units != "auto" else units
    if isinstance(entries, Iterable) and not isinstance(entries, str):
        units = tuple(cls for entry in entries for cls in _classes(module, entry))
    unit_modules = {child for child in module.children() if any(True for _ in child.parameters())}
    unit_modules.update(_matching(module, units))
    return lambda candidate: candidate in unit_modules


def _classes(module: nn.Module, entry: type[nn.Module] | str) -> list[type[nn.Module]]:
    """Return a class, or the classes in `module` with its name."""
    if not isinstance(entry, str):
        return [entry]
    present = dict.fromkeys(type(child) for child in module.modules())
    matches = [cls for cls in present if cls.__name__ == entry.rpartition(".")[2]]
    if not matches:
        names = ", ".join(sorted(cls.__name__ for cls in present))
        raise ConfigError(f"`units={entry!r}`: the model has no module of that class. It has {names}.")
    return matches


def _matching(module: nn.Module, units: UnitRule) -> set[nn.Module]:
    if isinstance(units, str):
        return set(_repeated_in_containers(module))
    if isinstance(units, type | tuple):
        return {child for child in module.modules() if isinstance(child, units)}
    return {child for child in module.modules() if callable(units) and units(child)}


def _repeated_in_containers(module: nn.Module) -> Iterable[nn.Module]:
    """Yield the layers that occur repeatedly in a container."""
    for container in module.modules():
        if isinstance(container, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            children = list(container.children())
            counts = Counter(map(type, children))
            yield from (
                child for child in children if counts[type(child)] > 1 and any(True for _ in child.parameters())
            )


def move_unsharded(module: nn.Module, device: torch.device) -> None:
    """Move tensors that are not parameters or buffers, such as states of metrics.

    The engine has already moved parameters and buffers.
    """
    if next(module.parameters(), None) is None:
        module.to(device)
    else:
        for child in module.children():
            move_unsharded(child, device)
