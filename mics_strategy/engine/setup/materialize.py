"""First values of the shards.

For a model with values, ranks compare a fingerprint of every parameter. Where they differ, rank 0 broadcasts its
parameter, as in plain data parallel training. For a model on the meta device, one unit at a time is allocated and
initialized with one random seed on all ranks. Each rank keeps its shards only, so no rank ever holds more than one
whole unit.

Each module on the meta device initializes itself by its own methods. Memory without a value is NaN, so tensors that no
method initializes are found.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from mics_strategy.comm.consensus import gather_objects
from mics_strategy.comm.process_groups import ProcessGroups
from mics_strategy.engine.bucket import Bucket
from mics_strategy.engine.unit import Unit
from mics_strategy.engine.units import UnitSpec
from mics_strategy.errors import ConfigError

Initializer = Callable[[nn.Module], None]
_NO_VALUE = {dtype: torch.iinfo(dtype).min for dtype in (torch.int16, torch.int32, torch.int64)}
_WORDS = 1 << 24  # words per pass of `fingerprint`


def materialize(
    model: nn.Module,
    units: list[tuple[UnitSpec, Unit]],
    groups: ProcessGroups,
    initializer: Initializer | str,
    device: torch.device,
) -> None:
    """Load the first values of all units into their shards, inner units first.

    Collective.

    Args:
        model: Whole model. Its methods initialize tensors on the meta device if `initializer` is ``"auto"``.
        units: Units as specified and as built.
        groups: Process groups of the model.
        initializer: Function that initializes one module, or ``"auto"``.
        device: Device of the shards.

    Raises:
        ConfigError: A tensor on the meta device is not initialized and `initializer` is ``"auto"``.
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
        differing = set() if is_meta else _differing([value for module, _ in units for value in _values_of(module)])
        for module, unit in sorted(units, key=lambda pair: -pair[0].depth):
            values = dict(_values_of(module))
            values.update(initialized_values(module, initialize, device))
            if is_auto:  # the author of an initializer may load the rest later
                check_initialized(modules_of(module))
            if is_meta:
                differing = _differing(values.items())
            _load_shards(values, unit.buckets, groups, differing)
            _put_parameters(module, {entry.name: entry.parameter for entry in module.parameters})


def _values_of(unit: UnitSpec) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and values of a unit's parameters."""
    return ((entry.name, entry.parameter.detach()) for entry in unit.parameters)


def _differing(values: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
    """Names of the tensors that are not equal on all ranks. Collective.

    Cost:
        One gather of a small object.
    """
    first, *others = gather_objects({name: fingerprint(value) for name, value in values})
    return {name for other in others for name in first if other[name] != first[name]}


def _load_shards(
    values: dict[str, torch.Tensor],
    buckets: list[Bucket],
    groups: ProcessGroups,
    differing: set[str],
) -> None:
    """Load shards of whole values, with rank 0's where ranks differ.

    Collective where they differ.

    Cost:
        A broadcast of every parameter that differs.
    """
    for bucket in buckets:
        for position, param_slice in enumerate(bucket.layout.param_slices):
            value = values[param_slice.name].to(groups.device)
            if groups.island.job_group is not None and param_slice.name in differing:
                value = value.clone()
                groups.island.job_group.broadcast(value, param_slice.name)
            bucket.load(position, value)


def fingerprint(value: torch.Tensor) -> tuple[int, int]:
    """A fingerprint of a tensor's bits: plain and weighted sum of its words mod 2**64.

    Different tensors have equal fingerprints only by a rare coincidence.

    Cost:
        Memory: 256 MiB for a tensor of any size. One synchronization with the device.
    """
    flat = value.detach().contiguous().as_strided((value.numel(),), (1,))  # a single element may have any stride
    words = flat.view({1: torch.uint8, 2: torch.int16}.get(flat.element_size(), torch.int32))
    sums = torch.zeros(2, dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), _WORDS):
        part = words[start : start + _WORDS].to(torch.int64)
        sums[0] += part.sum()
        sums[1] += part.mul_(torch.arange(start + 1, start + 1 + part.numel(), device=words.device)).sum()
    plain, weighted = sums.tolist()
    return plain, weighted


def initialized_values(unit: UnitSpec, initializer: Initializer, device: torch.device) -> dict[str, torch.Tensor]:
    """Allocate and initialize the tensors of one unit that are on the meta device.

    Buffers stay in their modules. Modules with values keep them. The random generators must have the same state on all
    ranks.

    Args:
        unit: Unit to initialize.
        initializer: Function that initializes one module.
        device: Device of the new tensors.

    Returns:
        The whole parameters that were on the meta device, by name.
    """
    modules = modules_of(unit)
    meta_params = [entry for entry in unit.parameters if entry.parameter.is_meta]
    modules_with_values = {
        module for entry in unit.parameters if not entry.parameter.is_meta for module, _ in entry.locations
    }
    modules_with_meta_buffers = [
        module for module in modules if any(b is not None and b.is_meta for b in module._buffers.values())
    ]
    if not meta_params and not modules_with_meta_buffers:
        return {}
    values = {entry.name: empty_sentinel_like(entry.parameter, device) for entry in meta_params}
    _put_parameters(unit, {name: nn.Parameter(value, requires_grad=False) for name, value in values.items()})
    for module in modules_with_meta_buffers:
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = empty_sentinel_like(buffer, device)
    for module in reversed(modules):
        if module not in modules_with_values:
            initializer(module)
    return values


def _put_parameters(unit: UnitSpec, parameters: dict[str, nn.Parameter]) -> None:
    for entry in unit.parameters:
        if entry.name in parameters:
            for module, attribute in entry.locations:
                module._parameters[attribute] = parameters[entry.name]
            for alias in entry.aliases:
                alias.container[alias.key] = parameters[entry.name]


def modules_of(unit: UnitSpec) -> list[nn.Module]:
    """Modules with parameters or buffers of the unit, not of inner ones, in order."""
    from_parameters = {module for entry in unit.parameters for module, _ in entry.locations}
    inner = {module for child in unit.inner for module in child.modules()}
    return [module for module in unit.module.modules() if module in from_parameters or module not in inner]


def shared_seed() -> int:
    """Rank 0's next random seed, on every rank. Collective."""
    return gather_objects(int(torch.randint(0, 2**62, ()).item()))[0]


def empty_sentinel_like(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Memory for a meta tensor, filled with NaN or the smallest integer."""
    empty = torch.empty_like(like, device=device)
    if empty.dtype in _NO_VALUE:
        return empty.fill_(_NO_VALUE[empty.dtype])
    return empty.fill_(math.nan) if empty.is_floating_point() else empty.zero_()


def check_initializer(initializer: object) -> None:
    """Raise for an `initializer` of `shard()` with no meaning.

    Raises:
        ConfigError: It is neither ``"auto"`` nor callable.
    """
    if initializer != "auto" and not callable(initializer):
        raise ConfigError(
            f"`initializer={initializer!r}` is neither 'auto' nor callable. Use 'auto', or a function of a module."
        )


def find_initializer(model: nn.Module) -> Initializer:
    """A function that initializes one module of `model` as on a real device.

    Inside of models of transformers it calls the model's ``_init_weights``. For other modules it calls
    ``reset_parameters``. Tensors that are still without values then get them from a method ``_init_weights`` of an
    outer module, if there is one; its author may not have called it for the others.
    """
    by_transformers = _modules_of_transformers(model)
    author = _defining_package(model)
    adapters = _adapter_initializations(model)

    def initialize(module: nn.Module) -> None:
        reset = getattr(module, "reset_parameters", None)
        pretrained_model = by_transformers.get(module)
        if pretrained_model is not None:
            pretrained_model._init_weights(module)
            if is_uninitialized(module) and callable(reset):  # the class is unknown to transformers
                reset()
                pretrained_model._init_weights(module)
        else:
            if callable(reset):
                reset()
            if author is not None and is_uninitialized(module):
                author._init_weights(module)
        _reset_adapters(module, adapters)

    return initialize


def describe_initializer(model: nn.Module) -> str:
    """A line for users on the methods that initialize a model on the meta device."""
    by_transformers, author = _modules_of_transformers(model), _defining_package(model)
    sources = ["`_init_weights()` of transformers"] if by_transformers else []
    if any(module not in by_transformers for module in model.modules() if _own_tensors(module)):
        sources.append("each module's `reset_parameters()`")
    line = f"First values of {type(model).__name__}, which is on the meta device: {', '.join(sources)}."
    if author is None:
        return line
    name = type(author).__name__
    return (
        f"{line} {name} is not a model of transformers, so `{name}._init_weights()` is called only for modules that "
        "have no `reset_parameters()`. To call it for all modules, pass `initializer=model._init_weights` to "
        "`shard()`, the strategy or the plugin."
    )


def _modules_of_transformers(model: nn.Module) -> dict[nn.Module, Any]:
    """The innermost model of transformers around each module inside of one."""
    modeling = sys.modules.get("transformers.modeling_utils")  # imported if such a model exists
    base: type | None = getattr(modeling, "PreTrainedModel", None)
    if base is None:
        return {}
    owners: dict[nn.Module, Any] = {}
    for candidate in model.modules():  # outer ones first
        if isinstance(candidate, base):
            owners.update(dict.fromkeys(candidate.modules(), candidate))
    return owners


def _defining_package(model: nn.Module) -> Any:
    """The first module with ``_init_weights`` outside of transformers, or None."""
    by_transformers = _modules_of_transformers(model)
    others = (module for module in model.modules() if module not in by_transformers)
    return next((module for module in others if callable(getattr(module, "_init_weights", None))), None)


def _own_tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def is_uninitialized(module: nn.Module) -> bool:
    """Whether a tensor of the module itself has no value yet."""
    return any(_has_no_value(tensor) for tensor in _own_tensors(module))


def _has_no_value(tensor: torch.Tensor) -> bool:
    if not tensor.numel() or tensor.is_meta or tensor.layout is not torch.strided:
        return False
    if tensor.dtype in _NO_VALUE:
        return bool((tensor == _NO_VALUE[tensor.dtype]).all())
    return tensor.is_floating_point() and bool(tensor.isnan().all())


def check_initialized(modules: list[nn.Module]) -> None:
    """Raise for tensors without values.

    Raises:
        ConfigError: A module's tensor was not initialized. The error names the class of the first one.
    """
    for module in modules:
        if is_uninitialized(module):
            raise ConfigError(
                f"{type(module).__name__} is on the meta device and nothing gives its tensors values: neither its own "
                "`reset_parameters()` nor `_init_weights()` of the model initializes them. Define "
                "`reset_parameters()`, pass `initializer=` to `shard()` (or to the strategy or plugin), or build the "
                "model on a real device."
            )


def _adapter_initializations(model: nn.Module) -> dict[str, Any]:
    """Values of `init_lora_weights` of the model's `peft` adapters, by adapter name."""
    configs = (config for module in model.modules() for config in getattr(module, "peft_config", {}).items())
    return {name: getattr(config, "init_lora_weights", True) for name, config in configs}


def _reset_adapters(module: nn.Module, adapters: dict[str, Any]) -> None:
    """Initialize adapters as `peft` does: a LoRA starts without effect.

    Raises:
        ConfigError: The first values of an adapter are computed from base weights, which have no values yet.
    """
    reset = getattr(module, "reset_lora_parameters", None)
    if not callable(reset):
        return
    for name in getattr(module, "r", {}):
        init_value = adapters.get(name, True)
        if not isinstance(init_value, bool) and init_value != "gaussian":
            raise ConfigError(
                f"The adapter {name!r} is initialized from the base weights (init_lora_weights={init_value!r}), which "
                "have no values on the meta device. Build the model on a real device, or use init_lora_weights=True."
            )
        reset(name, init_value)
