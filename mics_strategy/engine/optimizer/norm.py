"""Norm of the whole gradient, and clipping.

The norm takes one pass over this rank's shards and one all-reduce over the ranks with different shards. Replicas are
left out, because they would count every shard again.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from mics_strategy.errors import ConfigError

if TYPE_CHECKING:
    from mics_strategy.comm.process_groups import ProcessGroups
    from mics_strategy.engine.parameter import ShardedParameter


def total_norm(parameters: list[ShardedParameter], groups: ProcessGroups, norm_type: float) -> torch.Tensor:
    """Norm of all gradients together, a scalar equal on all ranks. Collective.

    Args:
        parameters: Parameters whose gradients are final. One without a gradient counts as 0.
        groups: Process groups of the model.
        norm_type: Order of the p-norm, a positive number or infinity.

    Raises:
        ConfigError: `norm_type` is not positive.

    Cost:
        One all-reduce of one number over the ranks with different shards.
    """
    if not norm_type > 0:
        raise ConfigError(f"`norm_type={norm_type}` is not a norm. Use a positive number or `math.inf`.")
    grads = []
    for parameter in parameters:
        grad = parameter.raw_grad
        is_repeated = parameter.mics_slice.dim is None and parameter.mics_index > 0
        if grad is not None and not is_repeated:
            grads.append(getattr(grad, "_local_tensor", grad))
    grads = [grad for grad in grads if grad.numel()]
    norms = torch._foreach_norm(grads, norm_type) if grads else []
    stacked = torch.stack([norm.float() for norm in norms]) if norms else torch.zeros(1, device=groups.device)
    if math.isinf(norm_type):
        total = stacked.max()
        return groups.reduce_over_shards(total, is_max=True)
    return groups.reduce_over_shards(stacked.pow(norm_type).sum(), is_max=False).pow(1.0 / norm_type)


def clip(parameters: list[ShardedParameter], norm: torch.Tensor, max_norm: float) -> None:
    """Scale all gradients so that their norm is at most `max_norm`.

    The factor is that of torch's `clip_grad_norm_`.

    Args:
        parameters: Parameters whose gradients are scaled in place.
        norm: Present norm of the gradients, a scalar tensor.
        max_norm: Largest norm after scaling.
    """
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    grads = [grad for p in parameters if (grad := p.raw_grad) is not None]
    locals_ = [getattr(grad, "_local_tensor", grad) for grad in grads]
    if locals_:
        torch._foreach_mul_(locals_, factor.to(locals_[0].device))
