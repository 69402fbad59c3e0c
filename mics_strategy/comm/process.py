"""What the system says of this process and its threads.

A forked child has none of its parent's connections and threads, so that collectives are refused in it.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import torch.distributed as dist

from mics_strategy.errors import LifecycleError

_groups_are_of_parent = False


def check_not_forked() -> None:
    """Raise if this process was forked from a rank: a collective would never end.

    Raises:
        LifecycleError: It was, as the workers of a `DataLoader` are.
    """
    if _groups_are_of_parent:
        raise LifecycleError(
            "A sharded model or tensor was used in a process forked from a rank, such as a worker of a `DataLoader`, "
            "which has no connection to other ranks. Compute in the rank itself (`num_workers=0`), or give the workers "
            "a plain copy of the model."
        )


def cpu_seconds(thread: threading.Thread) -> float:
    """CPU time of a thread; 0 of one that has ended, and where the system does not say."""
    try:
        return int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0]) / 1e9
    except (OSError, IndexError):
        return 0.0


def _note_fork() -> None:
    global _groups_are_of_parent
    _groups_are_of_parent = dist.is_initialized()


os.register_at_fork(after_in_child=_note_fork)
