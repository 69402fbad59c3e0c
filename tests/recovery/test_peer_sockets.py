"""A death shows by the connection, a farewell is no death, and strangers do not count."""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mics_strategy.recovery.peer_sockets import PeerSockets

TOKEN = "f" * 32


@contextmanager
def connected() -> Iterator[tuple[PeerSockets, PeerSockets]]:
    first, second = PeerSockets(0, None), PeerSockets(1, None)
    addresses = {0: first.address, 1: second.address}
    first.connect(addresses, TOKEN)
    second.connect(addresses, TOKEN)
    until(lambda: first.num_known == 1 and second.num_known == 1, first, second)
    try:
        yield first, second
    finally:
        first.close()
        second.close()


def until(is_met: Callable[[], bool], *peers: PeerSockets) -> None:
    deadline_s = time.monotonic() + 5.0
    while not is_met() and time.monotonic() < deadline_s:
        for peer in peers:
            peer.poll(0.01)
    assert is_met()


def test_a_connection_that_ends_is_a_death() -> None:
    with connected() as (first, _):
        with socket.create_connection(first.address) as third:
            third.sendall(TOKEN.encode() + b"00000002")
            until(lambda: first.num_known == 2, first)
        until(lambda: first.gone == {2}, first)
        assert first.died == {2}


def test_a_farewell_is_no_death() -> None:
    with connected() as (first, second):
        second.close()
        until(lambda: first.gone == {1}, first)
        assert first.died == set()


def test_who_does_not_know_the_token_is_nobody() -> None:
    with connected() as (first, _):
        with socket.create_connection(first.address) as stranger:
            stranger.sendall(b"0" * 32 + b"00000007")
            first.poll(0.1)
            first.poll(0.1)
        first.poll(0.1)
        first.poll(0.1)
        assert (first.gone, first.num_known) == (set(), 1)
