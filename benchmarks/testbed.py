"""How is a cluster with slow links made on one machine?

A node is a network namespace. Each has one interface, `uplink`, to a bridge; traffic control lets R bits a second pass
it in either direction. Ranks of a node share its namespace, and the kernel routes what they send to their own address
over its loopback, so only what leaves the node is slow and is counted on the uplink. The bridge has a namespace, too:
nothing appears among the machine's own interfaces, and two testbeds can use the same addresses.

The names of the namespaces say which process owns them, so that a later testbed can remove what a killed one left.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

UPLINK = "uplink"
_PREFIX = "slow-links"
_TOOLS = ("ip", "tc", "setpriv")
_BURST_BYTES = 128 * 1024  # two of the largest packets: less, and the loopback's could never pass
_LONGEST_QUEUE_MS = 200  # then packets are dropped, and TCP sends more slowly


class TestbedError(RuntimeError):
    """The testbed cannot be made here."""

    __test__ = False  # pytest: not a test


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkBytes:
    """What has passed one interface since it exists, headers included."""

    sent: int
    received: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One namespace.

    Attributes:
        index: From 0.
        namespace: Its name.
        address: Of its uplink.
    """

    index: int
    namespace: str
    address: str

    def command(self, arguments: list[str]) -> list[str]:
        """A command line that runs another one on this node, and ends it when its starter dies."""
        return ["setpriv", "--pdeathsig", "KILL", "ip", "netns", "exec", self.namespace, *arguments]

    def link_bytes(self, interface: str = UPLINK) -> LinkBytes:
        """What the node has sent to the others and received from them until now; or over its loopback, `lo`."""
        return parse_link_bytes(_call("ip", "netns", "exec", self.namespace, "cat", "/proc/net/dev"), interface)


@dataclass(frozen=True, slots=True, kw_only=True)
class Testbed:
    """Nodes that reach each other over slow links. Made by `make_testbed`."""

    __test__ = False  # pytest: not a test

    nodes: tuple[Node, ...]

    def processes(self) -> list[int]:
        """Ids of all processes that run on the nodes."""
        return [pid for node in self.nodes for pid in _processes(node.namespace)]


@contextmanager
def make_testbed(*, nodes: int, rate_mbit: float, loopback_mbit: float | None = None) -> Iterator[Testbed]:
    """Make nodes, and remove them and every process on them however the block ends.

    In the main thread SIGTERM leaves the block as an exception does. Leftovers of owners that died are removed first.

    Args:
        nodes: How many.
        rate_mbit: What an uplink lets pass in each direction, in 1e6 bits a second, headers included.
        loopback_mbit: The same for what ranks of one node send each other; None does not limit it.

    Yields:
        The testbed, with all links up.

    Raises:
        TestbedError: No nodes, not root, no iproute2, or the kernel refuses.
    """
    if nodes < 1 or rate_mbit <= 0:
        raise TestbedError(
            f"`nodes={nodes}, rate_mbit={rate_mbit}` is no testbed. Use 1 node or more and a rate above 0."
        )
    _require_tools()
    remove_leftovers()
    owner = f"{_PREFIX}.{os.getpid()}.{_start_time(os.getpid())}.{secrets.token_hex(4)}"
    names = [f"{owner}.node{index}" for index in range(nodes)]
    switch = f"{owner}.switch"
    with _termination_raises():
        try:
            _add_switch(switch)
            made = tuple(_add_node(name, index, switch, rate_mbit) for index, name in enumerate(names))
            if loopback_mbit is not None:
                for node in made:
                    _limit(node.namespace, "lo", loopback_mbit)
            yield Testbed(nodes=made)
        finally:
            with _signals_wait():
                _remove([*names, switch])


def parse_link_bytes(table: str, interface: str) -> LinkBytes:
    """The counters of one interface in the text of /proc/net/dev."""
    for line in table.splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            fields = counters.split()
            return LinkBytes(received=int(fields[0]), sent=int(fields[8]))
    raise TestbedError(f"There is no interface {interface!r} here. Read the counters on a node of the testbed.")


def own_link_bytes() -> LinkBytes:
    """What the node on which this process runs has sent and received over its uplink until now."""
    return parse_link_bytes(Path("/proc/self/net/dev").read_text(), UPLINK)


def remove_leftovers() -> list[str]:
    """Remove the namespaces whose owner is dead, with the processes in them.

    Returns:
        Their names.
    """
    listed = [line.split()[0] for line in _call("ip", "netns", "list").splitlines() if line.strip()]
    dead = [name for name in listed if name.startswith(f"{_PREFIX}.") and not _is_owner_alive(name)]
    _remove(dead)
    return dead


def _is_owner_alive(name: str) -> bool:
    _, pid, start_time, *_ = name.split(".")
    return _start_time(int(pid)) == start_time


def _start_time(pid: int) -> str:
    """When a process started, in ticks since the machine did; "" where there is none. A number may be used again."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[19]


def _require_tools() -> None:
    if os.geteuid() != 0:
        raise TestbedError(
            f"A testbed was asked for, and this process runs as user {os.geteuid()}: network namespaces are made by "
            "root. Run the command as root."
        )
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        raise TestbedError(
            f"A testbed was asked for, and {', '.join(missing)} is not installed. Install iproute2 and util-linux."
        )


def _call(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise TestbedError(
            f"`{' '.join(command)}` failed with {done.returncode}: {done.stderr.strip()}. Run as root, on a kernel "
            "with network namespaces and, for containers, with the capabilities NET_ADMIN and SYS_ADMIN."
        )
    return done.stdout


def _ip(namespace: str, command: str) -> None:
    _call("ip", "-n", namespace, *command.split())


def _add_switch(switch: str) -> None:
    _call("ip", "netns", "add", switch)
    _ip(switch, "link add name bridge type bridge")
    _ip(switch, "link set dev bridge up")


def _add_node(name: str, index: int, switch: str, rate_mbit: float) -> Node:
    address, port = f"10.0.{index // 250}.{index % 250 + 1}", f"node{index}"
    _call("ip", "netns", "add", name)
    _ip(name, "link set dev lo up")
    _ip(name, f"link add name {UPLINK} type veth peer name {port} netns {switch}")
    _ip(switch, f"link set dev {port} master bridge up")
    _ip(name, f"addr add {address}/16 dev {UPLINK}")
    _ip(name, f"link set dev {UPLINK} up")
    _limit(name, UPLINK, rate_mbit)
    _limit(switch, port, rate_mbit)
    return Node(index=index, namespace=name, address=address)


def _limit(namespace: str, interface: str, rate_mbit: float) -> None:
    """Shape what leaves by `interface`."""
    limit = f"rate {round(rate_mbit * 1000)}kbit burst {_BURST_BYTES} latency {_LONGEST_QUEUE_MS}ms"
    _call("tc", "-n", namespace, *f"qdisc add dev {interface} root tbf {limit}".split())


def _processes(namespace: str) -> list[int]:
    done = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
    return [int(pid) for pid in re.findall(r"\d+", done.stdout)]


def _remove(names: list[str]) -> None:
    """Remove namespaces that may or may not exist; with the last one of a link the link goes."""
    for name in names:
        for pid in _processes(name):
            _kill(pid)
    for name in names:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # has ended meanwhile


@contextmanager
def _termination_raises() -> Iterator[None]:
    """Make SIGTERM an exception, as SIGINT is one; in the main thread, which alone may say what signals do."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Let no signal interrupt the removal."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
