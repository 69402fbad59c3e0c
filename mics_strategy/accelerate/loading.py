"""What if only some ranks have read the weights of a model?

With ``fsdp_cpu_ram_efficient_loading``, which launchers ask for unless told otherwise, `from_pretrained` leaves the
other ranks with memory that holds anything, or with none at all for what was not in the files, such as a new head.
Sharding takes rank 0's values wherever ranks differ; here every rank gets memory for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist
from torch import nn

from mics_strategy.accelerate.agreement import broadcast_from_rank_0


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
