"""Buffers of the engine of one model, by the rules of `engine.build`.

Units of one kind have equal buckets, so that the arithmetic runs once for each kind. Buckets are cached.

Pure.
"""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from mics_strategy.comm.residuals import residual_numel
from mics_strategy.comm.workspace import aligned_bytes
from mics_strategy.config import ShardConfig, sum_dtype_of
from mics_strategy.engine.layout import BucketLayout, make_layout, num_first_hop_chunks, split_into_buckets
from mics_strategy.engine.schedule import (
    USAGE_DTYPE,
    first_hop_numel,
    full_numel,
    unshard_role,
    usage_numel,
)
from mics_strategy.planner.communicators import Workspaces, coalescing_routes, comm_layout
from mics_strategy.planner.model import ModelDescription, ParameterShape
from mics_strategy.scopes import COLLECTIVES, Scopes

_PARAM_ROLES = ("param_all_gather", "secondary_all_gather", "param_sync")


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketSize:
    """A bucket: its layout, and the dtypes of masters and unsharded parameters."""

    layout: BucketLayout
    master_dtype: torch.dtype
    param_dtype: torch.dtype
    is_trained: bool

    @property
    def sum_dtype(self) -> torch.dtype:
        """Dtype in which its gradients are added."""
        return sum_dtype_of(self.master_dtype)

    @property
    def numel(self) -> int:
        """Elements of its parameters, without padding."""
        return sum(param_slice.numel for param_slice in self.layout.param_slices)


@functools.lru_cache(maxsize=4096)
def _bucket_sizes(
    parameters: tuple[ParameterShape, ...],
    degrees: tuple[int, int],
    block_numels: tuple[int, int],
    dtypes: tuple[tuple[torch.dtype, torch.dtype], ...],
) -> tuple[BucketSize, ...]:
    """Buckets of a unit, as the engine makes them.

    Args:
        parameters: Parameters of the unit.
        degrees: Ranks that share a bucket's rows, of frozen and of trained parameters.
        block_numels: Elements of a codec block, of frozen and of trained parameters.
        dtypes: Dtypes of master and unsharded values of each parameter.
    """
    by_kind: dict[tuple[torch.dtype, torch.dtype, bool], list[tuple[str, torch.Size]]] = collections.defaultdict(list)
    for parameter, (master, param) in zip(parameters, dtypes, strict=True):
        by_kind[master, param, parameter.is_trained].append((parameter.name, torch.Size(parameter.shape)))
    sizes = []
    for (master, param, is_trained), shapes in by_kind.items():
        for positions in split_into_buckets([shape.numel() * param.itemsize for _, shape in shapes]):
            layout = make_layout(
                shapes[positions.start : positions.stop],
                degrees[is_trained],
                block_numels[is_trained],
                itemsize=min(master.itemsize, param.itemsize),
            )
            sizes.append(BucketSize(layout=layout, master_dtype=master, param_dtype=param, is_trained=is_trained))
    return tuple(sizes)


class EngineBuffers:
    """The engine's buffers on one rank of a job on GPUs.

    Args:
        model: Description of the model.
        config: Configuration; `coalesce="auto"` counts as False.
        scopes: Degrees and codecs.
        master_dtype: Dtype of the parameters whose own is ``"auto"``.
    """

    def __init__(self, model: ModelDescription, config: ShardConfig, scopes: Scopes, master_dtype: torch.dtype) -> None:
        self._model = model
        self._config = config
        self._scopes = scopes
        frozen_degree = scopes.optimizer if scopes.params > 1 else 1
        self._comms = comm_layout(scopes)
        self._counts = collections.Counter(unit.kind for unit in model.units)
        first = {unit.kind: unit for unit in reversed(model.units)}
        self._kinds = {
            kind: _bucket_sizes(
                unit.parameters,
                (frozen_degree, scopes.optimizer),
                self._comms.block_numels,
                tuple((dtype, config.param_dtype_of(dtype)) for dtype in _dtypes(unit.parameters, master_dtype)),
            )
            for kind, unit in first.items()
        }

    @property
    def buckets_by_kind(self) -> Mapping[str, tuple[BucketSize, ...]]:
        """Buckets of each kind of units."""
        return self._kinds

    @property
    def num_communicators(self) -> int:
        """Communicators of a rank."""
        return self._comms.num_communicators

    @property
    def num_trained(self) -> int:
        """Elements that this rank's optimizer updates."""
        return self._sum_over_trained(lambda bucket: bucket.layout.shard_numel)

    @property
    def moments_bytes(self) -> int:
        """Bytes of Adam's two moments, in the dtype of the masters."""
        return self._sum_over_trained(lambda bucket: 2 * bucket.layout.shard_numel * bucket.master_dtype.itemsize)

    @property
    def pending_grad_bytes(self) -> int:
        """Bytes of autograd's gradients of the root and of two units in a row."""
        by_kind = {
            kind: sum(b.numel * b.param_dtype.itemsize for b in buckets if b.is_trained)
            for kind, buckets in self._kinds.items()
        }
        root, *others = [by_kind[unit.kind] for unit in self._model.units]
        return root + max(map(sum, itertools.pairwise([*others, 0])), default=0)

    def bytes_by_purpose(self) -> dict[str, int]:
        """Bytes by purpose, with the names in `Sharded.memory`."""
        scopes = self._scopes
        sizes = {
            "master shards": self._sum_over(lambda bucket: bucket.layout.shard_numel * bucket.master_dtype.itemsize)
        }
        if scopes.params > 1:
            sizes["parameter shards"] = self._sum_over(self._param_shard_bytes)
            sizes["slots"] = self._slot_bytes()
        else:
            sizes["unsharded parameters"] = self._sum_over(self._unsharded_bytes)
        if scopes.has_secondary:
            sizes["secondary shards"] = self._sum_over(
                lambda bucket: bucket.layout.numel_at(scopes.secondary) * bucket.param_dtype.itemsize
            )
        sizes |= self._gradient_bytes()
        sizes["error feedback"] = self._sum_over_trained(self._residual_bytes)
        sizes |= self._staging_bytes()
        sizes["workspaces"] = self._workspace_bytes()
        return sizes

    def _buckets(self) -> Iterable[BucketSize]:
        """One bucket of each that differs."""
        return (bucket for buckets in self._kinds.values() for bucket in buckets)

    def _trained(self, kind: str) -> list[BucketSize]:
        return [bucket for bucket in self._kinds[kind] if bucket.is_trained]

    def _sum_over(self, num_bytes: Callable[[BucketSize], int]) -> int:
        """Sum over all buckets of all units."""
        return sum(self._counts[kind] * sum(map(num_bytes, buckets)) for kind, buckets in self._kinds.items())

    def _sum_over_trained(self, num_bytes: Callable[[BucketSize], int]) -> int:
        return self._sum_over(lambda bucket: num_bytes(bucket) if bucket.is_trained else 0)

    def _wire(self, bucket: BucketSize) -> torch.dtype:
        """Dtype of a bucket's gradients on the wire."""
        return self._config.wire_dtype_of(bucket.master_dtype)

    def _param_shard_bytes(self, bucket: BucketSize) -> int:
        """Bytes of a parameter shard; 0 where all-gathers send the masters."""
        scope, layout = self._scopes.params, bucket.layout
        return 0 if layout.ranks == scope else layout.numel_at(scope) * bucket.param_dtype.itemsize

    def _unsharded_bytes(self, bucket: BucketSize) -> int:
        """Bytes of parameters that every rank keeps whole; 0 where they are the masters."""
        is_master = bucket.layout.ranks == 1 and bucket.param_dtype == bucket.master_dtype
        return 0 if is_master else bucket.layout.unpadded_numel * bucket.param_dtype.itemsize

    def _casts_each_gather(self, bucket: BucketSize) -> bool:
        """Whether every all-gather casts the master shard."""
        is_at_scope = bucket.layout.ranks == self._scopes.params > 1
        return is_at_scope and bucket.param_dtype != bucket.master_dtype

    def _slot_bytes(self) -> int:
        """Bytes of `prefetch + 1` slots for each nesting depth, which units take in turn."""
        by_kind = {
            kind: aligned_bytes(*((b.layout.unpadded_numel, b.param_dtype) for b in buckets))
            for kind, buckets in self._kinds.items()
        }
        seen: dict[int, int] = collections.defaultdict(int)
        largest: dict[tuple[int, int], int] = {}
        num_slots = self._config.prefetch + 1
        for unit in self._model.units:
            depth = unit.depth if unit.name else 0
            slot = (depth, seen[depth] % num_slots)
            seen[depth] += 1
            largest[slot] = max(largest.get(slot, 0), by_kind[unit.kind])
        return sum(largest.values())

    def _gradient_bytes(self) -> dict[str, int]:
        """Bytes of sums, of the optimizer's gradients, and of flags of used parameters."""
        scopes = self._scopes
        sizes = {
            "gradients": self._sum_over_trained(lambda b: b.layout.numel_at(scopes.grads) * b.sum_dtype.itemsize),
            "cast gradients": self._sum_over_trained(
                lambda b: b.layout.shard_numel * b.master_dtype.itemsize if b.sum_dtype != b.master_dtype else 0
            ),
        }
        if scopes.grads != scopes.optimizer:
            sizes["reduced gradients"] = self._sum_over_trained(lambda b: b.layout.shard_numel * b.sum_dtype.itemsize)
        num_parameters = self._sum_over_trained(lambda b: len(b.layout.param_slices))
        sizes["used parameters"] = usage_numel(num_parameters) * USAGE_DTYPE.itemsize
        return sizes

    def _staging_bytes(self) -> dict[str, int]:
        """Bytes of the buffers that hold payloads while they are sent."""
        scopes, prefetch = self._scopes, self._config.prefetch
        full = [
            aligned_bytes((bucket.layout.full_numel, bucket.param_dtype))
            for bucket in self._buckets()
            if self._needs_staging(bucket)
        ]
        sizes = {"all-gather staging buffers": max(full, default=0)}
        if any(bucket.param_dtype != bucket.master_dtype for bucket in self._buckets()):
            casts_each_gather = any(map(self._casts_each_gather, self._buckets()))
            by_kind = [aligned_bytes(*map(self._cast_spec, buckets)) for buckets in self._kinds.values()]
            sizes["cast staging buffers"] = (prefetch + casts_each_gather) * max(by_kind, default=0)
        if scopes.grads > 1:
            sizes["gradient staging buffers"] = self._grad_staging_bytes()
        if scopes.optimizer > scopes.grads:
            wires = [
                b.layout.numel_at(scopes.grads) * self._wire(b).itemsize
                for b in self._buckets()
                if b.is_trained and self._wire(b) != b.sum_dtype
            ]
            sizes["second-hop staging buffers"] = 2 * max(wires, default=0)
        return sizes

    def _is_synced(self, bucket: BucketSize) -> bool:
        """Whether parameters are sent from the optimizer's scope to their own."""
        return self._scopes.optimizer > self._scopes.params and (bucket.is_trained or self._scopes.params > 1)

    def _cast_spec(self, bucket: BucketSize) -> tuple[int, torch.dtype]:
        """Elements and dtype of a payload that is cast from the master shard."""
        is_cast = self._is_synced(bucket) or self._casts_each_gather(bucket)
        return bucket.layout.shard_numel if is_cast else 0, bucket.param_dtype

    def _needs_staging(self, bucket: BucketSize) -> bool:
        """Whether an all-gather of parameters needs a flat buffer."""
        scopes, role = self._scopes, unshard_role(self._scopes)
        if scopes.has_secondary:
            return True
        is_sent = self._is_synced(bucket) if role == "param_sync" else scopes.params > 1
        return is_sent and not bucket.layout.is_one_parameter and not self._coalesces(bucket, role)

    def _grad_staging_bytes(self) -> int:
        """Bytes of one buffer for all first hops; of two a depth if encoded ahead."""
        scopes = self._scopes
        if not self._comms.is_first_hop_quantized:
            sizes = [
                (first_hop_numel(b.layout, scopes.grads, self._num_chunks(b)), self._wire(b))
                for b in self._buckets()
                if b.is_trained
            ]
            return max((aligned_bytes(size) for size in sizes), default=0)
        by_depth: dict[int, list[int]] = collections.defaultdict(list)
        for unit in self._model.units:
            if trained := self._trained(unit.kind):
                flat_bytes = aligned_bytes(*((bucket.layout.full_numel, self._wire(bucket)) for bucket in trained))
                by_depth[unit.depth if unit.name else 0].append(flat_bytes)
        most = 2 if "reduce" in self._config.overlap else 1
        return sum(min(len(sizes), most) * max(sizes) for sizes in by_depth.values())

    def _num_chunks(self, bucket: BucketSize) -> int:
        """Chunks of a first hop; one where each first hop has a flat buffer of its own."""
        if self._comms.is_first_hop_quantized:
            return 1
        return num_first_hop_chunks(bucket.layout, bucket.param_dtype.itemsize)

    def _coalesces(self, bucket: BucketSize, role: str) -> bool:
        """Whether a bucket's tensors are sent in one launch."""
        dtype = self._wire(bucket) if role == "grad_reduce_scatter" else bucket.param_dtype
        if self._config.coalesce is not True or not bucket.layout.is_evenly_divisible:
            return False
        if role == "grad_reduce_scatter" and (not bucket.is_trained or bucket.param_dtype != self._wire(bucket)):
            return False
        return bool(coalescing_routes(self._comms, role, bucket.layout.full_numel * dtype.itemsize))

    def _residual_bytes(self, bucket: BucketSize) -> int:
        """Bytes of a bucket's residuals of error feedback."""
        num_bytes = 0
        for role in ("grad_reduce_scatter", "second_hop_reduce_scatter", "second_hop_all_reduce"):
            numel = full_numel(role, bucket.layout, self._scopes)
            for sized in self._comms.routes[role][:1]:  # with codecs
                route = sized.for_bytes(numel * self._wire(bucket).itemsize)
                num_bytes += residual_numel(route, COLLECTIVES[role], numel) * torch.float32.itemsize
        return num_bytes

    def _workspace_bytes(self) -> int:
        """Bytes of the scratch memory of collectives."""
        scopes, workspaces = self._scopes, Workspaces(self._comms)
        for bucket in self._buckets():
            layout, dtype = bucket.layout, bucket.param_dtype
            for role in _PARAM_ROLES:
                if role == "param_sync" and not self._is_synced(bucket):
                    continue
                workspaces.reserve(role, full_numel(role, layout, scopes), dtype, dtype)
                if self._coalesces(bucket, unshard_role(scopes)):
                    workspaces.reserve_coalesced(role, full_numel(role, layout, scopes), dtype)
            if not bucket.is_trained:
                continue
            wire, total = self._wire(bucket), bucket.sum_dtype
            numel = first_hop_numel(layout, scopes.grads, self._num_chunks(bucket))
            workspaces.reserve("grad_reduce_scatter", numel, wire, total)
            if self._num_chunks(bucket) == 1 and self._coalesces(bucket, "grad_reduce_scatter"):
                workspaces.reserve_coalesced("grad_reduce_scatter", layout.full_numel, wire)
            for role in ("second_hop_reduce_scatter", "second_hop_all_reduce"):
                workspaces.reserve(role, full_numel(role, layout, scopes), wire, total)
        return workspaces.total_bytes


def _dtypes(parameters: Iterable[ParameterShape], default: torch.dtype) -> list[torch.dtype]:
    return [p.dtype if isinstance(p.dtype, torch.dtype) else default for p in parameters]
