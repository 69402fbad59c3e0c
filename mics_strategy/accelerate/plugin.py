"""Plugin for `Accelerator(fsdp_plugin=...)`.

Accelerate has no extension point for strategies except its FSDP plugin. This plugin carries a `ShardConfig`, and those
options of the FSDP plugin that have the same meaning here.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy
from typing_extensions import override

from mics_strategy import ConfigError, ShardConfig
from mics_strategy.accelerate import launch
from mics_strategy.snapshots.job import RecoveryOptions

UnitRule = str | int | type[nn.Module] | Iterable[type[nn.Module] | str] | Callable[[nn.Module], bool]
_FSDP2 = 2
_LAYER_NAMES = "transformer_cls_names_to_wrap"
# Options of the FSDP plugin with the same meaning here.
_log = logging.getLogger(__name__)
_SHARED = (
    *("state_dict_type", "activation_checkpointing", "cpu_ram_efficient_loading", "auto_wrap_policy"),
    *("transformer_cls_names_to_wrap", "min_num_params", "mixed_precision_policy"),
)


class MiCSPlugin(FullyShardedDataParallelPlugin):  # type: ignore[misc]
    """Sharding options of an `Accelerator`.

    Args:
        config: Name of a preset, or a `ShardConfig`. Default: the launcher's configuration, or else "mics".
        units: Units, as in `mics_strategy.shard`. Default: the layer classes named by the launcher's configuration or
            by `transformer_cls_names_to_wrap`, or else "auto".
        initializer: Initializer of models on the meta device, as in `mics_strategy.shard`.
        recovery: ``"memory"`` lets `transformers.Trainer` take snapshots in host memory, from which `train` continues
            when the launcher starts the script again; a dict has options of `MemorySnapshots` (`every`, `job`,
            `folder`). Default: the launcher's configuration, or else "none".
        **options: Fields of `ShardConfig`, and these options of Accelerate's FSDP plugin: `state_dict_type` (format of
            `save_state`: ``"SHARDED_STATE_DICT"``, a folder to which every rank writes its shards, or
            ``"FULL_STATE_DICT"``, a file), `activation_checkpointing` (of every unit), `cpu_ram_efficient_loading`,
            `auto_wrap_policy`, `transformer_cls_names_to_wrap`, `min_num_params`, `mixed_precision_policy` (dtypes of
            parameters and reductions, without autocast). Under `Accelerator(mixed_precision=...)` without a policy,
            parameters are gathered in 16 bits; with `param_dtype="float32"` in fp32, under autocast.

    Attributes:
        config: Requested configuration.
        recovery: Snapshots that `recovery` asks for.

    Raises:
        ConfigError: An option is unknown or invalid, or belongs to FSDP and has no meaning here.
    """

    def __init__(
        self,
        config: str | ShardConfig | None = None,
        *,
        units: UnitRule | None = None,
        initializer: Callable[[nn.Module], None] | str = "auto",
        recovery: str | Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        shared = {name: options.pop(name) for name in _SHARED if name in options}
        _check_known(options)
        is_launched = launch.is_enabled()
        base = config if config is not None else (launch.config() if is_launched else "mics")
        self.config = ShardConfig.of(base, **options)
        self.units = units
        self.initializer = initializer
        if recovery is None:
            recovery = launch.recovery() if is_launched else "none"
        self.recovery = RecoveryOptions.of(recovery)
        fixed = {"fsdp_version": _FSDP2, "reshard_after_forward": True, "cpu_offload": False}
        super().__init__(**fixed, **shared)
        launch.check_supported()  # the stock plugin has read these options from the environment
        layer_names: list[str] | None = getattr(self, _LAYER_NAMES) or (launch.layer_classes() if is_launched else None)
        setattr(self, _LAYER_NAMES, [name.strip() for name in layer_names] if layer_names else None)
        if self.mixed_precision_policy is not None:
            self.config = _with_dtypes_of(self.mixed_precision_policy, self.config, set(options))

    @classmethod
    def from_fsdp_plugin(cls, plugin: FullyShardedDataParallelPlugin) -> MiCSPlugin:
        """Combine the launcher's configuration with the shared options of a stock plugin.

        Args:
            plugin: Stock plugin, made by code that does not know `MiCSPlugin`, such as `transformers.Trainer`.

        Raises:
            ConfigError: The plugin requests something that the engine does not support.
        """
        _check_fsdp_options(plugin)
        if launch.is_enabled() and os.environ.get("RANK", "0") == "0":
            _log.warning(
                "A script's FSDP plugin (`fsdp=` of `TrainingArguments`) meets the launcher's file. The file says how "
                "the model is sharded, and of the plugin count only its %s.",
                ", ".join(f"`{name}`" for name in _SHARED),
            )
        options = {name: getattr(plugin, name) for name in _SHARED}
        return cls(**{name: value for name, value in options.items() if value is not None})

    def is_equivalent_to(self, other: MiCSPlugin) -> bool:
        """Whether both plugins shard and save a model in the same way."""
        names = ("config", "units", "initializer", "recovery", *_SHARED)
        return all(getattr(self, name) == getattr(other, name) for name in names)

    @override
    def set_auto_wrap_policy(self, model: nn.Module) -> None:
        """Raise, because only Accelerate's own FSDP calls this method.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            "`MiCSPlugin` was given to an Accelerator that trains with FSDP and would ignore it. Construct "
            "`accelerate.Accelerator` after `import mics_strategy.accelerate`, or derive your class from "
            "`mics_strategy.accelerate.MiCSAccelerator`."
        )

    @override
    def set_mixed_precision(self, mixed_precision: Any, buffer_autocast: bool = False, override: bool = False) -> None:
        """Keep the policy; `MiCSAccelerator` resolves `mixed_precision` later."""
        if override or self.mixed_precision_policy is not None:
            super().set_mixed_precision(mixed_precision, buffer_autocast, override)

    def units_for(self, model: nn.Module) -> Any:
        """Return the value of `shard(units=...)` for a model."""
        if self.units is not None:
            return self.units
        if self.transformer_cls_names_to_wrap:
            return tuple(self.transformer_cls_names_to_wrap)
        if self.auto_wrap_policy is transformer_auto_wrap_policy:
            present = {type(module).__name__ for module in model.modules()}
            return tuple(name for name in getattr(model, "_no_split_modules", None) or () if name in present) or "auto"
        if self.auto_wrap_policy is size_based_auto_wrap_policy:
            return self.min_num_params or "auto"
        if self.auto_wrap_policy is not None:
            return lambda module: self.auto_wrap_policy(module=module, recurse=False, nonwrapped_numel=_numel(module))
        return "auto"


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _check_known(options: dict[str, Any]) -> None:
    fields = {field.name for field in dataclasses.fields(ShardConfig)}
    foreign = set(FullyShardedDataParallelPlugin.__dataclass_fields__) - set(_SHARED)
    for name in sorted(set(options) - fields):
        if name in foreign:
            raise ConfigError(
                f"`MiCSPlugin({name}=...)` is an option of FSDP that has no meaning here. Remove it. To choose what is "
                "sharded over which ranks, use a preset or `params`, `grads` and `optimizer`."
            )
        matches = difflib.get_close_matches(name, [*fields, *_SHARED], n=1)
        suggestion = f" Did you mean {matches[0]!r}?" if matches else ""
        names = ", ".join([*sorted(fields), *_SHARED])
        raise ConfigError(f"Unknown option {name!r} of MiCSPlugin.{suggestion} Known: units, recovery, {names}.")


def _check_fsdp_options(plugin: FullyShardedDataParallelPlugin) -> None:
    offload, reshard = plugin.cpu_offload, plugin.reshard_after_forward
    is_offloading = isinstance(offload, CPUOffloadPolicy) or getattr(offload, "offload_params", False)
    offloads_activations = getattr(plugin, "activation_checkpointing_offload", False)  # since Accelerate 1.15
    strategy = getattr(reshard or plugin.sharding_strategy, "name", "FULL_SHARD") if plugin.fsdp_version == 1 else None
    checks = {
        "cpu_offload": (is_offloading, launch.HINT_OFFLOAD),
        "reshard_after_forward": (reshard is False, launch.HINT_RESHARD),
        "sharding_strategy": (strategy not in (None, "FULL_SHARD"), f"Use a preset in place of {strategy}."),
        "ignored_modules": (plugin.ignored_modules, launch.HINT_IGNORED),
        "activation_checkpointing_offload": (offloads_activations, launch.HINT_ACTIVATIONS),
    }
    for name, (is_set, hint) in checks.items():
        if is_set:
            value = getattr(plugin, name)
            raise ConfigError(f"`{name}={value}` of an FSDP plugin or of `fsdp_config` is not supported. {hint}")


def _with_dtypes_of(policy: MixedPrecisionPolicy, config: ShardConfig, names: set[str]) -> ShardConfig:
    """Add the dtypes of a policy to a configuration that has none of its own.

    Raises:
        ConfigError: Dtypes contradict each other, or the engine does not support the policy.
    """
    if not policy.cast_forward_inputs or policy.output_dtype not in (None, policy.param_dtype):
        raise ConfigError(
            f"`mixed_precision_policy={policy}` is not supported: inputs are always cast to `param_dtype`, and outputs "
            "have that dtype. Remove `cast_forward_inputs` and `output_dtype`."
        )
    dtypes = {"param_dtype": policy.param_dtype, "reduce_dtype": policy.reduce_dtype}
    for name, dtype in dtypes.items():
        if dtype is not None and name in names and getattr(config, name) not in ("auto", dtype):
            raise ConfigError(
                f"`mixed_precision_policy` has {name}={dtype}, but `{name}={getattr(config, name)}` was also given. "
                "Remove one of them."
            )
    return ShardConfig.of(config, **{k: v for k, v in dtypes.items() if isinstance(v, torch.dtype) and k not in names})
