"""The stores of a job: one in which nobody waits for a lost process, and a client that no other thread blocks."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from typing_extensions import override

_POLL_S = 0.002
_STORE_TIMEOUT_S = 60.0
_made: list[GenerationStore] = []  # of torch's groups, which keep only the part of them that is in C++


class GenerationStore(Store):
    """A store in which nobody waits for the keys of a process that is lost.

    Args:
        store: Store with the keys.
        is_over: Whether a process has been lost that would set keys, or the generation has ended.
        longest: Longest wait for keys.

    Attributes:
        underlying_store: Store with the keys.
    """

    def __init__(self, store: Store, is_over: Callable[[], bool], longest: timedelta) -> None:
        super().__init__()
        self.underlying_store: Any = store
        self._is_over = is_over
        self._longest = longest
        _made.append(self)

    def outlive_job(self) -> None:
        """Be a store like any other from now on: the job has ended, and its last group has not."""
        self._is_over = bool

    @override
    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set.

        Raises:
            DistStoreError: A process was lost, or it took too long.
        """
        deadline_s = time.monotonic() + (timeout or self._longest).total_seconds()
        while not self.check(keys):
            if time.monotonic() > deadline_s:
                raise dist.DistStoreError(f"No process has set {keys} in time.")
            time.sleep(_POLL_S)

    @override
    def get(self, key: str) -> bytes:
        self.wait([key])
        return bytes(self.underlying_store.get(key))

    @override
    def set(self, key: str, value: str | bytes) -> None:
        self.underlying_store.set(key, value)

    @override
    def add(self, key: str, value: int) -> int:
        return int(self.underlying_store.add(key, value))

    @override
    def check(self, keys: list[str]) -> bool:
        """Whether all keys are set.

        Raises:
            DistStoreError: They are not, and a process was lost: who polls would wait for it.
        """
        is_set = bool(self.underlying_store.check(keys))
        if not is_set and self._is_over():
            raise dist.DistStoreError(f"A process was lost before it set {keys}.")
        return is_set

    @override
    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        return bytes(self.underlying_store.compare_set(key, expected_value, desired_value))

    @override
    def delete_key(self, key: str) -> bool:
        return bool(self.underlying_store.delete_key(key))

    deleteKey = delete_key  # by which torch's C++ finds it


def own_client(store: Any) -> Any:
    """A client of the same store that no other thread blocks, as one that waits for a key does."""
    while isinstance(store, (PrefixStore, GenerationStore)):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        return TCPStore(store.host, store.port, None, False, timedelta(seconds=_STORE_TIMEOUT_S), False)
    return store
