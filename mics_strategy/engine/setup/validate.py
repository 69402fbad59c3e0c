"""Validation of a model and of the arguments of `shard()`.

A model that would fail later, on one rank or without an error, raises here on every rank.
"""

from __future__ import annotations

import hashlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from mics_strategy.errors import ConfigError

_MARK = "_mics_sharded"


def target_device(device: torch.device | str) -> torch.device:
    """The device to train on.

    Args:
        device: Argument of `shard()`; ``"auto"`` is this rank's GPU if the process group serves CUDA, else the CPU.

    Raises:
        ConfigError: The backend of the process group does not serve the device.
    """
    backend = dist.get_backend()
    serves_cuda = torch.cuda.is_available() and ("nccl" in backend or backend in ("undefined", "fake"))
    if device == "auto":
        target = torch.device("cuda" if serves_cuda and backend != "fake" else "cpu")
    else:
        target = torch.device(device)
    if target.type == "cuda" and serves_cuda and target.index is None:
        target = _local_gpu()
    if target.type != "cpu" and not (target.type == "cuda" and serves_cuda):
        raise ConfigError(
            f"`device={target}` cannot be used with the process group backend {backend!r} on this machine. Use NCCL "
            "for CUDA, or gloo for the CPU."
        )
    return target


def _local_gpu() -> torch.device:
    """The GPU of this rank: the process group's, the current one, or by `LOCAL_RANK`.

    A current device 0 counts as the default. Then `LOCAL_RANK` decides among the devices that the process can see.
    """
    bound = getattr(dist.group.WORLD, "bound_device_id", None)
    if bound is not None and bound.type == "cuda":
        return torch.device("cuda", bound.index)
    current = torch.cuda.current_device()
    if current == 0 and "LOCAL_RANK" in os.environ:
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    return torch.device("cuda", current)


def check_initializer(initializer: object) -> None:
    """Raise for an `initializer` of `shard()` with no meaning.

    Raises:
        ConfigError: It is neither ``"auto"`` nor callable.
    """
    if initializer != "auto" and not callable(initializer):
        raise ConfigError(
            f"`initializer={initializer!r}` is neither 'auto' nor callable. Use 'auto', or a function of a module."
        )


def check_model(module: nn.Module, target: torch.device) -> None:
    """Raise for a model that cannot be sharded.

    Args:
        module: Model to shard.
        target: Device to train on.

    Raises:
        ConfigError: A parameter or module is not supported. The error names the first one and the remedy.
    """
    for name, child in module.named_modules():
        if hasattr(child, _MARK):
            raise ConfigError(
                f"`{name or type(child).__name__}` is sharded already. Call `shard()` once, on the outermost model."
            )
        if getattr(child, "sparse", False) is True and isinstance(child, (nn.Embedding, nn.EmbeddingBag)):
            raise ConfigError(
                f"`{name}` makes sparse gradients, which cannot be reduce-scattered. Build it with `sparse=False`."
            )
        if getattr(child, "max_norm", None) is not None and isinstance(child, (nn.Embedding, nn.EmbeddingBag)):
            raise ConfigError(
                f"`{name}` renormalizes the rows that a batch looks up (`max_norm={child.max_norm}`). Each rank has "
                "another batch, so parameters would diverge between ranks. Build it without `max_norm` and "
                "renormalize after `optimizer.step()`, under `torch.no_grad()`: `weight.mul_((max_norm / "
                "weight.norm(dim=1, keepdim=True).clamp(min=1e-7)).clamp(max=1))`."
            )
    for name, parameter in module.named_parameters():
        _check_parameter(name, parameter, target)


def _check_parameter(name: str, parameter: nn.Parameter, target: torch.device) -> None:
    if isinstance(parameter, DTensor):
        raise ConfigError(f"`{name}` is a DTensor, so this model is sharded already. Shard the plain model.")
    if type(parameter) is not nn.Parameter:
        raise ConfigError(
            f"`{name}` is a {type(parameter).__name__}, not a plain parameter. Initialize or unwrap the model before "
            "`shard()`."
        )
    if parameter.requires_grad and parameter.is_complex():
        raise ConfigError(
            f"`{name}` is complex. Reductions do not support complex dtypes. Keep its real and imaginary parts as two "
            "parameters."
        )
    if parameter.requires_grad and not parameter.is_floating_point():
        raise ConfigError(
            f"`{name}` has integer dtype {parameter.dtype} and requires gradients. Freeze it with "
            "`requires_grad_(False)`."
        )
    if parameter.device.type not in ("meta", "cpu") and parameter.device != target:
        raise ConfigError(
            f"`{name}` is on {parameter.device}, but this rank trains on {target}. Move the model to {target}, or "
            "leave it on the CPU or meta device."
        )
    if parameter.layout is not torch.strided:
        raise ConfigError(f"`{name}` has layout {parameter.layout}. Make it dense (`torch.strided`).")
    if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
        raise ConfigError(
            f"`{name}` has gradient hooks, which would never run on its shards. Remove them, or register a hook on the "
            "module."
        )


def model_fingerprint(module: nn.Module) -> str:
    """A short text, equal on ranks with the same parameters in the same order."""
    lines = [f"{n} {tuple(p.shape)} {p.dtype} {p.requires_grad}" for n, p in module.named_parameters()]
    return f"{len(lines)} parameters, digest {hashlib.sha256(chr(10).join(lines).encode()).hexdigest()[:16]}"


def count_meta_tensors(module: nn.Module) -> str:
    """The number of tensors on the meta device, as a text."""
    num = sum(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
    return f"{num} parameters and buffers without values"


def mark_sharded(module: nn.Module, handle: object) -> None:
    """Mark a module as sharded, and keep `handle` alive as long as the module."""
    object.__setattr__(module, _MARK, handle)
