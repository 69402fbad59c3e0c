"""The memory of the engine for a described model.

Pure.
"""

from __future__ import annotations

import functools

import torch

from mics_strategy.config import ShardConfig
from mics_strategy.engine.bucket_specs import BucketRules, BucketSpec, ParamSpec, coalesced, make_buckets
from mics_strategy.engine.memory_plan import MemoryPlan, UnitBuckets
from mics_strategy.planner.model import ModelDescription, UnitModel
from mics_strategy.scopes import Scopes

_make_buckets = functools.lru_cache(maxsize=4096)(make_buckets)  # a planner asks for the same ones often


def engine_memory(
    model: ModelDescription, config: ShardConfig, scopes: Scopes, master_dtype: torch.dtype
) -> MemoryPlan:
    """The memory plan of the engine on one rank of a job on GPUs.

    Args:
        model: Units in the order of the engine, the root first.
        config: Configuration; `coalesce="auto"` counts as False.
        scopes: Degrees and codecs.
        master_dtype: Dtype of the parameters whose own is ``"auto"``.
    """
    rules = BucketRules.of(scopes, is_stream_ordered=True)
    by_kind: dict[str, tuple[BucketSpec, ...]] = {}
    for unit in model.units:
        if unit.kind not in by_kind:
            by_kind[unit.kind] = _make_buckets(_param_specs(unit, config, master_dtype), rules)
    if config.coalesce is True:
        by_kind = {kind: coalesced(buckets, scopes) for kind, buckets in by_kind.items()}
    units = [
        UnitBuckets(name=unit.name, kind=unit.kind, depth=unit.depth if unit.name else 0, buckets=by_kind[unit.kind])
        for unit in model.units
    ]
    return MemoryPlan(units, config, scopes)


def _param_specs(unit: UnitModel, config: ShardConfig, master_dtype: torch.dtype) -> tuple[ParamSpec, ...]:
    return tuple(
        ParamSpec.of(
            parameter.name,
            torch.Size(parameter.shape),
            parameter.dtype if isinstance(parameter.dtype, torch.dtype) else master_dtype,
            config,
            trainable=parameter.is_trained,
        )
        for parameter in unit.parameters
    )
