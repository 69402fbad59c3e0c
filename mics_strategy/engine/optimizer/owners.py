"""Which rank updates which tensor, when an optimizer needs tensors whole?

Every whole tensor goes to one rank of the optimizer scope: the largest first, each to the rank that has the fewest
bytes so far. No rank then has more than the mean and one tensor beyond it.

Pure.

Source:
    AMSP (arXiv:2311.00257) section IV-C2, inter-tensor sharding; Graham (1969), longest processing time first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mics_strategy.engine.layout import ParamSlice


def assign_owners(sizes_bytes: list[int], owner_bytes: list[int]) -> list[int]:
    """The owner of each tensor.

    Args:
        sizes_bytes: Of the tensors.
        owner_bytes: What each rank owns already; grows by what it is given.
    """
    owners = [0] * len(sizes_bytes)
    for position in sorted(range(len(sizes_bytes)), key=lambda position: (-sizes_bytes[position], position)):
        owner = min(range(len(owner_bytes)), key=lambda rank: (owner_bytes[rank], rank))
        owner_bytes[owner] += sizes_bytes[position]
        owners[position] = owner
    return owners


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerAssignment:
    """Tensors of one bucket that are updated whole, and the rank of the optimizer scope that updates each."""

    regions: tuple[ParamSlice, ...]
    owners: tuple[int, ...]
    ranks: int

    def numel(self, owner: int, index: int) -> int:
        """Elements that shard `index` holds of the tensors of `owner`; a scalar is in every shard."""
        mine = (region for region, by in zip(self.regions, self.owners, strict=True) if by == owner)
        return sum(region.local_shape(index).numel() for region in mine)

    def rows_numels(self, index: int) -> list[int]:
        """Elements in shard `index`, by owner."""
        return [self.numel(owner, index) for owner in range(self.ranks)]

    def whole_numels(self, owner: int) -> list[int]:
        """Elements of the tensors of `owner`, by the shard that holds them."""
        return [self.numel(owner, index) for index in range(self.ranks)]
