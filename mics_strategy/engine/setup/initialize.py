"""First values of modules that were built on the meta device.

Each module initializes itself by its own methods. Memory without a value is NaN, so tensors that no method initializes
are found.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mics_strategy.errors import ConfigError

Initializer = Callable[[nn.Module], None]
_NO_VALUE = {dtype: torch.iinfo(dtype).min for dtype in (torch.int16, torch.int32, torch.int64)}


def empty_sentinel_like(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Memory for a meta tensor, filled with NaN or the smallest integer."""
    empty = torch.empty_like(like, device=device)
    if empty.dtype in _NO_VALUE:
        return empty.fill_(_NO_VALUE[empty.dtype])
    return empty.fill_(math.nan) if empty.is_floating_point() else empty.zero_()


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
    if not tensor.numel() or tensor.is_meta:
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
