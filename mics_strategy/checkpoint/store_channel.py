"""Messages between the ranks of a save, over the job's store.

No process group takes part. A receiver polls, so that it never blocks the store for other ranks. Every rank writes a
heartbeat, so that a receiver detects a rank that is gone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mics_strategy.errors import CheckpointError

_HEARTBEAT_S = 5.0  # interval of the heartbeat
_SILENT_S = 120.0  # without a heartbeat, after which a rank counts as dead
_POLL_S = (0.001, 0.05)  # first and longest polling interval


class StoreChannel:
    """Message channel of the ranks of one save.

    Args:
        store: Store of the job.
        name: Name of the save, unique in the job.
        rank: Rank of this process.
    """

    def __init__(self, store: Any, name: str, rank: int) -> None:
        self._store = store
        self._name = name
        self._rank = rank

    def send(self, topic: str, value: bytes) -> None:
        """Send a value to all ranks."""
        self._ask("set", topic, value)

    def recv(self, topic: str, rank: int) -> bytes:
        """Wait for a value that a rank sends.

        Raises:
            CheckpointError: The rank has written no heartbeat for two minutes, or the store cannot be reached.
        """
        pause_s, last_heartbeat, heard_s = _POLL_S[0], b"", time.monotonic()
        while not self._ask("check", topic):
            now, heartbeat = time.monotonic(), self._heartbeat_of(rank)
            if heartbeat != last_heartbeat:
                last_heartbeat, heard_s = heartbeat, now
            elif now - heard_s > _SILENT_S:
                raise CheckpointError(
                    f"Rank {rank} has written no heartbeat for {_SILENT_S:.0f} s while a checkpoint was being saved. "
                    "Its process is dead or stopped. Look at the end of its output, then start the job again."
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_S[1])
        value: bytes = self._ask("get", topic)
        return value

    def delete(self, topic: str) -> None:
        """Delete a value to free its memory in the store."""
        self._ask("delete_key", topic)

    @contextmanager
    def heartbeat(self) -> Iterator[None]:
        """Write a heartbeat during the block."""
        done = threading.Event()

        def beat() -> None:
            count = 0
            while not done.wait(_HEARTBEAT_S):
                count += 1
                try:
                    self.send(f"heartbeat {self._rank}", str(count).encode())
                except CheckpointError:
                    return  # the receiver of this store raises

        thread = threading.Thread(target=beat, name=f"heartbeat of {self._name}")
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _heartbeat_of(self, rank: int) -> bytes:
        return self._ask("get", f"heartbeat {rank}") if self._ask("check", f"heartbeat {rank}") else b""

    def _ask(self, operation: str, topic: str, *value: bytes) -> Any:
        key = f"mics/save/{self._name}/{topic}"
        try:
            return getattr(self._store, operation)([key] if operation == "check" else key, *value)
        except RuntimeError as error:
            raise CheckpointError(
                f"The job's store cannot be reached ({error}), so ranks cannot report the result of the save. The "
                "process that holds the store, usually rank 0's, has ended. Look at the end of its output."
            ) from error
