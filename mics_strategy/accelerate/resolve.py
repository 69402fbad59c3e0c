"""Resolution of the plugin and the partition size of a process.

All Accelerators of a process share one state, and so one plugin. The partition size can also be requested by
`ParallelismConfig`, in the script or in the launcher's configuration.
"""

from __future__ import annotations

from typing import Any

from mics_strategy import ConfigError, ShardConfig
from mics_strategy.accelerate import framework, launch
from mics_strategy.accelerate.plugin import MiCSPlugin


def resolve_plugin(requested: Any, parallelism: Any) -> MiCSPlugin:
    """Return the requested plugin, one made from it, or that of this process.

    Args:
        requested: Value of `Accelerator(fsdp_plugin=...)`, or None.
        parallelism: Value of `Accelerator(parallelism_config=...)`, or None.

    Raises:
        ConfigError: They contradict each other, or this process's earlier Accelerator.
    """
    if requested is None:
        requested = framework.current_plugin()
    if requested is None:
        plugin = MiCSPlugin()
    elif isinstance(requested, MiCSPlugin):
        plugin = requested
    else:
        plugin = MiCSPlugin.from_fsdp_plugin(requested)
    sizes = {name: getattr(parallelism, name) or 1 for name in launch.PARALLEL_SIZES} if parallelism else {}
    size = launch.partition_size_of(sizes) if sizes else launch.partition_size()
    if size is not None and plugin.config.partition_size != size:
        if plugin.config.partition_size != "auto":
            raise ConfigError(
                f"`partition_size={plugin.config.partition_size!r}` contradicts `parallelism_config` with "
                f"dp_shard_size={size}. Remove `parallelism_config`."
            )
        plugin.config = plugin.config.replace(partition_size=size)
    if size is not None and not _is_partitioned(size, plugin.config):
        raise ConfigError(
            f"`parallelism_config` with dp_shard_size={size} sets the size of a partition, but no scope of "
            f"{plugin.config} is a partition. Remove `parallelism_config`, or use the preset 'mics'."
        )
    current = framework.current_plugin()
    if isinstance(current, MiCSPlugin) and current.is_equivalent_to(plugin):
        return current  # a notebook cell was run again
    if framework.is_started():
        raise ConfigError(
            "This process already has an Accelerator without this `MiCSPlugin`, and all Accelerators of a process "
            "share one state. Pass the plugin to the first one, or import `mics_strategy.accelerate` before it."
        )
    return plugin


def _is_partitioned(size: int, config: ShardConfig) -> bool:
    """Whether scopes of the configuration are partitions of that size."""
    scopes = {config.params, config.grads, config.optimizer, config.secondary_params}
    if size in (1, launch.num_processes()) and scopes <= {"none", "world" if size > 1 else "none"}:
        return True
    return config.is_auto or "partition" in scopes
