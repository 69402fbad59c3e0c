"""How do two ranks of one node hand numbers to each other without sending them?

The receiver reads them where the sender has them.

1. The sender writes a note: the tag of the transfer, where the piece is, and how many bytes it has.
2. The receiver waits for the note, reads the piece into the place where it belongs, and writes back that it has.
3. The sender may overwrite the piece when that answer is there.

Notes and answers go over a socket of the two, of Unix: a thread that waits is woken by the message itself, and by the
end of the other process. Each is for one tag, so what comes for another transfer waits until somebody asks for it.
"""

from __future__ import annotations

import select
import socket
import struct
import weakref
from collections import deque
from contextlib import suppress

import torch
from torch.distributed.constants import default_pg_timeout

from mics_strategy.collectives import process_memory
from mics_strategy.collectives.process_memory import Stretches

_MESSAGE = struct.Struct("=iqq")  # tag, address, bytes
_IS_READ = -1  # in place of the bytes, in an answer
_AT_ONCE = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_CREDENTIALS = struct.Struct("=iii")  # Linux's struct ucred
_TIMEVAL = struct.Struct("@ll")
_PATIENCE_S = int(default_pg_timeout.total_seconds())  # as long as gloo waits


class Neighbour:
    """Another rank of the node, to one group. One thread at a time may use it, beside `cancel`.

    Args:
        connection: To that rank, keeping the bounds of messages; closed with this object.
        rank: Its number.

    Attributes:
        process: Its process, as this one knows it.
    """

    def __init__(self, connection: socket.socket, rank: int) -> None:
        self._connection = connection
        self._rank = rank
        self._notes: dict[int, deque[tuple[int, int]]] = {}
        self._answers: dict[tuple[int, int], int] = {}  # by tag and address; how many nobody has asked for
        self._finalizer = weakref.finalize(self, connection.close)
        self._finalizer.atexit = False  # a thread may still wait then
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.pack(_PATIENCE_S, 0))
        self.process = _process_behind(connection)

    def offer(self, piece: torch.Tensor, tag: int) -> Offer:
        """Let the neighbour read `piece`, which must stay unchanged until that is waited for."""
        self._write(tag, piece.data_ptr(), piece.numel() * piece.itemsize)
        return Offer(self, piece, tag)

    def expect(self, out: torch.Tensor | Stretches, tag: int) -> Reading:
        """Read what the neighbour offers, into `out`, when that is waited for."""
        return Reading(self, out, tag)

    def read(self, out: torch.Tensor | Stretches, tag: int) -> None:
        """Block until the neighbour has offered a piece of that tag, and read it into `out`.

        Raises:
            RuntimeError: It has ended or left, or offers something else.
        """
        while tag not in self._notes:
            self._take_message()
        address, num_bytes = self._notes[tag].popleft()
        if not self._notes[tag]:
            del self._notes[tag]
        expected = out.numel() * out.dtype.itemsize
        if num_bytes != expected:
            raise RuntimeError(f"rank {self._rank} offers {num_bytes} bytes where {expected} are expected")
        try:
            process_memory.read_into(out, self.process, address)
        except OSError as error:
            where = f"rank {self._rank} (process {self.process})"
            raise RuntimeError(f"the memory of {where} cannot be read: {error.strerror}") from error
        self._write(tag, address, _IS_READ)

    def wait_until_read(self, piece: torch.Tensor, tag: int) -> None:
        """Block until the neighbour has read a piece.

        Raises:
            RuntimeError: It has ended or left.
        """
        answer = tag, piece.data_ptr()
        while answer not in self._answers:
            self._take_message()
        count = self._answers.pop(answer)
        if count > 1:
            self._answers[answer] = count - 1

    def _take_message(self) -> None:
        try:
            message = self._connection.recv(_MESSAGE.size)
        except OSError as error:
            raise RuntimeError(f"no word from rank {self._rank}: {error.strerror}") from error
        if not message:
            raise RuntimeError(f"rank {self._rank} has closed the connection")
        tag, address, num_bytes = _MESSAGE.unpack(message)
        if num_bytes == _IS_READ:
            self._answers[tag, address] = self._answers.get((tag, address), 0) + 1
        else:
            self._notes.setdefault(tag, deque()).append((address, num_bytes))

    def _write(self, tag: int, address: int, num_bytes: int) -> None:
        """Without waiting for a neighbour that writes as much itself: what it has written is taken in meanwhile."""
        message = _MESSAGE.pack(tag, address, num_bytes)
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
        events = poll.poll(1000 * _PATIENCE_S)
        if not events:
            raise RuntimeError(f"rank {self._rank} takes nothing in")
        if events[0][1] != select.POLLOUT:
            self._take_message()

    def cancel(self) -> None:
        """End whatever waits for the neighbour, here and there, with an error. From any thread."""
        with suppress(OSError):  # of a connection that has ended
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of the connection; nothing may be under way."""
        self._finalizer()


class Offer:
    """A piece that a neighbour is to read."""

    __slots__ = ("_neighbour", "_piece", "_tag")

    def __init__(self, neighbour: Neighbour, piece: torch.Tensor, tag: int) -> None:
        self._neighbour = neighbour
        self._piece: torch.Tensor | None = piece
        self._tag = tag

    def wait(self) -> None:
        """Block until the piece may be overwritten."""
        piece, self._piece = self._piece, None
        if piece is not None:
            self._neighbour.wait_until_read(piece, self._tag)

    def is_completed(self) -> bool:
        """Whether that has been waited for."""
        return self._piece is None


class Reading:
    """A piece that this rank is to read."""

    __slots__ = ("_neighbour", "_out", "_tag")

    def __init__(self, neighbour: Neighbour, out: torch.Tensor | Stretches, tag: int) -> None:
        self._neighbour = neighbour
        self._out: torch.Tensor | Stretches | None = out
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
