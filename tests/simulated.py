"""How does a test run on 8 or 32 ranks without processes?

One thread per rank, with torch's threaded process group: real values, real subgroups, collectives
that copy between threads. Two things are added:

- *One rank at a time.* A rank runs while it holds the baton and passes it on where it waits for
  others (in a collective, in the creation of a group). What is one per process (random generators,
  `os.environ`) is swapped with the baton, so each rank has its own, as a process would.
- *No silent hang.* When every rank waits for somebody, the job is stopped at once and says which
  ranks have failed, or where each rank stands.

What differs from gloo: a collective with `async_op=True` has finished when it returns, so two
groups used in opposite orders by two ranks stop here and not there. There is no send and receive,
no `reduce`; other module globals and `torch.set_default_dtype` are shared by all ranks.
"""

import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed import multi_threaded_pg as threaded

from tests.rank_report import Failure, RankContext, RankError, node_environment
from tests.seeds import GeneratorState, seed_generators

POLL_S = 0.05
STOP_S = 5.0  # for the other ranks, after the first failure
_this_thread = threading.local()
_terminate = threaded.ProcessLocalGroup._terminate


@dataclass(slots=True)
class _Job:
    """What the simulated ranks of one job share."""

    baton: threading.Lock = field(default_factory=threading.Lock)
    runs: int | None = None  # the rank that holds the baton
    num_waits: int = 0  # so far; while it stands still, no rank has moved
    is_over: bool = False  # a thread that comes back later must not touch anything


@dataclass(slots=True)
class _Rank:
    """One simulated rank: what it alone may see, and what became of it."""

    ctx: RankContext
    job: _Job
    env: dict[str, str] = field(init=False)
    generators: GeneratorState = field(init=False)
    thread: threading.Thread = field(init=False)
    is_blocked: Callable[[], bool] | None = None  # set while it waits for other ranks
    value: Any = None
    failure: Failure | None = None

    def __post_init__(self) -> None:
        """Start from the seeds of the calling process, the same on every rank."""
        self.env = dict(os.environ) | node_environment(self.ctx)
        self.generators = GeneratorState.save()

    def take_baton(self) -> None:
        """Wait for the turn of this rank, then put its own state in place."""
        self.job.baton.acquire()
        if self.job.is_over:
            sys.exit("the job was given up")
        self.job.runs = self.ctx.rank
        _set_environment(self.env)
        self.generators.restore()

    def pass_baton(self) -> None:
        """Keep this rank's own state and let another rank run."""
        if not self.job.is_over:
            self.env = dict(os.environ)
            self.generators = GeneratorState.save()
        self.job.runs = None
        self.job.baton.release()

    @contextmanager
    def waits(self, is_blocked: Callable[[], bool]) -> Iterator[None]:
        """Let other ranks run; `is_blocked` tells from outside whether others must still come."""
        self.job.num_waits += 1
        self.is_blocked = is_blocked
        self.pass_baton()
        try:
            yield
        finally:
            self.is_blocked = None
            self.take_baton()


def _set_environment(env: dict[str, str]) -> None:
    for name in os.environ.keys() - env.keys():
        del os.environ[name]
    for name, value in env.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


_blocking_join = threaded.Collective.join


def _join(collective: Any, group_rank: int, data: object) -> object:
    """Replaces `Collective.join`, which blocks until every rank of the group has come."""

    def others_are_missing() -> bool:
        has_joined = collective._data[group_rank] is not None
        return has_joined and any(joined is None for joined in collective._data)  # torch counts them later

    with _this_thread.rank.waits(others_are_missing):
        try:
            return _blocking_join(collective, group_rank, data)
        except Exception as error:  # of the collective itself: its other ranks would wait for ever
            _stop_all(error)
            raise


def _barrier(_rank: int, store: dist.Store, _name: str, num_ranks: int, _timeout: object) -> None:
    """Replaces the barrier at the creation of a group, which could not be interrupted."""

    def others_are_missing() -> bool:
        return store.add("arrived", 0) < num_ranks

    store.add("arrived", 1)
    with _this_thread.rank.waits(others_are_missing):
        while others_are_missing():
            if _terminate.is_set():
                sys.exit("another rank failed")
            time.sleep(0.001)


@contextmanager
def _threaded_world() -> Iterator[None]:
    """Make the state of `torch.distributed` thread-local; restore all process-wide state after."""
    env, generators = dict(os.environ), GeneratorState.save()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    threaded._install_threaded_pg()
    seed_generators()
    try:
        with (
            mock.patch.object(threaded.Collective, "join", _join),
            mock.patch.object(threaded, "_store_based_barrier", _barrier),
        ):
            yield
    finally:
        threaded.ProcessLocalGroup.reset()
        threaded._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        _set_environment(env)
        generators.restore()


def simulate(
    world_size: int,
    fn: Callable[..., Any],
    *args: object,
    ranks_per_node: int | None = None,
    timeout_s: float = 250.0,
) -> list[Any]:
    """Run `fn(ctx, *args)` on `world_size` simulated ranks and return their results in order.

    Args:
        world_size: Any number of ranks; 32 are comfortable.
        fn: Any callable; it runs in a fresh default group.
        args: Given to every rank as they are, not copied.
        ranks_per_node: Pretend nodes of this size; one node where not given.
        timeout_s: After this the job counts as hung.

    Raises:
        RankError: A rank failed or hung. Ranks that were only stopped because of it are not named.
    """
    size = ranks_per_node or world_size
    if world_size < 1 or world_size % size:
        raise ValueError(f"no {world_size} ranks in nodes of {size}")
    store, job = dist.HashStore(), _Job()
    with _threaded_world(), tempfile.TemporaryDirectory(prefix="ranks-") as directory:
        ranks = [
            _Rank(RankContext(rank=r, world_size=world_size, ranks_per_node=size, tmp_path=Path(directory)), job)
            for r in range(world_size)
        ]
        for rank in ranks:
            rank.thread = threading.Thread(target=_run, args=(rank, store, fn, args), daemon=True)
            rank.thread.start()
        try:
            hung = _wait(ranks, timeout_s)
        finally:
            job.is_over = True
    failures = hung or {rank.ctx.rank: rank.failure for rank in ranks if rank.failure}
    if failures:
        raise RankError(world_size, failures)
    return [rank.value for rank in ranks]


def _run(rank: _Rank, store: dist.Store, fn: Callable[..., Any], args: tuple[object, ...]) -> None:
    """The body of one rank's thread."""
    _this_thread.rank = rank
    torch.set_num_threads(1)
    rank.take_baton()
    try:
        world_size = rank.ctx.world_size
        dist.init_process_group("threaded", rank=rank.ctx.rank, world_size=world_size, store=store)
        if not hasattr(dist.distributed_c10d._world, "comms"):  # torch 2.11 forgets it here, and then cannot destroy
            dist.distributed_c10d._world.comms = []
        rank.value = fn(rank.ctx, *args)
        dist.destroy_process_group()
    except BaseException as error:  # reported to the test
        if not (isinstance(error, SystemExit) and (_terminate.is_set() or rank.job.is_over)):
            rank.failure = Failure.of(error)  # the others go on as far as they can: they may fail, too
    finally:
        _clear_sharding_prop_cache()  # each thread has one, and torch 2.11 frees it without the interpreter's lock
        rank.pass_baton()


def _stop_all(error: BaseException) -> None:
    """Wake the ranks that wait: each leaves with SystemExit."""
    with threaded.ProcessLocalGroup._coll_lock:
        threaded.ProcessLocalGroup.exception_handle(error)


def _wait(ranks: list[_Rank], timeout_s: float) -> dict[int, Failure]:
    """Wait for the threads; where they hang, stop them and, unless others have failed, say where each stands."""
    deadline_s = time.monotonic() + timeout_s
    is_stopping = False
    hung: dict[int, Failure] = {}
    while alive := [rank for rank in ranks if rank.thread.is_alive()]:
        alive[0].thread.join(POLL_S)
        is_late = time.monotonic() > deadline_s
        if is_stopping:
            if is_late:
                break
        elif _terminate.is_set():
            is_stopping, deadline_s = True, time.monotonic() + STOP_S
        elif is_late or _is_deadlock(alive):
            if not any(rank.failure for rank in ranks):
                hung = {rank.ctx.rank: _hung(rank, timeout_s) for rank in alive}
            _stop_all(TimeoutError())
            is_stopping, deadline_s = True, time.monotonic() + STOP_S
    return hung


def _is_deadlock(alive: list[_Rank]) -> bool:
    num_waits = alive[0].job.num_waits
    blocked = [rank.is_blocked for rank in alive]
    all_blocked = all(is_blocked is not None and is_blocked() for is_blocked in blocked)
    return all_blocked and alive[0].job.num_waits == num_waits


def _hung(rank: _Rank, timeout_s: float) -> Failure:
    if rank.job.runs is None:
        reason = "waits for ranks that do not come"
    elif rank.job.runs == rank.ctx.rank:
        reason = f"did not end in {timeout_s} s"
    else:
        reason = f"waits for rank {rank.job.runs}"
    frame = sys._current_frames().get(rank.thread.ident or 0)
    stack = "".join(traceback.format_stack(frame)) if frame else ""
    return Failure(TimeoutError(reason), stack)
