"""Construction of the engine of one model: memory, units, reducer.

The engine's memory is allocated here, as `memory_plan` says.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch

from mics_strategy.comm.process_groups import ProcessGroups
from mics_strategy.config import ShardConfig
from mics_strategy.engine.bucket import Bucket, UnshardedParams, param_comms
from mics_strategy.engine.bucket_specs import BucketRules, BucketSpec, ParamSpec, collectives_of, make_buckets
from mics_strategy.engine.delayed_hops import DelayedHops, make_delayed
from mics_strategy.engine.feedback import make_feedback
from mics_strategy.engine.grad_bucket import GradBucket, GradMemory
from mics_strategy.engine.memory import MemoryTracker, Slot, StagingPool, arena, carve_views, staging_views
from mics_strategy.engine.memory_plan import MemoryPlan, Staging, UnitBuckets
from mics_strategy.engine.parameter import make_sharded_parameter
from mics_strategy.engine.plan import ROOT_NAME
from mics_strategy.engine.rank_agreement import AccumulationWindow, RankAgreement, ReplicaCheck
from mics_strategy.engine.reducer import Reducer, ReducerBuffers
from mics_strategy.engine.schedule import USAGE_DTYPE, second_hop_order
from mics_strategy.engine.second_hops import SecondHops
from mics_strategy.engine.step import Engine, OverlapPolicy
from mics_strategy.engine.streams import OpStream, Streams
from mics_strategy.engine.unit import GatherResources, Unit
from mics_strategy.engine.units import ParamRef, UnitSpec
from mics_strategy.scopes import COLLECTIVES, REDUCTIONS, Scopes

Gradients = dict[int, list[GradBucket]]  # of the trainable buckets, by unit index


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """Configuration, process groups, device and memory tracker of a model; what ``"auto"`` chose, and why."""

    config: ShardConfig
    groups: ProcessGroups
    device: torch.device
    memory: MemoryTracker
    chosen: str = ""


def make_bucket_specs(
    modules: Sequence[UnitSpec], config: ShardConfig, rules: BucketRules
) -> list[tuple[BucketSpec, ...]]:
    """The buckets of each unit."""
    return [
        make_buckets((_param_spec(entry, config) for entry in module.parameters), rules, module.name or ROOT_NAME)
        for module in modules
    ]


def _param_spec(entry: ParamRef, config: ShardConfig) -> ParamSpec:
    shape, dtype, trainable = entry.parameter.shape, entry.parameter.dtype, entry.parameter.requires_grad
    spec = ParamSpec.of(entry.name, shape, dtype, config, trainable=trainable)
    return dataclasses.replace(spec, locations=tuple(entry.locations))


def plan_memory(
    modules: Sequence[UnitSpec],
    specs: Sequence[tuple[BucketSpec, ...]],
    config: ShardConfig,
    scopes: Scopes,
    *,
    is_stream_ordered: bool = True,
) -> MemoryPlan:
    """The memory of the engine of these units; see `MemoryPlan`."""
    units = [
        UnitBuckets(name=module.name, kind=module.name, depth=module.depth, buckets=buckets)
        for module, buckets in zip(modules, specs, strict=True)
    ]
    return MemoryPlan(units, config, scopes, is_stream_ordered=is_stream_ordered)


def build_units(modules: list[UnitSpec], plan: MemoryPlan, context: BuildContext) -> list[Unit]:
    """Units with all their parameter memory; values are not filled in yet.

    Args:
        modules: Modules and parameters of the units.
        plan: Their memory.
        context: See `BuildContext`.
    """
    specs = [spec for unit in plan.units for spec in unit.buckets]
    masters = [master for master in _arena("master shards", specs, plan, context) if master is not None]
    param_shards = _arena("parameter shards", specs, plan, context)
    if context.groups.scopes.params > 1:  # where only the dtype differs, every all-gather casts the masters
        param_shards = [
            master if shard is None and master.dtype == spec.param_dtype else shard
            for spec, master, shard in zip(specs, masters, param_shards, strict=True)
        ]
    secondary_shards = _arena("secondary shards", specs, plan, context)
    slots = _slots(plan, context)
    if context.groups.scopes.params == 1:
        whole = _arena_or(masters, "unsharded parameters", specs, plan, context)
        unsharded = [
            UnshardedParams(spec, own.data, is_master=own is master)
            for spec, master, own in zip(specs, masters, whole, strict=True)
        ]
    else:
        unsharded = [
            params for unit, slot in zip(plan.units, slots, strict=True) for params in _lent(unit, slot, plan, context)
        ]
    columns = zip(specs, masters, param_shards, secondary_shards, unsharded, strict=True)
    buckets = iter(
        [
            Bucket(spec, context.groups, master, param_shard, secondary, params)
            for spec, master, param_shard, secondary, params in columns
        ]
    )
    return [
        Unit(module.name, index, module.module, [next(buckets) for _ in unit.buckets], slot)
        for index, (module, unit, slot) in enumerate(zip(modules, plan.units, slots, strict=True))
    ]


def _arena(
    purpose: str, specs: Sequence[BucketSpec], plan: MemoryPlan, context: BuildContext
) -> list[torch.Tensor | None]:
    """The piece of each bucket in one arena; None where it has none."""
    pieces = [plan.piece(purpose, spec) for spec in specs]
    tensors = iter(arena(context.memory, purpose, [piece for piece in pieces if piece is not None], context.device))
    return [None if piece is None else next(tensors) for piece in pieces]


def _arena_or(
    others: Sequence[torch.Tensor], purpose: str, specs: Sequence[BucketSpec], plan: MemoryPlan, context: BuildContext
) -> list[torch.Tensor]:
    """As `_arena`, with the tensors of another one where a bucket has no piece."""
    pieces = _arena(purpose, specs, plan, context)
    return [other if own is None else own for own, other in zip(pieces, others, strict=True)]


def _slots(plan: MemoryPlan, context: BuildContext) -> list[Slot]:
    """The slot of each unit."""
    num_units, slots = Counter(plan.slots), {}
    for first, num_bytes in plan.slot_bytes.items():
        buffer = context.memory.zeros("slots", num_bytes, torch.uint8, context.device)
        slots[first] = Slot(buffer, is_shared=num_units[first] > 1)
    return [slots[first] for first in plan.slots]


def _lent(unit: UnitBuckets, slot: Slot, plan: MemoryPlan, context: BuildContext) -> list[UnshardedParams]:
    """The parameters of one unit, in its slot.

    With `check="poison"` in memory of their own: values of the slot's next resident would overwrite the NaN.
    """
    poisons, buffer = context.config.check == "poison", slot.buffer
    if poisons:
        num_bytes = plan.poisoned_bytes[unit.kind]
        buffer = context.memory.zeros("poisoned parameters", num_bytes, torch.uint8, context.device)
    views = carve_views(buffer, [(spec.layout.unpadded_numel, spec.param_dtype) for spec in unit.buckets])
    return [UnshardedParams(spec, view, poisons=poisons) for spec, view in zip(unit.buckets, views, strict=True)]


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


def build_engine(
    units: list[Unit],
    plan: MemoryPlan,
    context: BuildContext,
    engine: Engine | None = None,
    grad_buckets: Gradients | None = None,
) -> Engine:
    """The engine of `units`, with all buffers of all-gathers and reductions.

    Args:
        units: The units.
        plan: Their memory.
        context: See `BuildContext`.
        engine: Engine to build again in place, so that hooks which refer to it stay valid; None for a new one.
        grad_buckets: Its gradients, which are also built again; None for new ones.
    """
    config, overlap = context.config, context.config.overlap
    grad_buckets = _grad_buckets(units, plan, context, grad_buckets)
    streams = Streams(context.device, context.groups.scopes)
    buffers = _reducer_buffers(grad_buckets, plan, context)
    _allocate_workspaces(units, context)
    overlaps_second_hop = "second_hop" in overlap and config.second_hop != "delayed" and _has_second_hop(context)
    can_predict = config.second_hop == "boundary" and context.groups.grad_comm is not None
    window = AccumulationWindow(predicts=overlaps_second_hop and can_predict)
    reducer = Reducer(
        grad_buckets=grad_buckets,
        units=units,
        groups=context.groups,
        streams=streams,
        buffers=buffers,
        overlap_reduce="reduce" in overlap,
        overlap_second_hop=overlaps_second_hop,
        window=window,
        second_hops=_second_hops(grad_buckets, streams.second_hop, plan, window, context),
        agreement=_agreement(units, grad_buckets, plan, context),
    )
    engine = Engine.__new__(Engine) if engine is None else engine
    engine.__init__(  # type: ignore[misc]
        units,
        reducer,
        _gather_resources(plan, streams.all_gather, context),
        OverlapPolicy(
            prefetch=config.prefetch if "gather" in overlap else 0,
            second_hop_every_backward=config.second_hop == "micro_step",
            sync_at_once="update" not in overlap,
            keeps_params_unsharded=context.groups.param_comm is None,
        ),
    )
    return engine


def _has_second_hop(context: BuildContext) -> bool:
    """Whether second hops send anything. What is left of them would make the host wait for the first hops."""
    return context.groups.second_scatter_comm is not None or context.groups.replica_comm is not None


def _second_hops(
    grad_buckets: Gradients,
    stream: OpStream,
    plan: MemoryPlan,
    window: AccumulationWindow,
    context: BuildContext,
) -> SecondHops:
    wires = _pool("second-hop staging buffers", plan.second_hop_staging, context)
    in_order = {index: grad_buckets[index] for index in second_hop_order(grad_buckets)}
    if context.config.second_hop == "delayed":
        delayed = make_delayed(grad_buckets.values(), context.memory, context.device)
        return DelayedHops(stream, wires, in_order, window, delayed)
    return SecondHops(stream, wires, in_order, window)


def _agreement(units: list[Unit], grad_buckets: Gradients, plan: MemoryPlan, context: BuildContext) -> RankAgreement:
    counts = context.memory.zeros("used parameters", plan.usage_numel, USAGE_DTYPE, context.device)
    buckets = [bucket for unit in units for bucket in unit.buckets]
    replicas = ReplicaCheck(buckets, context.groups, context.config.steps_between_checks)
    return RankAgreement(counts, [*chain.from_iterable(grad_buckets.values())], context.groups, replicas)


def _pool(purpose: str, staging: Staging, context: BuildContext) -> StagingPool:
    return StagingPool(context.memory, purpose, staging.count, staging.num_bytes, context.device)


def _gather_resources(plan: MemoryPlan, stream: OpStream, context: BuildContext) -> GatherResources:
    return GatherResources(
        stream=stream,
        flat=_pool("all-gather staging buffers", plan.gather_staging, context),
        cast=_pool("cast staging buffers", plan.cast_staging, context),
        is_stream_ordered=context.groups.is_stream_ordered,
    )


def _grad_buckets(
    units: list[Unit], plan: MemoryPlan, context: BuildContext, former: Gradients | None = None
) -> Gradients:
    """The gradients of the buckets of each unit that has any. Former ones are built again in place."""
    buckets = [bucket for unit in units for bucket in unit.trainable_buckets]
    specs = [bucket.spec for bucket in buckets]
    accumulators = [own for own in _arena("gradients", specs, plan, context) if own is not None]
    results = _arena_or(accumulators, "reduced gradients", specs, plan, context)
    casts = _arena_or(results, "cast gradients", specs, plan, context)
    feedbacks = make_feedback(specs, context.groups, context.memory, context.device)
    memories = [
        GradMemory(accumulator=accumulator, result=result, result_cast=cast, feedback=feedback)
        for accumulator, result, cast, feedback in zip(accumulators, results, casts, feedbacks, strict=True)
    ]
    stagings = iter(zip(buckets, memories, _shared_staging(specs, plan, context), strict=True))
    if former is not None:
        for grad_bucket in (grad_bucket for of_unit in former.values() for grad_bucket in of_unit):
            GradBucket.__init__(grad_bucket, *next(stagings))
        return former
    return {
        unit.index: [GradBucket(*next(stagings)) for _ in unit.trainable_buckets]
        for unit in units
        if unit.trainable_buckets
    }


def _shared_staging(
    specs: list[BucketSpec], plan: MemoryPlan, context: BuildContext
) -> list[torch.Tensor] | list[None]:
    """One flat buffer of gradients, as a view for each bucket.

    Each is None where first hops do not use it one after the other.
    """
    if context.groups.grad_comm is None or not plan.shares_grad_staging:
        return [None] * len(specs)
    num_bytes = plan.shared_grad_staging_bytes
    buffer = context.memory.zeros("gradient staging buffers", num_bytes, torch.uint8, context.device)
    return [carve_views(buffer, [plan.first_hop_piece(spec)])[0] for spec in specs]


def _reducer_buffers(
    grad_buckets: dict[int, list[GradBucket]], plan: MemoryPlan, context: BuildContext
) -> ReducerBuffers:
    memory, device, staging = context.memory, context.device, plan.grad_staging_by_depth
    pools = {depth: _pool("gradient staging buffers", staging[depth], context) for depth in staging}
    views = {
        index: staging_views([(g.bucket.layout.full_numel, g.wire_dtype) for g in unit_grad_buckets])
        for index, unit_grad_buckets in grad_buckets.items()
    }
    largest = max((pool.num_bytes for pool in staging.values()), default=0)
    return ReducerBuffers(
        flat_pools={index: pools[plan.units[index].depth] for index in grad_buckets},
        flat_views=views,
        zero_grads=functools.cache(partial(memory.zeros, "zero gradients", largest, torch.uint8, device)),
    )


def _allocate_workspaces(units: list[Unit], context: BuildContext) -> None:
    """Allocate a workspace for the largest collective in flight of each queue."""
    groups = context.groups
    codecs = groups.scopes.codecs
    variants = [(groups.grad_comm, groups.second_scatter_comm, groups.replica_comm)]
    if codecs.first_hop is not None or codecs.second_hop is not None:
        variants.append(groups.unquantized)
    for bucket in (bucket for unit in units for bucket in unit.buckets):
        comms = {role: [comm] for role, comm in param_comms(groups, trainable=bucket.spec.trainable).items()}
        comms["param_sync"].append(groups.exact_sync_comm)
        comms["outer_all_reduce"] = [groups.island.outer_comm]
        comms |= {role: [*of_role] for role, of_role in zip(REDUCTIONS, zip(*variants, strict=True), strict=True)}
        for shape in collectives_of(bucket.spec, groups.scopes):
            for comm in comms[shape.role]:
                if comm is None:
                    continue
                sized, collective = comm.for_bytes(shape.numel * shape.wire.itemsize), COLLECTIVES[shape.role]
                if not shape.is_coalesced:
                    sized.reserve(collective, shape.numel, shape.wire, shape.dtype)
                elif sized.coalesced is not None:
                    sized.coalesced.reserve(collective, shape.numel, shape.wire)
    for workspace in groups.workspaces.values():
        workspace.bind(context.memory.zeros("workspaces", workspace.needed_bytes, torch.uint8, context.device))
