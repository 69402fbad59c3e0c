"""Jobs whose ranks die, and come: ``python -m tests.recovery.job FOLDER`` forks real processes, kills them by SIGKILL.

FOLDER/scenarios.json holds a list of `Scenario`; the results of the ranks that end are in FOLDER/<scenario>/<rank>.
"""

import atexit
import contextlib
import dataclasses
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
        newcomers: Fields of the scenario that each of these blocks has instead.
        optimizer: Name of it in torch.
        dtype: Name of the parameters' dtype in torch.
        freezes: Whether the first layer is frozen.
        seeds_ranks: Whether each rank has other random numbers.
        fails_to_load: Whether the state of the loop cannot be loaded.
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
    newcomers: tuple[dict[str, Any], ...] = ()
    optimizer: str = "AdamW"
    dtype: str = "float32"
    freezes: bool = False
    seeds_ranks: bool = False
    fails_to_load: bool = False
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
        self._clock: threading.Timer | None = None
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

    def start_clock(self, folder: Path) -> None:
        """Die some seconds from now, if that is what shall be."""
        if self._kill is not None and self._kill[1] == "clock":

            def note_and_die() -> None:
                (folder / f"killed-{os.getpid()}").write_text(str(time.time()))
                die()

            self._clock = threading.Timer(self._kill[0], note_and_die)
            self._clock.start()

    def stop_clock(self) -> None:
        """Do not die any more: the result is written now."""
        if self._clock is not None:
            self._clock.cancel()
            self._clock.join()

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

    def __init__(self, *, fails_to_load: bool) -> None:
        self.step = 0
        self.shape = (4, 6)
        self._fails_to_load = fails_to_load

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "shape": self.shape}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._fails_to_load:
            raise RuntimeError("of a script")
        self.step, self.shape = state["step"], state["shape"]


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    return getattr(torch.optim, name)([p for p in model.parameters() if p.requires_grad], lr=0.01)


def wait_for_newcomers(scenario: Scenario, recovery: Recovery, step: int, folder: Path) -> None:
    """Let newcomers ask to join, on the first rank, and wait until they do."""
    count = scenario.joins.count(step)
    if count and dist.get_rank() == 0 and not (folder / f"joins-{step}").exists():
        (folder / f"joins-{step}").touch()
        deadline_s = time.monotonic() + TIMEOUT_S / 4
        num_before, applications = sum(join < step for join in scenario.joins), recovery._membership.applications
        while sum(a.index >= num_before for a in applications.waiting) < count and time.monotonic() < deadline_s:
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
    progress, recovery = Progress(fails_to_load=scenario.fails_to_load), None
    if address is not None:
        killer.start_clock(folder)  # it may die while it joins
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
    if scenario.profiles and address is None:
        sharded.profile(steps=100)
    if scenario.seeds_ranks and address is None:
        torch.manual_seed(dist.get_rank())
    if scenario.forks and not os.fork():
        time.sleep(CHILD_S)
        os._exit(0)
    losses, repeated, seconds, draws, sizes, ends = {}, [], [], {}, {}, {}
    if address is None:
        killer.start_clock(folder)
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
        "bytes": dict(sharded.memory.bytes_by_purpose),
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
            fields = scenario.newcomers[block] if scenario.newcomers else {}
            scenario = dataclasses.replace(
                scenario, ranks_per_node=min(scenario.ranks_per_node, scenario.block), **fields
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
    killer.stop_clock()
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
    command = [sys.executable, "-m", "tests.recovery.job", str(folder)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    print(output)
    (folder / "output").write_text(output)
    return {
        name: {int(path.name): pickle.loads(path.read_bytes()) for path in sorted((folder / name).glob("[0-9]*"))}
        for name in names
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
