"""Why is a sharded tensor not put together by torch's own `full_tensor`?

On gloo, torch's functional all-gather ends in the backend's coalesced one, which damages the heap of the process now
and then while other Python threads run (torch 2.11 to 2.13; ``docs/design/full-tensor.md`` has the program that shows
it). Lanes are such threads, and saving a model is a call for each of its tensors. The plain
all-gather has no such fault.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Shard


def full_tensor(tensor: DTensor) -> torch.Tensor:
    """The whole tensor on every rank, bitwise what torch's `full_tensor` gives. Without a gradient.

    Args:
        tensor: Anywhere. On the CPU: if it is sharded, then along one dimension of its mesh.

    Returns:
        A tensor of its global shape and dtype. Without any sharding, it may be the local part itself.

    Cost: one all-gather of the tensor over its shards. Collective: all ranks of its mesh call it.
    """
    tensor = cast("DTensor", tensor.detach())
    if not tensor.numel():
        return tensor.to_local().new_empty(tensor.shape)  # gloo divides by the size
    cuts = [(axis, placement) for axis, placement in enumerate(tensor.placements) if isinstance(placement, Shard)]
    is_partial = any(isinstance(placement, Partial) for placement in tensor.placements)
    if tensor.device.type != "cpu" or is_partial or len(cuts) != 1:
        return DTensor.full_tensor(tensor)
    ((axis, placement),) = cuts
    return _gathered(tensor, tensor.device_mesh.get_group(axis), placement.dim)


def _gathered(tensor: DTensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """As bytes, since gloo does not know every dtype; in pieces of one size, the last ones padded."""
    local, length, degree = tensor.to_local(), tensor.shape[dim], group.size()
    rows = -(-length // degree)
    padded = local.new_zeros(*local.shape[:dim], rows, *local.shape[dim + 1 :])
    padded.narrow(dim, 0, local.shape[dim]).copy_(local)
    pieces = [torch.empty_like(padded) for _ in range(degree)]
    dist.all_gather([piece.view(-1).view(torch.uint8) for piece in pieces], padded.view(-1).view(torch.uint8), group)
    return torch.cat(pieces, dim).narrow(dim, 0, length).contiguous()
