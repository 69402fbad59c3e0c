"""Waits of a rank for gloo's own collectives, watched for stalls.

A rank that waits long tells the watchdog what it waits for, again and again until the wait ends (see `desync`).
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from mics_strategy.comm.desync import CollectiveFingerprint, DesyncWatchdog, OpId
from mics_strategy.comm.work import as_communication_error
from mics_strategy.errors import CommunicationError, LifecycleError, MiCSError

STALL_CHECK_S = 2.0  # before a waiting rank first checks whether its peers wait for something else
MAX_STALL_CHECK_S = 30.0  # between two checks
LONG_WAIT_S = 8.0  # between two checks, when a rank warns that it waits


class WatchedWork:
    """Work of one of gloo's own collectives, watched for stalls.

    Args:
        work: Work of gloo, which may be waited for again after a wait that timed out.
        watchdog: Finds out why this rank waits long.
        op: The collective.
    """

    def __init__(self, work: Any, watchdog: DesyncWatchdog, op: OpId) -> None:
        self._work = work
        self._watchdog = watchdog
        self._op = op

    def wait(self) -> None:
        """Block until the work is done.

        Raises:
            LifecycleError: It never will be: ranks wait for different collectives.
        """
        interval_s = STALL_CHECK_S
        while not self._is_done(interval_s):
            self._watchdog.check(self._op)
            interval_s = min(2 * interval_s, MAX_STALL_CHECK_S)
        self._watchdog.withdraw_report()

    def _is_done(self, within_s: float) -> bool:
        try:
            self._work.wait(timedelta(seconds=within_s))
        except RuntimeError:
            if self._work.is_completed():  # failed with that error, not timed out
                raise
            return False
        return True

    def is_completed(self) -> bool:
        """Whether the work has ended, with or without an error."""
        return bool(self._work.is_completed())


class CallWatch:
    """Watches calls of torch that block the host until all ranks have made them.

    Args:
        watchdog: Finds out why this rank waits long.

    Attributes:
        common_values: Sum of the digests of what all ranks must have in common, since the last step of any model.
    """

    def __init__(self, watchdog: DesyncWatchdog) -> None:
        self.watchdog = watchdog
        self._fingerprints: dict[tuple[tuple[int, ...], bool], CollectiveFingerprint] = {}
        self.common_values: torch.Tensor | None = None
        self._lock = threading.Lock()
        self._op: OpId | None = None  # that this rank waits for
        self._num_calls = 0
        self._thread: threading.Thread | None = None

    def record(self, label: str, ranks: Sequence[int], *, is_ordered: bool = True) -> None:
        """Add a collective, or what ranks do alike, to the fingerprint of its ranks.

        Args:
            label: Its payload; the same on all ranks.
            ranks: Its ranks, of which this is one, in the same order on all.
            is_ordered: See `CollectiveFingerprint`.
        """
        key = tuple(ranks), is_ordered
        if key not in self._fingerprints:
            index = ranks.index(self.watchdog.rank)
            self._fingerprints[key] = CollectiveFingerprint(ranks=key[0], index=index, is_ordered=is_ordered)
        self._fingerprints[key].update(label)

    @property
    def fingerprints(self) -> dict[str, CollectiveFingerprint]:
        """Fingerprints of what was recorded since the last model was made, by name."""
        return {
            f"{'operations' if is_ordered else 'writes and steps'} of ranks {_short(ranks)}": fingerprint
            for (ranks, is_ordered), fingerprint in self._fingerprints.items()
        }

    def begin_model(self) -> None:
        """Forget what ranks recorded for other models: after an error they may differ, and make a new one."""
        self._fingerprints.clear()
        self.common_values = None

    def compare(self, value: torch.Tensor) -> None:
        """Let the next step of a model compare a digest, an int64 scalar. The order of such calls does not matter."""
        known = self.common_values
        self.common_values = value if known is None else known.to(value.device) + value

    @contextmanager
    def watching(self, label: str, ranks: frozenset[int]) -> Iterator[None]:
        """Watch one call.

        Args:
            label: Name of the call, the same on all ranks.
            ranks: Ranks that make it.

        Raises:
            LifecycleError: It failed because ranks wait for different collectives.
            CommunicationError: It failed for another reason.

        Cost: Some microseconds. A thread runs until there was no call for a while: to start one costs 0.4 ms.
        """
        op = self.watchdog.record("calls", label, "", ranks)
        with self._lock:
            self._op = op
            self._num_calls += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._check_long_calls, name="watch of calls", daemon=True)
                self._thread.start()
        try:
            try:
                yield
            finally:
                with self._lock:
                    self._op = None
        except CommunicationError:
            self.watchdog.explain()
            raise
        except MiCSError:
            raise
        except RuntimeError as error:
            raise as_communication_error(f"The {label}", error, self.watchdog.explain()) from error
        self.watchdog.withdraw_report()

    def _check_long_calls(self) -> None:
        num_calls, interval_s = 0, STALL_CHECK_S
        while True:
            time.sleep(interval_s)
            with self._lock:
                if num_calls != self._num_calls:
                    num_calls, interval_s = self._num_calls, STALL_CHECK_S
                elif self._op is None:
                    self._thread = None
                    return
                else:
                    with suppress(LifecycleError):  # other ranks raise it, which ends the call of this one
                        self.watchdog.check(self._op)
                    if interval_s >= LONG_WAIT_S > interval_s / 2:
                        self.watchdog.warn(self._op)
                    interval_s = min(2 * interval_s, MAX_STALL_CHECK_S)


def _short(ranks: Sequence[int]) -> str:
    """Ranks as text, another one for others."""
    text = ", ".join(map(str, ranks))
    return text if len(ranks) <= 8 else f"{ranks[0]} to {ranks[-1]} ({zlib.crc32(text.encode()):08x})"


_call_watches: WeakKeyDictionary[Any, CallWatch] = WeakKeyDictionary()


def call_watch(rank: int) -> CallWatch:
    """What watches the calls of this rank, and of all models: one for each default group."""
    watch = _call_watches.get(dist.group.WORLD)
    if watch is None:
        watch = _call_watches[dist.group.WORLD] = CallWatch(DesyncWatchdog(rank))
    return watch
