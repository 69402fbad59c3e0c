"""Construction of the engine of one model: memory, units, reducer.

The engine's memory is allocated here: arenas, slots, staging buffers and workspaces.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from mics_strategy.comm.process_groups import ProcessGroups
from mics_strategy.comm.workspace import aligned_bytes
from mics_strategy.config import ShardConfig, sum_dtype_of
from mics_strategy.engine.backward_grads import GradStaging
from mics_strategy.engine.boundary import AccumulationBoundary
from mics_strategy.engine.bucket import Bucket, UnshardedParams, param_comms
from mics_strategy.engine.feedback import make_feedback
from mics_strategy.engine.grad_bucket import GradBucket, GradMemory
from mics_strategy.engine.layout import BucketSpec, make_layout, num_first_hop_chunks, split_into_buckets
from mics_strategy.engine.memory import MemoryTracker, Slot, StagingPool, arena, carve_views, staging_views
from mics_strategy.engine.parameter import make_sharded_parameter
from mics_strategy.engine.rank_agreement import DesyncCheck, ReplicaCheck
from mics_strategy.engine.reducer import BackwardCount, Reducer, ReducerBuffers
from mics_strategy.engine.schedule import (
    USAGE_DTYPE,
    first_hop_numel,
    full_numel,
    shard_numel,
    usage_numel,
)
from mics_strategy.engine.step import Engine, OverlapPolicy
from mics_strategy.engine.streams import OpStream, Streams
from mics_strategy.engine.unit import GatherResources, Unit
from mics_strategy.engine.units import ParamRef, UnitSpec
from mics_strategy.engine.zero_copy import coalesced_comm_for

_NO_BYTES = torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """Configuration, process groups, device and memory tracker of a model; what ``"auto"`` chose, and why."""

    config: ShardConfig
    groups: ProcessGroups
    device: torch.device
    memory: MemoryTracker
    chosen: str = ""


def make_bucket_specs(unit: UnitSpec, context: BuildContext) -> list[BucketSpec]:
    """The buckets of a unit: its parameters by dtype and trainability.

    Buckets stand in the order of their first parameters. Parameters of more than `MAX_BUCKET_BYTES` have several: a
    staging buffer holds one bucket at a time, where the stream orders collectives.
    """
    by_kind: dict[tuple[torch.dtype, bool], list[ParamRef]] = defaultdict(list)
    for entry in unit.parameters:
        by_kind[entry.parameter.dtype, entry.parameter.requires_grad].append(entry)
    specs = []
    for (dtype, trainable), kind_entries in by_kind.items():
        shards = context.groups.trainable_placement if trainable else context.groups.frozen_placement
        param_dtype = context.config.param_dtype_of(dtype)
        specs += [
            BucketSpec(
                name=f"{unit.name or '(root)'}{'' if trainable else ' (frozen)'}",
                layout=make_layout(
                    [(entry.name, entry.parameter.shape) for entry in entries],
                    shards.degree,
                    context.groups.scopes.block_numel(is_trainable=trainable),
                    itemsize=min(dtype.itemsize, param_dtype.itemsize),
                ),
                locations=tuple(tuple(entry.locations) for entry in entries),
                master_dtype=dtype,
                param_dtype=param_dtype,
                trainable=trainable,
            )
            for entries in _split(kind_entries, param_dtype.itemsize)
        ]
    return specs


def _split(entries: list[ParamRef], itemsize: int) -> Iterator[list[ParamRef]]:
    """Cut parameters into the lists of buckets."""
    for positions in split_into_buckets([entry.parameter.numel() * itemsize for entry in entries]):
        yield entries[positions.start : positions.stop]


def build_units(modules: list[UnitSpec], specs: list[list[BucketSpec]], context: BuildContext) -> list[Unit]:
    """Units with all their parameter memory; values are not filled in yet.

    Args:
        modules: Modules and parameters of the units.
        specs: Buckets of each unit.
        context: See `BuildContext`.
    """
    all_specs = [spec for unit_specs in specs for spec in unit_specs]
    sizes = [(spec.layout.shard_numel, spec.master_dtype) for spec in all_specs]
    masters = arena(context.memory, "master shards", sizes, context.device)
    param_shards = _allocate_param_shards(all_specs, masters, context)
    secondary_shards = _allocate_secondary_shards(all_specs, context)
    slots = _slots(modules, specs, context)
    if context.groups.scopes.params == 1:
        unsharded = _persistent_params(all_specs, masters, context)
    else:
        unsharded = [
            params for unit_specs, slot in zip(specs, slots, strict=True) for params in _lent(unit_specs, slot, context)
        ]
    columns = zip(all_specs, masters, param_shards, secondary_shards, unsharded, strict=True)
    buckets = iter(
        [
            Bucket(spec, context.groups, master, param_shard, secondary, params)
            for spec, master, param_shard, secondary, params in columns
        ]
    )
    return [
        Unit(module.name, index, module.module, [next(buckets) for _ in unit_specs], slot)
        for index, (module, unit_specs, slot) in enumerate(zip(modules, specs, slots, strict=True))
    ]


def _lent(specs: list[BucketSpec], slot: Slot, context: BuildContext) -> list[UnshardedParams]:
    """The parameters of one unit, in its slot.

    With `check="poison"` in memory of their own: values of the slot's next resident would overwrite the NaN.
    """
    sizes = [(spec.layout.unpadded_numel, spec.param_dtype) for spec in specs]
    poisons, buffer = context.config.check == "poison", slot.buffer
    if poisons:
        buffer = context.memory.zeros("poisoned parameters", aligned_bytes(*sizes), torch.uint8, context.device)
    return [
        UnshardedParams(spec, view, poisons=poisons)
        for spec, view in zip(specs, carve_views(buffer, sizes), strict=True)
    ]


def _allocate_param_shards(
    specs: list[BucketSpec], masters: list[torch.Tensor], context: BuildContext
) -> list[torch.Tensor | None]:
    """The parameter shards; None where every all-gather casts the masters."""
    degree = context.groups.scopes.params
    if degree == 1:
        return [None] * len(specs)
    is_kept = [spec.layout.ranks != degree for spec in specs]
    sizes = [(s.layout.numel_at(degree), s.param_dtype) for s, kept in zip(specs, is_kept, strict=True) if kept]
    pieces = iter(arena(context.memory, "parameter shards", sizes, context.device))
    masters_or_none = [m if m.dtype == s.param_dtype else None for s, m in zip(specs, masters, strict=True)]
    return [next(pieces) if kept else other for kept, other in zip(is_kept, masters_or_none, strict=True)]


def _allocate_secondary_shards(specs: list[BucketSpec], context: BuildContext) -> list[torch.Tensor | None]:
    if not context.groups.scopes.has_secondary:
        return [None] * len(specs)
    sizes = [(spec.layout.numel_at(context.groups.scopes.secondary), spec.param_dtype) for spec in specs]
    return [*arena(context.memory, "secondary shards", sizes, context.device)]


def _persistent_params(
    specs: list[BucketSpec], masters: list[torch.Tensor], context: BuildContext
) -> list[UnshardedParams]:
    """The parameters with `params="replicate"`.

    Their memory is the masters' own where those are whole and have the compute dtype.
    """
    is_new = [spec.layout.ranks != 1 or spec.param_dtype != spec.master_dtype for spec in specs]
    sizes = [(spec.layout.unpadded_numel, spec.param_dtype) for spec, new in zip(specs, is_new, strict=True) if new]
    pieces = iter(arena(context.memory, "unsharded parameters", sizes, context.device))
    return [
        UnshardedParams(spec, (next(pieces) if new else master).data, is_master=not new)
        for spec, master, new in zip(specs, masters, is_new, strict=True)
    ]


def _slots(modules: list[UnitSpec], specs: list[list[BucketSpec]], context: BuildContext) -> list[Slot]:
    """Bind every unit to a slot. Units of one nesting depth share `prefetch + 1` slots, in turn."""
    if context.groups.scopes.params == 1:
        return [Slot(_NO_BYTES) for _ in modules]
    bound: dict[tuple[int, int], list[int]] = defaultdict(list)
    seen: dict[int, int] = defaultdict(int)
    for index, module in enumerate(modules):
        bound[module.depth, seen[module.depth] % (context.config.prefetch + 1)].append(index)
        seen[module.depth] += 1
    slots: dict[int, Slot] = {}
    for indices in bound.values():
        sizes = [[(spec.layout.unpadded_numel, spec.param_dtype) for spec in specs[index]] for index in indices]
        size = max(aligned_bytes(*of_unit) for of_unit in sizes)
        slot = Slot(context.memory.zeros("slots", size, torch.uint8, context.device), is_shared=len(indices) > 1)
        slots.update(dict.fromkeys(indices, slot))
    return [slots[index] for index in range(len(modules))]


def add_sharded_parameters(units: list[Unit], modules: list[UnitSpec], context: BuildContext) -> None:
    """Make parameters of the optimizer shards, and register them in the modules."""
    for unit, module in zip(units, modules, strict=True):
        requires_grad = {entry.name: entry.parameter.requires_grad for entry in module.parameters}
        for bucket in unit.buckets:
            for param_slice in bucket.layout.param_slices:
                sharded = make_sharded_parameter(
                    bucket.master_shard,
                    param_slice,
                    bucket.placement,
                    bucket.writes,
                    requires_grad=requires_grad[param_slice.name],
                )
                bucket.sharded_params.append(sharded)
        unit.register_sharded({entry.name: entry.aliases for entry in module.parameters})


def build_engine(units: list[Unit], modules: list[UnitSpec], context: BuildContext) -> Engine:
    """The engine of `units`, with all buffers of all-gathers and reductions."""
    config, overlap = context.config, context.config.overlap
    gradients = _gradients(units, context)
    streams = Streams(context.device, context.groups.scopes)
    buffers = _reducer_buffers(gradients, modules, context)
    _allocate_workspaces(units, gradients, context)
    reducer = Reducer(
        gradients=gradients,
        units=units,
        groups=context.groups,
        streams=streams,
        buffers=buffers,
        overlap_reduce="reduce" in overlap,
        overlap_second_hop="second_hop" in overlap,
        boundary=AccumulationBoundary(predicts=_has_overlapping_second_hop(context)),
        desync_check=DesyncCheck(
            buffers.usage,
            context.groups,
            ReplicaCheck(
                [bucket for unit in units for bucket in unit.buckets], context.groups, config.steps_between_checks
            ),
        ),
    )
    return Engine(
        units,
        reducer,
        BackwardCount(reducer),
        _gather_resources(units, streams.all_gather, context),
        OverlapPolicy(
            prefetch=config.prefetch if "gather" in overlap else 0,
            second_hop_every_backward=config.second_hop == "micro_step",
            sync_at_once="update" not in overlap,
        ),
    )


def _has_overlapping_second_hop(context: BuildContext) -> bool:
    """Whether a backward that is predicted to be the last one may start second hops."""
    config, groups = context.config, context.groups
    has_second_hop = groups.outer_grad_comm is not None or groups.replica_comm is not None
    is_excluded = config.second_hop == "micro_step" or "second_hop" not in config.overlap
    return groups.grad_comm is not None and has_second_hop and not is_excluded


def _gather_resources(units: list[Unit], stream: OpStream, context: BuildContext) -> GatherResources:
    groups, memory, count = context.groups, context.memory, context.config.prefetch
    if groups.is_stream_ordered:  # the buckets that need a buffer, one after the other
        staged = [[bucket] for unit in units for bucket in unit.buckets if bucket.needs_staging]
    else:
        staged = [unit.buckets for unit in units if unit.needs_staging]
    flat = [aligned_bytes(*((b.layout.full_numel, b.spec.param_dtype) for b in buckets)) for buckets in staged]
    num_flat = 1 if groups.is_stream_ordered else count
    cast = [aligned_bytes(*(bucket.cast_shard_spec for bucket in unit.buckets)) for unit in units]
    buckets = [bucket for unit in units for bucket in unit.buckets]
    sends_syncs = groups.trainable_placement.sync_comm is not None
    needs_cast = any(b.casts_each_gather or (sends_syncs and b.needs_cast) for b in buckets)
    num_cast = count + any(bucket.casts_each_gather for bucket in buckets)  # the unit that computes has one as well
    return GatherResources(
        stream=stream,
        flat=StagingPool(memory, "all-gather staging buffers", num_flat, max(flat, default=0), context.device),
        cast=StagingPool(memory, "cast staging buffers", num_cast, max(cast) if needs_cast else 0, context.device),
        is_stream_ordered=groups.is_stream_ordered,
    )


def _gradients(units: list[Unit], context: BuildContext) -> dict[int, list[GradBucket]]:
    scopes, memory, device = context.groups.scopes, context.memory, context.device
    buckets = [bucket for unit in units for bucket in unit.trainable_buckets]
    sum_dtypes = [sum_dtype_of(bucket.spec.master_dtype) for bucket in buckets]
    sizes = [(b.layout.numel_at(scopes.grads), dtype) for b, dtype in zip(buckets, sum_dtypes, strict=True)]
    accumulators = results = arena(memory, "gradients", sizes, device)
    if scopes.grads != scopes.optimizer:
        sizes = [(b.layout.shard_numel, dtype) for b, dtype in zip(buckets, sum_dtypes, strict=True)]
        results = arena(memory, "reduced gradients", sizes, device)
    cast_indices = [i for i, bucket in enumerate(buckets) if bucket.spec.master_dtype != sum_dtypes[i]]
    sizes = [(buckets[i].layout.shard_numel, buckets[i].spec.master_dtype) for i in cast_indices]
    casts = dict(zip(cast_indices, arena(memory, "cast gradients", sizes, device), strict=True))
    stagings = _shared_staging(buckets, context)
    wires = [context.config.wire_dtype_of(bucket.spec.master_dtype) for bucket in buckets]
    layouts = [bucket.layout for bucket in buckets]
    feedbacks = make_feedback([*zip(layouts, wires, strict=True)], context.groups, memory, device)
    grad_buckets = iter(
        GradBucket(
            bucket,
            GradMemory(
                accumulator=accumulators[i],
                result=results[i],
                result_cast=casts.get(i, results[i]),
                feedback=feedbacks[i],
            ),
            wires[i],
            stagings[i],
        )
        for i, bucket in enumerate(buckets)
    )
    return {
        unit.index: [next(grad_buckets) for _ in unit.trainable_buckets] for unit in units if unit.trainable_buckets
    }


def _shared_staging(buckets: list[Bucket], context: BuildContext) -> list[GradStaging] | list[None]:
    """One flat buffer of gradients, as a view for each bucket.

    Each is None where first hops do not use it one after the other.
    """
    groups = context.groups
    if groups.grad_comm is None or not groups.shares_gradient_staging:
        return [None] * len(buckets)
    counts = [num_first_hop_chunks(bucket.layout, bucket.spec.param_dtype.itemsize) for bucket in buckets]
    sizes = [
        (
            first_hop_numel(bucket.layout, groups.scopes.grads, count),
            context.config.wire_dtype_of(bucket.spec.master_dtype),
        )
        for bucket, count in zip(buckets, counts, strict=True)
    ]
    num_bytes = max((aligned_bytes(size) for size in sizes), default=0)
    staging = context.memory.zeros("gradient staging buffers", num_bytes, torch.uint8, context.device)
    return [
        GradStaging(buffer=carve_views(staging, [size])[0], num_chunks=count)
        for size, count in zip(sizes, counts, strict=True)
    ]


def _reducer_buffers(
    gradients: dict[int, list[GradBucket]], modules: list[UnitSpec], context: BuildContext
) -> ReducerBuffers:
    groups, memory, device = context.groups, context.memory, context.device
    sizes = {
        index: [(g.bucket.layout.full_numel, g.wire_dtype) for g in unit_gradients]
        for index, unit_gradients in gradients.items()
    }
    needs_flat = groups.grad_comm is not None and not groups.shares_gradient_staging
    flat = {index: aligned_bytes(*sizes[index]) if needs_flat else 0 for index in gradients}
    by_depth: dict[int, list[int]] = defaultdict(list)
    for index in gradients:
        by_depth[modules[index].depth].append(index)
    flat_pools: dict[int, StagingPool] = {}
    for indices in by_depth.values():
        count = min(len(indices), 2 if "reduce" in context.config.overlap else 1)
        pool = StagingPool(memory, "gradient staging buffers", count, max(flat[index] for index in indices), device)
        flat_pools.update(dict.fromkeys(indices, pool))
    largest = max(flat.values(), default=0)
    wires = [g.second_hop_wire_bytes for unit_gradients in gradients.values() for g in unit_gradients]
    num_parameters = sum(len(g.bucket.layout.param_slices) for gs in gradients.values() for g in gs)
    return ReducerBuffers(
        flat_pools=flat_pools,
        flat_views={index: staging_views(sizes[index]) for index in gradients},
        zero_grads=functools.cache(partial(memory.zeros, "zero gradients", largest, torch.uint8, device)),
        second_hop=StagingPool(memory, "second-hop staging buffers", 2, max(wires, default=0), device),
        usage=memory.zeros("used parameters", usage_numel(num_parameters), USAGE_DTYPE, device),
    )


def _allocate_workspaces(units: list[Unit], gradients: dict[int, list[GradBucket]], context: BuildContext) -> None:
    """Allocate a workspace for the largest collective in flight of each queue."""
    groups, scopes = context.groups, context.groups.scopes
    for bucket in (bucket for unit in units for bucket in unit.buckets):
        layout, dtype = bucket.layout, bucket.spec.param_dtype
        for role, comm in param_comms(groups, trainable=bucket.spec.trainable).items():
            if comm is not None:
                numel = shard_numel(role, layout, scopes)
                comm.reserve_all_gather(numel, dtype)
                coalesced = (
                    coalesced_comm_for(comm, layout, dtype.itemsize) if bucket.spec.coalesce_all_gather else None
                )
                if coalesced is not None:
                    coalesced.reserve_all_gather(numel, dtype)
        if groups.exact_sync_comm is not None:
            groups.exact_sync_comm.reserve_all_gather(shard_numel("param_sync", layout, scopes), dtype)
    variants = [(groups.grad_comm, groups.outer_grad_comm, groups.replica_comm)]
    if scopes.codecs.first_hop is not None or scopes.codecs.second_hop is not None:
        variants.append(groups.unquantized)
    all_gradients = [gradient for unit_gradients in gradients.values() for gradient in unit_gradients]
    for gradient, (grad_comm, outer_comm, replica_comm) in itertools.product(all_gradients, variants):
        layout, wire, dtype = gradient.bucket.layout, gradient.wire_dtype, gradient.result.dtype
        if grad_comm is not None:
            num_chunks = len(gradient.first_hop_chunks)
            grad_comm.reserve_reduce_scatter(first_hop_numel(layout, scopes.grads, num_chunks), wire, dtype)
            coalesced = (
                coalesced_comm_for(grad_comm, layout, wire.itemsize)
                if gradient.bucket.spec.coalesce_reduce_scatter and num_chunks == 1
                else None
            )
            if coalesced is not None:
                coalesced.reserve_reduce_scatter(shard_numel("grad_reduce_scatter", layout, scopes), wire)
        if outer_comm is not None:
            outer_comm.reserve_reduce_scatter(full_numel("second_hop_reduce_scatter", layout, scopes), wire, dtype)
        if replica_comm is not None:
            replica_comm.reserve_all_reduce(full_numel("second_hop_all_reduce", layout, scopes), wire, dtype)
    for workspace in groups.workspaces.values():
        workspace.bind(context.memory.zeros("workspaces", workspace.needed_bytes, torch.uint8, context.device))
