"""What is done to a model when it is prepared, and what if an earlier Accelerator has done it?

A model stays sharded as long as it lives. Another Accelerator, such as that of a second `transformers.Trainer`, goes on
with it, if it asks for the same.
"""

from __future__ import annotations

import functools
import logging
import weakref
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from mics_strategy import ConfigError, ShardConfig, Sharded, shard
from mics_strategy.accelerate import framework
from mics_strategy.accelerate.plugin import MiCSPlugin
from mics_strategy.accelerate.rendezvous import broadcast_from_rank_0

_log = logging.getLogger(__name__)
_PREPARED = "_mics_prepared"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedModel:
    """What a model knows of its first Accelerator.

    Attributes:
        handle: Of the sharded model, which that keeps alive.
        config: What was asked for.
        recomputes: Whether units are recomputed in the backward.
    """

    handle: weakref.ref[Sharded]
    config: ShardConfig
    recomputes: bool


def shard_for_plugin(model: nn.Module, plugin: MiCSPlugin, device: torch.device, *, in_low_precision: bool) -> Sharded:
    """Shard a plain model in place, ready to be trained and evaluated. Collective.

    Args:
        model: With values, at least on rank 0, or on the meta device.
        plugin: How.
        device: Where it trains.
        in_low_precision: Whether computing is in lower precision than what is trained shall have.
    """
    if in_low_precision:
        _use_fp32_masters(model)
    was_lacking = materialize_missing(model)
    units, initializer = plugin.units_for(model), plugin.initializer
    sharded = shard(model, plugin.config, units=units, device=device, initializer=initializer)
    if was_lacking:
        sharded.synchronize_buffers()
    if plugin.activation_checkpointing:
        checkpoint_activations(sharded)
    recomputes = bool(plugin.activation_checkpointing)
    prepared = PreparedModel(handle=weakref.ref(sharded), config=plugin.config, recomputes=recomputes)
    model.__dict__[_PREPARED] = prepared
    return sharded


def reuse_sharded(model: nn.Module, plugin: MiCSPlugin) -> Sharded | None:
    """The handle of a model that an earlier Accelerator has sharded; None for any other.

    Raises:
        ConfigError: It was sharded in another way.
    """
    handle = sharded_of_model(model)
    if handle is None:
        return None
    found: PreparedModel = model.__dict__[_PREPARED]
    then, now = _asked(found.config, found.recomputes), _asked(plugin.config, bool(plugin.activation_checkpointing))
    differing = [name for name, value in then.items() if now[name] != value]
    if differing:
        was, cannot = (", ".join(f"{name}={each[name]}" for name in differing) for each in (then, now))
        raise ConfigError(
            f"This {type(model).__name__} was sharded by an earlier Accelerator with {was}, and cannot be sharded with "
            f"{cannot}. Use the same options, or save the model and load it again."
        )
    return handle


def sharded_of_model(model: nn.Module) -> Sharded | None:
    """The handle of a model that some Accelerator of this process has sharded; None for any other."""
    found: PreparedModel | None = model.__dict__.get(_PREPARED)
    return None if found is None else found.handle()


def check_output_layer(sharded: Sharded) -> None:
    """Refuse units in which TRL would take the gradients of an output layer from a copy that nobody reduces.

    Raises:
        ConfigError: On every rank; the output layer is in a unit below the root.
    """
    layer = framework.externally_read_output_layer(sharded.model)
    below_root = sharded.units[1:] if layer is not None else []
    unit = next((unit for unit in below_root if layer in [*unit.module.modules()]), None)
    if unit is not None:
        raise ConfigError(
            f"The output layer is in the unit `{unit.name}`, and this Trainer of TRL reads its weight without calling "
            "it, while only the root unit is gathered. Let units be layers: leave the wrap policy and its number of "
            "parameters out, or name the classes of layers in `fsdp_transformer_layer_cls_to_wrap`."
        )


def _asked(config: ShardConfig, recomputes: bool) -> dict[str, str]:
    return {**config.describe(), "activation_checkpointing": str(recomputes)}


def _use_fp32_masters(model: nn.Module) -> None:
    """Keep what is trained in fp32 where computing is in lower precision, as Accelerate does with FSDP."""
    low = [p for p in model.parameters() if p.requires_grad and p.is_floating_point() and p.dtype.itemsize < 4]
    for parameter in low:
        parameter.data = parameter.data.float()
    if low:
        _log.info("%d parameters of low precision are kept in fp32, as `mixed_precision` is on.", len(low))


def materialize_missing(model: nn.Module) -> bool:
    """Put zeros where rank 0 has a value and this rank has none. Collective.

    Parameters stay the objects that they are, as optimizers hold them. A rank that has drawn no values continues with
    rank 0's random numbers, if both began from one seed: with DDP every rank would have drawn the same ones, and what
    follows, such as dropout, would be the same.

    Returns:
        Whether some rank had none; the same on every rank.
    """
    lacking = {name for name, tensor in _tensors(model).items() if tensor.is_meta}
    own = _Rank(lacking=lacking, seed=torch.initial_seed())
    everyone: list[_Rank] = [own] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    first = everyone[0]
    for name in sorted(lacking - first.lacking):
        _fill(model, name)
    was_lacking = any(each.lacking - first.lacking for each in everyone)
    if was_lacking:
        state = broadcast_from_rank_0(torch.get_rng_state())
        if lacking - first.lacking and own.seed == first.seed:
            torch.set_rng_state(state)
    return was_lacking


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rank:
    """What a rank has read and drawn: names of tensors without values, and the seed of its generator."""

    lacking: set[str]
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
    """Recompute every unit but the root in the backward; what was drawn at random is drawn the same again.

    Raises:
        ConfigError: The model has no units but the root, all of whose activations would be kept or recomputed.
    """
    if len(sharded.units) == 1:
        raise ConfigError(
            "`activation_checkpointing` recomputes the layers that are units, and this model has none. Name their "
            "classes: `fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer`, or `MiCSPlugin(units=...)`."
        )
    for unit in sharded.units[1:]:
        _recompute(unit.module)


def _recompute(module: nn.Module) -> None:
    forward = module.forward

    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not module.training:
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    module.forward = recomputed
