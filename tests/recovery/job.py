"""Jobs whose ranks die, and come: ``python -m tests.recovery.job FOLDER`` forks real processes, kills them by SIGKILL.

FOLDER/scenarios.json holds a list of `Scenario`; the results of the ranks that end are in FOLDER/<scenario>/<rank>.
"""

import atexit
import contextlib
import dataclasses
import itertools
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from mics_strategy import Recovery, ShardConfig, Topology, load_checkpoint, save_checkpoint, shard
from mics_strategy.comm.transport import GlooTransport
from mics_strategy.engine.grad_bucket import GradBucket
from mics_strategy.recovery import attempt as attempt_module
from mics_strategy.recovery import entering
from mics_strategy.recovery import states as states_module
from mics_strategy.recovery.attempt import Attempt
from mics_strategy.recovery.membership import Membership
from mics_strategy.recovery.states import RankStates

TIMEOUT_S = 120.0
CHILD_S = 15.0  # that the child of a rank lives


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One job.

    Attributes:
        name: Its folder.
        kills: Ranks to kill, by their first numbers: step and point of each, or seconds and "clock".
        loads, saves: Folder of a checkpoint, and the step before which it is read or written.
        step_s: Seconds that a forward takes longer.
        forks: Whether each rank has a child process, as workers of a DataLoader are, which outlives it.
        rank_0_has_store: Whether rank 0 holds the store, not the launcher.
        profiles: Whether the job is profiled, longer than it runs; and again at its end.
        num_dealt: Micro-batches of a step that `Attempt.micro_batches` deals out, in fp64; 0 for one of each rank.
        joins: Step in which each block of newcomers asks to join; the job waits in it until they have. Their numbers
            follow those of the job.
        block: Ranks of each of these blocks.
        newcomer: Fields of the scenario that the newcomers have instead.
        optimizer: Name of it in torch.
        dtype: Name of the parameters' dtype in torch.
        freezes: Whether the first layer is frozen.
    """

    name: str
    preset: str = "mics"
    world_size: int = 4
    ranks_per_node: int = 2
    num_steps: int = 6
    kills: dict[str, tuple[float, str]] = field(default_factory=dict)
    loads: tuple[str, int] | None = None
    saves: tuple[str, int] | None = None
    lost_after_s: float = 1.5
    has_buffers: bool = False
    num_micro_steps: int = 1
    step_s: float = 0.0
    num_dealt: int = 0
    forks: bool = False
    profiles: bool = False
    rank_0_has_store: bool = False
    joins: tuple[int, ...] = ()
    block: int = 2
    newcomer: dict[str, Any] = field(default_factory=dict)
    optimizer: str = "AdamW"
    dtype: str = "float32"
    freezes: bool = False
    fields: dict[str, Any] = field(default_factory=dict)


def die() -> None:
    """As `kill -9`."""
    os.kill(os.getpid(), signal.SIGKILL)


class Killer:
    """Kills this process at one point of one step."""

    def __init__(self, kill: tuple[float, str] | None) -> None:
        self._kill = kill
        self.step = -1
        self._stack = contextlib.ExitStack()
        if kill is None:
            return
        patches = {
            "hop": (GradBucket, "second_hop"),
            "agreement": (Membership, "agree"),
            "regroup": (attempt_module, "rebuild"),
            "wait": (entering, "answer_to"),
            "receive": (states_module, "decode"),
            "send": (RankStates, "transfer"),
            "settle": (RankStates, "settle"),
        }
        for point, (owner, name) in patches.items():
            self._stack.enter_context(mock.patch.object(owner, name, self._before(point, getattr(owner, name))))
        any_of = GlooTransport.any_of

        def send_and_die(transport: GlooTransport, flag: bool, tag: int) -> bool:
            if self._is_due("barrier"):
                message = torch.zeros(1, dtype=torch.uint8)
                transport.group.send([message], (transport.index + 1) % transport.size, tag).wait()
                die()
            return any_of(transport, flag, tag)

        self._stack.enter_context(mock.patch.object(GlooTransport, "any_of", send_and_die))

    def _is_due(self, point: str) -> bool:
        return self._kill is not None and (self.step, point) == tuple(self._kill)

    def start_clock(self, folder: Path, rank: int) -> None:
        """Die some seconds from now, if that is what shall be."""
        if self._kill is not None and self._kill[1] == "clock":

            def note_and_die() -> None:
                (folder / f"killed-{rank}").write_text(str(time.time()))
                die()

            threading.Timer(self._kill[0], note_and_die).start()

    def strike(self, point: str) -> None:
        """Die if this is the point and the step."""
        if self._is_due(point):
            if point == "error":
                raise RuntimeError("of a script")
            if point == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            die()

    def _before(self, point: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def strike_first(*args: Any, **kwargs: Any) -> Any:
            self.strike(point)
            return function(*args, **kwargs)

        return strike_first


def make_model(*, has_buffers: bool) -> nn.Module:
    """A small model, the same on all ranks."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(12) if has_buffers else nn.LayerNorm(12)
    return nn.Sequential(nn.Linear(6, 12), norm, nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 3))


def batch(step: int, micro_step: int, dtype: torch.dtype) -> torch.Tensor:
    """The batch of this rank, [4, 6]."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro_step + dist.get_rank())
    return torch.randn(4, 6, generator=generator).to(dtype)


def dealt_batch(step: int, number: int) -> torch.Tensor:
    """A batch that is the same on any rank, [4, 6]."""
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + number), dtype=torch.float64)


class Progress:
    """The step of a loop, as a script counts it."""

    def __init__(self) -> None:
        self.step = 0
        self.shape = (4, 6)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "shape": self.shape}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.shape = state["step"], state["shape"]


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    return getattr(torch.optim, name)([p for p in model.parameters() if p.requires_grad], lr=0.01)


def wait_for_newcomers(scenario: Scenario, recovery: Recovery, step: int, folder: Path) -> None:
    """Let newcomers ask to join, on the first rank, and wait until they do."""
    count = scenario.joins.count(step)
    if count and dist.get_rank() == 0 and not (folder / f"joins-{step}").exists():
        (folder / f"joins-{step}").touch()
        deadline_s = time.monotonic() + TIMEOUT_S / 4
        while len(recovery._membership.applications.waiting) < count and time.monotonic() < deadline_s:
            time.sleep(0.02)


def train(scenario: Scenario, killer: Killer, folder: Path, address: str | None = None) -> dict[str, Any]:
    """Train; returns the loss of this rank in each step, the weights, and seconds of recoveries."""
    config = ShardConfig.preset(
        scenario.preset, topology=Topology(ranks_per_node=scenario.ranks_per_node), **scenario.fields
    )
    model = make_model(has_buffers=scenario.has_buffers)
    model.to(torch.float64 if scenario.num_dealt else getattr(torch, scenario.dtype))
    model[0].requires_grad_(not scenario.freezes)
    sharded = shard(model, config, units=[nn.Linear])
    optimizer = make_optimizer(scenario.optimizer, model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    progress, recovery = Progress(), None
    if scenario.loads is not None:
        progress.step = scenario.loads[1]
        scheduler.load_state_dict(load_checkpoint(folder.parent / scenario.loads[0], sharded, [optimizer]))
    else:
        recovery = Recovery(
            sharded,
            [optimizer],
            state={"scheduler": scheduler, "progress": progress},
            join=address,
            allows_one_copy=True,
            lost_after_s=scenario.lost_after_s,
        )
    optimizer.register_step_pre_hook(lambda *_: killer.strike("update"))
    model[3].register_forward_hook(lambda *_: killer.strike("forward"))
    if scenario.profiles:
        sharded.profile(steps=100)
    if scenario.forks and not os.fork():
        time.sleep(CHILD_S)
        os._exit(0)
    losses, repeated, seconds, draws, sizes, ends = {}, [], [], {}, {}, {}
    killer.start_clock(folder, dist.get_rank())
    while progress.step < scenario.num_steps:
        step = progress.step
        while scenario.saves and scenario.saves[1] == step:
            killer.step = step
            with contextlib.nullcontext() if recovery is None else recovery.attempt() as attempt:
                killer.strike("save")
                save_checkpoint(folder.parent / scenario.saves[0], sharded, [optimizer], extra=scheduler.state_dict())
            if recovery is None or attempt.completed:
                break
        killer.step, start_s = step, time.monotonic()
        with contextlib.nullcontext() if recovery is None else recovery.attempt() as attempt:
            if recovery is not None:
                wait_for_newcomers(scenario, recovery, step, folder)
            draws.setdefault(step, []).append(float(torch.rand(())))
            total = torch.zeros(())
            for values, weight in batches_of(scenario, step, attempt):
                hidden = model(values)
                time.sleep(scenario.step_s)
                hidden.register_hook(lambda _: killer.strike("backward"))
                loss = hidden.square().mean() * weight
                loss.backward()
                total += loss.detach()
            losses[step], sizes[step] = total.item(), dist.get_world_size()
            for point in ("clip", "stop", "error"):
                killer.strike(point)
            sharded.clip_grad_norm_(0.5)
            killer.strike("step")
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            killer.strike("end")
        if recovery is None or attempt.completed:
            ends[step] = time.time()
            progress.step += 1
        else:
            repeated.append(step)
            seconds.append(time.monotonic() - start_s)
    if scenario.profiles and recovery is not None:
        sharded.profile(steps=1)  # the former one has ended with the loss
    result = {"weights": sharded.full_state_dict(), "states": sharded.full_optimizer_state_dict(optimizer)}
    if recovery is not None:
        recovery.close()
    return result | {
        "losses": losses,
        "rank": dist.get_rank(),
        "sizes": sizes,
        "repeated": repeated,
        "seconds": seconds,
        "draws": draws,
        "ends": ends,
        "learning_rate": scheduler.get_last_lr(),
        "steps_done": sharded.steps_done,
    }


def batches_of(scenario: Scenario, step: int, attempt: Attempt | None) -> list[tuple[torch.Tensor, float]]:
    """The batches of this rank in a step, and the weights of their losses."""
    if scenario.num_dealt and attempt is not None:
        return [(dealt_batch(step, number), weight) for number, weight in attempt.micro_batches(scenario.num_dealt)]
    count, dtype = scenario.num_micro_steps, getattr(torch, scenario.dtype)
    return [(batch(step, micro_step, dtype), 1 / count) for micro_step in range(count)]


def run_rank(scenario: Scenario, number: int, port: int, folder: Path) -> None:
    """The process of one rank."""
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    kill = scenario.kills.get(str(number))
    killer, address = Killer(None if kill is None else tuple(kill)), None
    try:
        has_store = scenario.rank_0_has_store and number == 0
        store: Any = dist.TCPStore("127.0.0.1", port, None, has_store, timedelta(seconds=TIMEOUT_S), False)
        rank, world_size = number, scenario.world_size
        if number >= scenario.world_size:
            block, rank = divmod(number - scenario.world_size, scenario.block)
            address, world_size = f"127.0.0.1:{port}", scenario.block
            store = dist.PrefixStore(f"block {block}", store)  # of a launcher of its own
            scenario = dataclasses.replace(
                scenario, ranks_per_node=min(scenario.ranks_per_node, scenario.block), **scenario.newcomer
            )
            while not (folder / f"joins-{scenario.joins[block]}").exists():
                time.sleep(0.02)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
        result: Any = train(scenario, killer, folder, address)
    except SystemExit as error:
        result = {"error": f"SystemExit {error.code}"}
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        atexit._run_exitfuncs()  # as at the end of a script
    (folder / str(number)).write_bytes(pickle.dumps(result))
    os._exit(0)


def run_store(connection: int) -> None:
    """The process that holds the store, as torchrun's agent does."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=TIMEOUT_S), False)
    os.write(connection, str(store.port).encode())
    time.sleep(3600)


def run(scenario: Scenario, folder: Path) -> None:
    """Run one job, until all of its processes have ended."""
    folder.mkdir(parents=True)
    reader, writer = os.pipe()
    store_pid = os.fork()
    if not store_pid:
        run_store(writer)
    port = int(os.read(reader, 16))
    if scenario.rank_0_has_store:
        os.kill(store_pid, signal.SIGKILL)
        os.waitpid(store_pid, 0)  # or its port may not be free yet
    pids = []
    for number in range(scenario.world_size + scenario.block * len(scenario.joins)):
        pid = os.fork()
        if not pid:
            run_rank(scenario, number, port, folder)
        pids.append(pid)
    deadline_s = time.monotonic() + TIMEOUT_S
    waiting = set(pids)
    stopped = {pids[int(rank)] for rank, (_, point) in scenario.kills.items() if point == "stop"}
    while waiting - stopped and time.monotonic() < deadline_s:
        waiting -= {pid for pid in waiting if os.waitpid(pid, os.WNOHANG)[0]}
        time.sleep(0.02)
    for pid in (*waiting, *(() if scenario.rank_0_has_store else (store_pid,))):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def main(folder: Path) -> None:
    """Run all scenarios, one after the other."""
    for entry in json.loads((folder / "scenarios.json").read_text()):
        scenario = Scenario(**entry)
        run(scenario, folder / scenario.name)


def run_all(scenarios: Iterable[Scenario], folder: Path) -> dict[str, dict[int, Any]]:
    """Run jobs in processes of their own. Returns the results of the ranks that ended, by scenario and rank."""
    names = {scenario.name: scenario for scenario in scenarios}
    (folder / "scenarios.json").write_text(json.dumps([asdict(scenario) for scenario in names.values()]))
    subprocess.run([sys.executable, "-m", "tests.recovery.job", str(folder)], check=True)
    return {
        name: {int(path.name): pickle.loads(path.read_bytes()) for path in sorted((folder / name).glob("[0-9]*"))}
        for name in names
    }


@dataclass(frozen=True, kw_only=True)
class Case:
    """A job that loses ranks, and what must come of it.

    Attributes:
        scenario: The job.
        survivors: Numbers of the ranks that train to the end.
        continues_at: First step that the job runs with these ranks alone.
        before: First step and size of the job for each loss before the last.
    """

    scenario: Scenario
    survivors: tuple[int, ...]
    continues_at: int
    before: tuple[tuple[int, int], ...] = ()

    @property
    def references(self) -> list[Scenario]:
        """Jobs of as many ranks as were left, each of which starts from a checkpoint of the one before."""
        jobs, source = [], None
        job = dataclasses.replace(self.scenario, kills={}, joins=())
        varied = (job.preset, job.num_micro_steps, job.has_buffers, job.optimizer, job.dtype, job.freezes)
        key = "-".join(map(str, varied))
        phases = [(0, self.scenario.world_size), *self.before, (self.continues_at, len(self.survivors))]
        for (first, size), (last, _) in itertools.pairwise([*phases, (self.scenario.num_steps, 0)]):
            key = f"{key}-{size}x{first}"
            target = (f"{key}-to-{last}", last)
            per_node = min(self.scenario.ranks_per_node, size)
            size_of = {"world_size": size, "ranks_per_node": per_node}
            jobs.append(dataclasses.replace(job, name=f"{key}..{last}", loads=source, saves=target, **size_of))
            source = target
        return jobs


def check_case(case: Case, results: dict[str, dict[int, Any]]) -> None:
    """Compare with a job that had these ranks from that step on: losses, weights and optimizer states, bitwise."""
    job, reference = results[case.scenario.name], results[case.references[-1].name]
    finished = [number for number, result in job.items() if "error" not in result]
    assert finished == list(case.survivors), {number: result.get("error") for number, result in job.items()}
    ranks = [job[number]["rank"] for number in case.survivors]  # of newcomers: in the order in which they asked
    assert sorted(ranks) == list(range(len(case.survivors)))
    assert ranks == sorted(ranks) or case.scenario.joins
    for number in case.survivors:
        result, expected = job[number], reference[job[number]["rank"]]
        for step in range(case.continues_at, case.scenario.num_steps):
            assert result["losses"][step] == expected["losses"][step], (number, step)
            assert result["sizes"][step] == len(case.survivors)
        assert result["steps_done"] == case.scenario.num_steps
        assert result["learning_rate"] == expected["learning_rate"]
        assert all(len(set(draws)) == 1 for draws in result["draws"].values()), "a repeated step draws other numbers"
    weights, expected_weights = job[case.survivors[0]]["weights"], reference[0]["weights"]
    assert weights.keys() == expected_weights.keys()
    assert [name for name in weights if not torch.equal(weights[name], expected_weights[name])] == []
    states, expected_states = job[case.survivors[0]]["states"]["state"], reference[0]["states"]["state"]
    assert states.keys() == expected_states.keys()
    for number, state in states.items():
        assert all(torch.equal(state[key], expected_states[number][key]) for key in state), number


if __name__ == "__main__":
    main(Path(sys.argv[1]))
