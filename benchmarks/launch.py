"""How do the ranks of all nodes start, and what ends them?

Each rank is an ordinary process with the environment that an ordinary launcher gives it. The first one that fails ends
the others within seconds: they would wait for it in their next collective until its timeout.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.testbed import UPLINK, Node, Testbed

_ROOT = Path(__file__).parents[1]
_POLL_S = 0.05
_GRACE_S = 1.0  # between asking a rank to end and ending it
_SHOWN_LINES = 40


class RankFailedError(RuntimeError):
    """A rank ended with an error, or did not end in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What every rank runs.

    Attributes:
        command: Program and arguments.
        ranks_per_node: How many on each node.
        timeout_s: For all of them together.
        env: Added to this process's environment and the launcher's variables.
        port: Of rank 0's store, on node 0.
    """

    command: list[str]
    ranks_per_node: int
    timeout_s: float
    env: Mapping[str, str] = field(default_factory=dict)
    port: int = 29500


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rank:
    rank: int
    process: subprocess.Popen[bytes]
    output: Path

    def describe(self, problem: str) -> str:
        lines = self.output.read_text(errors="replace").splitlines()
        return "\n".join([f"Rank {self.rank} {problem}. The end of its output:", *lines[-_SHOWN_LINES:]])


def launch(bed: Testbed, job: Launch) -> list[str]:
    """Run a command on every rank of every node, and wait.

    Returns:
        What each rank wrote, stdout and stderr, in rank order.

    Raises:
        RankFailedError: A rank failed (its output is in the message), or time is over. All ranks have ended.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        ranks: list[_Rank] = []
        try:
            for node in bed.nodes:
                for local_rank in range(job.ranks_per_node):
                    ranks.append(_start(bed, node, local_rank, job, Path(folder)))
            _wait(ranks, job.timeout_s)
            return [rank.output.read_text(errors="replace") for rank in ranks]
        finally:
            _end(ranks)


def environment(bed: Testbed, node: Node, local_rank: int, job: Launch) -> dict[str, str]:
    """The variables that a launcher sets for one rank, which imports from this tree first."""
    return {
        "RANK": str(node.index * job.ranks_per_node + local_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(len(bed.nodes) * job.ranks_per_node),
        "LOCAL_WORLD_SIZE": str(job.ranks_per_node),
        "GROUP_RANK": str(node.index),
        "MASTER_ADDR": bed.nodes[0].address,
        "MASTER_PORT": str(job.port),
        "GLOO_SOCKET_IFNAME": UPLINK,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")])),
    }


def _start(bed: Testbed, node: Node, local_rank: int, job: Launch, folder: Path) -> _Rank:
    variables = environment(bed, node, local_rank, job)
    path = folder / variables["RANK"]
    with path.open("wb") as output:
        process = subprocess.Popen(
            node.command(job.command),
            env={**os.environ, **variables, **job.env},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that its own children can be ended with it
        )
    _inherit_nice(process.pid)
    return _Rank(rank=int(variables["RANK"]), process=process, output=path)


def _inherit_nice(pid: int) -> None:
    """Give a rank's session the niceness of this process.

    Linux divides the CPU between sessions first (autogroups), each with a niceness of its own, and ranks are sessions.
    """
    path = Path(f"/proc/{pid}/autogroup")
    if path.exists():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            path.write_text(str(os.getpriority(os.PRIO_PROCESS, 0)))


def _wait(ranks: list[_Rank], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while any(rank.process.poll() is None for rank in ranks):
        _raise_for_failed(ranks)
        if time.monotonic() > deadline:
            late = next(rank for rank in ranks if rank.process.poll() is None)
            raise RankFailedError(late.describe(f"has not ended after {timeout_s:g} s"))
        time.sleep(_POLL_S)
    _raise_for_failed(ranks)


def _raise_for_failed(ranks: list[_Rank]) -> None:
    failed = [rank for rank in ranks if rank.process.poll()]
    if failed:
        raise RankFailedError("\n\n".join(rank.describe(f"ended with {rank.process.returncode}") for rank in failed))


def _end(ranks: list[_Rank]) -> None:
    for rank in ranks:
        _signal(rank, signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_S
    while any(rank.process.poll() is None for rank in ranks) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    for rank in ranks:
        _signal(rank, signal.SIGKILL)
        rank.process.wait()


def _signal(rank: _Rank, number: signal.Signals) -> None:
    if rank.process.poll() is None:
        os.killpg(rank.process.pid, number)
