"""Units of a described model, with what the plan of a step depends on.

The engine makes the same units from a real model (`engine.build`); tests compare the two.

Pure.
"""

from __future__ import annotations

import torch

from mics_strategy.config import ShardConfig
from mics_strategy.engine.layout import num_first_hop_chunks
from mics_strategy.engine.plan import ROOT_NAME, BucketPlan, UnitPlan
from mics_strategy.planner.buffers import BucketSize, EngineBuffers
from mics_strategy.planner.model import ModelDescription
from mics_strategy.scopes import Scopes


def unit_plans(
    model: ModelDescription, config: ShardConfig, scopes: Scopes, master_dtype: torch.dtype
) -> tuple[UnitPlan, ...]:
    """The units of a model, as the engine cuts it on a GPU.

    Args:
        model: Model, its units in the order of the engine; the root is the first.
        config: Dtypes, prefetch.
        scopes: Ranks and axes of every model state.
        master_dtype: Dtype of the parameters before they are sharded.
    """
    by_kind = bucket_plans(EngineBuffers(model, config, scopes, master_dtype), config, scopes)
    return tuple(
        UnitPlan(name=unit.name or ROOT_NAME, slot=_slot(index, config, scopes), buckets=by_kind[unit.kind])
        for index, unit in enumerate(model.units)
    )


def bucket_plans(buffers: EngineBuffers, config: ShardConfig, scopes: Scopes) -> dict[str, tuple[BucketPlan, ...]]:
    """The buckets of each kind of units."""
    return {
        kind: tuple(_bucket_plan(bucket, config, scopes) for bucket in buckets)
        for kind, buckets in buffers.buckets_by_kind.items()
    }


def _slot(index: int, config: ShardConfig, scopes: Scopes) -> int:
    """First unit in the unit's slot; the root has its own, the others take turns."""
    if scopes.params == 1 or index == 0:
        return index
    return 1 + (index - 1) % (config.prefetch + 1)


def _bucket_plan(bucket: BucketSize, config: ShardConfig, scopes: Scopes) -> BucketPlan:
    is_chunked = bucket.is_trained and scopes.grads > 1
    return BucketPlan(
        layout=bucket.layout,
        param_dtype=bucket.param_dtype,
        wire_dtype=config.wire_dtype_of(bucket.master_dtype) if bucket.is_trained else bucket.param_dtype,
        sum_dtype=bucket.sum_dtype if bucket.is_trained else bucket.param_dtype,
        trainable=bucket.is_trained,
        has_gradients=bucket.is_trained,
        num_first_hop_chunks=num_first_hop_chunks(bucket.layout, bucket.param_dtype.itemsize) if is_chunked else 1,
    )
