"""Rules of a step's schedule, which the engine and the plan of a step share.

The engine asks these rules which collective is due when it runs a step; `plan` asks the same ones when it predicts the
step. Neither has a rule of its own.

- A unit is gathered unless its slot holds its current values (`needs_unshard`).
- A bucket is synced in front of its first all-gather after a change. That all-gather leaves the secondary shards, which
  the later ones gather until the next change (`ParamVersions`).
- The tensor of a collective is the flat buffer at the smaller of its two scopes (`full_numel`).
- A large parameter's first hop has several chunks (`first_hop_chunks`).
- First hops follow the first forwards of units, latest first (`reduction_order`), or include every unit where ranks may
  run different ones (`reduces_every_unit`). Second hops follow the units' index, last first (`second_hop_order`).

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from mics_strategy.engine.layout import ALIGN_NUMEL, BucketLayout
from mics_strategy.scopes import Scopes

USAGE_DTYPE = torch.int32  # of the small all-reduce in front of the second hop
T = TypeVar("T")


@dataclass(slots=True)
class ParamVersions:
    """Versions of one bucket's parameters in its buffers; -1 before the first.

    Attributes:
        has_secondary: Whether all-gathers of changed parameters leave a secondary shard.
        param_shard: Version at the parameter scope, which the last param sync has brought there.
        secondary_shard: Version of the secondary shard.
        unsharded: Version of the unsharded parameters.
    """

    has_secondary: bool = False
    param_shard: int = -1
    secondary_shard: int = -1
    unsharded: int = -1

    def needs_sync(self, version: int) -> bool:
        """Whether a param sync has to bring the present `version` to the parameter scope."""
        return self.param_shard != version

    def note_gather(self) -> str:
        """Note that the parameters are gathered now; return the role of the all-gather."""
        self.unsharded = self.param_shard
        if self.has_secondary and self.secondary_shard == self.param_shard:
            return "secondary_all_gather"
        return "param_all_gather"

    def keep_secondary(self) -> None:
        """Note that an all-gather of the parameters has left this rank's secondary shard."""
        self.secondary_shard = self.unsharded


class VersionedBucket(Protocol):
    """A bucket, or the plan's model of one."""

    @property
    def version(self) -> int:
        """Version of the parameters now."""

    @property
    def versions(self) -> ParamVersions:
        """Versions in the buffers."""


def needs_unshard(buckets: Iterable[VersionedBucket], *, is_resident: bool) -> bool:
    """Whether a unit has to be gathered before its next use.

    Args:
        buckets: Buckets of the unit.
        is_resident: Whether the unit is the last one that was gathered into its slot.
    """
    if not is_resident:
        return True
    for bucket in buckets:  # no generator: asked in every hook
        if bucket.versions.unsharded != bucket.version:
            return True
    return False


def full_numel(role: str, layout: BucketLayout, scopes: Scopes) -> int:
    """Elements of the full tensor in a role's collective, padding included. The role is one of `scopes.ROLES`."""
    return layout.numel_at(scopes.degrees_of(role)[0])


def shard_numel(role: str, layout: BucketLayout, scopes: Scopes) -> int:
    """Elements of each rank's shard of the full tensor in a role's collective.

    The shard is the input of an all-gather, the output of a reduce-scatter.
    """
    return layout.numel_at(scopes.degrees_of(role)[1])


def first_hop_chunks(slice_numel: int, count: int) -> list[tuple[int, int]]:
    """Ranges of elements of a rank's slice: the chunks of its first hop.

    Args:
        slice_numel: Elements of the flat buffer that one rank of the gradient scope receives.
        count: Chunks; fewer where the slice is smaller than so many multiples of `ALIGN_NUMEL`.
    """
    step = max(1, -(-slice_numel // (count * ALIGN_NUMEL))) * ALIGN_NUMEL
    return [(start, min(start + step, slice_numel)) for start in range(0, slice_numel, step)] or [(0, 0)]


def first_hop_numel(layout: BucketLayout, degree: int, num_chunks: int) -> int:
    """Elements of the full tensor of a bucket's largest chunk in the first hop.

    Args:
        layout: Layout of the bucket.
        degree: Degree of the gradient scope.
        num_chunks: Chunks of the first hop.
    """
    return degree * max(end - start for start, end in first_hop_chunks(layout.numel_at(degree), num_chunks))


def unshard_role(scopes: Scopes) -> str:
    """Role of the last collective before parameters are unsharded. It may write them in place."""
    if scopes.params == 1:
        return "param_sync"
    return "secondary_all_gather" if scopes.has_secondary else "param_all_gather"


def reduces_every_unit(scopes: Scopes) -> bool:
    """Whether every backward reduces every unit, as ranks may run different units."""
    return scopes.params == 1 or scopes.grads == 1


def reduction_order(forward_order: Iterable[T]) -> list[T]:
    """The order of first hops: by the first forward of each unit, latest first.

    Args:
        forward_order: Units in the order in which forwards entered them; a unit may occur several times.
    """
    return [*dict.fromkeys(forward_order)][::-1]


def second_hop_order(indices: Iterable[int]) -> list[int]:
    """The order of second hops of units, given by index. It depends on nothing that a rank has run."""
    return sorted(indices, reverse=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedHop:
    """A second hop of a bucket that another one of the same step followed.

    Attributes:
        micro_step: Index of the micro-step in which it started.
        unit: Index of the unit.
        bucket: Index among the trainable buckets of the unit.
    """

    micro_step: int
    unit: int
    bucket: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedHops:
    """What one step sent more than once.

    The last backward was predicted wrongly, gradients were read before it, or a backward went through a unit twice.

    Attributes:
        first_hops: Index of the micro-step, and of the unit, of first hops behind another one in the same backward.
        hops: Second hops that others of the same bucket followed.
        usage_reductions: Indices of the micro-steps of small all-reduces, without the last one.
    """

    first_hops: tuple[tuple[int, int], ...] = ()
    hops: tuple[RepeatedHop, ...] = ()
    usage_reductions: tuple[int, ...] = ()


NONE_REPEATED = RepeatedHops()


def usage_numel(num_parameters: int) -> int:
    """Elements of the small all-reduce.

    There is one for each trainable parameter, one for the backwards of ranks, one for their early second
    hops, and one for their agreement.
    """
    return num_parameters + 3
