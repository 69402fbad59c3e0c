"""How does a test run on several ranks?

This is the only file that starts ranks. Three generations of processes:

1. The pytest process forks a small *fork server* once, after collection, while it has one thread.
2. The fork server forks four *ranks* when the first job arrives, and again after a failure. So a
   process with threads (autograd, gloo, simulated ranks) is never copied.
3. The ranks run jobs (`rank_process.py`): module-level functions `fn(ctx, *args)`, sent by name.

A job that fails or hangs costs the pool its ranks; the next job gets new ones.
"""

import ctypes
import json
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.rank_process import Job, Reply, pickled_by_value, serve_jobs
from tests.rank_report import (
    Failure,
    RankContext,
    RankError,
    assert_refused,
    node_environment,
    raises_on_every_rank,
    refusal,
)
from tests.simulated import simulate

__all__ = [
    "MAX_RANKS",
    "RankContext",
    "RankError",
    "RankPool",
    "assert_refused",
    "raises_on_every_rank",
    "refusal",
    "simulate",
]

MAX_RANKS = 8
USUAL_RANKS = 4
TIMEOUT_S = 250.0  # of a job; below the 300 s of a test
GRACE_S = 10.0  # for the other ranks, after the first failure; they may wait for a core


class _ForkServer:
    """A process with one thread that forks ranks and kills them when asked."""

    def __init__(self) -> None:
        """Fork it. Raises RuntimeError where this process already has several threads."""
        _check_single_thread()
        self._control, server_end = socket.socketpair()
        self._pid = os.fork()
        if self._pid:
            server_end.close()
            return
        try:
            _die_with_parent()
            self._control.close()
            _serve(server_end)
        finally:
            os._exit(0)

    def fork_ranks(self, stack_dir: Path, fds: list[int]) -> list[int]:
        """Fork one rank per file descriptor, which becomes its connection; return their pids."""
        socket.send_fds(self._control, [str(stack_dir).encode()], fds)
        return json.loads(self._control.recv(4096))

    def kill_ranks(self) -> list[int]:
        """Kill the ranks; return their exit codes, -n for signal n."""
        self._control.sendall(b"kill")
        return json.loads(self._control.recv(4096))

    def close(self) -> None:
        """End the process."""
        self._control.close()
        os.waitpid(self._pid, 0)


def _check_single_thread() -> None:
    names = [thread.name for thread in threading.enumerate()]
    num_threads = len(os.listdir("/proc/self/task")) if sys.platform == "linux" else len(names)
    if num_threads > 1:
        raise RuntimeError(
            f"{num_threads} threads run already ({names}), so forking is not safe. Look for a test "
            "module that starts threads when it is imported, and set OMP_NUM_THREADS=1."
        )


def _die_with_parent() -> None:
    """Let the pool decide when to stop, and the kernel when the pool is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        pr_set_pdeathsig = 1  # <linux/prctl.h>
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _serve(control: socket.socket) -> None:
    pids: list[int] = []
    while True:
        request, fds, _, _ = socket.recv_fds(control, 4096, MAX_RANKS)
        if not request:
            break
        if fds:
            pids = [_fork_rank(control, fds, i, Path(request.decode())) for i in range(len(fds))]
            for fd in fds:
                os.close(fd)
            answer = pids
        else:
            answer = _kill(pids)
            pids = []
        control.sendall(json.dumps(answer).encode())
    _kill(pids)


def _fork_rank(control: socket.socket, fds: list[int], index: int, stack_dir: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        _die_with_parent()
        control.close()
        for i, fd in enumerate(fds):
            if i != index:
                os.close(fd)
        serve_jobs(Connection(fds[index]), stack_dir / f"rank{index}")
    finally:
        os._exit(0)


def _kill(pids: list[int]) -> list[int]:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)  # one that ended is still there until waited for
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


@dataclass(frozen=True, slots=True)
class _Rank:
    pid: int
    connection: Connection


@dataclass(slots=True)
class _Outcome:
    """What came back from a job so far."""

    values: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, Failure] = field(default_factory=dict)
    cleanup_failures: dict[int, Failure] = field(default_factory=dict)
    ended: list[int] = field(default_factory=list)  # ranks whose process went away


class RankPool:
    """Four gloo ranks, or eight once a job needs more, forked when first needed and replaced after a failure.

    Make it while the process has a single thread, and `close()` it at the end.
    """

    def __init__(self) -> None:
        """Fork the fork server."""
        self._server = _ForkServer()
        self._dir = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._ranks: list[_Rank] = []
        self._num_jobs = 0

    def __call__(
        self,
        world_size: int,
        fn: Callable[..., Any],
        *args: object,
        ranks_per_node: int | None = None,
        timeout_s: float = TIMEOUT_S,
        env: dict[str, str] | None = None,
        default_group: bool = True,
        calibrates: bool = False,
    ) -> list[Any]:
        """Run `fn(ctx, *args)` on ranks 0 ... world_size - 1 and return their results in order.

        Args:
            world_size: 1 to 8.
            fn: A module-level function.
            args: Anything that can be pickled; tensors are copied.
            ranks_per_node: Pretend nodes of this size; one node where not given.
            timeout_s: After this the job counts as hung.
            env: More environment variables of the job.
            default_group: Make a gloo default group before `fn` and destroy it after.
            calibrates: Let `hierarchical="auto"` measure; where not, it means two stages.

        Raises:
            RankError: A rank failed, hung or left something behind.
        """
        size = ranks_per_node or world_size
        if not 1 <= world_size <= MAX_RANKS or world_size % size:
            raise ValueError(f"no {world_size} ranks in nodes of {size}: the pool has {MAX_RANKS}")
        directory = self._dir / f"job{self._num_jobs}"
        self._num_jobs += 1
        (directory / "cwd").mkdir(parents=True)
        call = pickled_by_value((fn, args))
        common_env = _rendezvous() | (env or {})
        if len(self._ranks) < world_size:
            self.stop()
            self._start(USUAL_RANKS if world_size <= USUAL_RANKS else MAX_RANKS)
        try:
            for rank in range(world_size):
                ctx = RankContext(rank=rank, world_size=world_size, ranks_per_node=size, tmp_path=directory / "cwd")
                job = Job(
                    ctx=ctx,
                    call=call,
                    env=node_environment(ctx) | common_env,
                    timeout_s=timeout_s,
                    default_group=default_group,
                    calibrates=calibrates,
                )
                self._ranks[rank].connection.send_bytes(pickle.dumps(job))
            outcome = self._collect(world_size, timeout_s)
        except BaseException:  # such as the test's own timeout: the ranks are still at work
            self.stop()
            raise
        shutil.rmtree(directory, ignore_errors=True)
        self._raise_failures(world_size, outcome)
        return [outcome.values[rank] for rank in range(world_size)]

    def _start(self, num: int) -> None:
        pipes = [Pipe() for _ in range(num)]
        pids = self._server.fork_ranks(self._dir, [theirs.fileno() for _, theirs in pipes])
        for _, theirs in pipes:
            theirs.close()
        self._ranks = [_Rank(pid, ours) for pid, (ours, _) in zip(pids, pipes, strict=True)]

    def stop(self) -> list[int]:
        """Kill the ranks and return their exit codes; the next job gets new ones."""
        for rank in self._ranks:
            rank.connection.close()
        self._ranks = []
        return self._server.kill_ranks()

    def close(self) -> None:
        """Kill the ranks and the fork server."""
        self.stop()
        self._server.close()
        shutil.rmtree(self._dir, ignore_errors=True)

    def _collect(self, world_size: int, timeout_s: float) -> _Outcome:
        """Wait for every rank's reply, or until the deadline."""
        outcome = _Outcome()
        waiting = {self._ranks[rank].connection: rank for rank in range(world_size)}
        deadline_s = time.monotonic() + timeout_s
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline_s - time.monotonic()))
            if not ready:
                reason = f"no answer after {timeout_s} s"
                if outcome.failures or outcome.ended:
                    reason = f"no answer {GRACE_S} s after the first failure"
                self._add_stacks(outcome, sorted(waiting.values()), reason)
                break
            for connection in ready:
                _add_reply(outcome, waiting.pop(connection), connection)
            if outcome.failures or outcome.ended:
                deadline_s = min(deadline_s, time.monotonic() + GRACE_S)
        return outcome

    def _add_stacks(self, outcome: _Outcome, ranks: list[int], reason: str) -> None:
        """Ask the ranks that hang where they stand."""
        for rank in ranks:
            os.kill(self._ranks[rank].pid, signal.SIGUSR1)
        time.sleep(0.2)
        for rank in ranks:
            stacks = (self._dir / f"rank{rank}").read_text()
            outcome.failures[rank] = Failure(TimeoutError(reason), stacks)

    def _raise_failures(self, world_size: int, outcome: _Outcome) -> None:
        failures = outcome.failures
        if not failures and not outcome.ended:
            failures = outcome.cleanup_failures
        if not failures and not outcome.ended:
            return
        exit_codes = self.stop()
        for rank in outcome.ended:
            error = ChildProcessError(f"the process of the rank ended with exit code {exit_codes[rank]}")
            failures[rank] = Failure(error, "")
        raise RankError(world_size, failures)


def _add_reply(outcome: _Outcome, rank: int, connection: Connection) -> None:
    try:
        reply: Reply = pickle.loads(connection.recv_bytes())
    except (EOFError, ConnectionResetError):
        outcome.ended.append(rank)
        return
    outcome.values[rank] = reply.value
    if reply.failure:
        outcome.failures[rank] = reply.failure
    if reply.cleanup_failure:
        outcome.cleanup_failures[rank] = reply.cleanup_failure


def _rendezvous() -> dict[str, str]:
    """Where a job that makes its own default group meets, and the link gloo uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return rendezvous | ({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {})
