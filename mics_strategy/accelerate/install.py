"""How do `accelerate.Accelerator` and the functions that save come to be ours?

Once, when `mics_strategy.accelerate` is imported, and before or after anything else was. What they do for jobs that do
not ask for MiCS stays as it is.
"""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator

from mics_strategy.accelerate import checkpoints, framework, launch
from mics_strategy.accelerate.accelerator import MiCSAccelerator
from mics_strategy.accelerate.plugin import MiCSPlugin


def install() -> None:
    """Redirect the constructor, and the functions by which Accelerate and `transformers.Trainer` save and load."""
    framework.redirect(_class_for)
    framework.dispatch("save_fsdp_model", checkpoints.save_model)
    framework.dispatch("load_fsdp_model", checkpoints.load_model)
    framework.dispatch("save_fsdp_optimizer", checkpoints.save_optimizer)
    framework.dispatch("load_fsdp_optimizer", checkpoints.load_optimizer)


def _class_for(cls: type[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> type[Any]:
    """`MiCSAccelerator`, where the stock class was named and MiCS asked for."""
    if cls is not Accelerator:
        return cls
    plugins = (*args, kwargs.get("fsdp_plugin"), framework.current_plugin())
    is_asked_for = launch.is_asked_for() or any(isinstance(plugin, MiCSPlugin) for plugin in plugins)
    return MiCSAccelerator if is_asked_for else cls
