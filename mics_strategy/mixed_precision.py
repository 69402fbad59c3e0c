"""Mixed precision under the flags of Lightning and Accelerate.

``precision="bf16-mixed"`` of Lightning and ``mixed_precision="bf16"`` of Accelerate mean what they mean with FSDP: the
optimizer updates fp32 masters, ranks gather 16-bit parameters, and the forward runs under the framework's autocast.
Autocast then finds weights in its own dtype, so it copies none of them, and keeps what it keeps in fp32 (losses,
softmax).

As FSDP2 does, floating-point inputs of units are cast to the dtype of their parameters. The engine does so outside of
autocast; `cast_unit_inputs` does so inside, for all units but the root, whose inputs may be targets of a loss.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map

from mics_strategy.config import ShardConfig
from mics_strategy.engine.handle import Sharded
from mics_strategy.errors import ConfigError

T = TypeVar("T")
_log = logging.getLogger(__name__)


def with_mixed_precision(config: ShardConfig, model: nn.Module, dtype: torch.dtype | None, flag: str) -> ShardConfig:
    """Resolve ``param_dtype="auto"`` under a framework's mixed precision.

    Args:
        config: Requested configuration.
        model: Model, sharded or not.
        dtype: Dtype of autocast; None without mixed precision.
        flag: Option of the framework and its value, for the error.

    Returns:
        A configuration that gathers in `dtype`, or the same one: without mixed precision, with a `param_dtype` of the
        user, or with a model that needs its own dtypes (`reason_to_keep_dtypes`).

    Raises:
        ConfigError: `param_dtype` is neither `dtype` nor fp32.
    """
    if dtype is None:
        return config
    if config.param_dtype == "auto":
        return config if reason_to_keep_dtypes(model) else config.replace(param_dtype=dtype)
    if config.param_dtype not in (dtype, torch.float32):
        raise ConfigError(
            f"`{flag}` computes in {_name(dtype)}, but `param_dtype={_name(config.param_dtype)}` was also given. "
            f"Remove `param_dtype` to gather in {_name(dtype)}, or use `param_dtype='float32'` for autocast over "
            "parameters gathered in float32."
        )
    return config


def reason_to_keep_dtypes(model: nn.Module) -> str:
    """Return why parameters of a model cannot be gathered in 16 bits by default. It is empty for other models."""
    for name, module in model.named_modules():
        has_statistics = "running_mean" in dict(module.named_buffers(recurse=False))
        if has_statistics and next(module.parameters(recurse=False), None) is not None:
            return f"`{name}` has fp32 running statistics, with which torch computes no norm in 16-bit weights"
    named = dict(model.named_parameters())
    for name, parameter in named.items():
        if parameter.dtype == torch.float64:
            return f"`{name}` is float64, which autocast does not change"
    return "" if any(parameter.dim() for parameter in named.values()) else "all of them are scalars"


def apply_mixed_precision(sharded: Sharded, dtype: torch.dtype | None, flag: str) -> None:
    """Cast inputs of units as FSDP2 does, and print on rank 0 how the model is sharded, and in which dtypes.

    No dtypes are printed for a model that is stored, gathered and reduced in fp32 without autocast.

    Args:
        sharded: Handle of a model that is sharded with the result of `with_mixed_precision`.
        dtype: Dtype of autocast; None without mixed precision.
        flag: Option of the framework and its value.
    """
    is_gathered_in_it = dtype is not None and sharded.config.param_dtype == dtype
    if dtype is not None and is_gathered_in_it:
        cast_unit_inputs(sharded, dtype)
    if dist.get_rank() != 0:
        return
    print(sharded.report(), flush=True)
    stored = _stored_dtypes(sharded.model)
    if stored and (dtype is not None or _is_narrow(stored | set(map(sharded.config.param_dtype_of, stored)))):
        print(describe_mixed_precision(sharded, dtype, flag), flush=True)
    copies = 0 if dtype is None or is_gathered_in_it else _bytes_of_casts(sharded.model, dtype)
    if dtype is not None and copies and sharded.scopes.params > 1:
        _log.warning(
            "`%s` computes under autocast over gathered fp32 parameters. Autocast keeps a %s copy of all of them, %.3f "
            "GB on every rank, until the backward; with recomputed activations until the end of the forward, unless "
            "its cache is off. Sharding saves none of this memory. Parameters gathered in %s need no copy.",
            *(flag, _name(dtype), copies / 1e9, _name(dtype)),
        )


def describe_mixed_precision(sharded: Sharded, dtype: torch.dtype | None, flag: str) -> str:
    """Return one line with the dtypes of a model's parameters, gathers and reductions.

    Args:
        sharded: Handle of the model.
        dtype: Dtype of autocast; None without mixed precision.
        flag: Option of the framework and its value.
    """
    config = sharded.config
    stored = _stored_dtypes(sharded.model)
    gathered = {config.param_dtype_of(dtype) for dtype in stored}
    reduced = {config.wire_dtype_of(dtype) for dtype in stored}
    text = (
        f"`{flag}`: parameters in {_join(stored)} are gathered in {_join(gathered)}, gradients are reduced in "
        f"{_join(reduced)}."
    )
    reason = reason_to_keep_dtypes(sharded.model) if config.param_dtype == "auto" and dtype is not None else ""
    if reason:
        text += f" Parameters keep their dtypes because {reason}."
    elif dtype is not None and _is_narrow(gathered):
        text += " `param_dtype='float32'` gathers in 4 bytes, with autocast over them."
    if _is_narrow(gathered) and not _is_narrow(reduced):
        text += f" `reduce_dtype='{_name(_narrowest(gathered))}'` reduces in 2 bytes."
    return text


def cast_unit_inputs(sharded: Sharded, dtype: torch.dtype) -> None:
    """Cast floating-point inputs of all units but the root to `dtype` under autocast."""
    device_type = sharded.device.type

    def cast_inputs(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        if not torch.is_autocast_enabled(device_type):
            return None  # the engine has cast them
        return _cast_floating(args, dtype), _cast_floating(kwargs, dtype)

    for unit in sharded.internals.units[1:]:
        unit.module.register_forward_pre_hook(cast_inputs, with_kwargs=True)


def _cast_floating(tree: T, dtype: torch.dtype) -> T:
    """Cast floating-point tensors in tuples, lists and dicts.

    Other objects are unchanged: modules write into caches of keys and values.
    """

    def cast_leaf(leaf: object) -> object:
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return cast(
        "T",
        tree_map(cast_leaf, tree, is_leaf=lambda node: not isinstance(node, tuple) and type(node) not in (list, dict)),
    )


def _stored_dtypes(model: nn.Module) -> set[torch.dtype]:
    """Floating-point dtypes of the trained parameters, or of all if none is trained."""
    floating = [p for p in model.parameters() if p.is_floating_point()]
    return {p.dtype for p in floating if p.requires_grad} or {p.dtype for p in floating}


def _bytes_of_casts(model: nn.Module, dtype: torch.dtype) -> int:
    """Bytes of the copies that autocast makes of the trained fp32 parameters."""
    casts = (p.numel() for p in model.parameters() if p.requires_grad and p.dtype == torch.float32)
    return sum(casts) * dtype.itemsize


def _is_narrow(dtypes: Iterable[torch.dtype]) -> bool:
    return any(dtype.is_floating_point and dtype.itemsize == 2 for dtype in dtypes)


def _narrowest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    return min(dtypes, key=lambda dtype: dtype.itemsize)


def _join(dtypes: Iterable[torch.dtype]) -> str:
    """Return names with their sizes, such as "bfloat16 (2 bytes each)"."""
    return " and ".join(f"{_name(dtype)} ({dtype.itemsize} bytes each)" for dtype in sorted(dtypes, key=str))


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
