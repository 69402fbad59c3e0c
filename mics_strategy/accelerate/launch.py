"""What did the launcher's configuration ask for?

``accelerate launch`` does not know us. What stands under ``fsdp_config`` in its file it hands to every worker in
environment variables, unread: ``fsdp_version: mics`` and the mapping under ``fsdp_sharding_strategy`` arrive as text. A
script that does not load this package stops at the first (`int("mics")`), before it could train anything else.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Mapping
from typing import Any

from mics_strategy import Codec, ConfigError, ShardConfig, Topology

PARALLEL_SIZES = ("dp_shard_size", "dp_replicate_size", "tp_size", "cp_size", "sp_size")
_VERSION = "mics"
_DEFAULT = "FULL_SHARD"  # what the launcher sends where the file has no `fsdp_sharding_strategy`
_PRESET_OF_FSDP = {
    "SHARD_GRAD_OP": "zero2",
    "NO_SHARD": "ddp",
    "HYBRID_SHARD": "mics",
    "HYBRID_SHARD_ZERO2": "paro-nii",
}
_USE = "Use a mapping of plain values, such as `{preset: mics, partition_size: 8}`."
_OTHERS = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
}
HINT_OFFLOAD = "Nothing is offloaded. Shard over more ranks (`partition_size`)."
HINT_RESHARD = "To keep parameters, use `fsdp_sharding_strategy: {params: none}`."
HINT_IGNORED = "Every parameter is sharded. Freeze those that shall not be trained."
HINT_ACTIVATIONS = "Activations stay on the device."
# Asked for in words that belong to FSDP: the variable, the value that asks for nothing, and what to do.
_NOT_OFFERED = {
    "FSDP_OFFLOAD_PARAMS": ("false", HINT_OFFLOAD),
    "FSDP_RESHARD_AFTER_FORWARD": ("true", HINT_RESHARD),
    "FSDP_IGNORED_MODULES": ("", HINT_IGNORED),
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": ("false", HINT_ACTIVATIONS),
}


def is_enabled() -> bool:
    """Whether the launcher's configuration says ``fsdp_version: mics``."""
    return _is_true("ACCELERATE_USE_FSDP") and os.environ.get("FSDP_VERSION", "").lower() == _VERSION


def enable() -> None:
    """Say in the launcher's stead that this process shards, where its configuration says nothing else.

    Raises:
        ConfigError: It says something else.
    """
    if is_enabled():
        return
    for variable, name in _OTHERS.items():
        if _is_true(variable):
            raise ConfigError(
                f"The launcher's configuration asks for {name}, and `mics_strategy.run` is to shard. Write "
                "`distributed_type: FSDP` and, under `fsdp_config`, `fsdp_version: mics`; or start the script itself."
            )
    os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_VERSION=_VERSION)


def num_processes() -> int:
    """Processes that a launcher has started; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def config() -> ShardConfig:
    """What stands under ``fsdp_sharding_strategy``.

    Raises:
        ConfigError: An unknown option or value, or words of FSDP that mean nothing here.
    """
    check_supported()
    text = os.environ.get("FSDP_SHARDING_STRATEGY", _DEFAULT).strip()
    if text in (_DEFAULT, "", "None"):
        return ShardConfig.preset("mics")
    if text in _PRESET_OF_FSDP:
        raise ConfigError(
            f"`fsdp_sharding_strategy: {text}` is a word of FSDP. Use `fsdp_sharding_strategy: {_PRESET_OF_FSDP[text]}`"
            ", or a mapping of options such as `{preset: mics, partition_size: 8}`."
        )
    return config_of(_parse(text))


def config_of(options: str | Mapping[str, Any]) -> ShardConfig:
    """The configuration of a preset's name, or of a mapping of options with an optional ``preset``.

    Raises:
        ConfigError: An unknown option or value.
    """
    if isinstance(options, str):
        return ShardConfig.preset(options)
    given = dict(options)
    preset = given.pop("preset", "mics")
    for name, cls in (("topology", Topology), ("weight_codec", Codec), ("grad_codec", Codec)):
        if isinstance(given.get(name), Mapping):
            given[name] = _build(name, cls, given[name])
    return ShardConfig.preset(str(preset), **given)


def _build(name: str, cls: type[Any], fields: Mapping[str, Any]) -> Any:
    try:
        return cls(**fields)
    except TypeError as error:
        raise ConfigError(f"`{name}: {dict(fields)}` is no {cls.__name__}: {error}.") from error


def _parse(text: str) -> str | dict[str, Any]:
    """A mapping, which the launcher has written in Python's way; anything else is a preset's name."""
    if text[0].isalpha():
        return text
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError) as error:
        raise ConfigError(f"`fsdp_sharding_strategy: {text}` cannot be read ({error}). {_USE}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"`fsdp_sharding_strategy: {text}` is neither a preset's name nor a mapping. {_USE}")
    return found


def check_supported() -> None:
    """Refuse what the launcher's configuration asks of FSDP and the engine does not do.

    Raises:
        ConfigError: Naming the key of the configuration.
    """
    for variable, (nothing, remedy) in _NOT_OFFERED.items():
        value = os.environ.get(variable, nothing)
        if value.lower() not in (nothing, "", "none", "full_shard"):
            raise ConfigError(f"`{variable.lower()}: {value}` is not offered. {remedy}")


def layer_classes() -> list[str] | None:
    """What stands under ``fsdp_transformer_layer_cls_to_wrap``."""
    text = os.environ.get("FSDP_TRANSFORMER_CLS_TO_WRAP", "")
    found = [name.strip() for name in text.split(",") if name.strip() and name.strip() != "None"]
    return found or None


def partition_size() -> int | None:
    """The size of the shards that ``parallelism_config`` asks for.

    Raises:
        ConfigError: Other parallelism, or sizes that are not those of the job.
    """
    if not _is_true("ACCELERATE_USE_PARALLELISM_CONFIG"):
        return None
    sizes = {name: int(os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}", "1")) for name in PARALLEL_SIZES}
    return partition_size_of(sizes)


def partition_size_of(sizes: Mapping[str, int]) -> int:
    """The partition size that sizes of `ParallelismConfig` mean.

    Raises:
        ConfigError: Other parallelism, or sizes that are not those of the job.
    """
    others = [f"{name}={size}" for name, size in sizes.items() if not name.startswith("dp_") and size > 1]
    if others:
        raise ConfigError(f"`parallelism_config` asks for {', '.join(others)}. Only data parallelism is offered.")
    shard, replicate = sizes["dp_shard_size"], sizes["dp_replicate_size"]
    if shard * replicate != num_processes():
        raise ConfigError(
            f"`parallelism_config`: dp_shard_size={shard} times dp_replicate_size={replicate} is not the "
            f"{num_processes()} processes of this job. Leave it out, and give `partition_size` alone."
        )
    return shard


def _is_true(variable: str) -> bool:
    return os.environ.get(variable, "false").lower() in ("true", "1", "yes")
