"""The memory of the engine, before any of it is allocated: one rule for each buffer.

`build` allocates what `MemoryPlan` says. `estimate` and the planner add it up, without modules, tensors or groups.

Units of one kind have equal buckets, so that sums run once for each kind.

Pure.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch

from mics_strategy.comm.scratch import comm_layout, workspace_bytes
from mics_strategy.comm.workspace import aligned_bytes
from mics_strategy.config import ShardConfig
from mics_strategy.engine.bucket_specs import (
    DELAYED_STATE,
    OUTER_STATE,
    BucketSpec,
    Piece,
    bucket_plan,
    cast_piece,
    casts_each_gather,
    casts_second_hop,
    collectives_of,
    delayed_pieces,
    needs_flat_gather,
    outer_pieces,
    residual_numels,
    shares_grad_staging,
)
from mics_strategy.engine.plan import ROOT_NAME, BucketPlan, UnitPlan
from mics_strategy.engine.schedule import USAGE_DTYPE, first_hop_numel, usage_numel
from mics_strategy.scopes import Scopes

ARENAS = (  # purposes of which every bucket has a piece, or none
    *("master shards", "parameter shards", "secondary shards", "unsharded parameters"),
    *("gradients", "reduced gradients", "cast gradients"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitBuckets:
    """A unit: its name, the units around it, and its buckets, which all units of its kind have."""

    name: str
    kind: str
    depth: int
    buckets: tuple[BucketSpec, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Staging:
    """Equal buffers that hold payloads while they are sent."""

    count: int
    num_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes of all of them."""
        return self.count * self.num_bytes


class MemoryPlan:
    """The memory of one rank's engine.

    Args:
        units: Units of the model, the root first.
        config: Configuration.
        scopes: Degrees and codecs.
        is_stream_ordered: Whether a stream runs collectives one after the other, so that all may use one buffer. On
            gloo threads run them, and their results are put in place when something waits.
    """

    def __init__(
        self, units: Sequence[UnitBuckets], config: ShardConfig, scopes: Scopes, *, is_stream_ordered: bool = True
    ) -> None:
        self.units = units
        self._config = config
        self._scopes = scopes
        self._is_stream_ordered = is_stream_ordered
        self._counts = Counter(unit.kind for unit in units)
        self._kinds = {unit.kind: unit.buckets for unit in units}

    @property
    def _buckets(self) -> list[BucketSpec]:
        """One bucket of each that differs."""
        return [bucket for buckets in self._kinds.values() for bucket in buckets]

    def _sum(self, number: Callable[[BucketSpec], int], *, of_trainable: bool = False) -> int:
        """Sum over all buckets of all units."""
        return sum(
            self._counts[kind] * sum(number(bucket) for bucket in buckets if bucket.trainable or not of_trainable)
            for kind, buckets in self._kinds.items()
        )

    def _by_kind(self, piece: Callable[[BucketSpec], Piece], *, of_trainable: bool = False) -> dict[str, int]:
        """Bytes of one buffer for all buckets of a unit, by kind."""
        return {
            kind: aligned_bytes(*(piece(bucket) for bucket in buckets if bucket.trainable or not of_trainable))
            for kind, buckets in self._kinds.items()
        }

    @property
    def num_communicators(self) -> int:
        """NCCL's communicators of a rank."""
        return comm_layout(self._scopes).num_communicators

    @property
    def num_trained(self) -> int:
        """Elements that this rank's optimizer updates, padding included."""
        return self._sum(lambda bucket: bucket.layout.shard_numel, of_trainable=True)

    @property
    def moments_bytes(self) -> int:
        """Bytes of Adam's two moments, in the dtype of the masters."""
        return self._sum(lambda b: 2 * b.layout.shard_numel * b.master_dtype.itemsize, of_trainable=True)

    @property
    def pending_grad_bytes(self) -> int:
        """Most bytes of gradients that wait where autograd stored them: of the root and of two units in a row."""
        by_kind = {
            kind: sum(s.numel * b.param_dtype.itemsize for b in buckets if b.trainable for s in b.layout.param_slices)
            for kind, buckets in self._kinds.items()
        }
        root, *others = [by_kind[unit.kind] for unit in self.units]
        return root + max(map(sum, itertools.pairwise([*others, 0])), default=0)

    def bytes_by_purpose(self) -> dict[str, int]:
        """Bytes by purpose, with the names in `Sharded.memory`; scratch memory as on a backend that adds."""
        scopes = self._scopes
        sizes = {purpose: self._sum(partial(self._piece_bytes, purpose)) for purpose in ARENAS}
        if scopes.num_islands > 1:
            outer = partial(outer_pieces, is_delayed=self._config.outer_delay > 0)
            for purpose in OUTER_STATE:
                sizes[purpose] = self._sum(partial(_bytes_of, outer, purpose), of_trainable=True)
        if self._config.second_hop == "delayed":
            pieces = partial(delayed_pieces, scopes=scopes)
            for purpose in DELAYED_STATE:
                sizes[purpose] = self._sum(partial(_bytes_of, pieces, purpose), of_trainable=True)
        sizes["slots"] = sum(self.slot_bytes.values())
        sizes["poisoned parameters"] = sum(self.poisoned_bytes[unit.kind] for unit in self.units)
        residuals = partial(_num_residuals, scopes=scopes)
        sizes["error feedback"] = torch.float32.itemsize * self._sum(residuals, of_trainable=True)
        by_depth = sum(staging.total_bytes for staging in self.grad_staging_by_depth.values())
        sizes["gradient staging buffers"] = self.shared_grad_staging_bytes + by_depth
        sizes["second-hop staging buffers"] = self.second_hop_staging.total_bytes
        sizes["used parameters"] = self.usage_numel * USAGE_DTYPE.itemsize
        shapes = (shape for bucket in self._buckets for shape in collectives_of(bucket, scopes))
        sizes["workspaces"] = workspace_bytes(comm_layout(scopes), shapes)
        sizes["all-gather staging buffers"] = self.gather_staging.total_bytes
        sizes["cast staging buffers"] = self.cast_staging.total_bytes
        return sizes

    def piece(self, purpose: str, bucket: BucketSpec) -> Piece | None:
        """A bucket's piece of one of `ARENAS`; None where it has none, or other memory serves."""
        scopes, layout, master, param = self._scopes, bucket.layout, bucket.master_dtype, bucket.param_dtype
        match purpose:
            case "master shards":
                return layout.shard_numel, master
            case "parameter shards" if 1 < scopes.params != layout.ranks:  # else all-gathers send the masters
                return layout.numel_at(scopes.params), param
            case "secondary shards" if scopes.has_secondary:
                return layout.numel_at(scopes.secondary), param
            case "unsharded parameters" if scopes.params == 1 and (layout.ranks > 1 or param != master):
                return layout.unpadded_numel, param
            case "gradients" if bucket.trainable:
                return layout.numel_at(scopes.grads), bucket.accum_dtype
            case "reduced gradients" if bucket.trainable and scopes.grads != scopes.optimizer:
                return layout.shard_numel, bucket.sum_dtype
            case "cast gradients" if bucket.trainable and bucket.sum_dtype != master:
                return layout.shard_numel, master
        return None

    def _piece_bytes(self, purpose: str, bucket: BucketSpec) -> int:
        piece = self.piece(purpose, bucket)
        return 0 if piece is None else piece[0] * piece[1].itemsize

    @cached_property
    def slots(self) -> list[int]:
        """The first unit in the slot of each unit. Units of one nesting depth share `prefetch + 1` slots, in turn."""
        if self._scopes.params == 1:
            return [*range(len(self.units))]
        first: dict[tuple[int, int], int] = {}
        seen: dict[int, int] = defaultdict(int)
        slots = []
        for index, unit in enumerate(self.units):
            slots.append(first.setdefault((unit.depth, seen[unit.depth] % (self._config.prefetch + 1)), index))
            seen[unit.depth] += 1
        return slots

    @property
    def slot_bytes(self) -> dict[int, int]:
        """Bytes of each slot, by its first unit."""
        by_kind, largest = self._unsharded_bytes, dict.fromkeys(self.slots, 0)
        for unit, slot in zip(self.units, self.slots, strict=True):
            largest[slot] = max(largest[slot], by_kind[unit.kind])
        return largest

    @property
    def poisoned_bytes(self) -> dict[str, int]:
        """Bytes of a unit's own parameters, by kind, with `check="poison"`."""
        return self._unsharded_bytes if self._config.check == "poison" else dict.fromkeys(self._kinds, 0)

    @cached_property
    def _unsharded_bytes(self) -> dict[str, int]:
        if self._scopes.params == 1:
            return dict.fromkeys(self._kinds, 0)
        return self._by_kind(lambda bucket: (bucket.layout.unpadded_numel, bucket.param_dtype))

    @property
    def gather_staging(self) -> Staging:
        """Flat buffers of all-gathers: one for the largest bucket, or for units in flight."""
        if self._is_stream_ordered:
            staged = [bucket for bucket in self._buckets if needs_flat_gather(bucket, self._scopes)]
            return Staging(count=1, num_bytes=max(map(_flat_bytes, staged), default=0))
        staged_units = [
            sum(map(_flat_bytes, buckets))
            for buckets in self._kinds.values()
            if any(needs_flat_gather(bucket, self._scopes) for bucket in buckets)
        ]
        return Staging(count=self._config.prefetch, num_bytes=max(staged_units, default=0))

    @property
    def cast_staging(self) -> Staging:
        """Buffers of master shards, cast. The unit that computes has one as well, if every all-gather casts."""
        if not any(bucket.param_dtype != bucket.master_dtype for bucket in self._buckets):
            return Staging(count=0, num_bytes=0)
        by_kind = self._by_kind(partial(cast_piece, scopes=self._scopes))
        count = self._config.prefetch + any(casts_each_gather(bucket, self._scopes) for bucket in self._buckets)
        return Staging(count=count, num_bytes=max(by_kind.values(), default=0))

    @property
    def shares_grad_staging(self) -> bool:
        """Whether all first hops use one flat buffer of gradients."""
        return shares_grad_staging(self._scopes, is_stream_ordered=self._is_stream_ordered)

    def first_hop_piece(self, bucket: BucketSpec) -> Piece:
        """The full tensor of a bucket's largest chunk in the first hop."""
        return first_hop_numel(bucket.layout, self._scopes.grads, bucket.num_first_hop_chunks), bucket.wire_dtype

    @property
    def shared_grad_staging_bytes(self) -> int:
        """Bytes of the flat buffer that all first hops share; 0 where they do not."""
        if self._scopes.grads == 1 or not self.shares_grad_staging:
            return 0
        return max((aligned_bytes(self.first_hop_piece(b)) for b in self._buckets if b.trainable), default=0)

    @property
    def flat_grad_bytes(self) -> dict[str, int]:
        """Bytes of a unit's own flat buffer of gradients, by kind; 0 where all share one."""
        if self._scopes.grads == 1 or self.shares_grad_staging:
            return dict.fromkeys(self._kinds, 0)
        return self._by_kind(lambda bucket: (bucket.layout.full_numel, bucket.wire_dtype), of_trainable=True)

    @property
    def grad_staging_by_depth(self) -> dict[int, Staging]:
        """Flat buffers of gradients of the units of each nesting depth."""
        num_bytes, by_depth = self.flat_grad_bytes, defaultdict[int, list[int]](list)
        for unit in self.units:
            if any(bucket.trainable for bucket in unit.buckets):
                by_depth[unit.depth].append(num_bytes[unit.kind])
        most = 2 if "reduce" in self._config.overlap else 1
        return {d: Staging(count=min(len(sizes), most), num_bytes=max(sizes)) for d, sizes in by_depth.items()}

    @property
    def second_hop_staging(self) -> Staging:
        """Copies of sums in the wire dtype: for two hops in flight, and for all where they are delayed."""
        cast = [bucket for bucket in self._buckets if bucket.trainable and casts_second_hop(bucket, self._scopes)]
        largest = max((b.layout.numel_at(self._scopes.grads) * b.wire_dtype.itemsize for b in cast), default=0)
        is_delayed = self._config.second_hop == "delayed"
        count = self._sum(partial(casts_second_hop, scopes=self._scopes), of_trainable=True) if is_delayed else 2
        return Staging(count=count, num_bytes=largest)

    @property
    def usage_numel(self) -> int:
        """Elements of the flags of used parameters."""
        return usage_numel(self._sum(lambda bucket: len(bucket.layout.param_slices), of_trainable=True))

    def unit_plans(self) -> tuple[UnitPlan, ...]:
        """What the plan of a step depends on, of each unit."""
        by_kind = self.bucket_plans()
        return tuple(
            UnitPlan(name=unit.name or ROOT_NAME, slot=slot, buckets=by_kind[unit.kind])
            for unit, slot in zip(self.units, self.slots, strict=True)
        )

    def bucket_plans(self) -> dict[str, tuple[BucketPlan, ...]]:
        """The same of the buckets of each kind of units."""
        return {
            kind: tuple(bucket_plan(bucket, has_gradients=bucket.trainable) for bucket in buckets)
            for kind, buckets in self._kinds.items()
        }


def _flat_bytes(bucket: BucketSpec) -> int:
    return aligned_bytes((bucket.layout.full_numel, bucket.param_dtype))


def _bytes_of(pieces: Callable[[BucketSpec], dict[str, Piece]], purpose: str, bucket: BucketSpec) -> int:
    numel, dtype = pieces(bucket).get(purpose, (0, bucket.master_dtype))
    return numel * dtype.itemsize


def _num_residuals(bucket: BucketSpec, scopes: Scopes) -> int:
    return sum(residual_numels(bucket, scopes).values())
