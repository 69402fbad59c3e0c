"""Connections between ranks of one node that read one another's memory.

The receiver reads a piece from the memory of the sender.

1. The sender sends a descriptor: the tag of the collective, the bytes of the piece, and its address.
2. The receiver waits for the descriptor, reads the piece into its destination, and sends an acknowledgement.
3. The sender may overwrite the piece when the acknowledgement has arrived.

Descriptors and acknowledgements use a Unix socket between the two ranks: a waiting thread is woken by the message
itself, and by the end of the other process. Each message has a tag, and is kept until its collective asks for it.

`process_vm_readv` of Linux copies once, from one address space to the other, without a thread on the other side. The
kernel allows it between processes of one user unless it is configured otherwise: by the `ptrace` scope of Yama, by
seccomp, or by another user namespace. Process ids are valid within one namespace only. So `handshake` tries a read
before any collective relies on it.
"""

from __future__ import annotations

import ctypes
import functools
import os
import secrets
import select
import socket
import struct
import sys
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from datetime import timedelta
from functools import partial

import torch
from torch.distributed.constants import default_pg_timeout

_MESSAGE = struct.Struct("=iqq")  # tag, bytes, address
_ACK = -1  # in place of the bytes, in an acknowledgement
_MAX_BYTES = 1 << 30  # of one call; Linux copies less than 2 GiB
_Range = ctypes.c_size_t * 2  # struct iovec: address, bytes
_NO_WAIT = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_CREDENTIALS = struct.Struct("=iii")  # Linux's struct ucred
_TIMEVAL = struct.Struct("@ll")


class PeerConnection:
    """The connection to another rank of the node, within one group.

    For one thread at a time, except `cancel`.

    Args:
        connection: Socket to that rank, with message boundaries; closed with this object.
        rank: Number of that rank.
        timeout: Longest wait for it; the timeout of the group.
        group: Connections of this rank to all ranks of the group, which one thread uses; this one is added.

    Attributes:
        process: Process id of that rank, in the namespace of this process.
    """

    def __init__(
        self,
        connection: socket.socket,
        rank: int,
        timeout: timedelta = default_pg_timeout,
        group: weakref.WeakSet[PeerConnection] | None = None,
    ) -> None:
        self._connection = connection
        self._group = weakref.WeakSet[PeerConnection]() if group is None else group
        self._group.add(self)
        self._rank = rank
        self._descriptors: dict[int, deque[tuple[int, int]]] = {}  # bytes and address, by tag
        self._acks: dict[tuple[int, int], int] = {}  # unclaimed acknowledgements by tag and address
        self._finalizer = weakref.finalize(self, connection.close)
        self._finalizer.atexit = False  # a thread may still wait at exit
        self._timeout_s = timeout.total_seconds()
        seconds, rest = divmod(timeout, timedelta(seconds=1))
        limit = _TIMEVAL.pack(seconds, rest // timedelta(microseconds=1))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self.process = _peer_process(connection)

    def post_send(self, piece: torch.Tensor, tag: int) -> PeerWork:
        """Let the peer read `piece`. It must stay unchanged until the work has been waited for."""
        self._send(tag, piece.numel() * piece.itemsize, piece.data_ptr())
        return PeerWork(partial(self.wait_for_ack, piece.data_ptr(), tag), piece)

    def post_recv(self, out: torch.Tensor, tag: int) -> PeerWork:
        """Read the piece that the peer sends into `out`, when the work is waited for."""
        return PeerWork(partial(self.read, out, tag), out)

    def read(self, out: torch.Tensor, tag: int) -> None:
        """Wait for the peer's descriptor of that tag, and read its piece into `out`.

        Raises:
            RuntimeError: The peer has ended or closed the connection, or sends another piece than expected.
        """
        while tag not in self._descriptors:
            self._recv_message()
        sent_bytes, address = self._descriptors[tag].popleft()
        if not self._descriptors[tag]:
            del self._descriptors[tag]
        num_bytes = out.numel() * out.itemsize
        if sent_bytes != num_bytes:
            raise RuntimeError(f"rank {self._rank} sends {sent_bytes} bytes, but {num_bytes} are expected")
        try:
            read_into(out, self.process, address)
        except OSError as error:
            where = f"rank {self._rank} (process {self.process})"
            raise RuntimeError(f"the memory of {where} cannot be read: {error.strerror}") from error
        self._send(tag, _ACK, address)

    def wait_for_ack(self, address: int, tag: int) -> None:
        """Block until the peer has read the piece at that address.

        Raises:
            RuntimeError: The peer has ended or closed the connection.
        """
        ack = tag, address
        while ack not in self._acks:
            self._recv_message()
        count = self._acks.pop(ack)
        if count > 1:
            self._acks[ack] = count - 1

    def _recv_message(self) -> None:
        try:
            message = self._connection.recv(_MESSAGE.size)
        except BlockingIOError as error:
            raise RuntimeError(f"no message from rank {self._rank} within {self._timeout_s:g} s") from error
        except OSError as error:
            raise RuntimeError(f"no message from rank {self._rank}: {error.strerror}") from error
        if not message:
            raise RuntimeError(f"rank {self._rank} has closed the connection")
        tag, num_bytes, address = _MESSAGE.unpack(message)
        if num_bytes == _ACK:
            self._acks[tag, address] = self._acks.get((tag, address), 0) + 1
        else:
            self._descriptors.setdefault(tag, deque()).append((num_bytes, address))

    def _send(self, tag: int, num_bytes: int, address: int) -> None:
        """Send a message.

        While the peer's buffer is full, messages of all ranks of the group are received, so that a circle of senders
        goes on.
        """
        message = _MESSAGE.pack(tag, num_bytes, address)
        while True:
            try:
                self._connection.send(message, _NO_WAIT)
                return
            except BlockingIOError:
                self._wait_for_buffer()
            except OSError as error:
                raise RuntimeError(f"no message can be sent to rank {self._rank}: {error.strerror}") from error

    def _wait_for_buffer(self) -> None:
        """Block until this connection can send; receive what arrives in the group."""
        poll, by_file = select.poll(), {peer._connection.fileno(): peer for peer in self._group}
        for file, peer in by_file.items():
            poll.register(file, select.POLLIN | (select.POLLOUT if peer is self else 0))
        events = poll.poll(1000 * self._timeout_s)
        if not events:
            raise RuntimeError(f"rank {self._rank} has received nothing for {self._timeout_s:g} s")
        for file, event in events:
            peer = by_file[file]
            if event == select.POLLOUT:
                continue
            try:
                peer._recv_message()
            except RuntimeError:
                if peer is self:
                    raise
                self._group.discard(peer)  # has ended; whoever waits for it is told so

    def cancel(self) -> None:
        """Fail all waits for the peer, and its waits for this rank, with an error. From any thread."""
        with suppress(OSError):  # of a connection that has ended
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection; nothing may be in flight."""
        self._group.discard(self)
        self._finalizer()


class PeerWork:
    """A posted send or receive.

    Args:
        finish: Waits for the peer; called once.
        tensor: What is sent or received, which lives as long.
    """

    __slots__ = ("_finish", "_tensor")

    def __init__(self, finish: Callable[[], None], tensor: torch.Tensor) -> None:
        self._finish: Callable[[], None] | None = finish
        self._tensor: torch.Tensor | None = tensor

    def wait(self) -> None:
        """Block until a sent piece may be overwritten, or a received one has been read."""
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
            self._tensor = None

    def is_completed(self) -> bool:
        """Whether the work has been waited for."""
        return self._finish is None


def _peer_process(connection: socket.socket) -> int:
    """Process id of the other end, in the namespace of this process; 0 for none."""
    process, _, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(process)


Gather = Callable[[torch.Tensor], torch.Tensor]  # [n] int64 of this rank to [ranks, n]
_INDEX = struct.Struct("=i")


def handshake(ranks: Sequence[int], index: int, gather: Gather, timeout: timedelta) -> dict[int, PeerConnection]:
    """Connect all ranks of a group, if each can read the others' memory. Collective.

    1. Every rank listens, and gathers its socket name, a random cookie and the address of the cookie.
    2. It connects to the ranks after it, and gathers whether that succeeded.
    3. It accepts the ranks before it, reads the cookie of each rank, and gathers whether that succeeded.

    Args:
        ranks: Ranks of the group.
        index: Index of this rank among them.
        gather: All-gathers a tensor over the group.
        timeout: Longest wait for another rank in any collective.

    Returns:
        Connections to the other ranks by index; empty on all ranks where one of them cannot read another's memory.

    Cost:
        Three all-gathers of at most 24 bytes, and a socket for each other rank.
    """
    if sys.platform != "linux":
        return {}
    name, cookie = secrets.randbits(62), torch.tensor([secrets.randbits(62)])
    sockets: dict[int, socket.socket] = {}
    with _listen(name, len(ranks)) or nullcontext() as listener:
        offers = gather(torch.tensor([name, cookie.data_ptr(), int(cookie)])).tolist()
        others = range(index + 1, len(ranks))
        if _all_agree(gather, all(_connect(sockets, index, other, offers[other][0]) for other in others)):
            is_complete = listener is not None and _accept(sockets, listener, index)
            connections = {}
            if is_complete:
                group = weakref.WeakSet[PeerConnection]()
                connections = {
                    other: PeerConnection(end, ranks[other], timeout, group) for other, end in sockets.items()
                }
            can_read = all(_has_cookie(peer, *offers[other][1:]) for other, peer in connections.items())
            if _all_agree(gather, is_complete and can_read):
                return connections
    for end in sockets.values():
        end.close()
    return {}


def _all_agree(gather: Gather, is_possible: bool) -> bool:
    return bool(gather(torch.tensor([int(is_possible)])).all())


def _address(name: int) -> str:
    return f"\0mics {name:x}"  # in the abstract namespace, without a file


def _listen(name: int, backlog: int) -> socket.socket | None:
    """Listen under that name.

    Returns None where this process cannot, so that no peer can connect.
    """
    try:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError:
        return None
    try:
        listener.setblocking(False)
        listener.bind(_address(name))
        listener.listen(backlog)
    except OSError:
        listener.close()
        return None
    return listener


def _connect(sockets: dict[int, socket.socket], index: int, other: int, name: int) -> bool:
    try:
        end = sockets[other] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        end.connect(_address(name))
        end.send(_INDEX.pack(index))
    except OSError:
        return False
    return True


def _accept(sockets: dict[int, socket.socket], listener: socket.socket, index: int) -> bool:
    """Accept the ranks before this one. All of them have connected and have sent their index."""
    expected = set(range(index))
    try:
        for _ in range(index):
            end, _ = listener.accept()
            (other,) = _INDEX.unpack(end.recv(_INDEX.size, socket.MSG_DONTWAIT))
            end.setblocking(True)
            if other not in expected:  # a process outside of the group
                end.close()
                return False
            expected.remove(other)
            sockets[other] = end
    except (OSError, struct.error):
        return False
    return True


def _has_cookie(peer: PeerConnection, address: int, cookie: int) -> bool:
    value = torch.zeros(1, dtype=torch.int64)
    try:
        read_into(value, peer.process, address)
    except OSError:
        return False
    return int(value) == cookie


def read_into(out: torch.Tensor, process: int, address: int) -> None:
    """Copy memory of another process of this machine. Other threads run meanwhile.

    Args:
        out: Destination, contiguous, on the CPU; overwritten.
        process: Process id.
        address: Address of the bytes in that process.

    Cost:
        One copy in the kernel: 0.13 CPU seconds per GB where loopback TCP takes 0.5 (AMD EPYC, Linux 6).

    Raises:
        OSError: The kernel refuses, the process has ended, an address is not mapped, or this is not Linux.
    """
    done, num_bytes = 0, out.numel() * out.itemsize
    while done < num_bytes:
        part = min(num_bytes - done, _MAX_BYTES)
        local, remote = _Range(out.data_ptr() + done, part), _Range(address + done, part)
        copied = _process_vm_readv()(process, local, 1, remote, 1, 0)
        if copied != part:
            reason = os.strerror(ctypes.get_errno()) if copied < 0 else "the mapped memory ends"
            raise OSError(ctypes.get_errno(), f"{reason}, after {done + max(copied, 0)} of {num_bytes} bytes")
        done += copied


@functools.cache
def _process_vm_readv() -> Callable[..., int]:
    """The function of the C library.

    Raises:
        OSError: The C library has none, as on other systems than Linux.
    """
    try:
        function = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except (AttributeError, OSError, TypeError) as error:
        raise OSError("this system has no process_vm_readv") from error
    ranges = ctypes.POINTER(ctypes.c_size_t)
    function.argtypes = [ctypes.c_int, ranges, ctypes.c_ulong, ranges, ctypes.c_ulong, ctypes.c_ulong]
    function.restype = ctypes.c_ssize_t
    return function
