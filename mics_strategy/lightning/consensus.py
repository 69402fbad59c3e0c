"""Consensus of ranks before a save: all ranks succeed, or all raise.

A rank that raises alone leaves the others waiting in their next collective, so all ranks raise.

Collecting a checkpoint is collective. After an exception on one rank, the others are still inside a step, and a
callback that saves would wait for them until the process group's timeout. Therefore the ranks first synchronize through
the process group's key-value store, which no unfinished collective blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from mics_strategy import CheckpointError

ARRIVAL_TIMEOUT = timedelta(seconds=30)
T = TypeVar("T")


def require_every_rank(save_index: int, timeout: timedelta) -> None:
    """Return when all ranks have called this with the same `save_index`.

    Args:
        save_index: Number of this call in the run.
        timeout: Longest wait, at most `ARRIVAL_TIMEOUT`.

    Raises:
        CheckpointError: A rank did not call it in time.
    """
    if dist.get_world_size() == 1:
        return
    store = _get_default_store()
    keys = [f"mics_strategy/interrupted/{save_index}/{rank}" for rank in range(dist.get_world_size())]
    store.set(keys[dist.get_rank()], "")
    try:
        store.wait(keys, min(timeout, ARRIVAL_TIMEOUT))
    except RuntimeError as error:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        raise CheckpointError(
            f"A checkpoint was requested after an exception, but ranks {missing} did not reach the save, so the "
            "exception occurred on some ranks only. Nothing was saved. To lose less, save regularly with "
            "ModelCheckpoint(every_n_train_steps=...)."
        ) from error


def run_on_all_ranks(action: Callable[[], T]) -> T:
    """Run a local action; if it fails on one rank, raise on all. Collective.

    Raises:
        Exception: The action failed on this rank; its own exception.
        CheckpointError: The action failed on another rank only.
    """
    result: T | None = None
    failure: Exception | None = None
    try:
        result = action()
    except Exception as error:  # raised below, after the exchange
        failure = error
    failures: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, None if failure is None else f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    failed = [(rank, message) for rank, message in enumerate(failures) if message is not None]
    if failed:
        raise CheckpointError(f"Rank {failed[0][0]} failed, so this rank stopped as well: {failed[0][1]}")
    return result  # type: ignore[return-value]
