"""Do all ranks come to save or load, and does what one of them alone does succeed?

A script that saves on the main process only leaves that process waiting for the others, which train on. So ranks meet
in the job's key-value store first, which no collective occupies, and one that waits in vain says who is missing.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from mics_strategy import CheckpointError

PATIENCE_S = 300.0  # ranks may come from steps, or an evaluation, of different length
_PAUSE_S = 0.02
T = TypeVar("T")


class Rendezvous:
    """Where ranks meet before they save or load."""

    def __init__(self) -> None:
        self._occasion = 0

    def require_every_rank(self, call: str, patience_s: float = PATIENCE_S) -> None:
        """Return when all ranks have come here as often.

        Args:
            call: What they are about to do, for the error.
            patience_s: How long to wait for the last one.

        Raises:
            CheckpointError: Some rank did not come.
        """
        own, world_size = dist.get_rank(), dist.get_world_size()
        if world_size == 1:
            return
        store, occasion = _get_default_store(), self._occasion
        self._occasion += 1
        keys = [f"mics_strategy/met/{occasion}/{rank}" for rank in range(world_size)]
        store.set(keys[own], call)
        deadline_s = time.monotonic() + patience_s
        while not store.check(keys):  # a blocking wait would keep the store from other threads
            if time.monotonic() > deadline_s:
                missing = ", ".join(str(rank) for rank, key in enumerate(keys) if not store.check([key]))
                raise CheckpointError(
                    f"Rank {missing} did not call `{call}` within {patience_s:g} s of rank {own}. All ranks save and "
                    "load together: call it outside of `if accelerator.is_main_process`."
                )
            time.sleep(_PAUSE_S)
        if occasion:
            store.delete_key(f"mics_strategy/met/{occasion - 1}/{own}")  # everybody has seen it


def run_on_all_ranks(action: Callable[[], T]) -> T:
    """Do something local; if it fails on one rank, raise on all. Collective.

    Raises:
        CheckpointError: Naming a rank that failed.
    """
    result: T | None = None
    failure: Exception | None = None
    try:
        result = action()
    except (CheckpointError, OSError, RuntimeError, pickle.PickleError) as error:  # told to all ranks
        failure = error
    told: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(told, None if failure is None else str(failure))
    failed = next((rank for rank, words in enumerate(told) if words is not None), None)
    if failed is not None:
        raise CheckpointError(f"Rank {failed} failed: {told[failed]}") from failure
    return result  # type: ignore[return-value]


def broadcast_from_rank_0(value: T) -> T:
    """Rank 0's value. Collective."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]
