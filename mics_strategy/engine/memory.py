"""Who owns each buffer, and until when?

Everything is allocated once, when the model is sharded, and lives as long as the sharded model:

- *arenas* hold model states: one tensor per dtype and purpose, of which every bucket has a piece;
- *slots* hold unsharded parameters: a unit is bound to one slot for good, so its parameters keep one address;
- *stagings* hold what is travelling; whoever took one last is landed before the next may have it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from mics_strategy.engine.autograd import UnshardedParameter
from mics_strategy.errors import LifecycleError

_ALIGN_BYTES = 64
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_unwrapped = torch._C._functorch.get_unwrapped


@dataclass(slots=True)
class MemoryTracker:
    """Bytes that the engine allocated, by purpose."""

    bytes_by_purpose: dict[str, int] = field(default_factory=dict)

    def zeros(self, purpose: str, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A zeroed flat tensor, accounted under `purpose`."""
        with torch.inference_mode(False):
            tensor = torch.zeros(numel, dtype=dtype, device=device)
        self.bytes_by_purpose[purpose] = self.bytes_by_purpose.get(purpose, 0) + numel * dtype.itemsize
        return tensor

    @property
    def total_bytes(self) -> int:
        """All purposes together."""
        return sum(self.bytes_by_purpose.values())


def arena(
    memory: MemoryTracker, purpose: str, sizes: Sequence[tuple[int, torch.dtype]], device: torch.device
) -> list[torch.Tensor]:
    """One allocation per dtype, cut into consecutive pieces.

    Args:
        memory: Accounts for the bytes.
        purpose: What the arena holds.
        sizes: Elements and dtype of each piece.
        device: Where.
    """
    whole = {
        dtype: memory.zeros(purpose, sum(n for n, other in sizes if other is dtype), dtype, device)
        for dtype in dict.fromkeys(d for _, d in sizes)
    }
    used = dict.fromkeys(whole, 0)
    pieces = []
    for numel, dtype in sizes:
        pieces.append(whole[dtype][used[dtype] : used[dtype] + numel])
        used[dtype] += numel
    return pieces


def packed_bytes(sizes: Sequence[tuple[int, torch.dtype]]) -> int:
    """Bytes of a buffer that holds all of `sizes` side by side, each aligned."""
    return sum(math.ceil(numel * dtype.itemsize / _ALIGN_BYTES) * _ALIGN_BYTES for numel, dtype in sizes)


def carve_views(buffer: torch.Tensor, sizes: Sequence[tuple[int, torch.dtype]]) -> list[torch.Tensor]:
    """Typed views of a byte buffer, side by side, each aligned.

    The views have a version counter of their own: autograd saves parameters that live here, and a later
    gather into the same bytes is no modification that it should refuse.
    """
    views, start = [], 0
    for numel, dtype in sizes:
        piece = buffer.data[start : start + numel * dtype.itemsize]
        views.append(piece.view(dtype).data)
        start += packed_bytes([(numel, dtype)])
    return views


class CachedViews:
    """The views that `cut` gives of buffers which are lent again and again: made once of each.

    Args:
        sizes: As for `cut`.
    """

    def __init__(self, sizes: Sequence[tuple[int, torch.dtype]]) -> None:
        self._sizes = sizes
        self._num_bytes = packed_bytes(sizes)
        self._of: dict[int, list[torch.Tensor]] = {}

    def views_of(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Views of a lent buffer; the empty one, which is lent where nothing travels, as it is for every size."""
        if buffer.numel() < self._num_bytes:
            return [buffer] * len(self._sizes)
        address = buffer.data_ptr()
        if address not in self._of:
            self._of[address] = carve_views(buffer, self._sizes)
        return self._of[address]


def levels_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """A tensor and, where `torch.func` has wrapped it, what is inside, down to the one that has memory."""
    levels = [tensor]
    while _is_wrapped(levels[-1]):
        levels.append(_unwrapped(levels[-1]))
    return levels


class Resident(Protocol):
    """A unit that lives in a slot."""

    def evict(self) -> None:
        """The slot's content is about to be overwritten."""


@dataclass(slots=True, eq=False)
class Slot:
    """Bytes in which the units bound to it are unsharded, one at a time. `is_shared` where they are more than one."""

    buffer: torch.Tensor
    is_shared: bool = False
    resident: Resident | None = None

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is stored here."""
        *_, tensor = levels_of(tensor)
        return (
            type(tensor) in (torch.Tensor, nn.Parameter, UnshardedParameter)
            and tensor.layout is torch.strided
            and tensor.untyped_storage().data_ptr() == self.buffer.untyped_storage().data_ptr()
        )


def _always() -> bool:
    return True


@dataclass(slots=True, eq=False)
class StagingBuffer:
    """A buffer that one transfer after another borrows.

    Attributes:
        on_reuse: Called when the next borrower comes.
        is_busy: Whether the borrower still fills the buffer.
        may_reuse: Whether the borrower may be asked to land what it has filled so far.
    """

    buffer: torch.Tensor
    on_reuse: Callable[[], None] | None = None
    is_busy: Callable[[], bool] = bool
    may_reuse: Callable[[], bool] = _always

    def acquire(
        self, land: Callable[[], None], is_needed: Callable[[], bool], may_land: Callable[[], bool]
    ) -> torch.Tensor:
        """Borrow the buffer from whoever had it."""
        before, self.on_reuse = self.on_reuse, None
        if before is not None:
            before()
        if self.is_busy():
            raise LifecycleError(
                "A buffer is asked for while its borrower still fills it: gradients would be lost. This is a defect of "
                "the schedule; please report it."
            )
        self.on_reuse, self.is_busy, self.may_reuse = land, is_needed, may_land
        return self.buffer


class StagingPool:
    """Stagings handed out in turn.

    One more is allocated, for good, when each is still being filled and none may be sent before another: where
    gradients come in another order than the one in which ranks have agreed to send them.

    Args:
        memory: Accounts for the bytes.
        purpose: What travels.
        count: How many transfers may be under way.
        num_bytes: Size of each.
        device: Where.
    """

    def __init__(self, memory: MemoryTracker, purpose: str, count: int, num_bytes: int, device: torch.device) -> None:
        self._allocate: Callable[[], StagingBuffer] = lambda: StagingBuffer(
            memory.zeros(purpose, num_bytes, torch.uint8, device)
        )
        self._buffers = [self._allocate() for _ in range(count if num_bytes else 0)]
        self._next = 0

    def acquire(
        self,
        on_reuse: Callable[[], None],
        is_busy: Callable[[], bool] = bool,
        may_reuse: Callable[[], bool] = _always,
    ) -> torch.Tensor:
        """The next buffer in turn, after whoever had it has landed. Empty when nothing of this kind travels.

        Args:
            on_reuse: Called when the next borrower comes.
            is_busy: Whether the borrower still fills the buffer, so that another one is to be lent, if there is one.
            may_reuse: Whether the borrower may be asked to land although it still fills the buffer.
        """
        if not self._buffers:
            return torch.empty(0, dtype=torch.uint8)
        in_turn = self._buffers[self._next :] + self._buffers[: self._next]
        free = (each for each in in_turn if not each.is_busy())
        staging = next(free, None) or next((each for each in in_turn if each.may_reuse()), None)
        if staging is None:
            staging = self._allocate()
            self._buffers.append(staging)
        self._next = (self._buffers.index(staging) + 1) % len(self._buffers)
        return staging.acquire(on_reuse, is_busy, may_reuse)
