"""How do two ranks of one node hand numbers to each other without sending them?

The receiver reads them where the sender has them.

1. The sender writes a note: the tag of the transfer, how many bytes the piece has, and where it is, in one place or
   several.
2. The receiver waits for the note, reads the piece into the place where it belongs, and writes back that it has.
3. The sender may overwrite the piece when that answer is there.

Notes and answers go over a socket of the two, of Unix: a thread that waits is woken by the message itself, and by the
end of the other process. Each is for one tag, so what comes for another transfer waits until somebody asks for it.
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
_ACK = -1  # in place of the bytes, in an answer
_AT_ONCE = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_CREDENTIALS = struct.Struct("=iii")  # Linux's struct ucred
_TIMEVAL = struct.Struct("@ll")


class PeerConnection:
    """Another rank of the node, to one group. One thread at a time may use it, beside `cancel`.

    Args:
        connection: To that rank, keeping the bounds of messages; closed with this object.
        rank: Its number.
        patience: How long to wait for it; the timeout of the group.

    Attributes:
        process: Its process, as this one knows it.
    """

    def __init__(self, connection: socket.socket, rank: int, patience: timedelta = default_pg_timeout) -> None:
        self._connection = connection
        self._rank = rank
        self._descriptors: dict[int, deque[SourceVec]] = {}
        self._acks: dict[tuple[int, int], int] = {}  # by tag and first address; how many nobody has asked for
        self._finalizer = weakref.finalize(self, connection.close)
        self._finalizer.atexit = False  # a thread may still wait then
        self._patience_s = patience.total_seconds()
        seconds, rest = divmod(patience, timedelta(seconds=1))
        limit = _TIMEVAL.pack(seconds, rest // timedelta(microseconds=1))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self.process = _process_behind(connection)

    def post_send(self, piece: torch.Tensor | SourceVec, tag: int) -> SendWork:
        """Let the neighbour read `piece`, which must stay unchanged until that is waited for."""
        if isinstance(piece, torch.Tensor):
            spread = SourceVec([piece.data_ptr()], piece.numel() * piece.itemsize)
        else:
            spread = piece
        self._write(tag, spread.num_bytes, spread.addresses)
        return SendWork(self, piece, spread.first, tag)

    def post_recv(self, out: Target, tag: int) -> RecvWork:
        """Read what the neighbour offers, into `out`, when that is waited for."""
        return RecvWork(self, out, tag)

    def read(self, out: Target, tag: int) -> None:
        """Block until the neighbour has offered a piece of that tag, and read it into `out`.

        Raises:
            RuntimeError: It has ended or left, or offers something else.
        """
        while tag not in self._descriptors:
            self._take_message()
        note = self._descriptors[tag].popleft()
        if not self._descriptors[tag]:
            del self._descriptors[tag]
        num_bytes, num_sources = out.numel() * out.dtype.itemsize, readv.num_sources(out)
        if note.num_bytes != num_bytes:
            raise RuntimeError(f"rank {self._rank} offers {note.num_bytes} bytes where {num_bytes} are expected")
        if len(note.addresses) != num_sources:
            raise RuntimeError(
                f"rank {self._rank} offers {len(note.addresses)} stretches where {num_sources} are expected"
            )
        try:
            readv.read_into(out, self.process, note.addresses)
        except OSError as error:
            where = f"rank {self._rank} (process {self.process})"
            raise RuntimeError(f"the memory of {where} cannot be read: {error.strerror}") from error
        self._write(tag, _ACK, [note.first])

    def wait_for_ack(self, first: int, tag: int) -> None:
        """Block until the neighbour has read the piece of which that is the first address.

        Raises:
            RuntimeError: It has ended or left.
        """
        answer = tag, first
        while answer not in self._acks:
            self._take_message()
        count = self._acks.pop(answer)
        if count > 1:
            self._acks[answer] = count - 1

    def _take_message(self) -> None:
        try:
            message = self._connection.recv(_MAX_MESSAGE_BYTES)
        except BlockingIOError as error:
            raise RuntimeError(f"no word from rank {self._rank} within {self._patience_s:g} s") from error
        except OSError as error:
            raise RuntimeError(f"no word from rank {self._rank}: {error.strerror}") from error
        if not message:
            raise RuntimeError(f"rank {self._rank} has closed the connection")
        tag, num_bytes = _HEAD.unpack_from(message)
        spread = SourceVec(array(_ADDRESS, message[_HEAD.size :]), num_bytes)
        if num_bytes == _ACK:
            answer = tag, spread.first
            self._acks[answer] = self._acks.get(answer, 0) + 1
        else:
            self._descriptors.setdefault(tag, deque()).append(spread)

    def _write(self, tag: int, num_bytes: int, addresses: Sequence[int]) -> None:
        """Without waiting for a neighbour that writes as much itself: what it has written is taken in meanwhile."""
        message = _HEAD.pack(tag, num_bytes) + array(_ADDRESS, addresses).tobytes()
        while True:
            try:
                self._connection.send(message, _AT_ONCE)
                return
            except BlockingIOError:
                self._wait_for_room()
            except OSError as error:
                raise RuntimeError(f"rank {self._rank} cannot be told: {error.strerror}") from error

    def _wait_for_room(self) -> None:
        poll = select.poll()
        poll.register(self._connection, select.POLLIN | select.POLLOUT)
        events = poll.poll(1000 * self._patience_s)
        if not events:
            raise RuntimeError(f"rank {self._rank} has taken nothing in for {self._patience_s:g} s")
        if events[0][1] != select.POLLOUT:
            self._take_message()

    def cancel(self) -> None:
        """End whatever waits for the neighbour, here and there, with an error. From any thread."""
        with suppress(OSError):  # of a connection that has ended
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of the connection; nothing may be under way."""
        self._finalizer()


class SendWork:
    """A piece that a neighbour is to read."""

    __slots__ = ("_first", "_neighbour", "_piece", "_tag")

    def __init__(self, neighbour: PeerConnection, piece: torch.Tensor | SourceVec, first: int, tag: int) -> None:
        self._neighbour = neighbour
        self._piece: torch.Tensor | SourceVec | None = piece
        self._first = first
        self._tag = tag

    def wait(self) -> None:
        """Block until the piece may be overwritten."""
        piece, self._piece = self._piece, None
        if piece is not None:
            self._neighbour.wait_for_ack(self._first, self._tag)

    def is_completed(self) -> bool:
        """Whether that has been waited for."""
        return self._piece is None


class RecvWork:
    """A piece that this rank is to read."""

    __slots__ = ("_neighbour", "_out", "_tag")

    def __init__(self, neighbour: PeerConnection, out: Target, tag: int) -> None:
        self._neighbour = neighbour
        self._out: Target | None = out
        self._tag = tag

    def wait(self) -> None:
        """Block until the piece is here."""
        out, self._out = self._out, None
        if out is not None:
            self._neighbour.read(out, self._tag)

    def is_completed(self) -> bool:
        """Whether that has been waited for."""
        return self._out is None


def _process_behind(connection: socket.socket) -> int:
    """Number of the process at the other end, in this one's namespace; 0 where it has none."""
    process, _, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(process)


Gather = Callable[[torch.Tensor], torch.Tensor]  # [n] int64 of this rank to [ranks, n]
_INDEX = struct.Struct("=i")


def handshake(ranks: Sequence[int], index: int, gather: Gather, timeout_s: timedelta) -> dict[int, PeerConnection]:
    """Connect all ranks of a group, if each can read the others' memory. Collective.

    1. Every rank listens, and tells where, and a number that nobody can guess, and the address of it.
    2. It connects to those behind it, and tells whether it could.
    3. It accepts those before it, reads the number of each rank, and tells whether it could.

    Args:
        ranks: Of the group.
        index: Which of them this is.
        gather: Tells the others something.
        timeout_s: How long a rank waits for another one in any transfer.

    Returns:
        The others by index; none on any rank where one of them cannot read another's memory.

    Cost:
        Three gathers of some bytes, and a socket for each other rank.
    """
    if sys.platform != "linux":
        return {}
    name, number = secrets.randbits(62), torch.tensor([secrets.randbits(62)])
    connections: dict[int, socket.socket] = {}
    with _listen(name, len(ranks)) or nullcontext() as listener:
        told = gather(torch.tensor([name, number.data_ptr(), int(number)])).tolist()
        others = range(index + 1, len(ranks))
        if _all_agree(gather, all(_connect(connections, index, other, told[other][0]) for other in others)):
            is_complete = listener is not None and _accept(connections, listener, index)
            neighbours = {}
            if is_complete:
                neighbours = {o: PeerConnection(each, ranks[o], timeout_s) for o, each in connections.items()}
            can_read = all(_is_number(each, *told[other][1:]) for other, each in neighbours.items())
            if _all_agree(gather, is_complete and can_read):
                return neighbours
    for connection in connections.values():
        connection.close()
    return {}


def _all_agree(gather: Gather, is_possible: bool) -> bool:
    return bool(gather(torch.tensor([int(is_possible)])).all())


def _address(name: int) -> str:
    return f"\0mics {name:x}"  # of no file


def _listen(name: int, backlog: int) -> socket.socket | None:
    """Listen under that name; where this process cannot, nobody will find it."""
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


def _connect(connections: dict[int, socket.socket], index: int, other: int, name: int) -> bool:
    try:
        connection = connections[other] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect(_address(name))
        connection.send(_INDEX.pack(index))
    except OSError:
        return False
    return True


def _accept(connections: dict[int, socket.socket], listener: socket.socket, index: int) -> bool:
    """Accept those before this rank, all of which have connected and have said who they are."""
    expected = set(range(index))
    try:
        for _ in range(index):
            connection, _ = listener.accept()
            (other,) = _INDEX.unpack(connection.recv(_INDEX.size, socket.MSG_DONTWAIT))
            connection.setblocking(True)
            if other not in expected:  # a stranger
                connection.close()
                return False
            expected.remove(other)
            connections[other] = connection
    except (OSError, struct.error):
        return False
    return True


def _is_number(neighbour: PeerConnection, address: int, number: int) -> bool:
    found = torch.zeros(1, dtype=torch.int64)
    try:
        readv.read_into(found, neighbour.process, [address])
    except OSError:
        return False
    return int(found) == number
