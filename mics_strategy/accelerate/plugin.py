"""What does `Accelerator(fsdp_plugin=...)` take?

Accelerate has no socket for strategies but its FSDP plugin. This one carries a `ShardConfig` beside those words of
FSDP's that mean the same here.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy
from typing_extensions import override

from mics_strategy import ConfigError, ShardConfig
from mics_strategy.accelerate import launch

UnitRule = str | int | type[nn.Module] | Iterable[type[nn.Module] | str] | Callable[[nn.Module], bool]
_FSDP2 = 2
_LAYER_NAMES = "transformer_cls_names_to_wrap"
# Words of FSDP's that mean the same here.
_SHARED = (
    *("state_dict_type", "activation_checkpointing", "cpu_ram_efficient_loading", "auto_wrap_policy"),
    *("transformer_cls_names_to_wrap", "min_num_params", "mixed_precision_policy"),
)


class MiCSPlugin(FullyShardedDataParallelPlugin):  # type: ignore[misc]
    """How `Accelerator` shards.

    Args:
        config: A preset's name or a `ShardConfig`. Left out, what the launcher's configuration says, else "mics".
        units: As `mics_strategy.shard` takes it. Left out, the layer classes that the launcher's configuration or
            `transformer_cls_names_to_wrap` name, else "auto".
        initializer: As `mics_strategy.shard` takes it, for models on the meta device.
        **options: Fields of `ShardConfig`; and of Accelerate's FSDP plugin `state_dict_type` (what `save_state` writes:
            ``"SHARDED_STATE_DICT"``, a folder to which every rank writes its share, or ``"FULL_STATE_DICT"``, a file),
            `activation_checkpointing` (of every unit), `cpu_ram_efficient_loading`, `auto_wrap_policy`,
            `transformer_cls_names_to_wrap`, `min_num_params`, `mixed_precision_policy` (dtypes of parameters and
            reductions, in place of autocast).

    Attributes:
        config: What was asked for.

    Raises:
        ConfigError: Unknown or impossible options, or those of FSDP that mean nothing here.
    """

    def __init__(
        self,
        config: str | ShardConfig | None = None,
        *,
        units: UnitRule | None = None,
        initializer: Callable[[nn.Module], None] | str = "auto",
        **options: Any,
    ) -> None:
        shared = {name: options.pop(name) for name in _SHARED if name in options}
        _check_known(options)
        is_launched = launch.is_enabled()
        base = config if config is not None else (launch.config() if is_launched else "mics")
        self.config = ShardConfig.of(base, **options)
        self.units = units
        self.initializer = initializer
        fixed = {"fsdp_version": _FSDP2, "reshard_after_forward": True, "cpu_offload": False}
        super().__init__(**fixed, **shared)
        launch.check_supported()  # the stock plugin has read it from the environment
        named: list[str] | None = getattr(self, _LAYER_NAMES) or (launch.layer_classes() if is_launched else None)
        setattr(self, _LAYER_NAMES, [name.strip() for name in named] if named else None)
        if self.mixed_precision_policy is not None:
            self.config = _with_dtypes_of(self.mixed_precision_policy, self.config, set(options))

    @classmethod
    def from_fsdp_plugin(cls, plugin: FullyShardedDataParallelPlugin) -> MiCSPlugin:
        """The launcher's configuration, with what a stock plugin says in the words that both share.

        Args:
            plugin: Made by somebody who does not know us, such as `transformers.Trainer`.

        Raises:
            ConfigError: It asks for what the engine does not do.
        """
        _check_fsdp_options(plugin)
        given = {name: getattr(plugin, name) for name in _SHARED}
        return cls(**{name: value for name, value in given.items() if value is not None})

    def is_equivalent_to(self, other: MiCSPlugin) -> bool:
        """Whether a model would be sharded and saved alike."""
        names = ("config", "units", "initializer", *_SHARED)
        return all(getattr(self, name) == getattr(other, name) for name in names)

    @override
    def set_auto_wrap_policy(self, model: nn.Module) -> None:
        """Called by Accelerate's own FSDP, which must never see this plugin.

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
        """Keep the policy that was given; `Accelerator(mixed_precision=...)` means autocast, as with DDP."""
        if override or self.mixed_precision_policy is not None:
            super().set_mixed_precision(mixed_precision, buffer_autocast, override)

    def units_for(self, model: nn.Module) -> Any:
        """What `shard(units=...)` takes for this model."""
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
    own = set(ShardConfig.__dataclass_fields__)
    foreign = set(FullyShardedDataParallelPlugin.__dataclass_fields__) - set(_SHARED)
    for name in sorted(set(options) - own):
        if name in foreign:
            raise ConfigError(
                f"`MiCSPlugin({name}=...)` is an option of FSDP that means nothing here. Leave it out; what is sharded "
                "over which ranks is said by a preset or by `params`, `grads` and `optimizer`."
            )
        near = difflib.get_close_matches(name, [*own, *_SHARED], n=1)
        meant = f" Did you mean {near[0]!r}?" if near else ""
        known = ", ".join([*sorted(own), *_SHARED])
        raise ConfigError(f"Unknown option {name!r} of MiCSPlugin.{meant} Known: units, {known}.")


def _check_fsdp_options(plugin: FullyShardedDataParallelPlugin) -> None:
    offload, reshard = plugin.cpu_offload, plugin.reshard_after_forward
    is_offloading = isinstance(offload, CPUOffloadPolicy) or getattr(offload, "offload_params", False)
    strategy = getattr(reshard or plugin.sharding_strategy, "name", "FULL_SHARD") if plugin.fsdp_version == 1 else None
    asked = {
        "cpu_offload": (is_offloading, launch.HINT_OFFLOAD),
        "reshard_after_forward": (reshard is False, launch.HINT_RESHARD),
        "sharding_strategy": (strategy not in (None, "FULL_SHARD"), f"Use a preset in place of {strategy}."),
        "ignored_modules": (plugin.ignored_modules, launch.HINT_IGNORED),
        "activation_checkpointing_offload": (plugin.activation_checkpointing_offload, launch.HINT_ACTIVATIONS),
    }
    for name, (is_asked, remedy) in asked.items():
        if is_asked:
            value = getattr(plugin, name)
            raise ConfigError(f"`{name}={value}` of an FSDP plugin, or in `fsdp_config`, is not offered. {remedy}")


def _with_dtypes_of(policy: MixedPrecisionPolicy, config: ShardConfig, given: set[str]) -> ShardConfig:
    """The configuration with the dtypes of a policy, where it has none of its own.

    Raises:
        ConfigError: Dtypes that contradict each other, or what the engine does not do.
    """
    if not policy.cast_forward_inputs or policy.output_dtype not in (None, policy.param_dtype):
        raise ConfigError(
            f"`mixed_precision_policy={policy}`: inputs are cast to `param_dtype`, and outputs have it. Leave "
            "`cast_forward_inputs` and `output_dtype` out."
        )
    dtypes = {"param_dtype": policy.param_dtype, "reduce_dtype": policy.reduce_dtype}
    for name, dtype in dtypes.items():
        if dtype is not None and name in given and getattr(config, name) not in ("auto", dtype):
            raise ConfigError(
                f"`mixed_precision_policy` has {name}={dtype}, and `{name}={getattr(config, name)}` was given. "
                "Give one of them."
            )
    return ShardConfig.of(config, **{k: v for k, v in dtypes.items() if isinstance(v, torch.dtype) and k not in given})
