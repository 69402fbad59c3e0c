"""Choice of the modules that form units.

A unit should be large enough to fill a link, and small enough that a few unsharded units fit into memory alongside the
shards: one layer of a transformer. The rule ``"auto"`` takes the classes that the model repeats inside its containers,
outermost first, and the large embeddings and linear layers outside of them. Other parameters belong to the root unit.
A parameter that several units share belongs to the innermost unit around all of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear as _UncalledLinear

from mics_strategy.engine.aliases import Alias, find_aliases
from mics_strategy.errors import ConfigError

UnitRule = str | int | type[nn.Module] | Iterable[type[nn.Module] | str] | Callable[[nn.Module], bool]

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
MIN_SHARE = 0.05
# An all-gather of 8 MiB in 16 bits takes 42 us at 200 GB/s, as long as its launch (assumed). Below that, a unit of
# its own costs time, and saves no more than this much of each buffer.
LARGE_NUMEL = 4 * 2**20


@dataclass(slots=True)
class ParamRef:
    """One parameter of a unit.

    Attributes:
        name: First name of the parameter in the model.
        parameter: Plain parameter.
        locations: Every (module, attribute) that refers to it.
        aliases: Other references to it that modules hold.
    """

    name: str
    parameter: nn.Parameter
    locations: list[tuple[nn.Module, str]] = field(default_factory=list)
    aliases: list[Alias] = field(default_factory=list)


@dataclass(slots=True)
class UnitSpec:
    """A module that forms a unit.

    Attributes:
        name: Name of the module in the model; empty for the root.
        module: Module of the unit.
        depth: Number of units around it.
        parameters: Parameters that belong to this unit.
        inner: Modules of the units directly inside it.
    """

    name: str
    module: nn.Module
    depth: int
    parameters: list[ParamRef] = field(default_factory=list)
    inner: list[nn.Module] = field(default_factory=list)

    @property
    def is_trained(self) -> bool:
        """Whether any of its parameters requires a gradient."""
        return any(entry.parameter.requires_grad for entry in self.parameters)


def find_units(model: nn.Module, rule: UnitRule) -> list[UnitSpec]:
    """The units of `model` in module order, root first, with their parameters.

    Args:
        model: Whole model. It is always the first unit.
        rule: ``"auto"``, one or several module classes or their names, a predicate of a module, or an int, the
            smallest number of parameters of a unit.

    Raises:
        ConfigError: The model has no module of a class in the rule, or the rule is of another type.
    """
    chosen = _choose(model, rule) | {model}
    units: dict[nn.Module, UnitSpec] = {}
    enclosing: dict[str, tuple[UnitSpec, ...]] = {}  # outermost first; a module in two places has two paths
    for name, module in model.named_modules(remove_duplicate=False):
        outer = enclosing[name.rpartition(".")[0]] if name else ()
        if module in chosen and module not in units:
            units[module] = UnitSpec(name=name, module=module, depth=len(outer))
            if outer:
                outer[-1].inner.append(module)
        enclosing[name] = (*outer, units[module]) if module in chosen else outer
    _assign_parameters(model, enclosing)
    return list(units.values())


def _choose(model: nn.Module, rule: UnitRule) -> set[nn.Module]:
    if rule == "auto":
        layers = _repeated_layers(model)
        return layers | _large_layers(model, layers)
    if isinstance(rule, bool) or not (isinstance(rule, (int, type, Iterable)) or callable(rule)):
        raise ConfigError(
            f"`units={rule!r}` is not a rule. Use 'auto', module classes or their names, a predicate of a module, or a "
            "number of parameters."
        )
    if isinstance(rule, int):
        return _large_modules(model, rule)
    if isinstance(rule, type | Iterable):
        return _modules_of_classes(model, (rule,) if isinstance(rule, type | str) else tuple(rule))
    return {module for module in model.modules() if rule(module)}


def _modules_of_classes(model: nn.Module, classes_or_names: tuple[type[nn.Module] | str, ...]) -> set[nn.Module]:
    """Modules of any of the classes; a name does not stand for derived classes."""
    if not classes_or_names or not all(isinstance(entry, type | str) for entry in classes_or_names):
        raise ConfigError(
            f"`units={classes_or_names!r}` is not a rule, because not all entries are module classes or names. Use "
            "classes, for example [LlamaDecoderLayer], or their names."
        )
    classes = tuple(entry for entry in classes_or_names if isinstance(entry, type))
    names = {entry.rpartition(".")[2] for entry in classes_or_names if isinstance(entry, str)}
    present = {type(module).__name__ for module in model.modules()}
    chosen = {module for module in model.modules() if isinstance(module, classes) or type(module).__name__ in names}
    missing = names - present or ({cls.__name__ for cls in classes} if not chosen else set())
    if missing:
        raise ConfigError(
            f"`units`: the model has no module of class {', '.join(sorted(missing))}. It has "
            f"{', '.join(sorted(present))}. Use some of these."
        )
    return chosen


def _large_modules(model: nn.Module, min_numel: int) -> set[nn.Module]:
    """Innermost modules with at least `min_numel` parameters outside of inner units."""
    chosen: set[nn.Module] = set()

    def visit(module: nn.Module) -> int:
        num_left = sum(parameter.numel() for parameter in module.parameters(recurse=False)) + sum(
            visit(child) for child in module.children()
        )
        if num_left >= min_numel and not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            chosen.add(module)
            return 0
        return num_left

    visit(model)
    return chosen


def _repeated_layers(model: nn.Module) -> set[nn.Module]:
    """Outermost children of containers whose class repeats, with enough parameters."""
    siblings: dict[type[nn.Module], list[nn.Module]] = defaultdict(list)

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(module, _CONTAINERS) and not isinstance(child, _CONTAINERS) and _count(child):
                siblings[type(child)].append(child)
            visit(child)

    visit(model)
    total = max(1, _count(model))
    chosen: set[nn.Module] = set()
    inside: set[nn.Module] = set()
    for _, modules in sorted(siblings.items(), key=lambda item: -sum(map(_count, item[1]))):
        outer = [module for module in dict.fromkeys(modules) if module not in inside]
        if len(outer) >= 2 and sum(map(_count, outer)) >= MIN_SHARE * total:
            chosen.update(outer)
            inside.update(inner for module in outer for inner in module.modules())
    return chosen


def _large_layers(model: nn.Module, layers: set[nn.Module]) -> set[nn.Module]:
    """Embeddings and linear layers outside of `layers` with many parameters.

    They have `LARGE_NUMEL` at least.

    Parameters that modules outside share, as those of tied embeddings, are not theirs: such a parameter belongs to the
    innermost unit around all its modules.
    """
    users: dict[torch.Tensor, list[nn.Module]] = defaultdict(list)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            users[parameter].append(module)
    inside = {inner for layer in layers for inner in layer.modules()}
    chosen: set[nn.Module] = set()
    for module in model.modules():
        # The exception is the output layer of `nn.MultiheadAttention`, which reads its weight without a call.
        if module in inside or not isinstance(module, nn.Embedding | nn.Linear) or type(module) is _UncalledLinear:
            continue
        modules = set(module.modules())
        unshared = [parameter for parameter in module.parameters() if modules.issuperset(users[parameter])]
        if sum(parameter.numel() for parameter in unshared) >= LARGE_NUMEL:
            chosen.add(module)
    return chosen


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _assign_parameters(model: nn.Module, enclosing: dict[str, tuple[UnitSpec, ...]]) -> None:
    """Assign each parameter to the innermost unit around all modules with it."""
    owned: dict[torch.Tensor, ParamRef] = {}
    chains_of: dict[torch.Tensor, list[tuple[UnitSpec, ...]]] = defaultdict(list)
    for path, module in model.named_modules(remove_duplicate=False):
        for attribute, parameter in module._parameters.items():
            if parameter is None:
                continue
            name = f"{path}.{attribute}" if path else attribute
            entry = owned.setdefault(parameter, ParamRef(name=name, parameter=parameter))
            if (module, attribute) not in entry.locations:
                entry.locations.append((module, attribute))
            chains_of[parameter].append(enclosing[path])
    for alias, parameter in find_aliases(model):
        if parameter in owned:
            owned[parameter].aliases.append(alias)
    for parameter, entry in owned.items():
        chains = chains_of[parameter]
        shared = [levels[0] for levels in zip(*chains, strict=False) if all(unit is levels[0] for unit in levels)]
        shared[-1].parameters.append(entry)
