"""Rendezvous of ranks before saves and loads, and consensus on local actions.

A script that saves on the main process only leaves that process waiting for the others, which continue to train.
Therefore ranks first synchronize through the job's key-value store, which no collective blocks. A rank that waits too
long raises an error with the missing ranks.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from mics_strategy import CheckpointError

TIMEOUT_S = 300.0  # steps or evaluations before the call may take different times
_PAUSE_S = 0.02
T = TypeVar("T")


class Rendezvous:
    """Synchronization of ranks before they save or load."""

    def __init__(self) -> None:
        self._occasion = 0

    def require_every_rank(self, call: str, timeout_s: float = TIMEOUT_S) -> None:
        """Return when all ranks have called this method equally often.

        Args:
            call: Name of the following operation, for the error.
            timeout_s: Longest wait for the last rank, in seconds.

        Raises:
            CheckpointError: A rank did not call it in time.
        """
        rank_here, world_size = dist.get_rank(), dist.get_world_size()
        if world_size == 1:
            return
        store, count = _get_default_store(), self._occasion
        self._occasion += 1
        keys = [f"mics_strategy/met/{count}/{rank}" for rank in range(world_size)]
        store.set(keys[rank_here], call)
        deadline_s = time.monotonic() + timeout_s
        while not store.check(keys):  # a blocking wait would keep the store from other threads
            if time.monotonic() > deadline_s:
                missing = ", ".join(str(rank) for rank, key in enumerate(keys) if not store.check([key]))
                raise CheckpointError(
                    f"Rank {missing} did not call `{call}` within {timeout_s:g} s of rank {rank_here}. All ranks must "
                    "save and load together: call it outside of `if accelerator.is_main_process`."
                )
            time.sleep(_PAUSE_S)
        if count:
            store.delete_key(f"mics_strategy/met/{count - 1}/{rank_here}")  # all ranks have seen it


def run_on_all_ranks(action: Callable[[], T]) -> T:
    """Run a local action; if it fails on one rank, raise on all. Collective.

    Raises:
        CheckpointError: A rank failed; the error names it.
    """
    result: T | None = None
    failure: Exception | None = None
    try:
        result = action()
    except (CheckpointError, OSError, RuntimeError, pickle.PickleError) as error:  # reported to all ranks
        failure = error
    failures: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, None if failure is None else str(failure))
    failed = next((rank for rank, message in enumerate(failures) if message is not None), None)
    if failed is not None:
        raise CheckpointError(f"Rank {failed} failed: {failures[failed]}") from failure
    return result  # type: ignore[return-value]


def broadcast_from_rank_0(value: T) -> T:
    """Return rank 0's value. Collective."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]
