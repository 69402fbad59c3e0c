"""Access to the store of the job that never blocks forever.

The store often lives in the process of rank 0, and a rank that hangs does not answer. So each operation runs in a
thread, and the caller goes on without a result when none has come in time.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch.distributed as dist

T = TypeVar("T")
STORE_TIMEOUT_S = 2.0  # how long a working store may take to answer


class BoundedStore:
    """The default store of the job, with a time limit for each operation."""

    def __init__(self) -> None:
        self.store: Any = dist.distributed_c10d._get_default_store()
        self._thread: threading.Thread | None = None

    @property
    def is_silent(self) -> bool:
        """Whether the last operation has had no answer yet."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def holder(self) -> str:
        """The process that holds the store, as text."""
        is_of_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return "the launcher" if is_of_launcher else "rank 0"

    def run_within(self, operation: Callable[[], T], within_s: float = 0.0) -> T | None:
        """Run an operation that uses the store, within a time limit.

        Returns None where the store does not answer, or is gone.

        Args:
            operation: Function to run, in a thread of its own.
            within_s: Time that it may take when the store answers immediately, seconds.
        """
        if self.is_silent:
            return None
        pending: _StoreOperation[T] = _StoreOperation(operation)
        self._thread = threading.Thread(target=pending.run, name="mics store", daemon=True)
        self._thread.start()
        self._thread.join(within_s + STORE_TIMEOUT_S)
        return pending.value


class _StoreOperation(Generic[T]):
    """One operation on the store, and its result."""

    def __init__(self, operation: Callable[[], T]) -> None:
        self._operation = operation
        self.value: T | None = None

    def run(self) -> None:
        """Run the operation, and store its result.

        `value` stays None where the rank that held the store has exited.
        """
        try:
            self.value = self._operation()
        except dist.DistError:
            return
