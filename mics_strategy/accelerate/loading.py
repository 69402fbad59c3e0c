"""What if only some ranks have read the weights of a model?

With ``fsdp_cpu_ram_efficient_loading``, which launchers ask for unless told otherwise, `from_pretrained` leaves the
other ranks with memory that holds anything, or with none at all for what was not in the files, such as a new head.
Sharding takes rank 0's values wherever ranks differ; here every rank gets memory for them.
"""

from __future__ import annotations

from itertools import chain

import torch
import torch.distributed as dist
from torch import nn


def give_memory(model: nn.Module) -> bool:
    """Put zeros where rank 0 has a value and this rank has none. Collective.

    Parameters stay the objects that they are, as optimizers hold them.

    Returns:
        Whether some rank had none; the same on every rank.
    """
    lacking = {name for name, tensor in _tensors(model).items() if tensor.is_meta}
    everyone: list[set[str]] = [lacking] * dist.get_world_size()
    dist.all_gather_object(everyone, lacking)
    for name in sorted(lacking - everyone[0]):
        _fill(model, name)
    return any(names - everyone[0] for names in everyone)


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
