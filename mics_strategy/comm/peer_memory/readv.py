"""Reads from the memory of another process, with scatter-gather lists.

`process_vm_readv` of Linux copies once, from one address space to the other, without a socket or a thread on the other
side. The kernel allows it between processes of one user unless it is configured otherwise: by the `ptrace` scope of
Yama, by seccomp, or by another user namespace. Process ids are valid within one namespace only. So the handshake of
`connection` tries a read before any collective relies on it.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

IOV_MAX = 1024  # ranges of one call
_MAX_BYTES = 1 << 30  # of one call; Linux copies less than 2 GiB


class _IoVec(ctypes.Structure):
    """`struct iovec`."""

    _fields_ = (("address", ctypes.c_void_p), ("num_bytes", ctypes.c_size_t))


@dataclass(frozen=True, slots=True)
class SourceVec:
    """A piece in scattered memory of this process.

    Attributes:
        addresses: Addresses of its extents, in their order; at most `IOV_MAX`.
        num_bytes: Bytes of the piece, with the padding that is in no extent.
    """

    addresses: Sequence[int]
    num_bytes: int

    @property
    def first(self) -> int:
        """The first address; 0 where there is none."""
        return self.addresses[0] if self.addresses else 0


class GatherTarget:
    """Destination of a scattered piece of another process: one tensor for each extent.

    Args:
        parts: Tensors for the extents, in their order; contiguous, on the CPU.
        numel: Elements of the piece, with the padding that is in no extent and is not read.
        dtype: Dtype of the piece and of all tensors.
    """

    def __init__(self, parts: Sequence[torch.Tensor], numel: int, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.num_sources = len(parts)
        self._numel = numel
        self._parts = parts

    def numel(self) -> int:
        """Elements of the piece, as `torch.Tensor.numel`."""
        return self._numel

    def calls(self, addresses: Sequence[int]) -> list[_ReadvCall]:
        """The system calls that read the extents from those addresses of another process."""
        ranges = [
            (part.data_ptr(), address, part.numel() * self.dtype.itemsize)
            for part, address in zip(self._parts, addresses, strict=True)
        ]
        return [_ReadvCall(batch) for batch in _batches(ranges)]


class ScatterTarget:
    """Destinations of one contiguous piece: several tensors.

    Args:
        parts: Start of each extent in the piece, in elements, and the tensor for it; contiguous, on the CPU. Elements
            outside of the extents are not read.
        numel: Elements of the piece.
        dtype: Dtype of the piece and of all tensors.
    """

    num_sources = 1

    def __init__(self, parts: Sequence[tuple[int, torch.Tensor]], numel: int, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._numel = numel
        self._parts = parts
        self._targets = [target.view(-1) for _, target in parts]
        self._sources: dict[int, list[torch.Tensor]] = {}  # by the address of the piece: buffers are few and permanent
        self._calls: dict[int, list[_ReadvCall]] = {}

    def numel(self) -> int:
        """Elements of the piece, as `torch.Tensor.numel`."""
        return self._numel

    def copy(self, piece: torch.Tensor) -> None:
        """Fill the tensors from a piece of this process, [numel]."""
        sources = self._sources.get(piece.data_ptr())
        if sources is None:
            starts = [start for start, _ in self._parts]
            sources = [piece[start : start + out.numel()] for start, out in zip(starts, self._targets, strict=True)]
            self._sources[piece.data_ptr()] = sources
        if self._targets:  # else a rank after the last row, whose shard is all padding
            torch._foreach_copy_(self._targets, sources)

    def calls(self, addresses: Sequence[int]) -> list[_ReadvCall]:
        """The system calls that read the piece from that one address of another process."""
        (address,) = addresses
        if address not in self._calls:
            ranges = [
                (target.data_ptr(), address + start * self.dtype.itemsize, target.numel() * self.dtype.itemsize)
                for start, target in self._parts
            ]
            self._calls[address] = [_ReadvCall(batch) for batch in _batches(ranges)]
        return self._calls[address]


class _ReadvCall:
    """One system call: local and remote addresses of its ranges, and their bytes."""

    def __init__(self, ranges: Sequence[tuple[int, int, int]]) -> None:
        self.count = len(ranges)
        self.num_bytes = sum(num_bytes for _, _, num_bytes in ranges)
        self.local = _array([_IoVec(local, num_bytes) for local, _, num_bytes in ranges])
        self.remote = _array([_IoVec(remote, num_bytes) for _, remote, num_bytes in ranges])


def _array(ranges: list[_IoVec]) -> ctypes.Array[_IoVec]:
    return (_IoVec * len(ranges))(*ranges)


def _batches(ranges: Sequence[tuple[int, int, int]]) -> Iterator[list[tuple[int, int, int]]]:
    batch: list[tuple[int, int, int]] = []
    free_bytes = _MAX_BYTES
    for local, remote, num_bytes in ranges:
        for done in range(0, num_bytes, _MAX_BYTES):
            part = local + done, remote + done, min(num_bytes - done, _MAX_BYTES)
            if len(batch) == IOV_MAX or part[2] > free_bytes:
                yield batch
                batch, free_bytes = [], _MAX_BYTES
            batch.append(part)
            free_bytes -= part[2]
    if batch:
        yield batch


Target = torch.Tensor | ScatterTarget | GatherTarget


def num_sources(out: Target) -> int:
    """The number of addresses of another process from which `out` is filled."""
    return 1 if isinstance(out, torch.Tensor) else out.num_sources


def read_into(out: Target, process: int, addresses: Sequence[int]) -> None:
    """Copy memory of another process of this machine. Other threads run meanwhile.

    Args:
        out: Destination: a contiguous tensor on the CPU, or several; overwritten.
        process: Process id.
        addresses: Addresses of the bytes in that process, `num_sources(out)` of them.

    Cost:
        One copy in the kernel: 0.13 CPU seconds per GB where loopback TCP takes 0.5 (AMD EPYC, Linux 6).

    Raises:
        OSError: The kernel refuses, the process has ended, an address is not mapped, or this is not Linux.
    """
    parts = GatherTarget([out], out.numel(), out.dtype) if isinstance(out, torch.Tensor) else out
    calls = parts.calls(addresses)
    function, done = _function(), 0
    for call in calls:
        copied = function(process, call.local, call.count, call.remote, call.count, 0)
        if copied != call.num_bytes:
            reason = os.strerror(ctypes.get_errno()) if copied < 0 else "the mapped memory ends"
            done += max(copied, 0)
            total = sum(planned.num_bytes for planned in calls)
            raise OSError(ctypes.get_errno(), f"{reason}, after {done} of {total} bytes")
        done += copied


@functools.cache
def _function() -> Callable[..., int]:
    """`process_vm_readv` of the C library.

    Raises:
        OSError: The C library has no such function, as on other systems than Linux.
    """
    try:
        function = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except (AttributeError, OSError, TypeError) as error:
        raise OSError("this system has no process_vm_readv") from error
    ranges = ctypes.POINTER(_IoVec)
    function.argtypes = [ctypes.c_int, ranges, ctypes.c_ulong, ranges, ctypes.c_ulong, ctypes.c_ulong]
    function.restype = ctypes.c_ssize_t
    return function
