"""A connection to each other process of a job, which the kernel closes when that process dies.

So the others know of a death within milliseconds, and for certain. Nothing is sent but a greeting and a farewell. Where
a connection could not be made, where a host loses its power, and where a process is stopped, only its silence shows
(see `membership`).
"""

from __future__ import annotations

import os
import selectors
import socket
import weakref
from collections.abc import Mapping
from contextlib import suppress

from torch._C._distributed_c10d import TCPStore

_CONNECT_TIMEOUT_S = 2.0
_FAREWELL = b"left"
_NUM_DIGITS = 8
Address = tuple[str, int]


class PeerSockets:
    """The connections of one process.

    Args:
        number: Number of this process.
        store: Store of the job, which shows by which interface this process reaches others.

    Attributes:
        address: Host and port on which this process listens.
        gone: Numbers of the processes whose connections have ended.
        died: Those of them that had not said farewell.
    """

    def __init__(self, number: int, store: object) -> None:
        self._number = number
        self._listener = socket.create_server((_own_host(store), 0), backlog=1024)
        self.address: Address = self._listener.getsockname()[:2]
        self.gone: set[int] = set()
        self.died: set[int] = set()
        self._token = b""
        self._peers: dict[socket.socket, int | None] = {}  # None until the peer has sent its greeting
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        weak = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _drop(weak()))

    @property
    def num_known(self) -> int:
        """Number of processes that are connected and have sent their greeting."""
        return sum(number is not None for number in self._peers.values())

    def connect(self, addresses: Mapping[int, Address], token: str) -> None:
        """Connect to the processes with lower numbers; the others connect to this one.

        Args:
            addresses: Address of each process, by its number.
            token: Secret of the job, without which a greeting does not count.
        """
        self._token = token.encode()
        for address in [address for number, address in addresses.items() if number < self._number]:
            with suppress(OSError):  # unreachable: its silence will show
                self._greet(socket.create_connection(address, _CONNECT_TIMEOUT_S))

    def _greet(self, peer: socket.socket) -> None:
        self._peers[peer] = None
        self._selector.register(peer, selectors.EVENT_READ)
        peer.sendall(self._token + b"%0*d" % (_NUM_DIGITS, self._number))

    def poll(self, timeout_s: float) -> None:
        """Look at what has arrived, or wait for it.

        Args:
            timeout_s: Longest wait, seconds.
        """
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is self._listener:
                with suppress(OSError):
                    self._greet(self._listener.accept()[0])
            elif isinstance(key.fileobj, socket.socket):
                self._receive(key.fileobj)

    def _receive(self, peer: socket.socket) -> None:
        number, received = self._peers[peer], b""
        with suppress(OSError):
            received = peer.recv(len(self._token) + _NUM_DIGITS)
        if number is None and received.startswith(self._token) and received[len(self._token) :].isdigit():
            self._peers[peer] = int(received[len(self._token) :])
            return
        self._selector.unregister(peer)
        del self._peers[peer]
        peer.close()
        if number is not None:
            self.gone.add(number)
            self.died.update(() if received == _FAREWELL else (number,))

    def close(self) -> None:
        """Say farewell, and close the connections."""
        for peer in self._peers:
            with suppress(OSError):
                peer.sendall(_FAREWELL)
            peer.close()
        self._listener.close()
        self._selector.close()


def _drop(sockets: PeerSockets | None) -> None:
    """Close the connections in a forked child (a worker of a DataLoader), which may outlive its parent."""
    for peer in (*sockets._peers, sockets._listener) if sockets is not None else ():
        peer.close()


def _own_host(store: object) -> str:
    """The address by which this host reaches the one with the store."""
    if not isinstance(store, TCPStore):
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((store.host, store.port))  # sends nothing
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])
