"""Sharding for ``accelerate launch``, `Accelerator` and `transformers.Trainer`.

Scripts need not import this package: processes that ``accelerate launch --config_file mics.yaml`` starts import it as
soon as they import Accelerate (see `mics_strategy_autoload`). Without ``fsdp_version: mics`` in the launcher's
configuration and without a `MiCSPlugin`, nothing changes.

The import patches Accelerate once, before or after other imports.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from mics_strategy import ConfigError
from mics_strategy.version import install_advice

try:
    from accelerate import Accelerator
except ModuleNotFoundError as error:
    if error.name != "accelerate":
        raise
    message = f"`mics_strategy.accelerate` needs Accelerate, which is not installed. {install_advice('accelerate')}"
    raise ModuleNotFoundError(message, name=error.name) from error

from mics_strategy.accelerate import checkpoints, framework, launch
from mics_strategy.accelerate.accelerator import MiCSAccelerator
from mics_strategy.accelerate.plugin import MiCSPlugin

__all__ = ["MiCSAccelerator", "MiCSPlugin"]


def _install() -> None:
    """Patch the constructor, and the functions that save, load and compare."""
    framework.patch_function("save_fsdp_model", checkpoints.save_model)
    framework.patch_function("load_fsdp_model", checkpoints.load_model)
    framework.patch_function("save_fsdp_optimizer", checkpoints.save_optimizer)
    framework.patch_function("load_fsdp_optimizer", checkpoints.load_optimizer)
    _patch_assert_close()
    framework.patch_fsdp_version()
    framework.on_construct(_check_foreign)
    framework.patch_constructor(_class_for)  # last, so that after a failure above jobs with MiCS stop


def _class_for(cls: type[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> type[Any]:
    """Return `MiCSAccelerator` for the stock class if MiCS is requested."""
    if cls is not Accelerator:
        return cls
    plugins = (*args, kwargs.get("fsdp_plugin"), framework.current_plugin())
    is_requested = launch.is_enabled() or any(isinstance(plugin, MiCSPlugin) for plugin in plugins)
    return MiCSAccelerator if is_requested else cls


def _check_foreign(accelerator: Accelerator, plugin: Any) -> None:
    """Refuse classes that would ignore MiCS.

    On CPUs, Accelerate drops an FSDP plugin silently.

    Raises:
        ConfigError: The class is derived from the stock one.
    """
    if isinstance(accelerator, MiCSAccelerator) or not (isinstance(plugin, MiCSPlugin) or launch.is_enabled()):
        return
    name = type(accelerator).__name__
    raise ConfigError(
        f"MiCS is requested, but `{name}` is derived from `accelerate.Accelerator`, which would not shard. Derive "
        f"`{name}` from `mics_strategy.accelerate.MiCSAccelerator`."
    )


def _patch_assert_close() -> None:
    """Let ``torch.testing.assert_close`` compare DTensors with tensors. Idempotent. Such a comparison is collective."""
    stock = torch.testing.assert_close
    if hasattr(stock, "mics_stock"):
        return

    @functools.wraps(stock)
    def assert_close(actual: Any, expected: Any, **options: Any) -> None:
        is_mixed = isinstance(actual, DTensor) != isinstance(expected, DTensor)
        if is_mixed and isinstance(framework.current_plugin(), MiCSPlugin):
            actual, expected = _full(actual), _full(expected)
        stock(actual, expected, **options)

    assert_close.mics_stock = stock  # type: ignore[attr-defined]
    torch.testing.assert_close = assert_close


def _full(value: Any) -> Any:
    with torch.no_grad():
        return value.full_tensor() if isinstance(value, DTensor) else value


_install()
