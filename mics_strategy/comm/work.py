"""The asynchronous result of a collective, and the errors of a failed one.

A collective returns a `Work`; its result is valid after `Work.wait()`. Steps that need the result (adding a received
sum, copying out) are part of the work, so a caller never sees half a result.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from mics_strategy.comm.ranges import RecordedCollective
from mics_strategy.errors import CommunicationError, LifecycleError, ShapeError

DEVICE_ERRORS = (torch.OutOfMemoryError, torch.AcceleratorError)  # of any kernel before: no rank is to blame
Steps = Iterator[None]  # of a collective, of which the first one waits for no rank; see `queue`


class BackendWork(Protocol):
    """The part of ``torch.distributed.Work`` that every backend implements."""

    def wait(self) -> object:
        """Block (CPU) or make the current stream wait (CUDA)."""

    def is_completed(self) -> bool:
        """Whether the transport has finished, or has failed."""


class QueuedWork(BackendWork, Protocol):
    """Work of a communication thread."""

    def is_completed(self, within_s: float = 0.0) -> bool:
        """Whether the work has ended, with or without an error, within that time."""

    def join(self) -> None:
        """Block another communication thread until the work has ended. Raises its error."""


@dataclass(frozen=True, slots=True)
class Prologue:
    """What comes before a collective where that runs, without the host: in its communication thread, or on its stream.

    Attributes:
        works: Collectives of other communication threads that end first; none where streams wait for each other.
        prepare: Local work behind them.
    """

    works: Sequence[QueuedWork]
    prepare: Callable[[], None]

    def run(self) -> None:
        """Wait for the works, and prepare."""
        for work in self.works:
            work.join()
        self.prepare()


class Pending(Protocol):
    """One collective in flight, or one that starts when it is waited for."""

    def wait(self) -> object:
        """Make all received rows valid, and let the memory of the sent ones be overwritten.

        It blocks (CPU), or makes the current stream wait (CUDA).
        """


class Messages:
    """Messages in flight.

    Args:
        works: Work of the receives, then of the sends, each with the index of the other rank.
        set_awaited: Called with that index before each wait, in a list of its own; with an empty one behind the last.
    """

    __slots__ = ("_set_awaited", "_works")

    def __init__(self, works: list[tuple[int, BackendWork]], set_awaited: Callable[[list[int]], None]) -> None:
        self._works = works
        self._set_awaited = set_awaited

    def wait(self) -> None:
        """See `Pending.wait`."""
        for peer, work in self._works:
            self._set_awaited([peer])
            work.wait()
        self._set_awaited([])


class Launch:
    """A collective of a backend with streams, which runs on the stream that waits for it.

    Args:
        run: Runs it.
    """

    __slots__ = ("_run",)

    def __init__(self, run: Callable[[], object]) -> None:
        self._run = run

    def wait(self) -> None:
        """See `Pending.wait`."""
        self._run()


class Work:
    """One started collective and the steps that follow it.

    Args:
        label: Name of the collective, the unit and the axis, for errors.
        work: Started work of the transport; None when nothing had to be sent.
        queued: Task of a communication thread, before later ones of its queue; None where no thread runs it.
        on_failure: Called when the transport has failed: returns what else is known, or raises a more precise error.
        recorded: The collective while it is recorded; None if nothing records it.

    Attributes:
        keepalive: Tensors that live as long as this object.
    """

    __slots__ = ("__weakref__", "_on_failure", "_steps", "_work", "keepalive", "label", "queued", "recorded")

    def __init__(
        self,
        label: str,
        work: BackendWork | None,
        *,
        queued: QueuedWork | None = None,
        on_failure: Callable[[], str] = str,
        recorded: RecordedCollective | None = None,
    ) -> None:
        self.label = label
        self.recorded = recorded
        self._on_failure = on_failure
        self.queued = queued
        self._work = work
        self._steps: list[Callable[[], None]] = []
        self.keepalive: list[torch.Tensor] = []
        _started.add(self)

    def wait(self) -> None:
        """Make the result valid on the current stream. A second call does nothing.

        Raises:
            CommunicationError: The transport failed: a peer died, or did not take part in time.
            AcceleratorError: An earlier kernel on this device failed; with OutOfMemoryError as it is.
        """
        work, self._work = self._work, None
        steps, self._steps = self._steps, []
        recorded, self.recorded = self.recorded, None
        _started.discard(self)
        if recorded is not None:
            recorded.begin_wait()
        try:
            if work is not None:
                work.wait()
        except (LifecycleError, *DEVICE_ERRORS):
            raise
        except RuntimeError as error:
            raise as_communication_error(self.label, error, self._on_failure()) from error
        finally:
            if recorded is not None:
                recorded.end_wait()
        for step in steps:
            step()

    @property
    def has_completed(self) -> bool:
        """Whether the transport has finished, so that `wait` would not block on it."""
        return self._work is None or self._work.is_completed()

    def then(self, finish: Callable[[], None]) -> Work:
        """Add a step that runs once after the work, on the stream that waits.

        Returns this object.
        """
        self._steps.append(finish)
        return self

    def keep_alive(self, tensors: Iterable[torch.Tensor]) -> Work:
        """Hold tensors that must not be freed before the work is done on the device.

        Returns this object.
        """
        self.keepalive += tensors
        return self


def as_communication_error(label: str, error: RuntimeError, details: str = "") -> CommunicationError:
    """The error of a collective that has failed in the transport.

    Args:
        label: Name of the collective.
        error: Error of the transport.
        details: Further facts about the ranks, as sentences.
    """
    return CommunicationError(
        f"{label} failed: {error}. {details}A rank died, hangs, or runs other units. Look for the first error of "
        "the other ranks. All ranks must run the same units in the same order while anything is sharded."
    )


_started: weakref.WeakSet[Work] = weakref.WeakSet()


def has_pending_work() -> bool:
    """Whether a started collective is unfinished, and nothing has waited for it."""
    return any(not work.has_completed for work in list(_started))


def check_shapes(fits: bool, label: str, small: torch.Tensor, large: torch.Tensor) -> None:
    """Raise for buffers that do not fit one collective, before anything is sent.

    Raises:
        ShapeError: They do not fit.
    """
    if not fits:
        raise ShapeError(
            f"{label}: a buffer of {small.numel()} {small.dtype} and one of {large.numel()} {large.dtype} do not fit "
            "one collective. This is a defect of the layout; please report it."
        )
