"""Preparation of models: sharding, missing values, activation checkpointing.

A model stays sharded for its lifetime. A later Accelerator, such as that of a second `transformers.Trainer`, reuses it
if it requests the same options.
"""

from __future__ import annotations

import functools
import logging
import weakref
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mics_strategy import ConfigError, ShardConfig, Sharded, shard
from mics_strategy.accelerate import framework
from mics_strategy.comm.consensus import broadcast_from_rank_0, gather_objects

if TYPE_CHECKING:
    from mics_strategy.accelerate.plugin import MiCSPlugin

_log = logging.getLogger(__name__)
_PREPARED = "_mics_prepared"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedModel:
    """Record on a model of how it was prepared.

    Attributes:
        handle: Weak reference to the handle, which the first Accelerator keeps alive.
        config: Configuration of `shard`.
        recomputes: Whether units are recomputed in the backward.
    """

    handle: weakref.ref[Sharded]
    config: ShardConfig
    recomputes: bool


def shard_for_plugin(
    model: nn.Module, plugin: MiCSPlugin, config: ShardConfig, device: torch.device, micro_steps: int
) -> Sharded:
    """Shard an unsharded model in place, for training and evaluation. Collective.

    Args:
        model: Model with values at least on rank 0, or on the meta device.
        plugin: Sharding options.
        config: Configuration of the plugin under the Accelerator's mixed precision.
        device: Device of the training.
        micro_steps: Micro-steps of an optimizer step, on which ``"auto"`` scopes depend.
    """
    is_asked = config.is_auto and config.micro_steps == "unknown"
    known = config.replace(micro_steps=micro_steps) if is_asked else config
    had_missing = materialize_missing(model)
    units, initializer = plugin.units_for(model), plugin.initializer
    sharded = shard(model, known, units=units, device=device, initializer=initializer)
    if had_missing:
        sharded.buffers.synchronize()
    if plugin.activation_checkpointing:
        checkpoint_activations(sharded)
    recomputes = bool(plugin.activation_checkpointing)
    prepared = PreparedModel(handle=weakref.ref(sharded), config=config, recomputes=recomputes)
    model.__dict__[_PREPARED] = prepared
    return sharded


def reuse_sharded(model: nn.Module, plugin: MiCSPlugin, config: ShardConfig) -> Sharded | None:
    """Return the handle of a model that was sharded before; None for others.

    Args:
        model: Model, sharded or not.
        plugin: Sharding options.
        config: Configuration of the plugin under the Accelerator's mixed precision.

    Raises:
        ConfigError: The model was sharded with other options.
    """
    handle = sharded_of_model(model)
    if handle is None:
        return None
    prepared: PreparedModel = model.__dict__[_PREPARED]
    earlier, requested = (
        _describe_options(prepared.config, prepared.recomputes),
        _describe_options(config, bool(plugin.activation_checkpointing)),
    )
    differing = [name for name, value in earlier.items() if requested[name] != value]
    if differing:
        earlier_text, requested_text = (
            ", ".join(f"{name}={options[name]}" for name in differing) for options in (earlier, requested)
        )
        raise ConfigError(
            f"This {type(model).__name__} was sharded by an earlier Accelerator with {earlier_text}, and cannot be "
            f"sharded again with {requested_text}. Use the same options, or save the model and load it again."
        )
    return handle


def sharded_of_model(model: nn.Module) -> Sharded | None:
    """Return the handle of a model that this process has sharded; None for others."""
    prepared: PreparedModel | None = model.__dict__.get(_PREPARED)
    return None if prepared is None else prepared.handle()


def check_output_layer(sharded: Sharded) -> None:
    """Refuse units with an output layer whose gradients TRL would not reduce.

    Raises:
        ConfigError: The output layer is in a unit below the root. Raised on every rank.
    """
    layer = framework.externally_read_output_layer(sharded.model)
    below_root = sharded.internals.units[1:] if layer is not None else []
    unit = next((unit for unit in below_root if layer in [*unit.module.modules()]), None)
    if unit is not None:
        raise ConfigError(
            f"The output layer is in the unit `{unit.name}`, but this Trainer of TRL reads its weight without calling "
            "it, when only the root unit is gathered. Name the layer classes in `fsdp_transformer_layer_cls_to_wrap`: "
            "then the root unit holds all other parameters."
        )


def _describe_options(config: ShardConfig, recomputes: bool) -> dict[str, str]:
    return {**config.describe(), "activation_checkpointing": str(recomputes)}


def use_fp32_masters(model: nn.Module) -> None:
    """Keep trained parameters in fp32 under mixed precision, as for FSDP."""
    low_precision = [
        p for p in model.parameters() if p.requires_grad and p.is_floating_point() and p.dtype.itemsize < 4
    ]
    for parameter in low_precision:
        parameter.data = parameter.data.float()
    if low_precision:
        _log.info(
            "%d parameters of low precision are kept in fp32, because `mixed_precision` is on.", len(low_precision)
        )


def materialize_missing(model: nn.Module) -> bool:
    """Materialize zeros for tensors that have values on rank 0 only. Collective.

    Parameters remain the same objects, because optimizers hold them. If ranks began with the same seed, a rank that has
    drawn no values continues with rank 0's random numbers. With DDP every rank would have drawn the same numbers, so
    that later ones, such as those of dropout, are equal.

    Returns:
        Whether tensors were missing on any rank; equal on all ranks.
    """
    missing = {name for name, tensor in _tensors(model).items() if tensor.is_meta}
    local = _Rank(missing=missing, seed=torch.initial_seed())
    by_rank = gather_objects(local)
    rank_0 = by_rank[0]
    for name in sorted(missing - rank_0.missing):
        _fill(model, name)
    had_missing = any(rank.missing - rank_0.missing for rank in by_rank)
    if had_missing:
        state = broadcast_from_rank_0(torch.get_rng_state())
        if missing - rank_0.missing and local.seed == rank_0.seed:
            torch.set_rng_state(state)
    return had_missing


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rank:
    """Names of the tensors without values on a rank, and the seed of its generator."""

    missing: set[str]
    seed: int


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(chain(model.named_parameters(), model.named_buffers()))


def _fill(model: nn.Module, name: str) -> None:
    path, _, attribute = name.rpartition(".")
    module = model.get_submodule(path)
    tensor = getattr(module, attribute)
    zeros = torch.zeros_like(tensor, device="cpu")
    if not isinstance(tensor, nn.Parameter):
        setattr(module, attribute, zeros)
        return
    value = nn.Parameter(zeros, requires_grad=tensor.requires_grad)
    value.__dict__.update(tensor.__dict__)
    torch.utils.swap_tensors(tensor, value)


def checkpoint_activations(sharded: Sharded) -> None:
    """Recompute every unit except the root in the backward.

    The recomputation draws the same random numbers.

    Raises:
        ConfigError: The model has no unit except the root.
    """
    if len(sharded.internals.units) == 1:
        raise ConfigError(
            "`activation_checkpointing` recomputes the layers that are units, but this model has none. Name their "
            "classes: `fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer`, or `MiCSPlugin(units=...)`."
        )
    for unit in sharded.internals.units[1:]:
        _recompute(unit.module)


def _recompute(module: nn.Module) -> None:
    forward = module.forward

    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not module.training:
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    module.forward = recomputed
