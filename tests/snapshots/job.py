"""Jobs whose processes die and that are started again: ``python -m tests.snapshots.job FOLDER``.

FOLDER/scenarios.json holds a list of `Scenario`. Each has a launcher, a process that forks the ranks of one attempt
after the other, as the agent of torchrun starts them; ranks kill themselves by SIGKILL, at a point of a step or by a
timer. In FOLDER/<scenario> each rank leaves the losses of its steps by attempt, and at the end its states. With a path
of a scenario and under torchrun, it is one rank (`launch`).
"""

import dataclasses
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from mics_strategy import MemorySnapshots, ShardConfig, Topology, save_checkpoint, shard
from mics_strategy.snapshots.open_snapshot import OpenSnapshot
from mics_strategy.snapshots.write import SnapshotWriter

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 120.0
EVERYBODY = -1
_LOST = "lost-node"  # followed by its number: file by which a rank that dies says that a node's memory is lost


@dataclass(frozen=True, kw_only=True)
class Kill:
    """One death.

    Attributes:
        attempt: Attempt of the job in which it happens.
        ranks: Ranks that die; [-1] for all.
        at: Step, or seconds for "clock".
        point: "step", "writing", "exchange", "loading" or "clock".
        loses: Nodes whose host memory is lost as well.
    """

    attempt: int
    ranks: list[int]
    at: float
    point: str = "step"
    loses: list[int] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One job.

    Attributes:
        name: Name of its folder.
        nodes: Numbers of the nodes of each attempt; the last ones count for those after it.
        kills: Deaths of its ranks.
        every: Steps between snapshots.
        saves_at: Step behind which a checkpoint is written to the disk; 0 for none.
        job: Name of the job, for one that is started by hand.
    """

    name: str
    preset: str = "zero3"
    optimizer: str = "adamw"
    nodes: list[list[int]] = field(default_factory=lambda: [[0, 1]])
    ranks_per_node: int = 2
    num_steps: int = 12
    every: int = 3
    kills: list[Kill] = field(default_factory=list)
    saves_at: int = 0
    job: str | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    step_s: float = 0.0
    folder: str = ""

    @property
    def num_attempts(self) -> int:
        """Attempts that it takes."""
        return len({kill.attempt for kill in self.kills}) + 1

    def nodes_of(self, attempt: int) -> list[int]:
        """Numbers of the nodes of an attempt."""
        return self.nodes[min(attempt, len(self.nodes) - 1)]

    def world_size(self, attempt: int) -> int:
        """Ranks of an attempt."""
        return len(self.nodes_of(attempt)) * self.ranks_per_node

    @classmethod
    def of(cls, values: dict[str, Any]) -> "Scenario":
        """Make it from the values of its fields."""
        return cls(**{**values, "kills": [Kill(**kill) for kill in values["kills"]]})


class Killer:
    """Kills this process at one point of this attempt."""

    def __init__(self, scenario: Scenario, folder: Path, attempt: int, rank: int) -> None:
        self.step = 0
        self._folder = folder
        self._kills = [
            kill
            for kill in scenario.kills
            if kill.attempt == attempt and (rank in kill.ranks or EVERYBODY in kill.ranks)
        ]

    def strike(self, point: str, step: int) -> None:
        """Die if this is the point and the step."""
        for kill in self._kills:
            if kill.point == point and kill.at == step:
                self._die(kill)

    def _die(self, kill: Kill) -> None:
        for node in kill.loses:
            (self._folder / f"{_LOST}{node}").touch()
        os.kill(os.getpid(), signal.SIGKILL)

    def install(self) -> None:
        """Watch the points that are inside of the package, and start the clock."""
        for point, owner, name in (
            ("writing", SnapshotWriter, "_write_shard"),
            ("exchange", SnapshotWriter, "_exchange"),
            ("loading", OpenSnapshot, "load"),
        ):
            mock.patch.object(owner, name, self._before(point, getattr(owner, name))).start()
        for kill in self._kills:
            if kill.point == "clock":
                timer = threading.Timer(kill.at, self._die, (kill,))
                timer.daemon = True
                timer.start()

    def _before(self, point: str, function: Any) -> Any:
        def strike_first(owner: Any, *args: Any, **kwargs: Any) -> Any:
            is_behind = isinstance(owner, SnapshotWriter)  # the training goes on while a snapshot is written
            self.strike(point, owner.manifest.step if is_behind else self.step)
            return function(owner, *args, **kwargs)

        return strike_first


def make_model() -> nn.Module:
    """A small model, the same on all ranks, with odd sizes, a scalar and dropout."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 13), nn.LayerNorm(13), nn.Tanh(), nn.Dropout(0.2), nn.Linear(13, 12), Scale())
    return nn.Sequential(*model, nn.Linear(12, 3))


class Scale(nn.Module):
    """A scalar parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def make_optimizers(kind: str, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Optimizers with one sort of states."""
    if kind == "sgd":
        return [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)]
    if kind == "muon":
        matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
        others = [parameter for parameter in model.parameters() if parameter.dim() != 2]
        return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)]
    return [torch.optim.AdamW(model.parameters(), lr=0.01)]


def train(scenario: Scenario, folder: Path) -> None:
    """Run this attempt of the job to its end, or until it is killed."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    attempt = int(os.environ["ATTEMPT" if scenario.job is not None else "TORCHELASTIC_RESTART_COUNT"])
    killer = Killer(scenario, folder, attempt, rank)
    killer.install()
    model = make_model()
    topology = Topology(ranks_per_node=min(scenario.ranks_per_node, world_size))
    config = ShardConfig.preset(scenario.preset, topology=topology, hierarchical=False, **scenario.fields)
    sharded = shard(model, config, units=[nn.Linear])
    optimizers = make_optimizers(scenario.optimizer, model)
    node = folder / f"node{scenario.nodes_of(attempt)[rank // scenario.ranks_per_node]}"
    node.mkdir(exist_ok=True)
    snapshots = MemorySnapshots(sharded, optimizers, every=scenario.every, job=scenario.job, folder=node)
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(100 + rank)
    disk = folder / "disk" if scenario.saves_at else None
    step = snapshots.load({"step": 0}, checkpoints=disk)["step"]
    if rank == 0:
        (folder / f"begins-{attempt}").write_text(f"{step} {world_size} {time.time()}")
    losses = folder / f"losses-{rank}-{attempt}"
    losses.write_text("")
    while step < scenario.num_steps:
        time.sleep(scenario.step_s)
        batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(1000 * step + rank))
        loss = model(batch).square().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with losses.open("a") as file:
            file.write(f"{step} {loss.item().hex()}\n")
        step += 1
        killer.step = step
        snapshots.after_step({"step": step, "samples": torch.tensor(step)})
        if step == scenario.saves_at:
            save_checkpoint(folder / "disk" / "saved", sharded, optimizers, {"step": step})
        if any((kill.point, kill.at) == ("step", step) for kill in scenario.kills):
            snapshots.finish()  # so that it is known which one counts
        killer.strike("step", step)
    state: dict[str, Any] = {"states": dict(local_states(model, optimizers))}
    snapshots.finish()
    cost = snapshots.cost
    snapshots.close()
    state["cost"] = None if cost is None else dataclasses.asdict(cost)
    (folder / f"end-{rank}").write_bytes(pickle.dumps(state))


def local_states(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> Iterator[tuple[str, bytes]]:
    """This rank's parts of all parameters and states, by name; of scalars those of rank 0, which alone count."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0 and dist.get_rank():
            continue
        yield name, local_bytes(parameter)
        for number, optimizer in enumerate(optimizers):
            for key, value in optimizer.state.get(parameter, {}).items():
                yield f"{number}.{name}.{key}", local_bytes(value)


def local_bytes(value: Any) -> bytes:
    """The local part of a tensor."""
    local = value.to_local() if isinstance(value, DTensor) else value
    return bytes(local.detach().contiguous().view(-1).numpy().tobytes())


def agent_command(scenario: Scenario, path: Path, *options: str) -> list[str]:
    """The command of torchrun's agent on one node."""
    restarts = scenario.num_attempts - 1 if scenario.job is None else 0
    command = [sys.executable, "-m", "torch.distributed.run", *options, "--max-restarts", str(restarts)]
    return [*command, "--monitor-interval", "0.1", "-m", "tests.snapshots.job", str(path)]


def agent_environment(attempt: int = 0) -> dict[str, str]:
    """The environment of the agent."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ATTEMPT": str(attempt), "PYTHONPATH": str(ROOT)}
    # With one store for all attempts, torch reads addresses of the processes that died (pytorch #135712, #167288).
    return environment | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def write(scenario: Scenario, folder: Path) -> Path:
    """Write a scenario for ranks that torchrun starts."""
    folder.mkdir(exist_ok=True)
    path = folder / "scenario.json"
    path.write_text(json.dumps(dataclasses.asdict(scenario)))
    return path


def launch(scenario: Scenario, folder: Path, *, attempt: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a job under torchrun, with as many restarts as it has deaths."""
    options = ("--standalone", "--nproc-per-node", str(scenario.world_size(0)))
    command, environment = agent_command(scenario, write(scenario, folder), *options), agent_environment(attempt)
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


def run_all(scenarios: Iterable[Scenario], folder: Path) -> None:
    """Run jobs one after the other in a fresh interpreter, which forks their processes.

    Raises:
        AssertionError: A job did not end, with its output.
    """
    found = list(scenarios)
    folder.mkdir(exist_ok=True)
    (folder / "scenarios.json").write_text(json.dumps([dataclasses.asdict(scenario) for scenario in found]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.snapshots.job", str(folder)]
    timeout_s = TIMEOUT_S * (1 + len(found) / 2)
    child = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert child.returncode == 0, child.stdout[-3000:] + child.stderr[-3000:]


def output_of(folder: Path) -> str:
    """What the ranks of a job have printed."""
    return (folder / "output").read_text()


def _fork(function: Any, *args: Any) -> int:
    """Run a function in a forked process, and return its number."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        function(*args)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run_launcher(scenario: Scenario, folder: Path) -> None:
    """Start the ranks of one attempt after the other, until all of them end well."""
    folder.mkdir(exist_ok=True)
    output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    for attempt in range(scenario.num_attempts):
        receiving, sending = os.pipe()
        store = _fork(_run_store, sending)  # not here: a process with threads is not forked
        port = int(os.read(receiving, 16))
        pids = {_fork(_run_rank, scenario, folder, attempt, rank, port) for rank in range(scenario.world_size(attempt))}
        failed = False
        while pids:
            pid, status = os.wait()
            pids.discard(pid)
            if status and not failed:
                failed = True
                for other in pids:
                    os.kill(other, signal.SIGKILL)
        os.kill(store, signal.SIGKILL)
        os.waitpid(store, 0)
        for mark in folder.glob(f"{_LOST}*"):  # memory is lost with its processes, not before them
            shutil.rmtree(folder / f"node{mark.name.removeprefix(_LOST)}", ignore_errors=True)
            mark.unlink()
        if not failed:
            return
    raise AssertionError("the last attempt failed as well")


def _run_store(connection: int) -> None:
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    os.write(connection, str(store.port).encode())
    time.sleep(TIMEOUT_S)


def _run_rank(scenario: Scenario, folder: Path, attempt: int, rank: int, port: int) -> None:
    os.environ.update({"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": str(attempt)})
    os.environ["ATTEMPT"] = str(attempt)
    store = dist.TCPStore("localhost", port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=scenario.world_size(attempt), timeout=timedelta(seconds=60)
    )
    train(scenario, folder)
    dist.destroy_process_group()


def losses_of(folder: Path, world_size: int) -> list[dict[int, str]]:
    """The loss of each step on each rank, as the last attempt that ran it has it."""
    by_rank: list[dict[int, str]] = []
    for rank in range(world_size):
        found: dict[int, str] = {}
        for path in sorted(folder.glob(f"losses-{rank}-*"), key=lambda path: int(path.name.rpartition("-")[2])):
            found |= {int(step): loss for step, loss in (line.split() for line in path.read_text().splitlines())}
        by_rank.append(found)
    return by_rank


def begins_of(folder: Path) -> dict[int, int]:
    """The step with which each attempt began that was not killed before."""
    found = sorted(folder.glob("begins-*"))
    return {int(path.name.rpartition("-")[2]): int(path.read_text().split()[0]) for path in found}


def main(path: Path) -> None:
    """Run the jobs of a folder, or one rank of a job."""
    torch.set_num_threads(1)
    if path.is_dir():
        failed = False
        for values in json.loads((path / "scenarios.json").read_text()):
            scenario = Scenario.of(values)
            _, status = os.waitpid(_fork(_run_launcher, scenario, path / scenario.name), 0)
            if status:
                print(f"{scenario.name} failed:\n{output_of(path / scenario.name)}")
                failed = True
        sys.exit(int(failed))
    dist.init_process_group("gloo")
    train(Scenario.of(json.loads(path.read_text())), path.parent)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
