"""What does a collective look like to its caller?

A collective is started and gives a `Handle`; its result is valid after `Handle.wait()`. Work that needs the
result (adding a received sum, copying out) is part of the handle, so a caller never sees half a result.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from mics_strategy.collectives.trail import Trail
from mics_strategy.errors import CommunicationError


class Work(Protocol):
    """The part of ``torch.distributed.Work`` that every backend honours."""

    def wait(self) -> object:
        """Block (CPU) or make the current stream wait (CUDA)."""

    def is_completed(self) -> bool:
        """Whether the transport has done it, or given up."""


class Handle:
    """One started collective and what must follow it.

    Args:
        what: Names the collective, the unit and the axis in an error.
        works: Started transport work; empty when nothing had to be sent.
        finish: Runs once, after the work, on the stream that waits.
    """

    __slots__ = ("__weakref__", "_finish", "_works", "what")

    def __init__(self, what: str, works: list[Work], finish: Callable[[], None] | None = None) -> None:
        self.what = what
        self._works = works
        self._finish = finish
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
            except RuntimeError as error:
                raise CommunicationError(
                    f"{self.what} failed: {error}. A rank died or left the common schedule; look for the first error "
                    "of the other ranks. All ranks must run the same units in the same order while anything is sharded."
                ) from error
        if finish is not None:
            finish()

    @property
    def has_arrived(self) -> bool:
        """Whether the transport is done, so that `wait` would not block for it."""
        return all(work.is_completed() for work in self._works)

    def then(self, finish: Callable[[], None]) -> Handle:
        """The same handle, with more to do after the work."""
        before = self._finish

        def both() -> None:
            if before is not None:
                before()
            finish()

        self._finish = both
        return self


_started: weakref.WeakSet[Handle] = weakref.WeakSet()


def is_anything_under_way() -> bool:
    """Whether a collective that this process has started, and nobody has waited for, still travels."""
    return any(not handle.has_arrived for handle in list(_started))


class Collective(Protocol):
    """Collectives over one span of ranks. Inputs and outputs are contiguous and on the span's device."""

    size: int
    index: int

    @property
    def trails(self) -> Iterable[tuple[str, Trail]]:
        """What the groups behind it were asked for, by axis."""

    def gather(self, out: torch.Tensor, shard: torch.Tensor, what: str) -> Handle:
        """Put every rank's `shard` into `out`, in the order of the ranks' index.

        Args:
            out: [size * n], same dtype as `shard`; overwritten.
            shard: [n].
            what: Names the caller in errors.
        """

    def reduce(
        self, out: torch.Tensor, full: torch.Tensor, scratch: torch.Tensor, accumulate: bool, what: str
    ) -> Handle:
        """Sum every rank's `full` and keep this rank's slice.

        Args:
            out: [n], fp32 (or any wider dtype): holds the sum, or has it added.
            full: [size * n], the wire dtype; must stay unchanged until the handle has been waited for, and may be
                overwritten.
            scratch: [size * n], same dtype as `full`; overwritten.
            accumulate: Add to `out` instead of overwriting it.
            what: Names the caller in errors.
        """

    def all_reduce(self, tensor: torch.Tensor, scratch: torch.Tensor, what: str) -> Handle:
        """Sum `tensor` over the ranks, in place; every rank ends with the same bits.

        Args:
            tensor: [n], fp32 (or any wider dtype).
            scratch: [at least `all_reduce_scratch_numel`], the wire dtype; overwritten.
            what: Names the caller in errors.
        """

    def all_reduce_scratch_numel(self, numel: int, *, is_narrow: bool) -> int:
        """Elements of scratch that an all-reduce of `numel` elements needs.

        Args:
            numel: Of the tensor.
            is_narrow: Whether the wire dtype is another one than the tensor's.
        """
