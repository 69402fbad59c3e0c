"""Megatron-FSDP on one GPU, written as its users are told to write it.

The package is optional: where it cannot run, its rows hold the reason. It needs CUDA streams, so it has no CPU path.

Its parameters are those of a bf16 model; the optimizer updates fp32 copies (``main_params_dtype``), gradients are
accumulated and reduced in fp32 (``main_grads_dtype``, ``grad_comm_dtype``). The copies start from the bf16 values,
where other engines keep fp32 initial values.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

DISTRIBUTION = "megatron-fsdp"
VERSION = "0.6.1"  # whose interface is used here
_SHARD, _TENSOR = "fsdp", "tp"  # names of its mesh dimensions; the second is of size 1 and must be there


class NotMeasuredError(Exception):
    """An engine cannot run here, which is no fault of what is measured."""


def installed_version() -> str | None:
    """Version of the package, or None."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return None


def load(device: torch.device) -> Any:
    """The package.

    Raises:
        NotMeasuredError: It is not installed or cannot be imported, or the device is not a GPU.
    """
    try:
        package = importlib.import_module("megatron_fsdp")
    except ImportError as error:
        if error.name == "megatron_fsdp":
            raise NotMeasuredError(
                f"{DISTRIBUTION} is not installed: python -m pip install {DISTRIBUTION}=={VERSION}"
            ) from error
        raise NotMeasuredError(f"{DISTRIBUTION} cannot be imported: {error}") from error
    if device.type != "cuda":
        raise NotMeasuredError(f"{DISTRIBUTION} runs on CUDA devices only")
    return package


def sharded_model(
    package: Any, model: nn.Module, unit: type[nn.Module], device: torch.device, strategy: str
) -> nn.Module:
    """The model under Megatron-FSDP, whose parameters are the fp32 ones that an optimizer updates.

    Args:
        package: Result of `load`.
        model: Model with bf16 parameters, on the device.
        unit: Class of modules whose parameters are gathered and reduced together.
        device: Current device.
        strategy: ``"optim_grads_params"`` (its default, as ZeRO-3), or ``"no_shard"``.
    """
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(), 1), mesh_dim_names=(_SHARD, _TENSOR))
    policy = package.MixedPrecisionPolicy(
        main_params_dtype=torch.float32, main_grads_dtype=torch.float32, grad_comm_dtype=torch.float32
    )
    wrapped: nn.Module = package.fully_shard_model(
        model,
        device_mesh=mesh,
        dp_shard_dim=_SHARD,
        tp_dim=_TENSOR,
        fsdp_unit_modules=[unit],
        zero_dp_strategy=strategy,
        device=device,
        mixed_precision_policy=policy,
        preproc_state_dict_for_dcp_ckpt=False,  # nothing is saved
    )
    return wrapped


def adopt_optimizer(package: Any, optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer work on the sharded model, from its first step on.

    The package makes optimizer states by a step with gradients of 0. It must change no parameter and not count: weights
    would decay, and the bias correction of Adam would be that of a later step.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    package.fully_shard_optimizer(optimizer, preproc_state_dict_for_dcp_ckpt=False)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for state in optimizer.state.values():
        state["step"].zero_()
