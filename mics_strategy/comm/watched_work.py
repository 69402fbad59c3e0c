"""Waits of a rank for gloo's own collectives, watched for stalls.

A rank that waits long tells the watchdog what it waits for, again and again until the wait ends (see `desync`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from mics_strategy.comm.desync import DesyncWatchdog, OpId
from mics_strategy.comm.rank_records import RankRecords
from mics_strategy.comm.work import DEVICE_ERRORS, as_communication_error
from mics_strategy.errors import CommunicationError, LifecycleError, MiCSError

STALL_CHECK_S = 2.0  # before a waiting rank first checks whether its peers wait for something else
MAX_STALL_CHECK_S = 30.0  # between two checks
LONG_WAIT_S = 8.0  # between two checks, when a rank warns that it waits


def watch(is_done: Callable[[float], bool], watchdog: DesyncWatchdog, awaited: Callable[[], OpId]) -> None:
    """Block until something is done, and tell the watchdog now and then what this rank waits for.

    Args:
        is_done: Waits so many seconds. Returns whether it is done, or raises its error.
        watchdog: Finds out why this rank waits long.
        awaited: Returns the collective for which it waits now.

    Raises:
        LifecycleError: It never will be done: ranks wait for different collectives.
    """
    interval_s = STALL_CHECK_S
    while not is_done(interval_s):
        watchdog.check(awaited())
        interval_s = min(2 * interval_s, MAX_STALL_CHECK_S)
    watchdog.withdraw_report()


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
        watch(self._is_done, self._watchdog, lambda: self._op)

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
        records: Records of what ranks do alike.
    """

    def __init__(self, watchdog: DesyncWatchdog) -> None:
        self.watchdog = watchdog
        self.records = RankRecords(watchdog.rank)
        self._lock = threading.Lock()
        self._op: OpId | None = None  # that this rank waits for
        self._num_calls = 0
        self._thread: threading.Thread | None = None

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
        except (MiCSError, *DEVICE_ERRORS):
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


_call_watches: WeakKeyDictionary[Any, CallWatch] = WeakKeyDictionary()


def call_watch(rank: int) -> CallWatch:
    """What watches the calls of this rank, and of all models: one for each default group."""
    watch = _call_watches.get(dist.group.WORLD)
    if watch is None:
        watch = _call_watches[dist.group.WORLD] = CallWatch(DesyncWatchdog(rank))
    return watch
