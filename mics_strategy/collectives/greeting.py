"""Can all ranks of a group read one another's memory?

Found out once, by trying, with every pair that would do it, and all ranks do alike. What forbids it (see
`process_memory`), another system than Linux, a container of its own: then numbers go through the group's sockets as
between nodes.
"""

from __future__ import annotations

import secrets
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta

import torch

from mics_strategy.collectives import process_memory
from mics_strategy.collectives.neighbour import PeerConnection

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
        process_memory.read_into(found, neighbour.process, [address])
    except OSError:
        return False
    return int(found) == number
