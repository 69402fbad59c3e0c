"""Owners of the tensors that an optimizer updates as a whole.

Every such tensor is assigned to one rank of the optimizer scope: the largest first, each to the rank with the fewest
bytes so far. No rank then owns more than the mean plus one tensor.

Pure.

Source:
    AMSP (arXiv:2311.00257) section IV-C2, inter-tensor sharding; Graham (1969), longest processing time first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mics_strategy.engine.layout import ParamSlice

TENSORS_TO_OWNERS = 2  # of each parameter: value and gradient
TENSORS_TO_SHARDS = 1  # of each parameter: new value


def assign_owners(sizes_bytes: list[int], owner_bytes: list[int]) -> list[int]:
    """Assign each tensor to the rank with the fewest bytes, largest tensor first.

    Args:
        sizes_bytes: Bytes of each tensor.
        owner_bytes: Bytes that each rank owns already. Updated in place.

    Returns:
        The owner of each tensor.
    """
    owners = [0] * len(sizes_bytes)
    for position in sorted(range(len(sizes_bytes)), key=lambda position: (-sizes_bytes[position], position)):
        owner = min(range(len(owner_bytes)), key=lambda rank: (owner_bytes[rank], rank))
        owner_bytes[owner] += sizes_bytes[position]
        owners[position] = owner
    return owners


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerAssignment:
    """Owners of the tensors of one bucket that are updated as a whole.

    Attributes:
        param_slices: Slice of each tensor in the bucket.
        owners: Rank of the optimizer scope that updates each tensor.
        ranks: Number of ranks of the optimizer scope.
    """

    param_slices: tuple[ParamSlice, ...]
    owners: tuple[int, ...]
    ranks: int

    def numel(self, owner: int, index: int) -> int:
        """Elements in shard `index` of the tensors of `owner`. A scalar is in every shard."""
        param_slices = (
            param_slice
            for param_slice, slice_owner in zip(self.param_slices, self.owners, strict=True)
            if slice_owner == owner
        )
        return sum(param_slice.local_shape(index).numel() for param_slice in param_slices)

    def rows_numels(self, index: int) -> list[int]:
        """Elements in shard `index`, by the owner of their tensor."""
        return [self.numel(owner, index) for owner in range(self.ranks)]

    def whole_numels(self, owner: int) -> list[int]:
        """Elements of the tensors of `owner`, by shard."""
        return [self.numel(owner, index) for index in range(self.ranks)]

    def to_owners_numels(self, index: int) -> tuple[list[int], list[int]]:
        """Elements that rank `index` sends to each owner and receives from each shard: values and gradients."""
        sent, received = self.rows_numels(index), self.whole_numels(index)
        return [TENSORS_TO_OWNERS * numel for numel in sent], [TENSORS_TO_OWNERS * numel for numel in received]

    def to_shards_numels(self, index: int) -> tuple[list[int], list[int]]:
        """Elements that rank `index` sends to each shard and receives from each owner: new values."""
        return self.whole_numels(index), self.rows_numels(index)
