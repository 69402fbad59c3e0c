"""How are activations of units recomputed instead of kept?

The forward of each unit is replaced by one that torch checkpoints. Nothing is wrapped, so that names stay; the engine's
hooks stand outside of it, so that recomputing gathers nothing more.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from mics_strategy import ConfigError, Sharded


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
