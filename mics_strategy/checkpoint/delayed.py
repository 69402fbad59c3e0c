"""Delayed second hops in a checkpoint: ``delayed.pending``, ``.kept`` and ``.tentative``, each by parameter.

They are the means of the last window and of the one before, without a loss scale, and the tentative parameters (see
`engine.delayed_hops`), sharded as the parameters are. A name is missing where no rank had a gradient, and all of a kind
where it is not needed. Other trainings leave them out: they continue from the committed parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from typing import Any

import torch

from mics_strategy.checkpoint.state import LocalState
from mics_strategy.engine.delayed_hops import DelayedHops
from mics_strategy.engine.handle import Sharded
from mics_strategy.engine.optimizer.delayed import delayed_of

_DELAYED, _PENDING, _KEPT, _TENTATIVE = "delayed", "pending", "kept", "tentative"


def add_delayed(local: LocalState, sharded: Sharded) -> None:
    """Add what a training with delayed second hops has in flight. Waits for it; nothing is copied.

    Args:
        local: State that this rank holds, changed in place.
        sharded: Model.
    """
    target = delayed_of(sharded)
    if target is None or not target.hops.has_pending:
        return
    target.hops.settle()
    kinds = (_PENDING, _KEPT, _TENTATIVE) if target.hops.is_tentative else (_PENDING,)
    state: dict[str, dict[str, Any]] = {kind: {} for kind in kinds}
    for kind, name, tensor, is_used in _tensors(target.hops):
        if kind in kinds and is_used:
            state[kind][name] = tensor
            if tensor.dim() == 0:
                local.scalars.add(f"{_DELAYED}.{kind}.{name}")
    local.values[_DELAYED] = state


def _tensors(hops: DelayedHops) -> Iterator[tuple[str, str, torch.Tensor, bool]]:
    """Kind, name, values as a tensor sharded like the parameter, and whether any rank had a gradient."""
    for delayed in hops.delayed:
        bucket = delayed.bucket
        for position, (own, parameter) in enumerate(
            zip(bucket.layout.param_slices, bucket.sharded_params, strict=True)
        ):
            for kind, values, is_used in (
                (_PENDING, delayed.result, position in delayed.positions),
                (_KEPT, delayed.kept, position in delayed.kept_positions),
                (_TENTATIVE, delayed.tentative, True),
            ):
                yield kind, own.name, parameter.like_self(own.view_in(values, bucket.placement.index)), is_used


def load_delayed(sharded: Sharded, read: Callable[[dict[str, Any]], None], entries: Container[str]) -> None:
    """Continue with what was in flight; behind `restart` of the target.

    Args:
        sharded: Model, whose parameters are loaded.
        read: Function that fills nested dicts with names of the checkpoint.
        entries: Names in the checkpoint.
    """
    target = delayed_of(sharded)
    if target is None:
        return
    hops = target.hops
    state: dict[str, dict[str, Any]] = {_PENDING: {}, _KEPT: {}, _TENTATIVE: {}}
    for kind, name, tensor, _ in _tensors(hops):
        if f"{_DELAYED}.{kind}.{name}" in entries:
            state[kind][name] = tensor
    for delayed in hops.delayed:
        delayed.result.zero_()
        delayed.kept.zero_()
        names = [own.name for own in delayed.bucket.layout.param_slices]
        positions, kept = ([i for i, name in enumerate(names) if name in state[kind]] for kind in (_PENDING, _KEPT))
        delayed.resume(positions, kept)
    read({_DELAYED: state})
    hops.resume(has_pending=bool(state[_PENDING]), is_tentative=bool(state[_TENTATIVE]))
