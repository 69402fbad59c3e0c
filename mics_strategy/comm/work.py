"""What does a collective look like to its caller?

A collective is started and gives a `Work`; its result is valid after `Work.wait()`. Work that needs the
result (adding a received sum, copying out) is part of the handle, so a caller never sees half a result.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol

import torch

from mics_strategy.errors import CommunicationError, LifecycleError, ShapeError


class BackendWork(Protocol):
    """The part of ``torch.distributed.Work`` that every backend honours."""

    def wait(self) -> object:
        """Block (CPU) or make the current stream wait (CUDA)."""

    def is_completed(self) -> bool:
        """Whether the transport has done it, or given up."""


class Work:
    """One started collective and what must follow it.

    Args:
        what: Names the collective, the unit and the axis in an error.
        works: Started transport work; empty when nothing had to be sent.
        is_queued: Whether what is asked for next, of the same lane, waits for this by itself.
        on_failure: Called when the transport has given up: says why, or raises what it knows better.
    """

    __slots__ = ("__weakref__", "_finish", "_on_failure", "_works", "is_queued", "keepalive", "what")

    def __init__(
        self,
        what: str,
        works: list[BackendWork],
        *,
        is_queued: bool = False,
        on_failure: Callable[[], str] = str,
    ) -> None:
        self.what = what
        self._on_failure = on_failure
        self.is_queued = is_queued
        self._works = works
        self._finish: Callable[[], None] | None = None
        self.keepalive: list[torch.Tensor] = []
        _started.add(self)

    def wait(self) -> None:
        """Make the result valid on the current stream. Calling it again does nothing.

        Raises:
            CommunicationError: The transport failed: a peer died or did not take part in time.
        """
        works, self._works = self._works, []
        finish, self._finish = self._finish, None
        _started.discard(self)
        for work in works:
            try:
                work.wait()
            except LifecycleError:
                raise
            except RuntimeError as error:
                raise as_communication_error(self.what, error, self._on_failure()) from error
        if finish is not None:
            finish()

    @property
    def has_completed(self) -> bool:
        """Whether the transport is done, so that `wait` would not block for it."""
        return all(work.is_completed() for work in self._works)

    def then(self, finish: Callable[[], None]) -> Work:
        """The same handle, with more to do after the work, once, on the stream that waits."""
        before = self._finish

        def both() -> None:
            if before is not None:
                before()
            finish()

        self._finish = both
        return self

    def keep_alive(self, tensors: list[torch.Tensor]) -> Work:
        """The same handle, which holds tensors that must not be freed before its work is done on the device."""
        self.keepalive = tensors
        return self


def as_communication_error(what: str, error: RuntimeError, found: str = "") -> CommunicationError:
    """The error of a collective that the transport has given up.

    Args:
        what: Names the collective.
        error: Of the transport.
        found: What is known of the ranks beside, as sentences.
    """
    return CommunicationError(
        f"{what} failed: {error}. {found}A rank died, stands still or left the common schedule; look for the first "
        "error of the other ranks. All ranks must run the same units in the same order while anything is sharded."
    )


_started: weakref.WeakSet[Work] = weakref.WeakSet()


def has_pending_work() -> bool:
    """Whether a collective that this process has started, and nobody has waited for, still travels."""
    return any(not handle.has_completed for handle in list(_started))


def check_shapes(fits: bool, what: str, small: torch.Tensor, large: torch.Tensor) -> None:
    """Refuse buffers that do not belong to one collective, before anything is sent.

    Raises:
        ShapeError: They do not fit.
    """
    if not fits:
        raise ShapeError(
            f"{what}: buffers of {small.numel()} {small.dtype} and {large.numel()} {large.dtype} do not belong to one "
            "collective. This is a defect of the layout; please report it."
        )
