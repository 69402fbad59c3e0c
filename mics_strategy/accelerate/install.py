"""How do `accelerate.Accelerator` and the functions that save come to be ours?

Once, when `mics_strategy.accelerate` is imported, and before or after anything else was. What they do for jobs that do
not ask for MiCS stays as it is. Workers of a launcher whose file asks for it import it when they import Accelerate
(`mics_strategy_autoload`).
"""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator

from mics_strategy import ConfigError
from mics_strategy.accelerate import checkpoints, framework, launch
from mics_strategy.accelerate.accelerator import MiCSAccelerator
from mics_strategy.accelerate.comparing import compare_wholes
from mics_strategy.accelerate.plugin import MiCSPlugin


def install() -> None:
    """Redirect the constructor, and the functions by which Accelerate and its users save, load and compare."""
    framework.dispatch("save_fsdp_model", checkpoints.save_model)
    framework.dispatch("load_fsdp_model", checkpoints.load_model)
    framework.dispatch("save_fsdp_optimizer", checkpoints.save_optimizer)
    framework.dispatch("load_fsdp_optimizer", checkpoints.load_optimizer)
    compare_wholes()
    framework.watch_construction(_refuse_foreign)
    framework.redirect(_class_for)  # last: what fails above leaves jobs that ask for us to stop, not half installed


def _class_for(cls: type[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> type[Any]:
    """`MiCSAccelerator`, where the stock class was named and MiCS asked for."""
    if cls is not Accelerator:
        return cls
    plugins = (*args, kwargs.get("fsdp_plugin"), framework.current_plugin())
    is_asked_for = launch.is_asked_for() or any(isinstance(plugin, MiCSPlugin) for plugin in plugins)
    return MiCSAccelerator if is_asked_for else cls


def _refuse_foreign(accelerator: Accelerator, plugin: Any) -> None:
    """Refuse classes that would ignore what is asked for: on CPUs, Accelerate drops an FSDP plugin without a word.

    Raises:
        ConfigError: The class is derived from the stock one.
    """
    if isinstance(accelerator, MiCSAccelerator) or not (isinstance(plugin, MiCSPlugin) or launch.is_asked_for()):
        return
    name = type(accelerator).__name__
    raise ConfigError(
        f"MiCS is asked for, and `{name}` is derived from `accelerate.Accelerator`, which would not shard. Derive "
        f"`{name}` from `mics_strategy.accelerate.MiCSAccelerator`."
    )
