"""How is everything put together, once?

From the units and the scopes to arenas, slots, stagings, and the objects that use them. All memory that the
engine will ever need is allocated here.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass

import torch

from mics_strategy.config import ShardConfig, sum_dtype_of
from mics_strategy.mesh import Mesh
from mics_strategy.sharding import coalescing
from mics_strategy.sharding.bucket import Bucket, BucketSpec
from mics_strategy.sharding.buffers import Memory, Slot, StagingRing, arena, cut, packed_bytes
from mics_strategy.sharding.direct import coalesced_of
from mics_strategy.sharding.engine import Engine, GatherBuffers, Timing
from mics_strategy.sharding.gradients.gradient import BucketGradient
from mics_strategy.sharding.gradients.reducer import Reducer, ReducerBuffers, second_hop_bytes
from mics_strategy.sharding.gradients.usage import CommonWay, usage_numel
from mics_strategy.sharding.layout import plan_bucket
from mics_strategy.sharding.parameter import make_sharded_parameter
from mics_strategy.sharding.replicas import ReplicaCheck
from mics_strategy.sharding.streams import Streams
from mics_strategy.sharding.unit import Unit
from mics_strategy.sharding.wrap import OwnedParameter, UnitModule

_NO_BYTES = torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where a model is built: its configuration, process groups, device and the account of its memory."""

    config: ShardConfig
    mesh: Mesh
    device: torch.device
    memory: Memory


def plan_buckets(unit: UnitModule, site: Site) -> list[BucketSpec]:
    """The buckets of a unit: its parameters by dtype and trainability, in order of first appearance."""
    by_kind: dict[tuple[torch.dtype, bool], list[OwnedParameter]] = defaultdict(list)
    for entry in unit.parameters:
        by_kind[entry.parameter.dtype, entry.parameter.requires_grad].append(entry)
    specs = []
    for (dtype, trainable), entries in by_kind.items():
        shards = site.mesh.trained if trainable else site.mesh.frozen
        param_dtype = site.config.param_dtype_of(dtype)
        specs.append(
            BucketSpec(
                name=f"{unit.name or '(root)'}{'' if trainable else ' (frozen)'}",
                layout=plan_bucket(
                    [(entry.name, entry.parameter.shape) for entry in entries],
                    shards.degree,
                    site.mesh.scopes.block_numel(is_trainable=trainable),
                    itemsize=min(dtype.itemsize, param_dtype.itemsize),
                ),
                homes=tuple(tuple(entry.homes) for entry in entries),
                master_dtype=dtype,
                param_dtype=param_dtype,
                trainable=trainable,
            )
        )
    return specs


def build_units(modules: list[UnitModule], site: Site) -> list[Unit]:
    """Units with all their parameter memory; values are not filled in yet."""
    specs = [plan_buckets(module, site) for module in modules]
    specs = coalescing.choose(specs, site.config, site.mesh, site.device)
    flat = [spec for of_unit in specs for spec in of_unit]
    scopes, memory, device = site.mesh.scopes, site.memory, site.device
    masters = arena(memory, "optimizer shards", [(spec.layout.shard_numel, spec.master_dtype) for spec in flat], device)
    shards = _params_shards(flat, masters, site)
    secondary = _secondary_shards(flat, site)
    slots = _slots(modules, specs, site)
    units, start = [], 0
    whole_memory = iter(_whole_for_good(flat, masters, site)) if scopes.params == 1 else None
    for index, (module, of_unit, slot) in enumerate(zip(modules, specs, slots, strict=True)):
        sizes = [(spec.layout.compact_numel, spec.param_dtype) for spec in of_unit]
        wholes = [next(whole_memory) for _ in of_unit] if whole_memory is not None else cut(slot.buffer, sizes)
        buckets = [
            Bucket(spec, site.mesh, masters[start + i], shards[start + i], secondary[start + i], whole)
            for i, (spec, whole) in enumerate(zip(of_unit, wholes, strict=True))
        ]
        start += len(of_unit)
        units.append(Unit(module.name, index, module.module, buckets, slot))
    return units


def _params_shards(specs: list[BucketSpec], masters: list[torch.Tensor], site: Site) -> list[torch.Tensor | None]:
    scopes = site.mesh.scopes
    if scopes.params == 1:
        return [None] * len(specs)
    own = [spec for spec in specs if spec.layout.ranks != scopes.params or spec.param_dtype != spec.master_dtype]
    sizes = [(spec.layout.numel_at(scopes.params), spec.param_dtype) for spec in own]
    pieces = iter(arena(site.memory, "parameter shards", sizes, site.device))
    keep = set(map(id, own))
    return [next(pieces) if id(spec) in keep else master for spec, master in zip(specs, masters, strict=True)]


def _secondary_shards(specs: list[BucketSpec], site: Site) -> list[torch.Tensor | None]:
    if not site.mesh.has_secondary:
        return [None] * len(specs)
    sizes = [(spec.layout.numel_at(site.mesh.scopes.secondary), spec.param_dtype) for spec in specs]
    return [*arena(site.memory, "secondary parameter shards", sizes, site.device)]


def _whole_for_good(specs: list[BucketSpec], masters: list[torch.Tensor], site: Site) -> list[torch.Tensor]:
    """Memory of parameters that are not sharded: the optimizer's own where nothing distinguishes the two."""
    own = [spec for spec in specs if spec.layout.ranks > 1 or spec.param_dtype != spec.master_dtype]
    pieces = iter(
        arena(
            site.memory,
            "unsharded parameters",
            [(spec.layout.compact_numel, spec.param_dtype) for spec in own],
            site.device,
        )
    )
    keep = set(map(id, own))
    return [(next(pieces) if id(spec) in keep else master).data for spec, master in zip(specs, masters, strict=True)]


def _slots(modules: list[UnitModule], specs: list[list[BucketSpec]], site: Site) -> list[Slot]:
    """Bind every unit to a slot: units of one nesting depth take turns on one more slot than are gathered ahead."""
    if site.mesh.scopes.params == 1:
        return [Slot(_NO_BYTES) for _ in modules]
    bound: dict[tuple[int, int], list[int]] = defaultdict(list)
    seen: dict[int, int] = defaultdict(int)
    for index, module in enumerate(modules):
        bound[module.depth, seen[module.depth] % (site.config.prefetch + 1)].append(index)
        seen[module.depth] += 1
    slots: dict[int, Slot] = {}
    for indices in bound.values():
        size = max(
            packed_bytes([(spec.layout.compact_numel, spec.param_dtype) for spec in specs[index]]) for index in indices
        )
        slot = Slot(site.memory.zeros("slots", size, torch.uint8, site.device), is_shared=len(indices) > 1)
        slots.update(dict.fromkeys(indices, slot))
    return [slots[index] for index in range(len(modules))]


def add_sharded_parameters(units: list[Unit], modules: list[UnitModule], site: Site) -> None:
    """Label the optimizer shards as parameters and put them into the modules."""
    for unit, module in zip(units, modules, strict=True):
        requires_grad = {entry.name: entry.parameter.requires_grad for entry in module.parameters}
        for bucket in unit.buckets:
            for region in bucket.layout.regions:
                sharded = make_sharded_parameter(bucket.master, region, bucket.shards, requires_grad[region.name])
                bucket.sharded.append(sharded)
        unit.place_sharded()


def build_engine(units: list[Unit], modules: list[UnitModule], site: Site) -> Engine:
    """The engine over `units`, with every buffer that gathers and reductions need."""
    config, overlap = site.config, site.config.overlap
    gradients = _gradients(units, site)
    streams = Streams(site.device)
    buffers = _reducer_buffers(gradients, modules, site)
    _add_workspaces(units, gradients, site)
    reducer = Reducer(
        gradients=gradients,
        units=units,
        mesh=site.mesh,
        streams=streams,
        buffers=buffers,
        overlap_reduce="reduce" in overlap,
        overlap_second_hop="second_hop" in overlap,
        way=CommonWay(
            buffers.usage,
            site.mesh,
            ReplicaCheck([bucket for unit in units for bucket in unit.buckets], site.mesh, config.steps_between_checks),
        ),
    )
    return Engine(
        units,
        reducer,
        streams,
        _gather_buffers(units, site),
        Timing(
            prefetch=config.prefetch if "gather" in overlap else 0,
            second_hop_every_backward=config.second_hop == "micro_step",
            update_at_once="update" not in overlap,
        ),
    )


def _gather_buffers(units: list[Unit], site: Site) -> GatherBuffers:
    mesh, memory, count = site.mesh, site.memory, site.config.prefetch
    staged = [unit.buckets if unit.is_staged else [] for unit in units]
    flat = [packed_bytes([(b.layout.full_numel, b.spec.param_dtype) for b in buckets]) for buckets in staged]
    shard = [packed_bytes([bucket.cast_size for bucket in unit.buckets]) for unit in units]
    update = mesh.trained.update
    casts = update is not None and any(bucket.needs_cast for unit in units for bucket in unit.buckets)
    staging = StagingRing(memory, "gather stagings", count, max(flat), site.device)
    cast = StagingRing(memory, "cast stagings", count, max(shard) if casts else 0, site.device)
    return GatherBuffers(staging=staging, cast=cast)


def _gradients(units: list[Unit], site: Site) -> dict[int, list[BucketGradient]]:
    scopes, memory, device = site.mesh.scopes, site.memory, site.device
    buckets = [bucket for unit in units for bucket in unit.trainable]
    wide = [sum_dtype_of(bucket.spec.master_dtype) for bucket in buckets]
    sums = arena(
        memory,
        "gradients",
        [(b.layout.numel_at(scopes.grads), w) for b, w in zip(buckets, wide, strict=True)],
        device,
    )
    results = sums
    if scopes.grads != scopes.optimizer:
        results = arena(
            memory,
            "reduced gradients",
            [(b.layout.shard_numel, w) for b, w in zip(buckets, wide, strict=True)],
            device,
        )
    narrow = [i for i, bucket in enumerate(buckets) if bucket.spec.master_dtype != wide[i]]
    sizes = [(buckets[i].layout.shard_numel, buckets[i].spec.master_dtype) for i in narrow]
    casts = dict(zip(narrow, arena(memory, "cast gradients", sizes, device), strict=True))
    made = iter(
        BucketGradient(
            bucket,
            sums[i],
            results[i],
            casts.get(i, results[i]),
            site.config.wire_dtype_of(bucket.spec.master_dtype),
        )
        for i, bucket in enumerate(buckets)
    )
    return {unit.index: [next(made) for _ in unit.trainable] for unit in units if unit.trainable}


def _reducer_buffers(
    gradients: dict[int, list[BucketGradient]], modules: list[UnitModule], site: Site
) -> ReducerBuffers:
    mesh, memory, device = site.mesh, site.memory, site.device
    flat = {
        index: packed_bytes([(g.bucket.layout.full_numel, g.wire_dtype) for g in of_unit])
        if mesh.reduce_grads is not None
        else 0
        for index, of_unit in gradients.items()
    }
    by_depth: dict[int, list[int]] = defaultdict(list)
    for index in gradients:
        by_depth[modules[index].depth].append(index)
    collecting: dict[int, StagingRing] = {}
    for indices in by_depth.values():
        count = min(len(indices), 2 if "reduce" in site.config.overlap else 1)
        ring = StagingRing(memory, "gradient stagings", count, max(flat[index] for index in indices), device)
        collecting.update(dict.fromkeys(indices, ring))
    largest = max(flat.values(), default=0)
    wires = [second_hop_bytes(g, mesh) for gs in gradients.values() for g in gs]
    count = sum(len(g.bucket.layout.regions) for gs in gradients.values() for g in gs)
    return ReducerBuffers(
        collecting=collecting,
        zeros=memory.zeros("zero gradients", largest, torch.uint8, device) if largest else _NO_BYTES,
        second_hop=StagingRing(memory, "second hop stagings", 2, max(wires, default=0), device),
        usage=memory.zeros("parameter usage", usage_numel(count), torch.int32, device),
    )


def _add_workspaces(units: list[Unit], gradients: dict[int, list[BucketGradient]], site: Site) -> None:
    """Memory of what is under way, as much as the largest transfer of each kind needs."""
    mesh, scopes = site.mesh, site.mesh.scopes
    for bucket in (bucket for unit in units for bucket in unit.buckets):
        layout, dtype = bucket.layout, bucket.spec.param_dtype
        for collective, numel in (
            (mesh.gather_params, layout.numel_at(scopes.params)),
            (mesh.gather_secondary, layout.numel_at(scopes.secondary)),
            (bucket.shards.update, layout.shard_numel),
        ):
            if collective is not None:
                collective.reserve_gather(numel, dtype)
                coalesced = coalesced_of(collective, layout, dtype.itemsize) if bucket.spec.coalesces_gathers else None
                if coalesced is not None:
                    coalesced.reserve_gather(numel, dtype)
    variants = [(mesh.reduce_grads, mesh.second_scatter, mesh.second_reduce)]
    if scopes.codecs.first_hop is not None or scopes.codecs.second_hop is not None:
        variants.append(mesh.uncoded)
    of_buckets = [gradient for of_unit in gradients.values() for gradient in of_unit]
    for gradient, (first, scatter, replicas) in itertools.product(of_buckets, variants):
        layout, wire, dtype = gradient.bucket.layout, gradient.wire_dtype, gradient.result.dtype
        if first is not None:
            first.reserve_reduce(layout.full_numel, wire, dtype)
            coalesced = coalesced_of(first, layout, wire.itemsize) if gradient.bucket.spec.coalesces_sums else None
            if coalesced is not None:
                coalesced.reserve_reduce(layout.numel_at(scopes.grads), wire)
        if scatter is not None:
            scatter.reserve_reduce(layout.numel_at(scopes.grads), wire, dtype)
        if replicas is not None:
            replicas.reserve_all_reduce(layout.shard_numel, wire, dtype)
    for workspace in mesh.workspaces.values():
        workspace.use(site.memory.zeros("workspaces", workspace.needed_bytes, torch.uint8, site.device))
