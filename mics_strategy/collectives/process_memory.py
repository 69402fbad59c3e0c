"""How does a process read what another one has in memory?

With `process_vm_readv` of Linux, which copies once, from one address space to the other, without a socket or a thread
on the other side. The kernel allows it between processes of one user unless it has been told otherwise: the `ptrace`
scope of Yama, seccomp, another namespace of users. Numbers of processes mean something within one namespace only. So
whoever wants to read tries first (see `greeting`).
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable

import torch


class _Range(ctypes.Structure):
    """`struct iovec`."""

    _fields_ = (("address", ctypes.c_void_p), ("num_bytes", ctypes.c_size_t))


def read_into(out: torch.Tensor, process: int, address: int) -> None:
    """Copy what another process of this machine has in memory; other threads run meanwhile.

    Args:
        out: Contiguous, on the CPU; overwritten.
        process: Its number.
        address: Where its bytes begin, as many as `out` has.

    Cost:
        One copy in the kernel: 0.13 CPU seconds per GB where loopback TCP takes 0.5 (AMD EPYC, Linux 6).

    Raises:
        OSError: The kernel refuses, or the process has ended, or has nothing there; or this is not Linux.
    """
    function, done, num_bytes = _function(), 0, out.numel() * out.itemsize
    while done < num_bytes:  # at most 2 GiB at a time
        here = _Range(out.data_ptr() + done, num_bytes - done)
        there = _Range(address + done, num_bytes - done)
        copied = function(process, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if copied <= 0:
            raise OSError(ctypes.get_errno(), f"{os.strerror(ctypes.get_errno())}, after {done} of {num_bytes} bytes")
        done += copied


@functools.cache
def _function() -> Callable[..., int]:
    """Of the C library.

    Raises:
        OSError: It has none, as elsewhere than on Linux.
    """
    try:
        function = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except (AttributeError, OSError, TypeError) as error:
        raise OSError("this system has no process_vm_readv") from error
    ranges = ctypes.POINTER(_Range)
    function.argtypes = [ctypes.c_int, ranges, ctypes.c_ulong, ranges, ctypes.c_ulong, ctypes.c_ulong]
    function.restype = ctypes.c_ssize_t
    return function
