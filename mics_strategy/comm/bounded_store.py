"""How does a rank ask the store of the job without waiting for it forever?

The store is often in the process of rank 0, and a rank that stands still answers nobody. So what is asked runs in a
thread, and who asked goes on when no answer has come in time.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch.distributed as dist

T = TypeVar("T")
STORE_TIMEOUT_S = 2.0  # how long a store that works may take


class BoundedStore:
    """The default store of the job."""

    def __init__(self) -> None:
        self.store: Any = dist.distributed_c10d._get_default_store()
        self._thread: threading.Thread | None = None

    @property
    def is_silent(self) -> bool:
        """Whether what was asked last has had no answer yet."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def holder(self) -> str:
        """Whose process has the store, in words."""
        is_of_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return "the launcher" if is_of_launcher else "rank 0"

    def run_within(self, operation: Callable[[], T], within_s: float = 0.0) -> T | None:
        """What `operation` returns, which uses the store; None where the store does not answer, or is gone.

        Args:
            operation: Runs in a thread of its own.
            within_s: How long it may take when the store answers at once.
        """
        if self.is_silent:
            return None
        answer: _StoreOperation[T] = _StoreOperation(operation)
        self._thread = threading.Thread(target=answer.wait_for, name="mics store", daemon=True)
        self._thread.start()
        self._thread.join(within_s + STORE_TIMEOUT_S)
        return answer.value


class _StoreOperation(Generic[T]):
    """What the store says, once it has."""

    def __init__(self, operation: Callable[[], T]) -> None:
        self._operation = operation
        self.value: T | None = None

    def wait_for(self) -> None:
        """Run the operation; no value where the rank that held the store has left."""
        try:
            self.value = self._operation()
        except dist.DistError:
            return
