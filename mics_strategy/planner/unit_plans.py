"""Units of a described model, with what the plan of a step depends on.

The engine makes the same units from a real model (`engine.build`); tests compare the two.

Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mics_strategy.config import ShardConfig, sum_dtype_of
from mics_strategy.engine.plan import BucketPlan, UnitPlan
from mics_strategy.engine.schedule import num_first_hop_chunks
from mics_strategy.planner.buffers import BucketSize, bucket_sizes

if TYPE_CHECKING:
    from mics_strategy.planner.model import ModelDescription, UnitModel
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
    by_kind: dict[str, tuple[BucketPlan, ...]] = {}
    plans = []
    for index, unit in enumerate(model.units):
        if unit.kind not in by_kind:
            by_kind[unit.kind] = _bucket_plans(unit, config, scopes, master_dtype)
        plans.append(UnitPlan(name=unit.name, slot=_slot(index, config, scopes), buckets=by_kind[unit.kind]))
    return tuple(plans)


def _slot(index: int, config: ShardConfig, scopes: Scopes) -> int:
    """First unit in the unit's slot; the root has its own, the others take turns."""
    if scopes.params == 1 or index == 0:
        return index
    return 1 + (index - 1) % (config.prefetch + 1)


def _bucket_plans(
    unit: UnitModel, config: ShardConfig, scopes: Scopes, master_dtype: torch.dtype
) -> tuple[BucketPlan, ...]:
    frozen_degree = scopes.optimizer if scopes.params > 1 else 1
    blocks = (scopes.block_numel(is_trainable=False), scopes.block_numel(is_trainable=True))
    dtypes = (master_dtype, config.param_dtype_of(master_dtype))
    return tuple(
        BucketPlan(
            layout=bucket.layout,
            param_dtype=bucket.param_dtype,
            wire_dtype=config.wire_dtype_of(master_dtype) if bucket.is_trained else bucket.param_dtype,
            sum_dtype=sum_dtype_of(master_dtype) if bucket.is_trained else bucket.param_dtype,
            trainable=bucket.is_trained,
            has_gradients=bucket.is_trained,
            num_first_hop_chunks=_num_chunks(bucket, scopes),
        )
        for bucket in bucket_sizes(unit.parameters, (frozen_degree, scopes.optimizer), blocks, dtypes)
    )


def _num_chunks(bucket: BucketSize, scopes: Scopes) -> int:
    if not bucket.is_trained or scopes.grads == 1:
        return 1
    return num_first_hop_chunks(bucket.layout, bucket.param_dtype.itemsize)
