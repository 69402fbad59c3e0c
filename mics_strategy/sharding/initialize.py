"""How does a module that was built on the meta device get its first values?

By its own methods, one module at a time. Memory without a value is NaN, so that what nobody initialises is found.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mics_strategy.errors import ConfigError

Initializer = Callable[[nn.Module], None]
_NO_VALUE = {dtype: torch.iinfo(dtype).min for dtype in (torch.int16, torch.int32, torch.int64)}


def without_value(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Memory for a tensor on the meta device; NaN (the least whole number) until somebody gives it a value."""
    empty = torch.empty_like(like, device=device)
    if empty.dtype in _NO_VALUE:
        return empty.fill_(_NO_VALUE[empty.dtype])
    return empty.fill_(math.nan) if empty.is_floating_point() else empty.zero_()


def find_initializer(model: nn.Module) -> Initializer:
    """How modules of `model` initialise themselves: ``_init_weights`` of transformers, or ``reset_parameters``."""
    candidates = (getattr(module, "_init_weights", None) for module in model.modules())
    whole_model: Any = next((candidate for candidate in candidates if callable(candidate)), None)

    adapters = _adapter_initializations(model)

    def initialize(module: nn.Module) -> None:
        own = getattr(module, "reset_parameters", None)
        if whole_model is not None:
            whole_model(module)
            if is_unfilled(module) and callable(own):  # of a class that transformers does not know
                own()
                whole_model(module)
        elif callable(own):
            own()
        _reset_adapters(module, adapters)

    return initialize


def is_unfilled(module: nn.Module) -> bool:
    """Whether a tensor of the module itself has no value yet."""
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return any(_has_no_value(tensor) for tensor in own)


def _has_no_value(tensor: torch.Tensor) -> bool:
    if not tensor.numel() or tensor.is_meta:
        return False
    if tensor.dtype in _NO_VALUE:
        return bool((tensor == _NO_VALUE[tensor.dtype]).all())
    return tensor.is_floating_point() and bool(tensor.isnan().all())


def refuse_unfilled(modules: list[nn.Module]) -> None:
    """Refuse values that nobody has given.

    Raises:
        ConfigError: Naming the class of the first module whose initialisation left one out.
    """
    for module in modules:
        if is_unfilled(module):
            raise ConfigError(
                f"{type(module).__name__} is on the meta device and nothing gives its tensors values: it has no "
                "`reset_parameters()` that does, and `_init_weights()` of the model leaves it out. Give it one, pass "
                "`initializer=` to `shard()`, or build the model on a real device."
            )


def _adapter_initializations(model: nn.Module) -> dict[str, Any]:
    """How the adapters that `peft` has put into a model begin, by adapter."""
    configs = (config for module in model.modules() for config in getattr(module, "peft_config", {}).items())
    return {name: getattr(config, "init_lora_weights", True) for name, config in configs}


def _reset_adapters(module: nn.Module, adapters: dict[str, Any]) -> None:
    """Let adapters of `peft` begin as `peft` lets them: a LoRA that changes nothing, not two random matrices.

    Raises:
        ConfigError: They are computed from base weights, which are not there yet.
    """
    reset = getattr(module, "reset_lora_parameters", None)
    if not callable(reset):
        return
    for name in getattr(module, "r", {}):
        begin = adapters.get(name, True)
        if not isinstance(begin, bool) and begin != "gaussian":
            raise ConfigError(
                f"The adapter {name!r} begins from the base weights (init_lora_weights={begin!r}), which are not known "
                "on the meta device. Build the model on a real device, or use init_lora_weights=True."
            )
        reset(name, begin)
