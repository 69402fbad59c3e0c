"""How do `accelerate.Accelerator` and the functions that save come to be ours?

Once, when `mics_strategy.accelerate` is imported, and before or after anything else was. What they do for jobs that do
not ask for MiCS stays as it is. Workers of a launcher whose file asks for it import it when they import Accelerate
(`mics_strategy_autoload`).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from accelerate import Accelerator
from torch.distributed.tensor import DTensor

from mics_strategy import ConfigError
from mics_strategy.accelerate import checkpoints, framework, launch
from mics_strategy.accelerate.accelerator import MiCSAccelerator
from mics_strategy.accelerate.plugin import MiCSPlugin


def install() -> None:
    """Redirect the constructor, and the functions by which Accelerate and its users save, load and compare."""
    framework.patch_function("save_fsdp_model", checkpoints.save_model)
    framework.patch_function("load_fsdp_model", checkpoints.load_model)
    framework.patch_function("save_fsdp_optimizer", checkpoints.save_optimizer)
    framework.patch_function("load_fsdp_optimizer", checkpoints.load_optimizer)
    patch_assert_close()
    framework.on_construct(_check_foreign)
    framework.patch_constructor(
        _class_for
    )  # last: what fails above leaves jobs that ask for us to stop, not half installed


def _class_for(cls: type[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> type[Any]:
    """`MiCSAccelerator`, where the stock class was named and MiCS asked for."""
    if cls is not Accelerator:
        return cls
    plugins = (*args, kwargs.get("fsdp_plugin"), framework.current_plugin())
    is_asked_for = launch.is_enabled() or any(isinstance(plugin, MiCSPlugin) for plugin in plugins)
    return MiCSAccelerator if is_asked_for else cls


def _check_foreign(accelerator: Accelerator, plugin: Any) -> None:
    """Refuse classes that would ignore what is asked for: on CPUs, Accelerate drops an FSDP plugin without a word.

    Raises:
        ConfigError: The class is derived from the stock one.
    """
    if isinstance(accelerator, MiCSAccelerator) or not (isinstance(plugin, MiCSPlugin) or launch.is_enabled()):
        return
    name = type(accelerator).__name__
    raise ConfigError(
        f"MiCS is asked for, and `{name}` is derived from `accelerate.Accelerator`, which would not shard. Derive "
        f"`{name}` from `mics_strategy.accelerate.MiCSAccelerator`."
    )


def patch_assert_close() -> None:
    """Let ``torch.testing.assert_close`` take a sharded tensor and a plain one. Collective then. Idempotent."""
    stock = torch.testing.assert_close
    if hasattr(stock, "mics_stock"):
        return

    @functools.wraps(stock)
    def assert_close(actual: Any, expected: Any, **options: Any) -> None:
        is_mixed = isinstance(actual, DTensor) != isinstance(expected, DTensor)
        if is_mixed and isinstance(framework.current_plugin(), MiCSPlugin):
            actual, expected = _whole(actual), _whole(expected)
        stock(actual, expected, **options)

    assert_close.mics_stock = stock  # type: ignore[attr-defined]
    torch.testing.assert_close = assert_close


def _whole(value: Any) -> Any:
    with torch.no_grad():
        return value.full_tensor() if isinstance(value, DTensor) else value
