"""What does the CPU have in place of a stream?

A `Lane` is a thread that works off programs in the order in which they were asked for, while the training loop
computes. A program posts sends and receives, waits for them, adds, and posts more; so a transfer of many stages goes on
although nobody waits for it, which on a GPU the streams see to. Ranks ask in one order for what a lane carries, so
programs meet.

Where the transport needs no thread (streams on a GPU; a transport that has finished when it returns), programs run at
once.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from typing import Protocol

from mics_strategy.collectives.ops import Work, failed
from mics_strategy.collectives.transport import Transport

Program = Callable[[], None]
PATIENCE_S = 5.0  # before a rank that waits looks whether its peers wait for something else
GRACE_S = 1.0  # for what is under way when the process ends


class Runner(Protocol):
    """Runs programs in order.

    Attributes:
        name: The same on all ranks, and no other runner's.
        is_queue: Whether a program may still be under way when `run` has returned.
    """

    name: str
    is_queue: bool

    def run(self, what: str, program: Program) -> Work | None:
        """Run `program` after all before it. Returns what to wait for; None when a stream orders what follows."""


class AtOnce:
    """Runs programs where and when they are asked for, on the current stream."""

    name = "at once"
    is_queue = False

    def run(self, what: str, program: Program) -> Work | None:
        """See `Runner.run`."""
        try:
            program()
        except RuntimeError as error:
            raise failed(what, error) from error
        return None


class Lane:
    """Runs programs in a thread of its own. After one that has failed, all others fail, too.

    Args:
        name: See `Runner`.
        on_long_wait: Called with the number and the name of a program for which somebody waits long; may raise.
    """

    is_queue = True

    def __init__(self, name: str, on_long_wait: Callable[[int, str], None]) -> None:
        self.name = name
        self._on_long_wait = on_long_wait
        self._queue: SimpleQueue[_Task | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._count = 0
        self._last: _Task | None = None
        weakref.finalize(self, self._queue.put, None)

    def run(self, what: str, program: Program) -> Work:
        """See `Runner.run`."""
        if self._thread is None:
            name = f"mics {self.name}"
            self._thread = threading.Thread(target=_work_off, args=(self._queue,), name=name, daemon=True)
            self._thread.start()
        task = self._last = _Task(self._count, what, program, self._on_long_wait)
        self._count += 1
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
        if self._last is not None and not self._last.is_completed(within_s=GRACE_S):
            for transport in transports:
                transport.cancel()
        self._queue.put(None)
        thread.join()


def _work_off(queue: SimpleQueue[_Task | None]) -> None:
    failure = None
    while (task := queue.get()) is not None:
        failure = task.execute(failure)
        del task  # keeps the tensors of its program


class _Task:
    """A program in the queue."""

    __slots__ = ("_done", "_failure", "_number", "_on_long_wait", "_program", "_what")

    def __init__(self, number: int, what: str, program: Program, on_long_wait: Callable[[int, str], None]) -> None:
        self._number = number
        self._what = what
        self._program: Program | None = program
        self._on_long_wait = on_long_wait
        self._done = threading.Event()
        self._failure: BaseException | None = None

    def execute(self, earlier: BaseException | None) -> BaseException | None:
        """Run it, unless one before has failed. Returns that failure or its own."""
        program, self._program = self._program, None
        self._failure = earlier
        if program is not None and earlier is None:
            try:
                program()
            except BaseException as error:
                self._failure = error  # raised again where somebody waits
        self._done.set()
        return self._failure

    def wait(self) -> None:
        """Block until the program has ended."""
        while not self._done.wait(PATIENCE_S):
            self._on_long_wait(self._number, self._what)
        if self._failure is not None:
            raise self._failure

    def is_completed(self, within_s: float = 0.0) -> bool:
        """Whether the program has ended, well or not, or does so within that time."""
        return self._done.wait(within_s)
