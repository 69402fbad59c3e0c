"""Do ranks of one node read the right numbers, and nothing where they may not, or where the other has gone?"""

import ctypes
import mmap
import os
import signal
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from mics_strategy import ShardConfig
from mics_strategy.comm import peer_memory
from mics_strategy.comm.peer_memory import PeerConnection
from mics_strategy.errors import CommunicationError
from tests import models
from tests.comm.networks import Network
from tests.engine.counting import CountC10d
from tests.engine.training import Run, start
from tests.ranks import RankContext, RankError, RankPool

_PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
pytestmark = [
    pytest.mark.wide,
    pytest.mark.skipif(
        _PTRACE_SCOPE.exists() and _PTRACE_SCOPE.read_text().strip() != "0",
        reason="this kernel lets no process read another, so ranks send",
    ),
]

FP32 = torch.float32
TIMEOUT_S = 20.0
READ = peer_memory.read_into


@contextmanager
def connected_pair() -> Iterator[tuple[PeerConnection, PeerConnection]]:
    """Two connections to each other, in one process, which reads its own memory."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pair = PeerConnection(one, 1), PeerConnection(other, 0)
    try:
        yield pair
    finally:
        for each in pair:
            each.close()


@pytest.mark.parametrize("numel", [1, 3, 1000, 3_000_000])
def test_a_piece_is_read(numel: int) -> None:
    piece, out = torch.randn(numel), torch.full((numel,), torch.nan)
    with connected_pair() as (one, other):
        recv, send = other.post_recv(out, 2), one.post_send(piece, 2)
        recv.wait()
        send.wait()
    assert torch.equal(out, piece)


def test_pieces_of_a_tag_come_in_the_order_of_sending_and_others_when_they_are_asked_for() -> None:
    outs = [torch.zeros(2) for _ in range(4)]
    with connected_pair() as (one, other):
        sends = [one.post_send(torch.full((2,), float(number)), tag=number // 2) for number in range(4)]
        for place in (2, 0, 3, 1):
            other.post_recv(outs[place], tag=place // 2).wait()
        for send in reversed(sends):
            send.wait()
    assert [out.tolist() for out in outs] == [[float(number)] * 2 for number in range(4)]


def test_more_descriptors_than_a_socket_holds_may_be_in_flight_both_ways() -> None:
    count, values = 5000, torch.arange(5000.0)
    outs = [torch.zeros(count), torch.zeros(count)]

    def exchange(connection: PeerConnection, out: Tensor) -> None:
        sends = [connection.post_send(values[n : n + 1], 1) for n in range(count)]
        for n in range(count):
            connection.post_recv(out[n : n + 1], 1).wait()
        for send in sends:
            send.wait()

    with connected_pair() as pair:
        threads = [threading.Thread(target=exchange, args=each) for each in zip(pair, outs, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
    assert all(torch.equal(out, values) for out in outs)


def test_a_circle_of_senders_goes_on_when_all_sockets_are_full() -> None:
    """Rank 0 sends to 1, 1 to 2, 2 to 0, each more than a socket holds before it receives anything."""
    count, values = 1000, torch.arange(1000.0)
    outs = [torch.zeros(count) for _ in range(3)]
    groups = [weakref.WeakSet[PeerConnection]() for _ in range(3)]
    to_next, to_previous = {}, {}
    for rank in range(3):
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        following = (rank + 1) % 3
        to_next[rank] = PeerConnection(one, following, group=groups[rank])
        to_previous[following] = PeerConnection(other, rank, group=groups[following])

    def exchange(rank: int) -> None:
        sends = [to_next[rank].post_send(values[n : n + 1], 1) for n in range(count)]
        for n in range(count):
            to_previous[rank].post_recv(outs[rank][n : n + 1], 1).wait()
        for send in sends:
            send.wait()

    threads = [threading.Thread(target=exchange, args=(rank,), daemon=True) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert all(torch.equal(out, values) for out in outs)
    for connection in [*to_next.values(), *to_previous.values()]:
        connection.close()


def test_a_sender_goes_on_when_a_third_rank_has_ended() -> None:
    count, values, outs = 1000, torch.arange(1000.0), torch.zeros(1000)
    group = weakref.WeakSet[PeerConnection]()
    (one, other), (third, its_end) = (socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2))
    sender, of_third = PeerConnection(one, 1, group=group), PeerConnection(third, 2, group=group)
    receiver, sends = PeerConnection(other, 0), []
    its_end.close()

    def send_all() -> None:
        sends.extend([sender.post_send(values[n : n + 1], 1) for n in range(count)])
        for send in sends:
            send.wait()

    thread = threading.Thread(target=send_all, daemon=True)
    thread.start()
    thread.join(0.2)  # until the socket is full
    assert not sends
    for n in range(count):
        receiver.post_recv(outs[n : n + 1], 1).wait()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    assert len(sends) == count
    assert torch.equal(outs, values)
    with pytest.raises(RuntimeError, match="rank 2 has closed the connection"):
        of_third.post_recv(torch.zeros(1), 1).wait()
    for connection in (sender, of_third, receiver):
        connection.close()


def test_a_dropped_connection_is_closed_at_once() -> None:
    """Without waiting for the garbage collector, although connections of a group know each other."""
    (one, other), (third, its_end) = (socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2))
    group = weakref.WeakSet[PeerConnection]()
    connections = [PeerConnection(one, 1, group=group), PeerConnection(third, 2, group=group)]
    del one, third, group
    connections.clear()
    assert (other.recv(1), its_end.recv(1)) == (b"", b"")
    other.close()
    its_end.close()


def test_a_piece_may_not_be_overwritten_before_it_was_read() -> None:
    with connected_pair() as (one, other):
        send, is_free = one.post_send(torch.ones(3), 1), threading.Event()
        thread = threading.Thread(target=lambda: (send.wait(), is_free.set()))
        thread.start()
        assert not is_free.wait(0.1)
        other.post_recv(torch.zeros(3), 1).wait()
        assert is_free.wait(TIMEOUT_S)
        thread.join()


def test_a_piece_of_another_size_is_found() -> None:
    with connected_pair() as (one, other):
        one.post_send(torch.zeros(5), 1)
        with pytest.raises(RuntimeError, match="rank 0 sends 20 bytes, but 16 are expected"):
            other.post_recv(torch.zeros(4), 1).wait()


@pytest.mark.parametrize(
    ("ends", "of_other"),
    [(PeerConnection.cancel, False), (PeerConnection.cancel, True), (PeerConnection.close, True)],
    ids=["cancelled-here", "cancelled-there", "closed-there"],
)
def test_who_waits_is_woken(ends: Callable[[PeerConnection], None], of_other: bool) -> None:
    errors: list[str] = []
    with connected_pair() as (one, other):

        def wait() -> None:
            with pytest.raises(RuntimeError) as failure:
                one.post_recv(torch.zeros(1), 1).wait()
            errors.append(str(failure.value))

        thread = threading.Thread(target=wait)
        thread.start()
        ends(other if of_other else one)
        thread.join(TIMEOUT_S)
        with pytest.raises(RuntimeError, match="no message can be sent to rank 1"):
            one.post_send(torch.zeros(1), 1)
    assert errors == ["rank 1 has closed the connection"]


def test_memory_is_read_in_parts_that_one_call_can_copy() -> None:
    piece, out = torch.arange(100), torch.zeros(100, dtype=torch.int64)
    with mock.patch.object(peer_memory, "_MAX_BYTES", 60):
        peer_memory.read_into(out, os.getpid(), piece.data_ptr())
    assert torch.equal(out, piece)


def test_a_read_beyond_what_is_there_says_how_far_it_came() -> None:
    with mmap.mmap(-1, 2 * mmap.PAGESIZE) as memory:
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        out = torch.zeros(2 * mmap.PAGESIZE, dtype=torch.uint8)
        peer_memory.read_into(out, os.getpid(), address)
        ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + mmap.PAGESIZE), mmap.PAGESIZE, 0)
        with pytest.raises(
            OSError, match=f"the mapped memory ends, after {mmap.PAGESIZE} of {2 * mmap.PAGESIZE} bytes"
        ):
            peer_memory.read_into(out, os.getpid(), address)
        ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + mmap.PAGESIZE), mmap.PAGESIZE, 3)
        del address


def test_a_read_that_the_kernel_refuses_says_why() -> None:
    with pytest.raises(OSError, match="Bad address, after 0 of 4 bytes"):
        peer_memory.read_into(torch.zeros(1), os.getpid(), 8)


def forbidding(ctx: RankContext, what: str) -> AbstractContextManager[object]:
    """On rank 1 reading fails, as the kernel makes it, or there are no more sockets."""
    if what == "nothing" or ctx.rank != 1:
        return nullcontext()
    where, name = (peer_memory, "read_into") if what == "reading" else (socket, "socket")
    return mock.patch.object(where, name, side_effect=PermissionError(1, "not permitted"))


def counted(ctx: RankContext, forbidden: str) -> tuple[int, int, list[Tensor]]:
    """What ranks of a node read and send over sockets, and the results."""
    with forbidding(ctx, forbidden):
        network = Network(ctx)
    one, other = network.one, network.other
    numel, size = 5000, one.size
    one.reserve("all_gather", one.size * numel, FP32, FP32)
    other.reserve("reduce_scatter", size * numel, FP32, FP32)
    other.reserve("all_reduce", numel, torch.bfloat16, FP32)
    network.lend()
    results = [torch.zeros(size * numel), torch.zeros(numel), network.values(one.index, numel)]
    with CountC10d() as count:
        one.all_gather(results[0], network.values(one.index, numel), "block").wait()
        other.reduce_scatter(results[1], network.values(one.index, size * numel), False, "block").wait()
        other.all_reduce(results[2], torch.bfloat16, "block").wait()
    return count.names["read"], count.names["send"], results


@pytest.mark.parametrize("forbidden", ["reading", "connecting"])
@pytest.mark.parametrize(("world", "per_node"), [(2, 2), (4, 2), (3, 3), (2, 1)])
def test_where_one_may_not_read_its_node_sends_and_finds_the_same(
    ranks: RankPool, world: int, per_node: int, forbidden: str
) -> None:
    reading = ranks(world, counted, "nothing", ranks_per_node=per_node)
    partly = ranks(world, counted, forbidden, ranks_per_node=per_node)
    for rank, ((read, sent, results), (still_read, more_sent, same)) in enumerate(zip(reading, partly, strict=True)):
        assert (bool(read), bool(sent)) == (per_node > 1, world > per_node)
        is_on_its_node = rank // per_node == 1 // per_node
        assert (still_read, more_sent) == ((0, read + sent) if is_on_its_node else (read, sent))
        assert all(torch.equal(a, b) for a, b in zip(results, same, strict=True))


def lose_a_rank(ctx: RankContext, dies: str) -> None:
    """Rank 1 dies while rank 0 reads its memory, or has just read it."""
    network = Network(ctx)
    one, pid_file = network.one, ctx.tmp_path / "pid"
    if ctx.rank == 1:
        pid_file.write_text(str(os.getpid()))
    assert network.gather(8)

    def read_into(out: Tensor, process: int, address: int) -> None:
        if dies == "before":
            os.kill(int(pid_file.read_text()), signal.SIGKILL)
        READ(out, process, address)
        if dies == "after":
            os.kill(int(pid_file.read_text()), signal.SIGKILL)

    with mock.patch.object(peer_memory, "read_into", read_into if ctx.rank == 0 else READ):
        for _ in range(2):
            one.all_gather(torch.empty(one.size * 8), torch.ones(8), "layers.3").wait()


@pytest.mark.parametrize("dies", ["before", "after"])
def test_when_a_rank_dies_while_it_is_read_the_others_say_so(ranks: RankPool, dies: str) -> None:
    with pytest.raises(RankError) as failure:
        ranks(4, lose_a_rank, dies, ranks_per_node=2, timeout_s=TIMEOUT_S)
    errors = failure.value.by_rank
    assert isinstance(errors.pop(1), ChildProcessError)
    assert sorted(errors) == [0, 2, 3]
    assert all(isinstance(error, CommunicationError) for error in errors.values())
    assert "All-gather of layers.3 over" in str(errors[0])
    assert "rank 1" in str(errors[0])


def trained(ctx: RankContext, forbidden: str, run: Run) -> dict[str, Tensor]:
    """The parameters after some steps."""
    with forbidding(ctx, forbidden):
        training = start(ctx, run)
    for step in range(run.steps):
        training.step(step)
    return training.parameters()


READERS = {
    "mics": (models.transformer, ShardConfig.preset("mics")),
    "zero3": (models.transformer, ShardConfig.preset("zero3")),
    "three-slots": (models.transformer, ShardConfig.preset("mics", prefetch=2)),
    "tied": (models.tied, ShardConfig.preset("mics")),
    "frozen": (models.frozen, ShardConfig.preset("mics")),
    "scalar": (models.scalar, ShardConfig.preset("mics")),
    "shared": (models.shared, ShardConfig.preset("mics")),
    "images": (models.conv_bn, ShardConfig.preset("mics")),
    "bf16": (models.transformer, ShardConfig.preset("mics", param_dtype="bfloat16")),
    "secondary": (models.transformer, ShardConfig.preset("zeropp-hpz")),
    "whole-parameters": (models.transformer, ShardConfig.preset("paro-nii")),
    "optimizer-of-all": (models.transformer, ShardConfig.preset("mics", optimizer="world")),
}


@pytest.mark.wide(every=3)
@pytest.mark.parametrize("name", READERS)
def test_training_ends_with_the_same_bits_whether_ranks_read_or_send(ranks: RankPool, name: str) -> None:
    case, config = READERS[name]
    run = Run(case=case, config=config, accumulation=2)
    reading, sending = (ranks(4, trained, what, run, ranks_per_node=2) for what in ("nothing", "reading"))
    for one, other in zip(reading, sending, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
