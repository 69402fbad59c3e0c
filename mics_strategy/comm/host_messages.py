"""Messages of bytes in host memory between any two ranks, over a gloo group of their own.

They wait neither for the collectives of a training step nor make these wait, and any thread may send or receive them.
"""

from __future__ import annotations

import weakref
from datetime import timedelta

import torch
import torch.distributed as dist

from mics_strategy.comm.resources import new_host_group
from mics_strategy.comm.transport import cancel_group
from mics_strategy.comm.work import BackendWork

_FOREVER = timedelta(days=1)
_open: weakref.WeakSet[HostMessages] = weakref.WeakSet()  # in this process


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
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)
