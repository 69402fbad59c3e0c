"""What was asked for: which plugin holds, and how large is a partition?

Accelerators of a process share one state, so one plugin. Beside it, `ParallelismConfig` is another word for the size of
a partition, in the script or in the launcher's configuration.
"""

from __future__ import annotations

from typing import Any

from mics_strategy import ConfigError, ShardConfig
from mics_strategy.accelerate import framework, launch
from mics_strategy.accelerate.plugin import MiCSPlugin


def resolve_plugin(given: Any, parallelism: Any) -> MiCSPlugin:
    """The plugin that was given, made of what was given, or that of this process.

    Args:
        given: As `Accelerator(fsdp_plugin=...)` takes it; None without one.
        parallelism: As `Accelerator(parallelism_config=...)` takes it; None without one.

    Raises:
        ConfigError: They contradict each other, or what this process has begun with.
    """
    if given is None:
        given = framework.current_plugin()
    if given is None:
        plugin = MiCSPlugin()
    elif isinstance(given, MiCSPlugin):
        plugin = given
    else:
        plugin = MiCSPlugin.from_fsdp_plugin(given)
    sizes = {name: getattr(parallelism, name) or 1 for name in launch.PARALLEL_SIZES} if parallelism else {}
    wanted = launch.partition_size_of(sizes) if sizes else launch.partition_size()
    if wanted is not None and plugin.config.partition_size != wanted:
        if plugin.config.partition_size != "auto":
            raise ConfigError(
                f"`partition_size={plugin.config.partition_size!r}` contradicts `parallelism_config`, which has "
                f"dp_shard_size={wanted}. Leave `parallelism_config` out."
            )
        plugin.config = plugin.config.replace(partition_size=wanted)
    if wanted is not None and not _is_partitioned(wanted, plugin.config):
        raise ConfigError(
            f"`parallelism_config` with dp_shard_size={wanted} gives the size of a partition, and no scope of "
            f"{plugin.config} is a partition. Leave `parallelism_config` out, or use the preset 'mics'."
        )
    current = framework.current_plugin()
    if isinstance(current, MiCSPlugin) and current.is_equivalent_to(plugin):
        return current  # a notebook's cell that is run again
    if framework.is_started():
        raise ConfigError(
            "This process has an Accelerator that was made without this `MiCSPlugin`, and all Accelerators of a "
            "process share one state. Give the plugin to the first one, or load `mics_strategy.accelerate` before it."
        )
    return plugin


def _is_partitioned(size: int, config: ShardConfig) -> bool:
    """Whether a partition of that size is what the scopes mean."""
    scopes = {config.params, config.grads, config.optimizer, config.secondary_params}
    if size in (1, launch.num_processes()) and scopes <= {"none", "world" if size > 1 else "none"}:
        return True
    return config.is_auto or "partition" in scopes
