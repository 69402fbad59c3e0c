"""Are the links as slow as they should be, and is everything gone afterwards?"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.testbed import (
    _BURST_BYTES,
    LinkBytes,
    Node,
    Testbed,
    TestbedError,
    make_testbed,
    parse_link_bytes,
    remove_leftovers,
)
from tests.benchmarks.needs import needs_testbed

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
MB = 10**6
FAST_MBIT, SLOW_MBIT = 400, 20
SLOWEST_S = 8 * (2 * MB - _BURST_BYTES) / (1e6 * SLOW_MBIT)  # no 2 MB pass the slow link sooner

RECEIVE = """
import socket, sys
server = socket.create_server((sys.argv[1], 5000))
print("listening", flush=True)
connection, _ = server.accept()
left = int(sys.argv[2])
while left:
    left -= len(connection.recv(min(left, 1 << 20)))
connection.sendall(b"x")
"""
SEND = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 5000))
start = time.perf_counter()
connection.sendall(bytes(int(sys.argv[2])))
connection.recv(1)
print(time.perf_counter() - start)
"""
OWN = f"""
import signal, sys, time
from benchmarks.testbed import make_testbed
signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
with make_testbed(nodes=1, rate_mbit={FAST_MBIT}) as bed:
    import subprocess
    subprocess.Popen(bed.nodes[0].command(["sleep", "300"]), start_new_session=True)
    while not bed.processes():
        time.sleep(0.01)
    print(bed.nodes[0].namespace, flush=True)
    time.sleep(300)
"""


def send(source: Node, target: Node, num_bytes: int) -> float:
    """Send from one node to another (or the same), through TCP; the seconds until all has arrived."""
    arguments = [target.address, str(num_bytes)]
    receive = subprocess.Popen(target.command([sys.executable, "-c", RECEIVE, *arguments]), stdout=subprocess.PIPE)
    with receive:
        assert receive.stdout is not None
        assert receive.stdout.readline() == b"listening\n"
        sent = subprocess.run(
            source.command([sys.executable, "-c", SEND, *arguments]), capture_output=True, text=True, check=True
        )
    return float(sent.stdout)


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


def start_owner() -> tuple[subprocess.Popen[str], str]:
    """A process with a testbed and a process on it, and the namespace of its node."""
    owner = subprocess.Popen([sys.executable, "-c", OWN], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    return owner, owner.stdout.readline().strip()


def has_ended_soon(pids: list[int]) -> bool:
    deadline = time.monotonic() + 5
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def processes(namespace: str) -> list[int]:
    listed = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=True).stdout
    return [int(pid) for pid in listed.split()]


@needs_testbed
def test_what_a_link_counts_is_what_was_sent() -> None:
    with make_testbed(nodes=3, rate_mbit=FAST_MBIT) as bed:
        first, second, third = bed.nodes
        before = [node.link_bytes() for node in bed.nodes]
        send(first, second, 4 * MB)
        after = [node.link_bytes() for node in bed.nodes]
    sent = [end.sent - start.sent for start, end in zip(before, after, strict=True)]
    received = [end.received - start.received for start, end in zip(before, after, strict=True)]
    assert 4 * MB <= sent[0] <= 1.06 * 4 * MB
    assert 4 * MB <= received[1] <= 1.06 * 4 * MB
    assert max(sent[1], sent[2], received[0], received[2]) < 0.1 * MB
    assert third.index == 2


@needs_testbed
def test_what_stays_inside_a_node_does_not_pass_its_link() -> None:
    with make_testbed(nodes=1, rate_mbit=SLOW_MBIT) as bed:
        (node,) = bed.nodes
        before, before_lo = node.link_bytes(), node.link_bytes("lo")
        send(node, node, 4 * MB)
        after, after_lo = node.link_bytes(), node.link_bytes("lo")
    assert after.sent - before.sent < 0.01 * MB
    assert after_lo.sent - before_lo.sent >= 4 * MB


@needs_testbed
def test_two_testbeds_at_once_keep_their_own_rates() -> None:
    with (
        make_testbed(nodes=2, rate_mbit=SLOW_MBIT) as slow,
        make_testbed(nodes=2, rate_mbit=FAST_MBIT) as fast,
    ):
        assert send(*fast.nodes, 2 * MB) < SLOWEST_S <= send(*slow.nodes, 2 * MB)


@needs_testbed
def test_the_loopback_can_be_limited_too() -> None:
    with make_testbed(nodes=1, rate_mbit=FAST_MBIT, loopback_mbit=SLOW_MBIT) as bed:
        assert send(bed.nodes[0], bed.nodes[0], 2 * MB) >= SLOWEST_S
    with make_testbed(nodes=1, rate_mbit=FAST_MBIT) as bed:
        assert send(bed.nodes[0], bed.nodes[0], 2 * MB) < SLOWEST_S


@needs_testbed
def test_nothing_is_left_after_an_exception() -> None:
    left: list[tuple[Testbed, subprocess.Popen[bytes]]] = []
    with pytest.raises(KeyError, match="stop"):
        _fail_with_a_process_on_a_node(left)
    ((bed, sleeper),) = left
    assert sleeper.wait(timeout=5) == -signal.SIGKILL
    assert not any(node.namespace in namespaces() for node in bed.nodes)


def _fail_with_a_process_on_a_node(left: list[tuple[Testbed, subprocess.Popen[bytes]]]) -> None:
    with make_testbed(nodes=2, rate_mbit=FAST_MBIT) as bed:
        left.append((bed, subprocess.Popen(bed.nodes[1].command(["sleep", "300"]))))
        while not bed.processes():
            time.sleep(0.01)
        raise KeyError("stop")


@needs_testbed
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_nothing_is_left_after_a_signal(number: signal.Signals) -> None:
    owner, namespace = start_owner()
    with owner:
        pids = processes(namespace)
        owner.send_signal(number)
        owner.wait(timeout=20)
    assert namespace not in namespaces()
    assert len(pids) == 1
    assert has_ended_soon(pids)


@needs_testbed
def test_what_a_killed_owner_left_is_removed_and_nothing_else() -> None:
    killed, left = start_owner()
    alive, kept = start_owner()
    with killed, alive:
        pids = processes(left)
        killed.kill()
        killed.wait()
        assert left in namespaces()
        removed = remove_leftovers()
        assert left in removed
        assert kept not in removed
        assert left not in namespaces()
        assert kept in namespaces()
        alive.terminate()
    assert len(pids) == 1
    assert has_ended_soon(pids)
    assert kept not in namespaces()


def test_other_users_than_root_are_refused() -> None:
    code = (
        "import os\n"
        "from benchmarks.testbed import TestbedError, make_testbed\n"
        "if os.geteuid() == 0: os.setuid(65534)\n"
        "try:\n"
        "    make_testbed(nodes=1, rate_mbit=100).__enter__()\n"
        "except TestbedError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "was asked for" in done.stdout
    assert "runs as user" in done.stdout
    assert "Run the command as root" in done.stdout


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(TestbedError, match=r"ip, tc, setpriv is not installed\. Install iproute2"):
        make_testbed(nodes=1, rate_mbit=100).__enter__()


@pytest.mark.parametrize(("nodes", "rate_mbit"), [(0, 100), (2, 0)])
def test_a_testbed_of_nothing_is_refused(nodes: int, rate_mbit: float) -> None:
    with pytest.raises(TestbedError, match="Use 1 node or more and a rate above 0"):
        make_testbed(nodes=nodes, rate_mbit=rate_mbit).__enter__()


TABLE = """\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo:     500       5    0    0    0     0          0         0      500       5    0    0    0     0       0          0
uplink: 1234567     900    0    0    0     0          0         0  7654321     800    0    0    0     0       0          0
"""  # noqa: E501


def test_counters_are_read_by_interface() -> None:
    assert parse_link_bytes(TABLE, "uplink") == LinkBytes(sent=7654321, received=1234567)


def test_a_process_outside_a_testbed_has_no_uplink() -> None:
    with pytest.raises(TestbedError, match="no interface 'uplink' here"):
        parse_link_bytes(TABLE.replace("uplink", "eth0"), "uplink")
