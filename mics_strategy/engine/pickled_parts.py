"""Pickles of sharded tensors, which hold the part of one rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from mics_strategy.errors import CheckpointError


def part_of_rank(tensor: DTensor, rank: int) -> DTensor:
    """A part that this rank has pickled. Also in a process without groups.

    Args:
        tensor: The part.
        rank: The rank that has pickled it.

    Raises:
        CheckpointError: This is another rank, which would take that part for its own.
    """
    if dist.is_initialized() and dist.get_rank() != rank:
        here = _coordinate(tensor, dist.get_rank())
        if any(
            placement.is_shard() and (here is None or here[dim] != of_saver)
            for dim, (placement, of_saver) in enumerate(
                zip(tensor.placements, _coordinate(tensor, rank) or (), strict=True)
            )
        ):
            raise CheckpointError(
                f"The file holds the part of rank {rank} of a sharded tensor, but this is rank {dist.get_rank()}. Save "
                "`sharded.full_state_dict()` or `tensor.full_tensor()`, called on all ranks, or use `save_checkpoint`. "
                "The other parts are not in this file."
            )
    return tensor


def _coordinate(tensor: DTensor, rank: int) -> list[int] | None:
    found = (tensor.device_mesh.mesh == rank).nonzero()
    return found[0].tolist() if len(found) else None


torch.serialization.add_safe_globals([part_of_rank])
