"""Messages of bytes in host memory between any two ranks, over a gloo group of their own.

They wait neither for the collectives of a training step nor make these wait, and any thread may send or receive them.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from mics_strategy.comm.queue import CommThread, TaskSteps
from mics_strategy.comm.resources import keep_groups, new_host_group
from mics_strategy.comm.transport import GlooTransport, cancel_group
from mics_strategy.comm.watched_work import STALL_CHECK_S, call_watch
from mics_strategy.comm.work import BackendWork, Messages
from mics_strategy.comm.workspace import Workspace

_FOREVER = timedelta(days=1)
_open: weakref.WeakSet[HostMessages] = weakref.WeakSet()  # in this process


class MessageWaits:
    """Waits for messages in a thread of its own, which is left alone if a rank dies in the middle of one.

    For one waiting thread at a time. See `CommThread.fail_stuck`.

    Args:
        name: Name of the thread.
        transport: Transport of the messages.
    """

    def __init__(self, name: str, transport: GlooTransport) -> None:
        self._transport = transport
        self._thread = CommThread(name, call_watch(dist.get_rank()).watchdog, [transport])

    def wait(self, works: Sequence[tuple[int, BackendWork]]) -> None:
        """Wait for messages, each with the index of its other rank.

        Raises:
            RuntimeError: A rank is gone, or the messages were cancelled.

        Cost:
            0.1 ms. A rank that dies in the middle of a message is noticed within three seconds.
        """
        messages = Messages([*works], self._transport.set_awaited)

        def task() -> Iterator[None]:
            yield
            messages.wait()

        queued = self._thread.submit("Messages", "", frozenset(), TaskSteps(task, None, Workspace()))
        while not queued.is_completed(within_s=STALL_CHECK_S):
            self._thread.fail_lost()
        queued.join()

    @property
    def is_stuck(self) -> bool:
        """Whether the thread was left alone."""
        return self._thread.is_stuck

    def close(self) -> None:
        """End the thread; if it was left alone, no group of this process is freed."""
        self._thread.close()
        if self.is_stuck:
            keep_groups()


def has_open_messages() -> bool:
    """Whether this process has a group for messages between hosts."""
    return bool(_open)


class HostMessages:
    """Messages between the hosts of all ranks. Making it is collective.

    Two messages between the same ranks with one tag arrive in the order of their sends. A message and the memory that
    receives it have the same size.

    Args:
        name: Name in torch's logs.

    Attributes:
        sent_bytes: Bytes of all messages that this rank has started to send.
    """

    def __init__(self, name: str) -> None:
        self._group = new_host_group(name) if dist.get_world_size() > 1 else None
        self._waits: list[MessageWaits] = []
        self.sent_bytes = 0
        _open.add(self)

    @property
    def _connected(self) -> dist.ProcessGroup:
        if self._group is None:
            raise RuntimeError("the group is closed, or has one rank")
        return self._group

    def send(self, data: torch.Tensor, rank: int, tag: int) -> BackendWork:
        """Start to send a contiguous tensor. It stays unchanged until the work has been waited for."""
        self.sent_bytes += data.numel() * data.itemsize
        return self._connected.send([data], rank, tag)

    def recv(self, data: torch.Tensor, rank: int, tag: int) -> BackendWork:
        """Start to receive into a contiguous tensor, overwritten."""
        return self._connected.recv([data], rank, tag)

    def waits(self, name: str) -> MessageWaits:
        """Waits for messages in one thread, in which the index of a rank is its number.

        Args:
            name: Name of the thread.
        """
        self._waits.append(MessageWaits(name, GlooTransport(self._connected, name)))
        return self._waits[-1]

    @property
    def is_stuck(self) -> bool:
        """Whether a thread still waits, and was left alone."""
        return any(waits.is_stuck for waits in self._waits)

    def recv_from_any(self, data: torch.Tensor, tag: int) -> int:
        """Wait for a message of any rank, for a day at most, and return that rank.

        Args:
            data: Contiguous tensor, overwritten.
            tag: Tag of the message.
        """
        work = self._connected.recv_anysource([data], tag)
        work.wait(_FOREVER)
        return int(work._source_rank())

    def cancel(self) -> None:
        """Fail the messages in flight of this rank, and those that other ranks exchange with it. From any thread."""
        if self._group is not None:
            cancel_group(self._group)

    def close(self) -> None:
        """Destroy the group. Not collective; nothing may be in flight."""
        group, self._group = self._group, None
        _open.discard(self)
        for waits in self._waits:
            waits.close()
        if group is not None and not self.is_stuck and dist.is_initialized():
            dist.destroy_process_group(group)


def close_all() -> None:
    """Close all messages of this process, which have failed. Not collective."""
    for messages in list(_open):
        messages.close()


@atexit.register
def _keep_stuck() -> None:
    if any(messages.is_stuck for messages in _open):
        keep_groups()
