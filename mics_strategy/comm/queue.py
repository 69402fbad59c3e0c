"""What does the CPU have in place of a stream?

A `CommThread` is a thread that works off programs in the order in which they were asked for, while the training loop
computes. A program posts sends and receives, waits for them, adds, and posts more; so a transfer of many stages goes on
although nobody waits for it, which on a GPU the streams see to. Ranks ask in one order for what a lane carries, so
programs meet.

Where the transport needs no thread (streams on a GPU; a transport that has finished when it returns), programs run at
once.
"""

from __future__ import annotations

import threading
import weakref
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Protocol

import torch

from mics_strategy.comm.algorithms import GroupAlgorithm, PlainAlgorithm, QuantizedAlgorithm, RingAlgorithm
from mics_strategy.comm.desync import DesyncWatchdog, OpId
from mics_strategy.comm.route import Algorithm, Hop, HopTraffic, Route
from mics_strategy.comm.traffic_log import TrafficLog
from mics_strategy.comm.transport import Transport
from mics_strategy.comm.work import BackendWork, Work, as_communication_error
from mics_strategy.comm.workspace import Workspace
from mics_strategy.errors import LifecycleError

CommTask = Callable[[], None]
STALL_CHECK_S = 2.0  # before a rank that waits looks whether its peers wait for something else
MAX_STALL_CHECK_S = 30.0  # between two looks
SHUTDOWN_GRACE_S = 1.0  # for what is under way when the process ends


class Executor(Protocol):
    """Runs programs in order.

    Attributes:
        name: The same on all ranks, and no other runner's.
        is_async: Whether a program may still be under way when `submit` has returned.
    """

    name: str
    is_async: bool

    def submit(self, what: str, size: str, ranks: frozenset[int], program: CommTask) -> BackendWork | None:
        """Run a program after all before it.

        Args:
            what: Names it in errors, the same on all ranks that take part.
            size: How much it moves, in words; the same, too.
            ranks: That take part.
            program: To run.

        Returns:
            What to wait for; None when a stream orders what follows.
        """


class InlineExecutor:
    """Runs programs where and when they are asked for, on the current stream."""

    name = "at once"
    is_async = False

    def submit(self, what: str, size: str, ranks: frozenset[int], program: CommTask) -> BackendWork | None:
        """See `Executor.run`."""
        try:
            program()
        except LifecycleError:
            raise
        except RuntimeError as error:
            raise as_communication_error(what, error) from error
        return None


class CommThread:
    """Runs programs in a thread of its own. After one that has failed, all others fail, too.

    Args:
        name: See `Executor`.
        watch: Looks for the reason where somebody waits long.
    """

    is_async = True

    def __init__(self, name: str, watch: DesyncWatchdog) -> None:
        self.name = name
        self._watchdog = watch
        self._queue: SimpleQueue[_QueuedTask | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._first_failure = _FirstFailure()
        self._last: _QueuedTask | None = None
        weakref.finalize(self, self._queue.put, None)

    def submit(self, what: str, size: str, ranks: frozenset[int], program: CommTask) -> BackendWork:
        """See `Executor.run`."""
        if self._thread is None:
            name = f"mics {self.name}"
            self._thread = threading.Thread(target=_run_queue, args=(self._queue,), name=name, daemon=True)
            self._thread.start()
        asked = self._watchdog.record(self.name, what, size, ranks)
        task = self._last = _QueuedTask(asked, program, self._watchdog, self._first_failure, self._last)
        self._queue.put(task)
        return task

    def close(self, transports: Iterable[Transport]) -> None:
        """End the thread, after what is under way.

        Args:
            transports: To cancel when a program does not end by itself.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return
        if self._last is not None and not self._last.is_completed(within_s=SHUTDOWN_GRACE_S):
            for transport in transports:
                transport.cancel()
        self._queue.put(None)
        thread.join()


class WatchedWork:
    """Work of gloo's own collectives, of which a rank that waits long looks for the reason.

    Args:
        work: May be waited for again after a wait that took too long.
        watch: Looks.
        asked: What it is.
    """

    def __init__(self, work: Any, watch: DesyncWatchdog, asked: OpId) -> None:
        self._work = work
        self._watchdog = watch
        self._op = asked

    def wait(self) -> None:
        """Block until the work is done.

        Raises:
            LifecycleError: It never will: ranks wait for different things.
        """
        patience_s = STALL_CHECK_S
        while not self._is_done(patience_s):
            self._watchdog.check(self._op)
            patience_s = min(2 * patience_s, MAX_STALL_CHECK_S)
        self._watchdog.forget()

    def _is_done(self, within_s: float) -> bool:
        try:
            self._work.wait(timedelta(seconds=within_s))
        except RuntimeError:
            if self._work.is_completed():  # with that error
                raise
            return False
        return True

    def is_completed(self) -> bool:
        """Whether the work is done, well or not."""
        return bool(self._work.is_completed())


def _run_queue(queue: SimpleQueue[_QueuedTask | None]) -> None:
    """Run what comes. Nothing stays here between two programs, so a lane that nobody knows any more can be freed."""
    with torch.inference_mode():  # nothing is for autograd; tensors made in anybody's inference mode may be written
        while (task := queue.get()) is not None:
            task.execute()
            del task


class _FirstFailure:
    """What has become of a lane: the failure of the first program that has failed."""

    __slots__ = ("failure",)

    def __init__(self) -> None:
        self.failure: BaseException | None = None


class _QueuedTask:
    """A program in the queue."""

    __slots__ = ("_asked", "_before", "_done", "_failure", "_fate", "_program", "_watch")

    def __init__(
        self, asked: OpId, program: CommTask, watch: DesyncWatchdog, fate: _FirstFailure, before: _QueuedTask | None
    ) -> None:
        self._asked = asked
        self._fate = fate
        self._before = before
        self._program: CommTask | None = program
        self._watch = watch
        self._done = threading.Event()
        self._failure: BaseException | None = None

    def execute(self) -> None:
        """Run it, unless one before has failed."""
        program, self._program = self._program, None
        self._before = None
        if program is not None and self._fate.failure is None:
            try:
                program()
            except BaseException as error:
                self._fate.failure = error  # raised again where somebody waits
        self._failure = self._fate.failure
        self._done.set()

    def wait(self) -> None:
        """Block until the program has ended.

        Raises:
            LifecycleError: It never will: ranks wait for different things.
        """
        patience_s = STALL_CHECK_S
        while not self._done.wait(patience_s):
            self._watch.check(self._first_under_way()._asked)
            patience_s = min(2 * patience_s, MAX_STALL_CHECK_S)
        if self._failure is not None:
            raise self._failure
        self._watch.forget()

    def _first_under_way(self) -> _QueuedTask:
        """What this waits for: itself, or one before it in the queue."""
        first = self
        while (before := first._before) is not None and not before._done.is_set():
            first = before
        return first

    def is_completed(self, within_s: float = 0.0) -> bool:
        """Whether the program has ended, well or not, or does so within that time."""
        return self._done.wait(within_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteBinding:
    """A route in this job.

    Attributes:
        route: The stages, with their codecs.
        transports: Of the slow stage, and of the fast one where there is one.
        ranks: That take part, in all stages.
        watch: Knows whether ranks have parted.
    """

    route: Route
    transports: list[Transport]
    ranks: frozenset[int]
    watch: DesyncWatchdog


def make_algorithm(transport: Transport, hop: Hop, workspace: Workspace, device: torch.device) -> GroupAlgorithm:
    """What carries out one hop of a route."""
    if hop.codec is not None:
        return QuantizedAlgorithm(transport, workspace, hop.codec, device)
    if hop.algorithm is Algorithm.RING and transport.is_point_to_point:
        return RingAlgorithm(transport, workspace)
    return PlainAlgorithm(transport, workspace)


@dataclass(frozen=True, slots=True)
class OpRequest:
    """A collective as ranks know it; all that ranks share which are asked for the same."""

    name: str
    size: str
    tag: int


class CollectiveQueue:
    """Names, counts and runs the programs of one channel.

    Args:
        channel: Where they go.
        runner: Runs them.
        workspace: Of the runner's programs.
        traffic_log: Receives every stage.
    """

    def __init__(self, channel: RouteBinding, runner: Executor, workspace: Workspace, traffic_log: TrafficLog) -> None:
        self._channel = channel
        self._executor = runner
        self._workspace = workspace
        self._traffic_log = traffic_log
        self._where = " and ".join(transport.description for transport in channel.transports)

    def next_op(self, kind: str, what: str, numel: int, dtype: torch.dtype) -> OpRequest:
        """Write into the trails what is asked for."""
        for transport in self._channel.transports:
            transport.fingerprint.update(what)
        count = self._channel.transports[0].fingerprint.count
        tag = zlib.crc32(f"{self._executor.name} {count} {kind} {what} {numel} {dtype}".encode()) % (2**31 - 1)
        return OpRequest(f"{kind} of {what}", f"{numel} {dtype}", tag)

    def log(self, messages: list[HopTraffic]) -> None:
        """Count what is to be sent."""
        for m in messages:
            self._traffic_log.record(m.collective, m.axis, m.size, m.dtype, m.full_bytes)

    def submit(self, asked: OpRequest, program: Callable[[], None]) -> Work:
        """Run a program, with the workspace to itself."""

        def in_workspace() -> None:
            self._workspace.reset()
            program()

        name = f"{asked.name} over {self._where}"
        work = self._executor.submit(name, asked.size, self._channel.ranks, in_workspace)
        works = [] if work is None else [work]
        return Work(name, works, is_queued=self._executor.is_async, on_failure=self._channel.watch.explain)
