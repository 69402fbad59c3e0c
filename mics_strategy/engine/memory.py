"""Memory of the engine: arenas, slots and staging buffers.

All memory is allocated when the model is sharded, and lives as long as the sharded model. There are two exceptions,
allocated when they are first needed: another gradient buffer where gradients arrive in another order than the ranks'
common one (`StagingPool`), and zeros for a unit without gradients on this rank (`ReducerBuffers.zero_grads`).

- *Arenas* hold model states: one tensor per dtype and purpose, with a piece for every bucket.
- *Slots* hold unsharded parameters. A unit is bound to one slot for good, so its parameters keep one address.
- *Staging buffers* hold payloads of collectives. The last borrower finishes its collective before the next one borrows.
  `GradCopies` copies gradients into them.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from mics_strategy.comm.workspace import aligned_bytes, once_per_buffer
from mics_strategy.engine.layout import BucketLayout
from mics_strategy.engine.lifecycle import GradFlag, GradFlags
from mics_strategy.errors import LifecycleError

_HUGE_PAGE_BYTES = 2**21
_MADV_HUGEPAGE = 14  # of Linux
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_unwrapped = torch._C._functorch.get_unwrapped


@dataclass(slots=True)
class MemoryTracker:
    """Tracker of the bytes that the engine allocates.

    Attributes:
        bytes_by_purpose: Allocated bytes, by purpose.
    """

    bytes_by_purpose: dict[str, int] = field(default_factory=dict)

    def zeros(self, purpose: str, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate a flat tensor of zeros, counted under `purpose`."""
        with torch.inference_mode(False):
            tensor = torch.empty(numel, dtype=dtype, device=device)
            if device.type == "cpu" and sys.platform == "linux":
                _advise_huge_pages(tensor)
            tensor.zero_()
        self.bytes_by_purpose[purpose] = self.bytes_by_purpose.get(purpose, 0) + numel * dtype.itemsize
        return tensor

    @property
    def total_bytes(self) -> int:
        """Bytes of all purposes together."""
        return sum(self.bytes_by_purpose.values())


def _advise_huge_pages(tensor: torch.Tensor) -> None:
    """Ask the kernel for huge pages in memory that nothing has written yet.

    Where it has none, or only for all memory, the advice changes nothing.

    Cost:
        A system call. Copies then take 0.05 to 0.06 CPU seconds per GB instead of 0.09 and sums 0.05 to 0.06 instead of
        0.08 (24 MB, AMD EPYC, Linux 6.18, both cores busy); reads of a peer's memory take about as long as before.
    """
    start = -(-tensor.data_ptr() // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    end = (tensor.data_ptr() + tensor.numel() * tensor.itemsize) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
    if start < end:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_HUGEPAGE)


def arena(
    memory: MemoryTracker, purpose: str, sizes: Sequence[tuple[int, torch.dtype]], device: torch.device
) -> list[torch.Tensor]:
    """Allocate one tensor per dtype, and cut it into consecutive pieces.

    Args:
        memory: Tracker of the allocated bytes.
        purpose: Purpose under which the bytes are counted.
        sizes: Elements and dtype of each piece.
        device: Device of the tensors.
    """
    buffers = {
        dtype: memory.zeros(purpose, sum(n for n, other in sizes if other is dtype), dtype, device)
        for dtype in dict.fromkeys(d for _, d in sizes)
    }
    offsets = dict.fromkeys(buffers, 0)
    pieces = []
    for numel, dtype in sizes:
        pieces.append(buffers[dtype][offsets[dtype] : offsets[dtype] + numel])
        offsets[dtype] += numel
    return pieces


def carve_views(buffer: torch.Tensor, sizes: Sequence[tuple[int, torch.dtype]]) -> list[torch.Tensor]:
    """Typed views of a byte buffer, one after the other, each aligned.

    Each view has its own version counter. Autograd saves parameters that are stored here, and must not take a later
    all-gather into the same bytes for a modification.
    """
    views, start = [], 0
    with torch.inference_mode(False):  # an evaluation may ask first, and training writes to them
        for numel, dtype in sizes:
            piece = buffer.data[start : start + numel * dtype.itemsize]
            views.append(piece.view(dtype).data)
            start += aligned_bytes((numel, dtype))
    return views


def staging_views(sizes: Sequence[tuple[int, torch.dtype]]) -> Callable[[torch.Tensor], list[torch.Tensor]]:
    """Views of each staging buffer, as `carve_views` makes them.

    Of the empty buffer, which stands for no payload, each view is the buffer itself.
    """
    num_bytes = aligned_bytes(*sizes)
    return once_per_buffer(
        lambda buffer: carve_views(buffer, sizes) if buffer.numel() >= num_bytes else [buffer] * len(sizes)
    )


def levels_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """A tensor and those inside its `torch.func` wrappers, down to one with memory."""
    levels = [tensor]
    while _is_wrapped(levels[-1]):
        levels.append(_unwrapped(levels[-1]))
    return levels


class Resident(Protocol):
    """A unit whose unsharded parameters are in a slot."""

    def evict(self) -> None:
        """Reshard, because the slot's content is about to be overwritten."""


@dataclass(slots=True, eq=False)
class Slot:
    """Memory in which the units bound to it are unsharded, one at a time.

    Attributes:
        buffer: Bytes of the slot.
        is_shared: Whether more than one unit is bound to the slot.
        resident: Unit whose parameters are in the slot; None before the first.
        users: Streams of the device that use the resident's parameters.
    """

    buffer: torch.Tensor
    is_shared: bool = False
    resident: Resident | None = None
    users: Collection[torch.cuda.Stream] = ()


_NO_BYTES = torch.empty(0, dtype=torch.uint8)


def _always() -> bool:
    return True


@dataclass(slots=True, eq=False)
class StagingBuffer:
    """A buffer that one collective after another borrows.

    Attributes:
        buffer: Bytes of the buffer.
        on_reuse: Callback of the present borrower; it finishes the collective when the next borrower comes.
        is_busy: Whether the borrower still fills the buffer.
        may_reuse: Whether `on_reuse` may send a buffer that is only partly filled.
    """

    buffer: torch.Tensor
    on_reuse: Callable[[], None] | None = None
    is_busy: Callable[[], bool] = bool
    may_reuse: Callable[[], bool] = _always

    def acquire(
        self, on_reuse: Callable[[], None], is_busy: Callable[[], bool], may_reuse: Callable[[], bool]
    ) -> torch.Tensor:
        """Finish the previous borrower's collective, and lend the buffer to the next one.

        Raises:
            LifecycleError: The previous borrower still fills the buffer.
        """
        previous, self.on_reuse = self.on_reuse, None
        if previous is not None:
            previous()
        if self.is_busy():
            raise LifecycleError(
                "A staging buffer was requested while its borrower still fills it. Gradients would be lost. This is a "
                "defect of the engine. Please report it."
            )
        self.on_reuse, self.is_busy, self.may_reuse = on_reuse, is_busy, may_reuse
        return self.buffer


class StagingPool:
    """Staging buffers that are lent in turn.

    When all are still being filled and none may be sent yet, the pool allocates one more, for good. This happens when
    gradients arrive in another order than the one in which all ranks send them.

    Args:
        memory: Tracker of the allocated bytes.
        purpose: Purpose under which the bytes are counted.
        count: Number of collectives that may be in flight.
        num_bytes: Bytes of each buffer; 0 for a pool that lends empty buffers.
        device: Device of the buffers.
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
        """Borrow the next buffer in turn, after its previous borrower has finished.

        Args:
            on_reuse: Callback that finishes the borrower's collective when the next borrower comes.
            is_busy: Whether the borrower still fills the buffer. The pool then lends another one if possible.
            may_reuse: Whether `on_reuse` may send a buffer that is only partly filled.

        Returns:
            [num_bytes] of uint8; empty for a pool without buffers.
        """
        if not self._buffers:
            return _NO_BYTES
        in_turn = self._buffers[self._next :] + self._buffers[: self._next]
        free = (candidate for candidate in in_turn if not candidate.is_busy())
        staging = next(free, None) or next((candidate for candidate in in_turn if candidate.may_reuse()), None)
        if staging is None:
            staging = self._allocate()
            self._buffers.append(staging)
        self._next = (self._buffers.index(staging) + 1) % len(self._buffers)
        return staging.acquire(on_reuse, is_busy, may_reuse)


class GradCopies:
    """Copies of gradients into flat buffers of one bucket, in one call.

    Args:
        layout: Layout of the bucket.
    """

    def __init__(self, layout: BucketLayout) -> None:
        self._layout = layout
        self._views = once_per_buffer(
            lambda flat: [layout.strided_view(flat, position) for position in range(len(layout.param_slices))]
        )
        self._gaps: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def copy(self, flat: torch.Tensor, grads: dict[int, torch.Tensor], added: GradFlag, flags: GradFlags) -> None:
        """Copy gradients to their places in a flat buffer.

        Args:
            flat: [full_numel].
            grads: Gradients by position, in any dtype.
            added: Flag of the parameters of which the buffer holds a gradient already, to which the new one is added.
            flags: Flags of the parameters.
        """
        has_earlier = flags.any(added)
        if flat.is_cuda and not has_earlier and self.copy_all(flat, grads):
            return
        copied, summed = _Pairs(), _Pairs()
        views = self._views(flat)
        for position, grad in grads.items():
            pairs = summed if has_earlier and flags.has(added, position) else copied
            view = views[position]
            if view is not None and grad.is_contiguous():
                pairs.targets.append(view)
                pairs.sources.append(grad.view(view.shape))
            else:
                for flat_part, grad_part in self._layout.copy_pairs(flat, grad, position):
                    pairs.targets.append(flat_part)
                    pairs.sources.append(grad_part)
        with torch.no_grad():
            if copied.targets:
                torch._foreach_copy_(copied.targets, copied.sources)
            if summed.targets:
                torch._foreach_add_(summed.targets, summed.sources)

    def copy_all(self, flat: torch.Tensor, grads: dict[int, torch.Tensor]) -> bool:
        """Copy the gradients of all parameters in one kernel. Returns whether it can.

        All must be there, contiguous, of one dtype, and cut along dimension 0. The padding is overwritten with zeros.

        Source:
            FSDP2 (torch 2.13, `foreach_reduce_scatter_copy_in`), which has the kernel for it.
        """
        layout, dtypes = self._layout, {grad.dtype for grad in grads.values()}
        if len(grads) < len(layout.param_slices) or len(dtypes) > 1:
            return False
        dtype, pieces, end = dtypes.pop(), [], 0
        for position, param_slice in enumerate(layout.param_slices):
            grad = grads[position]
            if param_slice.dim != 0 or not grad.is_contiguous():
                return False
            pieces += [self._gap(param_slice.offset - end, flat, dtype), grad]
            end = param_slice.offset + param_slice.chunk_numel
        pieces.append(self._gap(layout.shard_numel - end, flat, dtype))
        filled = [piece for piece in pieces if piece.numel()]
        torch._chunk_cat(filled, 0, layout.ranks, out=flat.view(layout.ranks, -1))
        return True

    def _gap(self, numel: int, flat: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Zeros for the padding between two parameters, [ranks, numel]."""
        zeros = self._gaps.get((numel, dtype))
        if zeros is None:
            zeros = self._gaps[numel, dtype] = flat.new_zeros(self._layout.ranks, numel, dtype=dtype)
        return zeros


@dataclass(slots=True)
class _Pairs:
    """Parts of a flat buffer and of the gradients that belong there."""

    targets: list[torch.Tensor] = field(default_factory=list)
    sources: list[torch.Tensor] = field(default_factory=list)
