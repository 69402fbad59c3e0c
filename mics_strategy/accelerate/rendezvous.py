"""Rendezvous of ranks before saves and loads, and consensus on files.

A script that saves on the main process only leaves that process waiting for the others, which continue to train.
Therefore ranks first synchronize through the job's key-value store, which no collective blocks. A rank that waits too
long raises an error with the missing ranks.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from mics_strategy import CheckpointError, MiCSError
from mics_strategy.comm import consensus

TIMEOUT_S = 300.0  # steps or evaluations before the call may take different times
T = TypeVar("T")


class SaveRendezvous:
    """Synchronization of ranks before they save or load."""

    def __init__(self) -> None:
        self._rendezvous = consensus.Rendezvous("met")

    def require_every_rank(self, call: str, timeout_s: float = TIMEOUT_S) -> None:
        """Return when all ranks have called this method equally often.

        Args:
            call: Name of the following operation, for the error.
            timeout_s: Longest wait for the last rank, in seconds.

        Raises:
            CheckpointError: A rank did not call it in time.
        """
        missing = self._rendezvous.missing_ranks(timeout_s)
        if missing:
            raise CheckpointError(
                f"Rank {', '.join(map(str, missing))} did not call `{call}` within {timeout_s:g} s of rank "
                f"{dist.get_rank()}. All ranks must save and load together: call it outside of "
                "`if accelerator.is_main_process`."
            )


def run_on_files(action: Callable[[], T]) -> T:
    """Read or write files; if it fails on one rank, raise on all. Collective.

    Raises:
        CheckpointError: A rank failed; the error names it.
    """

    def attempt() -> T:
        try:
            return action()
        except MiCSError:
            raise
        except (OSError, RuntimeError, pickle.PickleError) as error:
            raise CheckpointError(str(error)) from error

    return consensus.run_on_all_ranks(attempt)


def broadcast_from_rank_0(value: T) -> T:
    """Return rank 0's value. Collective."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]
