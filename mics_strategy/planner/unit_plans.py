"""Units of a described model, with what the plan of a step depends on.

The engine makes the same units from a real model (`engine.build`); tests compare the two.

Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mics_strategy.config import ShardConfig, sum_dtype_of
from mics_strategy.engine.layout import make_layout, num_first_hop_chunks, split_entries
from mics_strategy.engine.plan import BucketPlan, UnitPlan

if TYPE_CHECKING:
    from mics_strategy.planner.model import ModelDescription, ParameterShape, UnitModel
    from mics_strategy.scopes import Scopes


def unit_plans(
    model: ModelDescription, config: ShardConfig, scopes: Scopes, master_dtype: torch.dtype
) -> tuple[UnitPlan, ...]:
    """The units of a model, as the engine cuts it on a backend that reduces large parameters in chunks.

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
    """First unit that is bound to the unit's slot: the root has its own, the others take turns."""
    if scopes.params == 1 or index == 0:
        return index
    return 1 + (index - 1) % (config.prefetch + 1)


def _bucket_plans(
    unit: UnitModel, config: ShardConfig, scopes: Scopes, master_dtype: torch.dtype
) -> tuple[BucketPlan, ...]:
    plans = []
    param_dtype = config.param_dtype_of(master_dtype)
    for is_trained in dict.fromkeys(parameter.is_trained for parameter in unit.parameters):
        entries = [parameter for parameter in unit.parameters if parameter.is_trained == is_trained]
        sizes_bytes = [entry.numel * param_dtype.itemsize for entry in entries]
        for part in split_entries(entries, sizes_bytes):
            plans.append(_bucket_plan(part, config, scopes, master_dtype))
    return tuple(plans)


def _bucket_plan(
    entries: list[ParameterShape], config: ShardConfig, scopes: Scopes, master_dtype: torch.dtype
) -> BucketPlan:
    is_trained = entries[0].is_trained
    param_dtype = config.param_dtype_of(master_dtype)
    layout = make_layout(
        [(entry.name, torch.Size(entry.shape)) for entry in entries],
        1 if scopes.params == 1 and not is_trained else scopes.optimizer,
        scopes.block_numel(is_trainable=is_trained),
        itemsize=min(master_dtype.itemsize, param_dtype.itemsize),
    )
    is_chunked = is_trained and scopes.grads > 1
    return BucketPlan(
        layout=layout,
        param_dtype=param_dtype,
        wire_dtype=config.wire_dtype_of(master_dtype) if is_trained else param_dtype,
        sum_dtype=sum_dtype_of(master_dtype) if is_trained else param_dtype,
        trainable=is_trained,
        has_gradients=is_trained,
        num_first_hop_chunks=num_first_hop_chunks(layout, param_dtype.itemsize) if is_chunked else 1,
    )
