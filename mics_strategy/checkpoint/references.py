"""The references of weight differences in a checkpoint.

A reference is what all ranks have received of a parameter. It has the name, the shape and the sharding of its
parameter, so that any ranks load it. With it a resumed training sends the differences that the uninterrupted one sends.
A checkpoint without references gives the loaded parameters themselves, which all ranks then have exactly.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from mics_strategy.engine.bucket import Bucket
from mics_strategy.engine.handle import Sharded
from mics_strategy.engine.parameter import ShardedParameter

REFERENCES = "references"
_VALUES, _SYNCED = "values", "synced"


def references_of(sharded: Sharded) -> dict[str, Any]:
    """The references of this rank's parameters; empty without differences."""
    if not sharded.scopes.codecs.has_differences:
        return {}
    values, synced = {}, []
    for bucket, position, parameter in _parameters(sharded):
        reference = bucket.reference(position)
        if reference is not None:
            values[parameter.mics_name] = parameter.like_self(reference)
            if not bucket.versions.needs_sync(bucket.version):
                synced.append(parameter.mics_name)
    return {REFERENCES: {_VALUES: values, _SYNCED: json.dumps(synced)}}


def request_references(sharded: Sharded, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Memory for this rank's part of saved references; empty where there are none."""
    if not sharded.scopes.codecs.has_differences or f"{REFERENCES}.{_SYNCED}" not in saved:
        return {}
    values = {}
    for _, _, parameter in _parameters(sharded):
        entry = saved.get(f"{REFERENCES}.{_VALUES}.{parameter.mics_name}")
        if isinstance(entry, TensorStorageMetadata) and entry.size == parameter.shape:
            empty = torch.empty_like(parameter.local, dtype=entry.properties.dtype)
            values[parameter.mics_name] = parameter.like_self(empty)
    return {REFERENCES: {_VALUES: values, _SYNCED: None}}


def restore_references(sharded: Sharded, loaded: Mapping[str, Any]) -> None:
    """Set references after the parameters were loaded. Collective.

    Args:
        sharded: Model.
        loaded: References that `request_references` returned, filled.
    """
    if not sharded.scopes.codecs.has_differences:
        return
    references = loaded.get(REFERENCES, {_VALUES: {}, _SYNCED: "[]"})
    sharded.internals.set_references({name: value.to_local() for name, value in references[_VALUES].items()})
    synced = {*json.loads(references[_SYNCED])}
    for bucket in {id(bucket): bucket for bucket, _, _ in _parameters(sharded)}.values():
        if all(parameter.mics_name in synced for parameter in bucket.sharded_params):
            bucket.versions.param_shard = bucket.version


def _parameters(sharded: Sharded) -> Iterator[tuple[Bucket, int, ShardedParameter]]:
    """Every parameter with its bucket and its position there."""
    for unit in sharded.internals.units:
        for bucket in unit.buckets:
            for position, parameter in enumerate(bucket.sharded_params):
                yield bucket, position, parameter
