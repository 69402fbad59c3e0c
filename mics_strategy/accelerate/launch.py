"""Configuration of ``accelerate launch``, as its workers read it.

``accelerate launch`` does not know this package. It passes everything under ``fsdp_config`` of its file to the workers
in environment variables, unparsed: ``fsdp_version: mics`` and the mapping under ``fsdp_sharding_strategy`` arrive as
text. A script that does not load this package stops at the former (`int("mics")`), before it could train in any other
way.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Mapping
from typing import Any

from mics_strategy import Codec, ConfigError, ShardConfig

PARALLEL_SIZES = ("dp_shard_size", "dp_replicate_size", "tp_size", "cp_size", "sp_size")
_VERSION = "mics"
_DEFAULT = "FULL_SHARD"  # value of the launcher if the file has no `fsdp_sharding_strategy`
_RECOVERY = "recovery"
_PRESET_OF_FSDP = {
    "SHARD_GRAD_OP": "zero2",
    "NO_SHARD": "ddp",
    "HYBRID_SHARD": "mics",
    "HYBRID_SHARD_ZERO2": "paro-nii",
}
_HINT_MAPPING = "Use a mapping of plain values, such as `{preset: mics, partition_size: 8}`."
_OTHER_PLUGINS = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
}
HINT_OFFLOAD = "Offloading is not available. Shard over more ranks (`partition_size`)."
HINT_RESHARD = "To keep parameters unsharded, use `fsdp_sharding_strategy: {params: replicate}`."
HINT_IGNORED = "Every parameter is sharded. Freeze the parameters that shall not be trained."
HINT_ACTIVATIONS = "Activations stay on the device. Remove the option."
# Options of FSDP that are not supported: variable -> (its default, what to do).
_UNSUPPORTED = {
    "FSDP_OFFLOAD_PARAMS": ("false", HINT_OFFLOAD),
    "FSDP_RESHARD_AFTER_FORWARD": ("true", HINT_RESHARD),
    "FSDP_IGNORED_MODULES": ("", HINT_IGNORED),
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": ("false", HINT_ACTIVATIONS),
}


def is_enabled() -> bool:
    """Whether the launcher's configuration has ``fsdp_version: mics``."""
    return _is_true("ACCELERATE_USE_FSDP") and os.environ.get("FSDP_VERSION", "").lower() == _VERSION


def check_version() -> None:
    """Refuse another word for the version, of which FSDP would make a number.

    Raises:
        ConfigError: It is neither a number nor ``mics``.
    """
    version = os.environ.get("FSDP_VERSION", "1")
    if not version.isdigit() and version.lower() != _VERSION:
        raise ConfigError(
            f"`fsdp_version: {version}` of the launcher's configuration is neither a version of FSDP nor `mics`. Write "
            "`fsdp_version: mics`."
        )


def enable() -> None:
    """Enable sharding in this process, unless the launcher requests otherwise.

    Raises:
        ConfigError: The launcher's configuration requests something else.
    """
    if is_enabled():
        return
    for variable, name in _OTHER_PLUGINS.items():
        if _is_true(variable):
            raise ConfigError(
                f"The launcher's configuration requests {name}, but `mics_strategy.run` shards with MiCS. Write "
                "`distributed_type: FSDP` and, under `fsdp_config`, `fsdp_version: mics`; or start the script directly."
            )
    os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_VERSION=_VERSION)


def num_processes() -> int:
    """Number of processes that a launcher has started; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def config() -> ShardConfig:
    """Return the configuration under ``fsdp_sharding_strategy``.

    Raises:
        ConfigError: An option or a value is unknown, or belongs to FSDP and has no meaning here.
    """
    check_supported()
    text = _strategy()
    if text in _PRESET_OF_FSDP:
        raise ConfigError(
            f"`fsdp_sharding_strategy: {text}` is an option of FSDP. Use `fsdp_sharding_strategy: "
            f"{_PRESET_OF_FSDP[text]}`, or a mapping of options such as `{{preset: mics, partition_size: 8}}`."
        )
    options = _parse(text)
    if not isinstance(options, str):
        options.pop(_RECOVERY, None)
    return config_of(options)


def recovery() -> Any:
    """Return `recovery` under ``fsdp_sharding_strategy``: what `MiCSPlugin(recovery=...)` takes.

    Raises:
        ConfigError: The mapping cannot be read.
    """
    options = _parse(_strategy())
    return "none" if isinstance(options, str) else options.get(_RECOVERY, "none")


def _strategy() -> str:
    text = os.environ.get("FSDP_SHARDING_STRATEGY", _DEFAULT).strip()
    return "mics" if text in (_DEFAULT, "", "None") else text


def config_of(options: str | Mapping[str, Any]) -> ShardConfig:
    """Make a configuration from a preset's name or a mapping of options.

    The mapping may have the key ``preset``.

    Raises:
        ConfigError: An option or a value is unknown.
    """
    if isinstance(options, str):
        return ShardConfig.preset(options)
    fields = dict(options)
    preset = fields.pop("preset", "mics")
    for name in ("weight_codec", "grad_codec", "outer_codec"):
        if isinstance(fields.get(name), Mapping):
            fields[name] = _codec_of(name, fields[name])
    return ShardConfig.preset(str(preset), **fields)


def _codec_of(name: str, fields: Mapping[str, Any]) -> Codec:
    try:
        return Codec(**fields)
    except TypeError as error:
        raise ConfigError(f"`{name}: {dict(fields)}` is not a valid Codec: {error}.") from error


def _parse(text: str) -> str | dict[str, Any]:
    """Parse a mapping, which the launcher writes as a Python dict, or a preset."""
    if text[0].isalpha():
        return text
    try:
        options = ast.literal_eval(text)
    except (ValueError, SyntaxError) as error:
        raise ConfigError(f"`fsdp_sharding_strategy: {text}` cannot be read ({error}). {_HINT_MAPPING}") from error
    if not isinstance(options, dict):
        raise ConfigError(f"`fsdp_sharding_strategy: {text}` is neither a preset nor a mapping. {_HINT_MAPPING}")
    return options


def check_supported() -> None:
    """Refuse options of FSDP that the engine does not support.

    Raises:
        ConfigError: There is such an option; the error names its key.
    """
    for variable, (default, hint) in _UNSUPPORTED.items():
        value = os.environ.get(variable, default)
        if value.lower() not in (default, "", "none", "full_shard"):
            raise ConfigError(f"`{variable.lower()}: {value}` is not supported. {hint}")


def layer_classes() -> list[str] | None:
    """Return the class names under ``fsdp_transformer_layer_cls_to_wrap``."""
    text = os.environ.get("FSDP_TRANSFORMER_CLS_TO_WRAP", "")
    names = [name.strip() for name in text.split(",") if name.strip() and name.strip() != "None"]
    return names or None


def partition_size() -> int | None:
    """Return the shard size that ``parallelism_config`` requests.

    Raises:
        ConfigError: Other parallelism is requested, or the sizes do not fit the job.
    """
    if not _is_true("ACCELERATE_USE_PARALLELISM_CONFIG"):
        return None
    sizes = {name: int(os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}", "1")) for name in PARALLEL_SIZES}
    return partition_size_of(sizes)


def partition_size_of(sizes: Mapping[str, int]) -> int:
    """Convert sizes of `ParallelismConfig` to the partition size.

    Raises:
        ConfigError: Other parallelism is requested, or the sizes do not fit the job.
    """
    others = [f"{name}={size}" for name, size in sizes.items() if not name.startswith("dp_") and size > 1]
    if others:
        raise ConfigError(f"`parallelism_config` requests {', '.join(others)}. Only data parallelism is supported.")
    shard, replicate = sizes["dp_shard_size"], sizes["dp_replicate_size"]
    if shard * replicate != num_processes():
        raise ConfigError(
            f"`parallelism_config`: dp_shard_size={shard} times dp_replicate_size={replicate} does not equal the "
            f"{num_processes()} processes of this job. Remove it, and set only `partition_size`."
        )
    return shard


def _is_true(variable: str) -> bool:
    return os.environ.get(variable, "false").lower() in ("true", "1", "yes")
