"""How do ranks tell one another how a save went, when no process group may take part?

Through the job's store. Whoever waits asks again and again, and so never keeps the store from others; and every rank
says now and then that it is alive, so that nobody waits for one that is gone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mics_strategy.errors import CheckpointError

_PULSE_S = 5.0  # between two signs of life
_SILENT_S = 120.0  # after which a rank counts as gone
_POLL_S = (0.001, 0.05)  # at first, and at the longest


class StoreChannel:
    """What the ranks of one save tell.

    Args:
        store: Of the job.
        name: Of the save; no other one of the job has it.
        rank: This one.
    """

    def __init__(self, store: Any, name: str, rank: int) -> None:
        self._store = store
        self._name = name
        self._rank = rank

    def send(self, what: str, value: bytes) -> None:
        """Let all ranks hear something."""
        self._ask("set", what, value)

    def recv(self, what: str, rank: int) -> bytes:
        """Wait for what a rank tells.

        Raises:
            CheckpointError: It has given no sign of life for minutes, or nothing can be heard any more.
        """
        pause_s, pulse, heard_s = _POLL_S[0], b"", time.monotonic()
        while not self._ask("check", what):
            now, found = time.monotonic(), self._pulse_of(rank)
            if found != pulse:
                pulse, heard_s = found, now
            elif now - heard_s > _SILENT_S:
                raise CheckpointError(
                    f"Rank {rank} has given no sign of life for {_SILENT_S:.0f} s while a checkpoint was written; "
                    "its process is gone, or stands still. Look at the end of its output, and start the job again."
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_S[1])
        value: bytes = self._ask("get", what)
        return value

    def delete(self, what: str) -> None:
        """Free the memory that it takes in the store."""
        self._ask("delete_key", what)

    @contextmanager
    def heartbeat(self) -> Iterator[None]:
        """Give signs of life in the meantime."""
        done = threading.Event()

        def beat() -> None:
            count = 0
            while not done.wait(_PULSE_S):
                count += 1
                try:
                    self.send(f"pulse {self._rank}", str(count).encode())
                except CheckpointError:
                    return  # whoever waits for this store is told

        thread = threading.Thread(target=beat, name=f"pulse of {self._name}")
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _pulse_of(self, rank: int) -> bytes:
        return self._ask("get", f"pulse {rank}") if self._ask("check", f"pulse {rank}") else b""

    def _ask(self, operation: str, what: str, *value: bytes) -> Any:
        key = f"mics/save/{self._name}/{what}"
        try:
            return getattr(self._store, operation)([key] if operation == "check" else key, *value)
        except RuntimeError as error:
            raise CheckpointError(
                f"The job's store cannot be reached ({error}), so the ranks cannot tell one another how the save went. "
                "The process that holds it has ended, rank 0's as a rule: look at the end of its output."
            ) from error
