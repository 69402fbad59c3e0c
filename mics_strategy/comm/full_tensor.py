"""Assembly of a full tensor from a sharded DTensor, safe on gloo.

On gloo, torch's `full_tensor` does not do: its functional all-gather ends in the backend's coalesced one, which
sometimes corrupts the heap of the process while other Python threads run (torch 2.11 to 2.13;
``docs/design/full-tensor.md`` has a program that shows it). Communication threads are such threads, and saving a model
makes one call for each of its tensors. The plain all-gather has no such fault.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Shard


def full_tensor(tensor: DTensor) -> torch.Tensor:
    """The full tensor on every rank, bitwise equal to torch's `full_tensor`.

    Without a gradient.

    Args:
        tensor: Tensor on any device. On the CPU: if it is sharded, then along one dimension of its mesh.

    Returns:
        A tensor of its global shape and dtype. If nothing is sharded, it may be the local part itself.

    Cost: one all-gather of the tensor over its shards. Collective over all ranks of its mesh.
    """
    tensor = cast("DTensor", tensor.detach())
    if not tensor.numel():
        return tensor.to_local().new_empty(tensor.shape)  # gloo divides by the size
    shardings = [(dim, placement) for dim, placement in enumerate(tensor.placements) if isinstance(placement, Shard)]
    is_partial = any(isinstance(placement, Partial) for placement in tensor.placements)
    if tensor.device.type != "cpu" or is_partial or len(shardings) != 1:
        return DTensor.full_tensor(tensor)
    ((mesh_dim, placement),) = shardings
    return _all_gather(tensor, tensor.device_mesh.get_group(mesh_dim), placement.dim)


def _all_gather(tensor: DTensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """Gather shards as bytes, since gloo does not support every dtype.

    All have one size; the last ones are padded.
    """
    local, length, degree = tensor.to_local(), tensor.shape[dim], group.size()
    rows = -(-length // degree)
    padded = local.new_zeros(*local.shape[:dim], rows, *local.shape[dim + 1 :])
    padded.narrow(dim, 0, local.shape[dim]).copy_(local)
    pieces = [torch.empty_like(padded) for _ in range(degree)]
    dist.all_gather([piece.view(-1).view(torch.uint8) for piece in pieces], padded.view(-1).view(torch.uint8), group)
    return torch.cat(pieces, dim).narrow(dim, 0, length).contiguous()
