"""Queues that run collectives in submission order.

On the CPU, a communication thread replaces a CUDA stream.

A `CommThread` runs tasks in the order in which they were submitted, while the training loop computes. A task posts
sends and receives, waits for them, adds, and posts more. So a collective of many stages makes progress although nothing
waits for it, as it does on a CUDA stream. Ranks submit the collectives of one queue in the same order, so their tasks
match.

Where the transport needs no thread (streams on a GPU; a transport that has finished when it returns), tasks run inline.
"""

from __future__ import annotations

import threading
import weakref
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from mics_strategy.comm.work import BackendWork, Work, as_communication_error
from mics_strategy.errors import LifecycleError

if TYPE_CHECKING:
    from mics_strategy.comm.desync import DesyncWatchdog, OpId
    from mics_strategy.comm.route import HopTraffic, Route, TrafficLog
    from mics_strategy.comm.transport import Transport
    from mics_strategy.comm.workspace import Workspace

CommTask = Callable[[], None]
STALL_CHECK_S = 2.0  # before a waiting rank first checks whether its peers wait for something else
MAX_STALL_CHECK_S = 30.0  # between two checks
SHUTDOWN_GRACE_S = 1.0  # for unfinished tasks when the process ends


class CommThread:
    """Runs tasks in its own thread.

    After a task has failed, all later tasks fail with its error.

    Args:
        name: Name of the thread: the same on all ranks, and unique on each.
        watchdog: Finds out why a rank waits long.
    """

    def __init__(self, name: str, watchdog: DesyncWatchdog) -> None:
        self.name = name
        self._watchdog = watchdog
        self._queue: SimpleQueue[_QueuedTask | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._first_failure = _FirstFailure()
        self._last: _QueuedTask | None = None
        weakref.finalize(self, self._queue.put, None)

    def submit(self, label: str, size: str, ranks: frozenset[int], task: CommTask) -> BackendWork:
        """Run a task after all previous ones.

        Args:
            label: Name of the collective in errors, the same on all ranks that take part.
            size: Size of the collective as text, the same on all ranks that take part.
            ranks: Ranks that take part.
            task: Function to run.
        """
        if self._thread is None:
            name = f"mics {self.name}"
            self._thread = threading.Thread(target=_run_queue, args=(self._queue,), name=name, daemon=True)
            self._thread.start()
        op = self._watchdog.record(self.name, label, size, ranks)
        queued = self._last = _QueuedTask(op, task, self._watchdog, self._first_failure, self._last)
        self._queue.put(queued)
        return queued

    def close(self, transports: Iterable[Transport]) -> None:
        """End the thread, after its unfinished tasks.

        Args:
            transports: Transports to cancel when a task does not end in time.
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


def _run_queue(queue: SimpleQueue[_QueuedTask | None]) -> None:
    """Run tasks until None arrives.

    No reference is held between two tasks, so that an unused queue can be freed.
    """
    with torch.inference_mode():  # nothing is recorded for autograd; inference tensors may be written
        while (task := queue.get()) is not None:
            task.execute()
            del task


class _FirstFailure:
    """The failure of the first failed task of a queue."""

    __slots__ = ("failure",)

    def __init__(self) -> None:
        self.failure: BaseException | None = None


class _QueuedTask:
    """A task in the queue."""

    __slots__ = ("_done", "_failure", "_first_failure", "_op", "_previous", "_task", "_watchdog")

    def __init__(
        self,
        op: OpId,
        task: CommTask,
        watchdog: DesyncWatchdog,
        first_failure: _FirstFailure,
        previous: _QueuedTask | None,
    ) -> None:
        self._op = op
        self._first_failure = first_failure
        self._previous = previous
        self._task: CommTask | None = task
        self._watchdog = watchdog
        self._done = threading.Event()
        self._failure: BaseException | None = None

    def execute(self) -> None:
        """Run the task, unless a previous one has failed."""
        task, self._task = self._task, None
        self._previous = None
        if task is not None and self._first_failure.failure is None:
            try:
                task()
            except BaseException as error:
                self._first_failure.failure = error  # raised again where the work is waited for
        self._failure = self._first_failure.failure
        self._done.set()

    def wait(self) -> None:
        """Block until the task has ended.

        Raises:
            LifecycleError: It never will: ranks wait for different collectives.
        """
        interval_s = STALL_CHECK_S
        while not self._done.wait(interval_s):
            self._watchdog.check(self._first_unfinished()._op)
            interval_s = min(2 * interval_s, MAX_STALL_CHECK_S)
        if self._failure is not None:
            raise self._failure
        self._watchdog.withdraw_report()

    def _first_unfinished(self) -> _QueuedTask:
        """The task that runs now: this one, or a previous one of the queue."""
        first = self
        while (previous := first._previous) is not None and not previous._done.is_set():
            first = previous
        return first

    def is_completed(self, within_s: float = 0.0) -> bool:
        """Whether the task has ended, with or without an error, within that time."""
        return self._done.wait(within_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteBinding:
    """A route bound to the transports of this job.

    Attributes:
        route: The stages, with their codecs.
        transports: Transports of the stages: one over all links, or the inter-node and the intra-node one.
        ranks: Ranks that take part in any stage.
        watchdog: Finds out whether ranks have diverged.
    """

    route: Route
    transports: list[Transport]
    ranks: frozenset[int]
    watchdog: DesyncWatchdog


@dataclass(frozen=True, slots=True)
class OpRequest:
    """A collective as all its ranks know it.

    Ranks with the same tag have submitted the same collective.
    """

    name: str
    size: str
    tag: int


class CollectiveQueue(ABC):
    """Names, counts and submits the collectives of one route.

    Args:
        name: Name of the queue: the same on all ranks, and unique on each.
        binding: Route and transports.
        workspace: Scratch memory of the tasks.
        traffic_log: Log that receives every stage.
    """

    def __init__(self, name: str, binding: RouteBinding, workspace: Workspace, traffic_log: TrafficLog) -> None:
        self._name = name
        self._binding = binding
        self._workspace = workspace
        self._traffic_log = traffic_log
        self._where = " and ".join(transport.description for transport in binding.transports)

    def next_op(self, kind: str, label: str, numel: int, dtype: torch.dtype) -> OpRequest:
        """Add the next collective to the fingerprints, and give it a tag."""
        for transport in self._binding.transports:
            transport.fingerprint.update(label)
        count = self._binding.transports[0].fingerprint.count
        tag = zlib.crc32(f"{self._name} {count} {kind} {label} {numel} {dtype}".encode()) % (2**31 - 1)
        return OpRequest(f"{kind} of {label}", f"{numel} {dtype}", tag)

    def log(self, hops: list[HopTraffic]) -> None:
        """Record what the collective sends."""
        for hop in hops:
            self._traffic_log.record(hop.collective, hop.axis, hop.size, hop.dtype, hop.full_bytes)

    @abstractmethod
    def submit(self, op: OpRequest, task: CommTask) -> Work:
        """Run a task, alone in the workspace, after all previous tasks of the queue."""


class InlineQueue(CollectiveQueue):
    """Runs every task inside `submit`; the current CUDA stream orders what follows."""

    @override
    def submit(self, op: OpRequest, task: CommTask) -> Work:
        name = f"{op.name} over {self._where}"
        self._workspace.reset()
        try:
            task()
        except LifecycleError:
            raise
        except RuntimeError as error:
            raise as_communication_error(name, error) from error
        return Work(name, [], on_failure=self._binding.watchdog.explain)


class ThreadQueue(CollectiveQueue):
    """Runs every task in a communication thread.

    Args:
        thread: Thread of all queues that share one order.
        binding: Route and transports.
        workspace: Scratch memory of the thread's tasks.
        traffic_log: Log that receives every stage.
    """

    def __init__(
        self, thread: CommThread, binding: RouteBinding, workspace: Workspace, traffic_log: TrafficLog
    ) -> None:
        super().__init__(thread.name, binding, workspace, traffic_log)
        self._thread = thread

    @override
    def submit(self, op: OpRequest, task: CommTask) -> Work:
        name = f"{op.name} over {self._where}"
        work = self._thread.submit(name, op.size, self._binding.ranks, partial(self._run, task))
        return Work(name, [work], is_on_thread=True, on_failure=self._binding.watchdog.explain)

    def _run(self, task: CommTask) -> None:
        self._workspace.reset()
        task()
