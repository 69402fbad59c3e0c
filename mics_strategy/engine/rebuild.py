"""A sharded model on other process groups, in place: the engine after ranks of the job were lost.

The ranks that are left have the shards that they had before, so nothing is sent and nothing is copied: masters,
optimizer states and slots stay. All that may be in the middle of a step is made anew: collectives, gradients and their
sums, staging buffers, the order of units, everything that is a process group. The model, its parameters, its
optimizers and the handle stay the same objects, and hooks refer to the same units, buckets and gradients.
"""

from __future__ import annotations

import dataclasses

from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from mics_strategy.comm.process_groups import ProcessGroups
from mics_strategy.engine.build import build_engine
from mics_strategy.engine.handle import Sharded
from mics_strategy.engine.memory_plan import MemoryPlan, UnitBuckets
from mics_strategy.engine.module_buffers import ModuleBuffers
from mics_strategy.engine.parameter import move_parameter, move_to_mesh

_KEPT = {  # purposes of the memory that stays
    *("master shards", "parameter shards", "secondary shards", "slots", "unsharded parameters", "poisoned parameters"),
}


def rebuild(sharded: Sharded, made: ProcessGroups) -> None:
    """Let a model use other process groups. Collective over their ranks.

    A step that has begun is dropped, with its gradients, and so is a profile.

    Args:
        sharded: Model, of whose former groups no collective is in flight.
        made: Groups in which this rank has the shards that it had before.
    """
    internals = sharded.internals
    engine, groups, context, units = internals.engine, internals.groups, internals.context, internals.units
    grad_buckets = engine.reducer.grad_buckets
    internals.step_hooks.reset_after_error()
    if sharded._profile is not None and sharded._profile.is_recording:
        sharded._profile.cancel()  # of collectives that are gone
    random = groups.trainable_placement.random  # which has counted the draws so far
    made.trainable_placement = dataclasses.replace(made.trainable_placement, random=random)
    vars(groups).clear()
    vars(groups).update(vars(made))  # in place: whoever has the object uses the new ones
    for unit in units:
        unit.restart(groups)
    mesh = groups.trainable_placement.device_mesh
    for parameter in internals.parameters:
        move_parameter(parameter, mesh)
    for optimizer in internals.step_hooks.optimizers:
        for parameter in (p for group in optimizer.param_groups for p in group["params"] if internals.target.owns(p)):
            for state in tree_leaves(optimizer.state.get(parameter, {})):
                if isinstance(state, DTensor):
                    move_to_mesh(state, mesh)
    for allocation in set(context.memory.bytes_by_purpose) - _KEPT:
        del context.memory.bytes_by_purpose[allocation]
    entries = [
        UnitBuckets(name=unit.name, kind=unit.name, depth=depth, buckets=tuple(bucket.spec for bucket in unit.buckets))
        for unit, depth in zip(units, internals.depths, strict=True)
    ]
    plan = MemoryPlan(entries, context.config, groups.scopes, is_stream_ordered=groups.is_stream_ordered)
    for emptied in (engine, *(grad_bucket for of_unit in grad_buckets.values() for grad_bucket in of_unit)):
        vars(emptied).clear()  # frees the buffers of before, which the new ones replace
    build_engine(units, plan, context, engine, grad_buckets)
    sharded.buffers = ModuleBuffers(sharded.model, context, engine)
    internals.target.is_check_due = internals.target.is_step_over = True
    groups.traffic_log.drain()
