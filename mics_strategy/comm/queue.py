"""Queues that run collectives in submission order.

On the CPU, a communication thread replaces a CUDA stream.

A `CommThread` runs tasks in the order in which they were submitted, while the training loop computes. A task posts
sends and receives, waits for them, adds, and posts more. So a collective of many stages makes progress although nothing
waits for it, as it does on a CUDA stream. Ranks submit the collectives of one queue in the same order, so their tasks
match.

Where the transport needs no thread (streams on a GPU; a transport that has finished when it returns), tasks run inline.

A task is a generator. Up to its first `yield` it waits for no rank: it encodes, and posts its first messages. So,
where a codec encodes, a thread starts a task while the one before it is on the wire, and only then finishes that one,
unless both use the same memory; the workspace has two parts then (`Workspace.encodes_ahead`). Tasks without a codec run
strictly one after the other. A rank always waits for its oldest collective, so no two ranks wait for each other.
Inline, that part of a task may run on another stream than the rest (see `engine.streams`).
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import torch

from mics_strategy.comm.desync import DesyncWatchdog, OpId
from mics_strategy.comm.process import check_not_forked, cpu_seconds
from mics_strategy.comm.ranges import Ranges, RecordedCollective, Recorder
from mics_strategy.comm.route import Route
from mics_strategy.comm.traffic import StageTraffic, TrafficLog
from mics_strategy.comm.transport import NUM_TAGS, Transport
from mics_strategy.comm.watched_work import watch
from mics_strategy.comm.work import Prologue, QueuedWork, Steps, Work
from mics_strategy.comm.workspace import Workspace

CommTask = Callable[[], Steps]
SHUTDOWN_GRACE_S = 1.0  # for unfinished tasks when the process ends
_IDLE_CPU_S = 1e-3  # of a thread that only waits, in that time


class CommThread:
    """Runs tasks in its own thread.

    After a task has failed, all tasks that have not ended fail with its error.

    Args:
        name: Name of the thread: the same on all ranks, and unique on each.
        watchdog: Finds out why a rank waits long.
        transports: Transports of the tasks, and others; may grow.

    Attributes:
        is_stuck: Whether the thread was left alone; see `fail_stuck`.
    """

    def __init__(self, name: str, watchdog: DesyncWatchdog, transports: Sequence[Transport] = ()) -> None:
        self.name = name
        self._watchdog = watchdog
        self._transports = transports
        self._queue: SimpleQueue[_QueuedTask | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._thread_state = _ThreadState(self)
        self._last: _QueuedTask | None = None
        self.is_stuck = False
        weakref.finalize(self, self._queue.put, None)

    def submit(self, label: str, size: str, ranks: frozenset[int], steps: TaskSteps) -> QueuedWork:
        """Run a task after all previous ones.

        Args:
            label: Name of the collective in errors, the same on all ranks that take part.
            size: Its size in errors.
            ranks: Ranks that take part.
            steps: The task.
        """
        if self._thread is None:
            name = f"mics {self.name}"
            self._thread = threading.Thread(target=_run_queue, args=(self._queue,), name=name, daemon=True)
            self._thread.start()
        op_id = self._watchdog.record(self.name, label, size, ranks)
        queued = self._last = _QueuedTask(op_id, steps, self._watchdog, self._thread_state, self._last)
        self._queue.put(queued)
        if self.is_stuck:
            queued.give_up()
        return queued

    def close(self) -> None:
        """End the thread, after its unfinished tasks. What does not end in time is cancelled, in all transports."""
        if self._thread is None:
            return
        if self._last is not None and not self._last.is_completed(within_s=SHUTDOWN_GRACE_S):
            self._cancel()
        self._queue.put(None)
        if not self.is_stuck:
            self._thread.join()
        self._thread = None

    def fail_lost(self) -> None:
        """Fail the unfinished tasks if the thread waits for a rank that is gone.

        Gloo says so to who waits for a whole message, and not for the rest of one; see `fail_stuck`. From any thread.
        """
        if lost := sorted({rank for transport in self._transports for rank in transport.lost_ranks()}):
            names = " and ".join(f"rank {rank}" for rank in lost)
            self._thread_state.failure = self._thread_state.failure or RuntimeError(
                f"{names} ended before a message was complete"
            )
            self._cancel()

    def _cancel(self) -> None:
        for transport in self._transports:
            transport.cancel()
        self.fail_stuck()

    def fail_stuck(self) -> None:
        """Fail the unfinished tasks if the thread waits for a message that was cancelled, and does not wake up.

        Gloo wakes nobody who waits for a message of which a part is sent or has arrived, even if its peer has died:
        `Pair::signalException` forgets such messages (torch 2.13, gloo 70dc360). The thread is left alone then, until
        the timeout of its group. Nothing writes to the memory of its tasks any more, as the connections are closed.

        From any thread. Behind `Transport.cancel` of all transports.
        """
        thread = self._thread
        if self._last is None or thread is None or self.is_stuck:
            return
        cpu_s = cpu_seconds(thread)
        while not self._last.is_completed(within_s=SHUTDOWN_GRACE_S):
            before_s, cpu_s = cpu_s, cpu_seconds(thread)
            if cpu_s - before_s < _IDLE_CPU_S:  # it waits: one that computes reaches its next message, which fails
                self.is_stuck = True
                self._thread_state.failure = self._thread_state.failure or RuntimeError(
                    "a message of which a part had been sent or had arrived was given up"
                )
                self._last.give_up()


def _run_queue(queue: SimpleQueue[_QueuedTask | None]) -> None:
    """Run tasks until None arrives.

    One that encodes starts before the one before it is finished (`TaskSteps.can_start_ahead`). No reference is held
    between two tasks, so that an unused queue can be freed.
    """
    with torch.inference_mode():  # nothing is recorded for autograd; inference tensors may be written
        while (task := queue.get()) is not None:
            task.start()
            while (following := _queued(queue)) is not None:
                if not following.uses_memory_of(task):
                    following.start()
                task.finish()
                task = following
                task.start()
            task.finish()
            del task


def _queued(queue: SimpleQueue[_QueuedTask | None]) -> _QueuedTask | None:
    """The next task, if it is queued now."""
    with suppress(Empty):
        task = queue.get_nowait()
        if task is None:
            queue.put(None)  # nothing follows it
        return task
    return None


class _ThreadState:
    """What the tasks of a thread share: the failure of the first failed one, and the thread."""

    __slots__ = ("failure", "thread")

    def __init__(self, thread: CommThread) -> None:
        self.failure: BaseException | None = None
        self.thread = weakref.ref(thread)


class _QueuedTask:
    """A task in the queue."""

    __slots__ = ("_behind", "_done", "_failure", "_op", "_previous", "_steps", "_thread_state", "_watchdog")

    def __init__(
        self,
        op: OpId,
        steps: TaskSteps,
        watchdog: DesyncWatchdog,
        thread_state: _ThreadState,
        previous: _QueuedTask | None,
    ) -> None:
        self._op = op
        self._thread_state = thread_state
        self._previous = previous
        self._steps: TaskSteps | None = steps
        self._behind = () if steps.prologue is None else steps.prologue.works
        self._watchdog = watchdog
        self._done = threading.Event()
        self._failure: BaseException | None = None

    def uses_memory_of(self, unfinished: _QueuedTask) -> bool:
        """Whether this task may read or write what another one reads or writes."""
        return self._steps is None or unfinished._steps is None or self._steps.uses_memory_of(unfinished._steps)

    def start(self) -> None:
        """Encode, and post the first messages, if the workspace has a part for that. A second call does nothing."""
        if self._steps is not None and self._steps.can_start_ahead:
            self._run(self._steps.start)

    def finish(self) -> None:
        """Run the rest, unless a task has failed."""
        steps, self._steps = self._steps, None
        self._previous = None
        if steps is not None:
            self._run(steps.wait)
        del steps  # who waits may free the model next: this thread no longer holds it
        self._behind = ()
        self._failure = self._thread_state.failure
        self._done.set()

    def give_up(self) -> None:
        """Fail this task, and the unfinished ones before it, whose thread is stuck."""
        task: _QueuedTask | None = self
        while task is not None and not task._done.is_set():
            task._failure = self._thread_state.failure
            task._done.set()
            task = task._previous

    def _run(self, step: Callable[[], None]) -> None:
        if self._thread_state.failure is None:
            try:
                step()
            except BaseException as error:  # raised again where the work is waited for
                self._thread_state.failure = self._thread_state.failure or error

    def wait(self) -> None:
        """Block until the task has ended.

        Raises:
            LifecycleError: It never will: ranks wait for different collectives.
        """
        watch(self._is_done_or_lost, self._watchdog, lambda: self._first_unfinished()._op)

    def _is_done_or_lost(self, within_s: float) -> bool:
        if self._is_done(within_s):
            return True
        thread = self._first_unfinished()._thread_state.thread()
        if thread is not None:
            thread.fail_lost()
        return self._is_done(within_s=0.0)

    def _is_done(self, within_s: float | None) -> bool:
        is_done = self._done.wait(within_s)
        if is_done and self._failure is not None:
            raise self._failure
        return is_done

    def _first_unfinished(self) -> _QueuedTask:
        """The task that runs now: this one, or one that comes before it, in this queue or in another one."""
        first = self
        while (previous := first._previous) is not None and not previous._done.is_set():
            first = previous
        for work in first._behind:
            if isinstance(work, _QueuedTask) and not work._done.is_set():
                return work._first_unfinished()
        return first

    def join(self) -> None:
        """See `QueuedWork.join`. The host, which waits for this task as well, watches it for stalls."""
        self._is_done(within_s=None)

    def is_completed(self, within_s: float = 0.0) -> bool:
        """Whether the task has ended, with or without an error, within that time."""
        return self._done.wait(within_s)


class TaskSteps:
    """A task in two steps, which has a part of the workspace for itself.

    Args:
        task: The task.
        tensors: Tensors that it reads and writes, each contiguous; None where that is not known.
        workspace: Scratch memory.
        prologue: Work that comes before it; None for none.
        recorded: The collective while it is recorded; None if nothing records it.
    """

    __slots__ = ("_has_ended", "_part", "_ranges", "_recorded", "_steps", "_task", "_workspace", "prologue")

    def __init__(
        self,
        task: CommTask,
        tensors: Iterable[torch.Tensor] | None,
        workspace: Workspace,
        prologue: Prologue | None = None,
        recorded: RecordedCollective | None = None,
    ) -> None:
        self.prologue = prologue
        self._task = task
        self._recorded = recorded
        self._ranges = None if tensors is None else [_address_range(tensor) for tensor in tensors]
        self._workspace = workspace
        self._steps: Steps | None = None
        self._part = 0
        self._has_ended = False

    @property
    def can_start_ahead(self) -> bool:
        """Whether `start` has not run, and may run while the task before is unfinished."""
        is_due = self.prologue is None or all(work.is_completed() for work in self.prologue.works)
        return self._steps is None and self._workspace.encodes_ahead and is_due

    def uses_memory_of(self, other: TaskSteps) -> bool:
        """Whether both tasks may read or write the same memory."""
        if self._ranges is None or other._ranges is None:
            return True
        return any(
            start < other_end and other_start < end
            for (start, end), (other_start, other_end) in itertools.product(self._ranges, other._ranges)
        )

    def start(self) -> None:
        """Run what waits for no rank, behind what comes before."""
        self._part = self._workspace.take()
        try:
            if self.prologue is not None:
                self.prologue.run()
            if self._recorded is not None:
                self._recorded.start()
            self._steps = self._task()
            next(self._steps, None)
        except BaseException:
            self._workspace.release(self._part)
            if self._recorded is not None:
                self._recorded.end()
            raise

    def wait(self) -> None:
        """Run the rest; all of it if the task has not started."""
        if self._steps is None:
            self.start()
        self._workspace.use(self._part)
        try:
            for _ in self._steps or ():
                pass
        finally:
            self._has_ended = True
            self._workspace.release(self._part)
            if self._recorded is not None:
                self._recorded.end()

    def is_completed(self) -> bool:
        """Whether the task has ended, with or without an error."""
        return self._has_ended


def _address_range(tensor: torch.Tensor) -> tuple[int, int]:
    start = tensor.data_ptr()
    return start, start + tensor.numel() * tensor.itemsize


@dataclass(slots=True, kw_only=True)
class RouteQueue:
    """A queue as the collectives of one route enter it: names, counts and submits them.

    Without a thread, the first step of a task runs inside `submit`, and the rest in `Work.wait`, on the CUDA stream
    that is current then. Such a work is waited for before the next but one is submitted, or before the next one unless
    the workspace has two parts.

    Attributes:
        name: Name of the queue: the same on all ranks, and unique on each.
        route: The stages, with their codecs.
        transports: Transports of the stages, slowest links first; one where one stage is over all links.
        ranks: Ranks that take part in any stage.
        workspace: Scratch memory of the tasks.
        thread: Thread of all queues that share one order; None where tasks run inline.
        watchdog: Finds out whether ranks have diverged.
        traffic_log: Log that receives every stage.
        ranges: Ranges of the model.
    """

    name: str
    route: Route
    transports: Sequence[Transport]
    ranks: frozenset[int]
    workspace: Workspace
    thread: CommThread | None
    watchdog: DesyncWatchdog
    traffic_log: TrafficLog
    ranges: Ranges
    _where: str = field(init=False)
    _stages_of: Callable[..., list[StageTraffic]] = field(init=False)

    def __post_init__(self) -> None:
        self._where = " and ".join(transport.description for transport in self.transports)
        route = self.route
        self._stages_of = functools.cache(lambda traffic_of, *payload: traffic_of(route, *payload))  # few, repeated

    def submit(
        self,
        kind: str,
        label: str,
        payload: tuple[Any, ...],
        task: Callable[[int], Steps],
        tensors: Iterable[torch.Tensor] | None = None,
        prologue: Prologue | None = None,
    ) -> Work:
        """Run a task; it finishes after all previous tasks of the queue.

        Adds the collective to the fingerprints and the traffic log. Ranks with the same tag have submitted the same.

        Args:
            kind: Kind of the collective.
            label: Label of the payload, the same on all ranks.
            payload: Function of the route that plans the stages, and its other arguments: elements, dtype on the wire,
                and what else it takes.
            task: The task, called with the tag of the collective.
            tensors: Tensors that it reads and writes, each contiguous; None where that is not known, and then the task
                starts when the one before has finished.
            prologue: Work that comes before it, on its thread or stream; None for none.
        """
        check_not_forked()
        _, numel, dtype, *_ = payload
        for transport in self.transports:
            transport.fingerprint.update(label)
        count = self.transports[0].fingerprint.count
        tag = zlib.crc32(f"{self.name} {count} {kind} {label} {numel} {dtype}".encode()) % NUM_TAGS
        stages = self._stages_of(*payload)
        self.traffic_log.record(stages)
        recorder = self.ranges.recorder
        recorded = None if recorder is None else self._record(recorder, kind, label, stages)
        steps = TaskSteps(partial(task, tag), tensors, self.workspace, prologue, recorded)
        name = f"{kind} of {label} over {self._where}"
        if self.thread is None:
            steps.start()
            return Work(name, steps, recorded=recorded)
        queued = self.thread.submit(name, f"{numel} {dtype}", self.ranks, steps)
        return Work(name, queued, queued=queued, on_failure=self.watchdog.explain, recorded=recorded)

    def _record(self, recorder: Recorder, kind: str, label: str, stages: list[StageTraffic]) -> RecordedCollective:
        axes = sorted({stage.axis: None for stage in stages}, key=lambda axis: not axis.startswith("intra_node"))
        sent_bytes = sum(stage.sent_bytes for stage in stages)
        name = kind.lower().replace("-", "_")
        return recorder.collective(self.name, name, label, "+".join(axes), sent_bytes)  # the fastest axis first
