"""Do communication threads run tasks in order, say what failed, and end?"""

import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mics_strategy.comm import watched_work
from mics_strategy.comm.desync import CollectiveFingerprint, OpId
from mics_strategy.comm.queue import CommTask, CommThread, RouteQueue, TaskSteps
from mics_strategy.comm.ranges import Ranges
from mics_strategy.comm.route import Route, Stage
from mics_strategy.comm.traffic import TrafficLog, all_gather_traffic
from mics_strategy.comm.work import Prologue, QueuedWork, Work
from mics_strategy.comm.workspace import Workspace
from mics_strategy.errors import CommunicationError, LifecycleError
from tests.comm.networks import Network
from tests.ranks import RankContext, RankError, RankPool

SHARED = torch.zeros(4)
WITHIN_S = 15.0  # far less than the timeout of a process group


class NullWatchdog:
    """In place of a watchdog: no rank waits forever."""

    def record(self, queue: str, label: str, size: str, ranks: frozenset[int]) -> OpId:
        return OpId(queue, 0, label, size, ranks)

    def check(self, op: OpId) -> None:
        pass

    def withdraw_report(self) -> None:
        pass


@contextmanager
def opened(name: str = "test") -> Iterator[CommThread]:
    comm_thread = CommThread(name, NullWatchdog())
    try:
        yield comm_thread
    finally:
        comm_thread.close()
    assert not threads_of(name)


def threads_of(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == f"mics {name}"]


def task_of(function: Callable[[], object]) -> CommTask:
    """A task that does nothing before the one before has finished."""

    def task() -> Iterator[None]:
        yield
        function()

    return task


def run(thread: CommThread, function: Callable[[], object]) -> QueuedWork:
    steps = TaskSteps(task_of(function), None, Workspace())
    return thread.submit("Task", "1 number", frozenset([0]), steps)


def submit(thread: CommThread | None, task: CommTask) -> Work:
    """Submit to a queue of that thread, or to one that runs tasks inline."""
    transport: Any = SimpleNamespace(
        description="two ranks",
        fingerprint=CollectiveFingerprint(ranks=(0, 1), index=0),
        blocks_host=thread is not None,
    )
    watchdog: Any = SimpleNamespace(explain=str)
    queue = RouteQueue(
        name="queue",
        route=Route(stages=(Stage(axis="intra_node", size=2),)),
        transports=[transport],
        ranks=frozenset([0]),
        workspace=Workspace(),
        thread=thread,
        watchdog=watchdog,
        traffic_log=TrafficLog(),
        ranges=Ranges(),
    )
    payload = all_gather_traffic, 2, torch.float32
    return queue.submit("All-gather", "block", payload, lambda _: task())


def test_tasks_run_one_after_the_other_in_the_order_of_submission() -> None:
    events: list[tuple[str, int]] = []

    def task(number: int) -> None:
        events.append(("begin", number))
        time.sleep(0.001)
        events.append(("end", number))

    with opened() as comm_thread:
        works = [run(comm_thread, lambda number=number: task(number)) for number in range(20)]
        for work in reversed(works):
            work.wait()
    assert events == [(what, number) for number in range(20) for what in ("begin", "end")]


class TwoSteps:
    """Tasks that note what they do, on a thread that does not begin before it is let go.

    Args:
        comm_thread: The thread.
        num_parts: Parts of their workspace.
    """

    def __init__(self, comm_thread: CommThread, num_parts: int = 2) -> None:
        self.events: list[str] = []
        self.workspace = Workspace()
        if num_parts == 2:
            self.workspace.encode_ahead()
        self._thread = comm_thread
        self._go_on = threading.Event()
        run(comm_thread, self._go_on.wait)

    def submit(
        self, name: str, tensor: torch.Tensor | None, *, fails_in: str = "", prologue: Prologue | None = None
    ) -> QueuedWork:
        def task() -> Iterator[None]:
            for step in ("start", "finish"):
                self.events.append(f"{step} {name}")
                if step == fails_in:
                    raise ValueError(name)
                yield

        steps = TaskSteps(task, None if tensor is None else [tensor], self.workspace, prologue)
        return self._thread.submit(name, "1 number", frozenset([0]), steps)

    def go_on(self) -> None:
        self._go_on.set()


def test_a_task_starts_while_the_one_before_is_unfinished() -> None:
    memory = torch.zeros(3)
    with opened() as comm_thread:
        tasks = TwoSteps(comm_thread)
        works = [tasks.submit(name, memory[index : index + 1]) for index, name in enumerate("abc")]
        tasks.go_on()
        works[-1].wait()
        assert all(work.is_completed() for work in works)
    assert tasks.events == ["start a", "start b", "finish a", "start c", "finish b", "finish c"]


@pytest.mark.parametrize(
    ("num_parts", "tensors"),
    [
        (1, (torch.zeros(1), torch.zeros(1))),
        (2, (None, torch.zeros(1))),
        (2, (torch.zeros(1), None)),
        (2, (SHARED, SHARED)),
        (2, (SHARED[:3], SHARED[2:])),
    ],
    ids=["one part", "unknown before", "unknown", "the same memory", "part of the same storage"],
)
def test_a_task_waits_for_the_one_before_where_both_need_the_same(
    num_parts: int, tensors: tuple[torch.Tensor | None, ...]
) -> None:
    with opened() as comm_thread:
        tasks = TwoSteps(comm_thread, num_parts)
        for name, tensor in zip("ab", tensors, strict=True):
            tasks.submit(name, tensor)
        tasks.go_on()
    assert tasks.events == ["start a", "finish a", "start b", "finish b"]


def test_a_task_runs_behind_one_of_another_thread_while_those_before_it_go_on() -> None:
    memory = torch.zeros(2)
    with opened("first") as first, opened("second") as second:
        before, tasks = TwoSteps(first), TwoSteps(second)
        tasks.events = before.events
        other = before.submit("first", None)
        tasks.submit("a", memory[:1])
        tasks.submit("b", memory[1:], prologue=Prologue([other], lambda: before.events.append("prepare b")))
        tasks.go_on()
        while "finish a" not in before.events:  # not held up by what b waits for
            time.sleep(0.001)
        before.go_on()
    first_events, second_events = ["start first", "finish first"], ["prepare b", "start b", "finish b"]
    assert before.events == ["start a", "finish a", *first_events, *second_events]


def test_a_task_whose_prologue_has_ended_starts_ahead() -> None:
    memory = torch.zeros(2)
    with opened() as comm_thread:
        tasks = TwoSteps(comm_thread)
        tasks.submit("a", memory[:1])
        tasks.submit("b", memory[1:], prologue=Prologue([], lambda: tasks.events.append("prepare b")))
        tasks.go_on()
    assert tasks.events == ["start a", "prepare b", "start b", "finish a", "finish b"]


def test_a_task_fails_with_the_one_of_another_thread_that_it_follows() -> None:
    with opened("first") as first, opened("second") as second:
        before, tasks = TwoSteps(first), TwoSteps(second)
        other = before.submit("first", None, fails_in="finish")
        work = tasks.submit("a", None, prologue=Prologue([other], lambda: None))
        tasks.go_on()
        before.go_on()
        with pytest.raises(ValueError, match="first"):
            work.wait()
    assert tasks.events == []


def test_who_waits_for_a_task_says_which_one_it_is_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that waits long compares what really runs with its peers."""
    asked: list[str] = []
    monkeypatch.setattr(watched_work, "STALL_CHECK_S", 0.01)
    with opened("first") as first, opened("second") as second:
        before, tasks = TwoSteps(first), TwoSteps(second)
        tasks.go_on()
        run(second, lambda: None).wait()
        other = before.submit("first", None)
        work = tasks.submit("a", None, prologue=Prologue([other], lambda: None))

        def check(_: NullWatchdog, op: OpId) -> None:
            asked.append(f"{op.queue}: {op.label}")
            before.go_on()

        monkeypatch.setattr(NullWatchdog, "check", check)
        work.wait()
    assert asked[0] in ("first: first", "first: Task")  # "Task" keeps the thread from beginning
    assert not [what for what in asked if what.startswith("second")]


@pytest.mark.parametrize("fails_in", ["start", "finish"])
def test_what_has_started_fails_with_the_task_before_it(fails_in: str) -> None:
    with opened() as comm_thread:
        tasks = TwoSteps(comm_thread)
        failing, started = tasks.submit("a", torch.zeros(1), fails_in=fails_in), tasks.submit("b", torch.zeros(1))
        tasks.go_on()
        for work in (failing, started):
            with pytest.raises(ValueError, match="a"):
                work.wait()
    assert "finish b" not in tasks.events


def test_closing_finishes_what_has_started() -> None:
    with opened() as comm_thread:
        tasks = TwoSteps(comm_thread)
        tasks.submit("a", torch.zeros(1))
        tasks.submit("b", torch.zeros(1))
        tasks.go_on()
    assert tasks.events[-1] == "finish b"


def test_parts_are_memory_of_their_own() -> None:
    workspace = Workspace()
    workspace.encode_ahead()
    workspace.reserve(100)
    workspace.bind(torch.zeros(workspace.needed_bytes, dtype=torch.uint8))
    first = workspace.take()
    of_first = workspace.allocate(60, torch.uint8)
    second = workspace.take()
    of_second = workspace.allocate(100, torch.uint8)
    workspace.use(first)
    more = workspace.allocate(40, torch.uint8)
    for value, piece in enumerate((of_first, of_second, more), 1):
        piece.fill_(value)
    assert [piece.unique().tolist() for piece in (of_first, of_second, more)] == [[1], [2], [3]]
    with pytest.raises(LifecycleError, match="starts while an earlier one uses"):
        workspace.take()
    workspace.release(first)
    assert workspace.take() == first
    with pytest.raises(LifecycleError, match="128 are reserved"):
        workspace.allocate(129, torch.uint8)
    workspace.use(second)
    with pytest.raises(LifecycleError, match="128 are reserved"):
        workspace.allocate(1, torch.uint8)


def test_a_task_runs_without_a_waiting_caller() -> None:
    ran = threading.Event()
    with opened() as comm_thread:
        run(comm_thread, ran.set)
        assert ran.wait(10.0)


def test_work_is_completed_when_its_task_has_ended() -> None:
    go_on = threading.Event()
    with opened() as comm_thread:
        work = run(comm_thread, go_on.wait)
        assert not work.is_completed()
        go_on.set()
        work.wait()
        assert work.is_completed()


def test_a_task_that_fails_fails_all_after_it_and_none_before_it() -> None:
    ran: list[str] = []

    def fail() -> None:
        raise ValueError("the second")

    with opened() as comm_thread:
        first, second = run(comm_thread, lambda: ran.append("first")), run(comm_thread, fail)
        later = [run(comm_thread, lambda: ran.append("later")) for _ in range(3)]
        first.wait()
        for work in (second, *later, second):
            with pytest.raises(ValueError, match="the second"):
                work.wait()
        with pytest.raises(ValueError, match="the second"):
            run(comm_thread, lambda: ran.append("much later")).wait()
    assert ran == ["first"]


def test_a_failure_reaches_all_who_wait() -> None:
    go_on, found = threading.Event(), []

    def fail() -> None:
        go_on.wait()
        raise ValueError("for all")

    def wait_for(work: QueuedWork) -> None:
        try:
            work.wait()
        except ValueError as error:
            found.append(str(error))

    with opened() as comm_thread:
        work = run(comm_thread, fail)
        threads = [threading.Thread(target=wait_for, args=(work,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        go_on.set()
        for thread in threads:
            thread.join()
    assert found == ["for all"] * 4


@pytest.mark.parametrize("is_thread", [True, False], ids=["comm_thread", "inline"])
@pytest.mark.parametrize(
    ("error", "expected"),
    [(RuntimeError("connection lost"), CommunicationError), (LifecycleError("too early"), LifecycleError)],
    ids=["transport", "schedule"],
)
def test_errors_of_the_transport_become_errors_of_communication(
    is_thread: bool, error: Exception, expected: type[Exception]
) -> None:
    def fail() -> None:
        raise error

    with opened() as comm_thread, pytest.raises(expected, match=str(error)):
        submit(comm_thread if is_thread else None, task_of(fail)).wait()


def test_nothing_of_a_task_is_for_autograd() -> None:
    with torch.inference_mode():
        made_elsewhere = torch.zeros(2)
    found: list[bool] = []

    def task() -> None:
        found.append(torch.is_inference_mode_enabled())
        found.append((torch.ones(2, requires_grad=True) * 2).requires_grad)
        made_elsewhere.add_(1)

    with opened() as comm_thread:
        run(comm_thread, task).wait()
    assert found == [True, False]
    assert made_elsewhere.tolist() == [1.0, 1.0]
    assert not torch.is_inference_mode_enabled()


def test_a_thread_without_tasks_has_no_thread_and_closes() -> None:
    comm_thread = CommThread("idle", NullWatchdog())
    assert not threads_of("idle")
    comm_thread.close()


def test_closing_twice_and_asking_again_is_fine() -> None:
    comm_thread, ran = CommThread("again", NullWatchdog()), []
    for number in range(2):
        run(comm_thread, lambda number=number: ran.append(number)).wait()
        comm_thread.close()
        comm_thread.close()
        assert not threads_of("again")
    assert ran == [0, 1]


def test_closing_lets_tasks_end_that_can() -> None:
    ran: list[int] = []
    with opened() as comm_thread:
        for number in range(3):
            run(comm_thread, lambda number=number: (time.sleep(0.05), ran.append(number)))
    assert ran == [0, 1, 2]


@pytest.mark.parametrize("fails", [False, True], ids=["after success", "after a failure"])
def test_a_forgotten_queue_ends_its_thread(fails: bool) -> None:
    def use_and_forget(comm_thread: CommThread) -> None:
        def task() -> None:
            if fails:
                raise ValueError(f"of {comm_thread}")

        work = run(comm_thread, task)
        with pytest.raises(ValueError, match="CommThread") if fails else nullcontext():
            work.wait()

    use_and_forget(CommThread("forgotten", NullWatchdog()))
    threads = threads_of("forgotten")
    gc.collect()
    for thread in threads:
        thread.join(10.0)
    assert not threads_of("forgotten")


class SlowEvent(threading.Event):
    """Whoever waits for it goes on while the thread that has set it is still in `set`."""

    def set(self) -> None:
        super().set()
        time.sleep(0.2)


def test_tensors_of_a_task_are_freed_before_whoever_waits_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened() as comm_thread:
        tensor = torch.zeros(2)
        seen = weakref.ref(tensor)
        monkeypatch.setattr("mics_strategy.comm.queue.threading.Event", SlowEvent)
        work = run(comm_thread, lambda tensor=tensor: tensor.add_(1))
        del tensor
        work.wait()
        gc.collect()
        assert seen() is None


def close_what_never_ends(ctx: RankContext, num_queues: int) -> tuple[bool, int]:
    """Rank 0 asks for what the others never will, in each queue, and stops. Returns whether it failed well."""
    network = Network(ctx)
    one, other = network.one, network.other
    for collective in (one, other):
        collective.reserve("all_gather", collective.size * 8, torch.float32, torch.float32)
    network.lend()
    assert network.gather(8)
    if ctx.rank:
        return True, 0
    handles = [
        comm.all_gather(torch.empty(8 * comm.size), torch.ones(8), "alone") for comm in (one, other)[:num_queues]
    ]
    start_s = time.monotonic()
    network.groups.resources.stop()
    assert time.monotonic() - start_s < WITHIN_S
    for handle in handles:
        with pytest.raises(CommunicationError, match="All-gather of alone"):
            handle.wait()
    return True, sum(thread.name.startswith("mics ") for thread in threading.enumerate())


@pytest.mark.parametrize("num_queues", [1, 2])
@pytest.mark.parametrize(("world", "per_node"), [(2, 2), (4, 2)])
def test_closing_ends_tasks_that_wait_for_what_never_comes(
    ranks: RankPool, world: int, per_node: int, num_queues: int
) -> None:
    assert ranks(world, close_what_never_ends, num_queues, ranks_per_node=per_node) == [(True, 0)] * world


def close_after_a_peer_has_died(ctx: RankContext) -> None:
    """Rank 0 waits for ranks 2 and 3, which do nothing; rank 1, to which it is connected, too, dies."""
    network, has_closed = Network(ctx), ctx.tmp_path / "closed"
    assert network.gather(8)
    handle = network.one.all_gather(torch.empty(32), torch.ones(8), "alone") if ctx.rank == 0 else None
    dist.barrier()
    if ctx.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError):
        dist.barrier()
    if handle is None:
        while not has_closed.exists():
            time.sleep(0.01)
        return
    try:
        network.groups.resources.stop()
        with pytest.raises(CommunicationError, match="All-gather of alone"):
            handle.wait()
        assert not any(thread.name.startswith("mics ") for thread in threading.enumerate())
    finally:
        has_closed.touch()


def test_closing_ends_a_task_although_another_peer_has_died(ranks: RankPool) -> None:
    with pytest.raises(RankError) as failure:
        ranks(4, close_after_a_peer_has_died)
    assert list(failure.value.by_rank) == [1], failure.value


def fail_in_the_middle(ctx: RankContext) -> bool:
    """The workspace of the second of three is too small, on all ranks."""
    network = Network(ctx)
    one = network.one
    one.reserve("reduce_scatter", 32, torch.float32, torch.float32)
    network.lend()
    handles = [
        one.reduce_scatter(torch.empty(n), torch.zeros(4 * n), False, f"block {i}") for i, n in enumerate((8, 8000, 8))
    ]
    handles[0].wait()
    for handle in handles[1:]:
        with pytest.raises(LifecycleError, match="are reserved"):
            handle.wait()
    return True


def test_after_a_collective_that_fails_the_queue_gives_no_result(ranks: RankPool) -> None:
    assert ranks(4, fail_in_the_middle, ranks_per_node=2) == [True] * 4
