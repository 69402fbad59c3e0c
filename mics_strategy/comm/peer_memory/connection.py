"""Connections between ranks of one node that read one another's memory.

The receiver reads a piece from the memory of the sender.

1. The sender sends a descriptor: the tag of the collective, the bytes of the piece, and its addresses.
2. The receiver waits for the descriptor, reads the piece into its destination, and sends an acknowledgement.
3. The sender may overwrite the piece when the acknowledgement has arrived.

Descriptors and acknowledgements use a Unix socket between the two ranks: a waiting thread is woken by the message
itself, and by the end of the other process. Each message has a tag, and is kept until its collective asks for it.
"""

from __future__ import annotations

import secrets
import select
import socket
import struct
import sys
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from datetime import timedelta

import torch
from torch.distributed.constants import default_pg_timeout

from mics_strategy.comm.peer_memory import readv
from mics_strategy.comm.peer_memory.readv import IOV_MAX, SourceVec, Target

_HEAD = struct.Struct("=iq")  # tag, bytes; addresses follow
_ADDRESS = "q"
_MAX_MESSAGE_BYTES = _HEAD.size + IOV_MAX * array(_ADDRESS).itemsize
_ACK = -1  # in place of the bytes, in an acknowledgement
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
        self._descriptors: dict[int, deque[SourceVec]] = {}
        self._acks: dict[tuple[int, int], int] = {}  # unclaimed acknowledgements by tag and first address
        self._finalizer = weakref.finalize(self, connection.close)
        self._finalizer.atexit = False  # a thread may still wait at exit
        self._timeout_s = timeout.total_seconds()
        seconds, rest = divmod(timeout, timedelta(seconds=1))
        limit = _TIMEVAL.pack(seconds, rest // timedelta(microseconds=1))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self.process = _peer_process(connection)

    def post_send(self, piece: torch.Tensor | SourceVec, tag: int) -> SendWork:
        """Let the peer read `piece`.

        It must stay unchanged until the work has been waited for.
        """
        if isinstance(piece, torch.Tensor):
            source = SourceVec([piece.data_ptr()], piece.numel() * piece.itemsize)
        else:
            source = piece
        self._send(tag, source.num_bytes, source.addresses)
        return SendWork(self, piece, source.first, tag)

    def post_recv(self, out: Target, tag: int) -> RecvWork:
        """Read the piece that the peer sends into `out`, when the work is waited for."""
        return RecvWork(self, out, tag)

    def read(self, out: Target, tag: int) -> None:
        """Wait for the peer's descriptor of that tag, and read its piece into `out`.

        Raises:
            RuntimeError: The peer has ended or closed the connection, or sends another piece than expected.
        """
        while tag not in self._descriptors:
            self._recv_message()
        source = self._descriptors[tag].popleft()
        if not self._descriptors[tag]:
            del self._descriptors[tag]
        num_bytes, num_sources = out.numel() * out.dtype.itemsize, readv.num_sources(out)
        if source.num_bytes != num_bytes:
            raise RuntimeError(f"rank {self._rank} sends {source.num_bytes} bytes, but {num_bytes} are expected")
        if len(source.addresses) != num_sources:
            raise RuntimeError(
                f"rank {self._rank} sends {len(source.addresses)} extents, but {num_sources} are expected"
            )
        try:
            readv.read_into(out, self.process, source.addresses)
        except OSError as error:
            where = f"rank {self._rank} (process {self.process})"
            raise RuntimeError(f"the memory of {where} cannot be read: {error.strerror}") from error
        self._send(tag, _ACK, [source.first])

    def wait_for_ack(self, first: int, tag: int) -> None:
        """Block until the peer has read the piece whose first address is `first`.

        Raises:
            RuntimeError: The peer has ended or closed the connection.
        """
        ack = tag, first
        while ack not in self._acks:
            self._recv_message()
        count = self._acks.pop(ack)
        if count > 1:
            self._acks[ack] = count - 1

    def _recv_message(self) -> None:
        try:
            message = self._connection.recv(_MAX_MESSAGE_BYTES)
        except BlockingIOError as error:
            raise RuntimeError(f"no message from rank {self._rank} within {self._timeout_s:g} s") from error
        except OSError as error:
            raise RuntimeError(f"no message from rank {self._rank}: {error.strerror}") from error
        if not message:
            raise RuntimeError(f"rank {self._rank} has closed the connection")
        tag, num_bytes = _HEAD.unpack_from(message)
        source = SourceVec(array(_ADDRESS, message[_HEAD.size :]), num_bytes)
        if num_bytes == _ACK:
            ack = tag, source.first
            self._acks[ack] = self._acks.get(ack, 0) + 1
        else:
            self._descriptors.setdefault(tag, deque()).append(source)

    def _send(self, tag: int, num_bytes: int, addresses: Sequence[int]) -> None:
        """Send a message.

        While the peer's buffer is full, messages of all ranks of the group are received, so that a circle of senders
        goes on.
        """
        message = _HEAD.pack(tag, num_bytes) + array(_ADDRESS, addresses).tobytes()
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
        """Fail all waits for the peer, and its waits for this rank, with an error.

        From any thread.
        """
        with suppress(OSError):  # of a connection that has ended
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection; nothing may be in flight."""
        self._group.discard(self)
        self._finalizer()


class SendWork:
    """A posted send: a piece that a peer will read."""

    __slots__ = ("_connection", "_first", "_piece", "_tag")

    def __init__(self, connection: PeerConnection, piece: torch.Tensor | SourceVec, first: int, tag: int) -> None:
        self._connection = connection
        self._piece: torch.Tensor | SourceVec | None = piece
        self._first = first
        self._tag = tag

    def wait(self) -> None:
        """Block until the piece may be overwritten."""
        piece, self._piece = self._piece, None
        if piece is not None:
            self._connection.wait_for_ack(self._first, self._tag)

    def is_completed(self) -> bool:
        """Whether the send has been waited for."""
        return self._piece is None


class RecvWork:
    """A posted receive: a piece that this rank will read."""

    __slots__ = ("_connection", "_out", "_tag")

    def __init__(self, connection: PeerConnection, out: Target, tag: int) -> None:
        self._connection = connection
        self._out: Target | None = out
        self._tag = tag

    def wait(self) -> None:
        """Block until the piece has been read."""
        out, self._out = self._out, None
        if out is not None:
            self._connection.read(out, self._tag)

    def is_completed(self) -> bool:
        """Whether the receive has been waited for."""
        return self._out is None


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
    """Accept the ranks before this one.

    All of them have connected and have sent their index.
    """
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
        readv.read_into(value, peer.process, [address])
    except OSError:
        return False
    return int(value) == cookie
