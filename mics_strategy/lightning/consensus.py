"""Do all ranks succeed, and are all here to save, when one was interrupted?

A rank that raises alone leaves the others waiting in their next collective, so all raise.

Collecting a checkpoint is collective. After an exception on one rank the others are still in the middle of a step,
and a callback that saves now would wait for them until the process group's timeout. So the ranks first meet in the
key-value store of the process group, which no unfinished collective occupies.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from mics_strategy import CheckpointError

PATIENCE = timedelta(seconds=30)
T = TypeVar("T")


def require_every_rank(occasion: int, timeout: timedelta) -> None:
    """Return when all ranks have called this for the same `occasion`.

    Args:
        occasion: Counts the calls of a run, from 0.
        timeout: How long to wait, at most `PATIENCE`.

    Raises:
        CheckpointError: Some rank did not come.
    """
    if dist.get_world_size() == 1:
        return
    store = _get_default_store()
    keys = [f"mics_strategy/interrupted/{occasion}/{rank}" for rank in range(dist.get_world_size())]
    store.set(keys[dist.get_rank()], "")
    try:
        store.wait(keys, min(timeout, PATIENCE))
    except RuntimeError as error:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        raise CheckpointError(
            f"A checkpoint was asked for after an exception, but ranks {missing} did not reach it: the exception came "
            "on some ranks only. Nothing was saved. Save regularly, with ModelCheckpoint(every_n_train_steps=...), to "
            "lose less."
        ) from error


def run_on_all_ranks(action: Callable[[], T]) -> T:
    """Do something local; if it fails on one rank, raise on all. Collective.

    Raises:
        Exception: This rank's own.
        CheckpointError: Another rank's, where this one succeeded.
    """
    result: T | None = None
    failure: Exception | None = None
    try:
        result = action()
    except Exception as error:  # raised below, when the others know
        failure = error
    failures: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, None if failure is None else f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    found = [(rank, message) for rank, message in enumerate(failures) if message is not None]
    if found:
        raise CheckpointError(f"Rank {found[0][0]} failed, so nothing was done on this one: {found[0][1]}")
    return result  # type: ignore[return-value]
