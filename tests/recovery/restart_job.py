"""Jobs that begin again when nodes die: ``python -m tests.recovery.restart_job FOLDER`` forks real processes.

FOLDER/scenarios.json holds a list of `Scenario`. Each process that ends leaves its result in
FOLDER/<scenario>/<number>; what all have printed is in FOLDER/<scenario>/output.
"""

import dataclasses
import gc
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import torch
import torch.distributed as dist
from torch import nn

from mics_strategy import MemorySnapshots, ShardConfig, load_checkpoint, restart_on_loss, save_checkpoint, shard
from mics_strategy.recovery import entering
from mics_strategy.recovery.membership import Membership
from mics_strategy.snapshots.open_snapshot import OpenSnapshot
from mics_strategy.snapshots.write import SnapshotWriter
from tests.snapshots.job import local_states, make_model, make_optimizers

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 100.0


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One job, of nodes of two ranks. Numbers of processes go on through those that come later.

    Attributes:
        name: Its folder.
        kills: Points at which processes die, by number: step, and "step", "writing", "exchange", "loading", "regroup",
            "end", "stop", "call" (in a step, and lets the node start that comes in it) or "error"; seconds and "clock".
        joins: Step in front of which rank 0 waits until each further node has asked to join.
        is_plain: Whether it trains once, without `restart_on_loss`.
        loads: Checkpoint from which a plain job begins: name of a scenario, and "/disk".
        is_repeated: Whether it trains once more when it has ended, behind a save to the disk.
        saves_at: Step in front of which a plain job writes a checkpoint and ends; -1 for none.
    """

    name: str
    preset: str = "zero3"
    optimizer: str = "adamw"
    num_nodes: int = 2
    num_steps: int = 12
    every: int = 3
    kills: dict[str, tuple[float, str]] = field(default_factory=dict)
    joins: tuple[int, ...] = ()
    is_plain: bool = False
    is_repeated: bool = False
    loads: str = ""
    saves_at: int = -1
    wait_for_node_s: float = 0.0
    step_s: float = 0.0
    fields: dict[str, Any] = field(default_factory=dict)


class Process:
    """One process of a job."""

    def __init__(self, scenario: Scenario, number: int, folder: Path) -> None:
        self._scenario = scenario
        self._number = number
        self._folder = folder
        self._kill = scenario.kills.get(str(number))
        self.step = 0
        self.begins: list[tuple[int, int]] = []  # step and ranks of each training
        self.ends: dict[int, float] = {}  # time of each step, the last time it was done
        self.losses: dict[int, str] = {}

    def strike(self, point: str, step: int) -> None:
        """Die here, if this is the point and the step."""
        if self._kill is not None and tuple(self._kill) == (step, point):
            if point == "error":
                raise RuntimeError("of a script")
            if point == "call":  # for a node that comes now
                (self._folder / f"joins-{step}").touch()
            os.kill(os.getpid(), signal.SIGSTOP if point == "stop" else signal.SIGKILL)

    def start_clock(self) -> None:
        """Die some seconds from now, if that is what shall be."""
        if self._kill is not None and self._kill[1] == "clock":

            def note_and_die() -> None:
                (self._folder / f"killed-{self._number}").write_text(str(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)

            clock = threading.Timer(self._kill[0], note_and_die)
            clock.daemon = True
            clock.start()

    def watch(self) -> None:
        """Watch the points that are inside of the package."""
        for point, owner, name in (
            ("writing", SnapshotWriter, "_write_shard"),
            ("exchange", SnapshotWriter, "_exchange"),
            ("loading", OpenSnapshot, "load"),
            ("regroup", Membership, "run_until_failure"),
        ):
            function = getattr(owner, name)

            def strike_first(this: Any, *args: Any, _point: str = point, _function: Any = function) -> Any:
                is_writer = isinstance(this, SnapshotWriter)  # the training goes on meanwhile
                self.strike(_point, this.manifest.step if is_writer else self.step)
                return _function(this, *args)

            mock.patch.object(owner, name, strike_first).start()

    def train(self) -> dict[str, Any]:
        """Train from the newest snapshot to the end."""
        scenario, rank, world_size = self._scenario, dist.get_rank(), dist.get_world_size()
        model = make_model()
        config = ShardConfig.preset(scenario.preset, hierarchical=False, **scenario.fields)
        sharded = shard(model, config, units=[nn.Linear])
        optimizers = make_optimizers(scenario.optimizer, model)
        for seed in (torch.manual_seed, random.seed, numpy.random.seed):
            seed(100 + rank)
        snapshots, step = None, 0
        if scenario.loads:
            step = load_checkpoint(self._folder.parent / scenario.loads, sharded, optimizers)["step"]
        elif not scenario.is_plain:
            memory = self._folder / f"memory-{self._number // 2}"
            memory.mkdir(exist_ok=True)
            snapshots = MemorySnapshots(sharded, optimizers, every=scenario.every, folder=memory)
            step = snapshots.load({"step": 0})["step"]
        if not self.begins:
            self.start_clock()
        self.begins.append((step, world_size))
        while step < max(scenario.num_steps, scenario.saves_at + 1):
            self.step = step
            self._wait_for_nodes(step, world_size)
            if step == scenario.saves_at:
                save_checkpoint(self._folder / "disk", sharded, optimizers, {"step": step})
                break
            for point in ("step", "error", "call", "stop"):
                self.strike(point, step)
            batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(1000 * step + rank))
            loss = model(batch).square().mean()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            self.losses[step], self.ends[step] = loss.item().hex(), time.time()
            time.sleep(scenario.step_s)
            step += 1
            if snapshots is not None:
                snapshots.after_step({"step": step})
                if step % scenario.every == 0 and not scenario.step_s:
                    snapshots.finish()  # so that it is known which one counts
        states = dict(local_states(model, optimizers))
        if snapshots is not None:
            snapshots.close()
        self.step = step
        self.strike("end", step)
        scopes = sharded.scopes
        degrees = (scopes.params, scopes.optimizer, scopes.ranks_per_node, scopes.world_size)
        return {"states": states, "rank": rank, "size": world_size, "degrees": degrees}

    def _wait_for_nodes(self, step: int, world_size: int) -> None:
        """Let the nodes start that come in this step, and wait until they have asked to join."""
        mark = self._folder / f"joins-{step}"
        calls = any(tuple(kill) == (step, "call") for kill in self._scenario.kills.values())
        if step in self._scenario.joins and not calls and dist.get_rank() == 0 and not mark.exists():
            mark.touch()
            deadline_s = time.monotonic() + TIMEOUT_S / 4
            while not (self._folder / f"asked-{step}").exists() and time.monotonic() < deadline_s:
                time.sleep(0.02)
            if world_size < 2 * self._scenario.num_nodes:
                time.sleep(30)  # until the others are ended for it


def run_process(scenario: Scenario, number: int, port: int, folder: Path) -> None:
    """One process, to its end."""
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RUN_ID="none", GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    process = Process(scenario, number, folder)
    process.watch()
    try:
        store: Any = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=TIMEOUT_S), False)
        join, rank, world_size = None, number, 2 * scenario.num_nodes
        if number >= world_size:
            block, rank = divmod(number - world_size, 2)
            join, world_size = f"127.0.0.1:{port}", 2
            store = dist.PrefixStore(f"block {block}", store)  # of a launcher of its own
            step = scenario.joins[block]
            while not (folder / f"joins-{step}").exists():
                time.sleep(0.02)
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), GROUP_RANK=str(number // 2))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
        if join is not None:
            apply = entering.apply

            def apply_and_say(*args: Any) -> int:
                index = apply(*args)
                (folder / f"asked-{step}").touch()
                return index

            mock.patch.object(entering, "apply", apply_and_say).start()
        if scenario.is_plain:
            result = process.train()
        else:
            options: Any = {"join": join, "lost_after_s": 3.0, "wait_for_node_s": scenario.wait_for_node_s}
            result = restart_on_loss(process.train, **options)
            if scenario.is_repeated:
                gc.collect()
                model = make_model()
                sharded = shard(model, "zero3", units=[nn.Linear])
                save_checkpoint(folder / "behind", sharded, make_optimizers("adamw", model))
                process.begins.clear()
                result = restart_on_loss(process.train, **options)
        result |= {"places": {name: os.environ[name] for name in ("RANK", "WORLD_SIZE")}}
    except SystemExit as error:
        result = {"error": f"SystemExit {error.code}"}
    except Exception as error:
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {error}"}
    result |= {"begins": process.begins, "losses": process.losses, "ends": process.ends}
    (folder / str(number)).write_bytes(pickle.dumps(result))
    sys.stdout.flush()
    os._exit(0)


def run(scenario: Scenario, folder: Path) -> None:
    """Run one job, until all of its processes have ended."""
    folder.mkdir(parents=True)
    reader, writer = os.pipe()
    store_pid = os.fork()
    if not store_pid:
        store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=TIMEOUT_S), False)
        os.write(writer, str(store.port).encode())
        time.sleep(3600)
    port = int(os.read(reader, 16))
    waiting, stopped = set(), set()
    output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for number in range(2 * (scenario.num_nodes + len(scenario.joins))):
        pid = os.fork()
        if not pid:
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.setpgid(0, 0)
            run_process(scenario, number, port, folder)
        waiting.add(pid)
        if scenario.kills.get(str(number), ("", ""))[1] == "stop":
            stopped.add(pid)
    deadline_s = time.monotonic() + TIMEOUT_S
    while waiting - stopped and time.monotonic() < deadline_s:
        waiting -= {pid for pid in waiting if os.waitpid(pid, os.WNOHANG)[0]}
        time.sleep(0.02)
    for pid in (*waiting, store_pid):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def run_all(scenarios: Iterable[Scenario], folder: Path) -> dict[str, dict[int, Any]]:
    """Run jobs in a fresh interpreter. Returns the results of the processes that ended, by scenario and number."""
    found = list(scenarios)
    (folder / "scenarios.json").write_text(json.dumps([dataclasses.asdict(scenario) for scenario in found]))
    command = [sys.executable, "-m", "tests.recovery.restart_job", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run(command, check=True, cwd=ROOT, env=environment)
    return {
        scenario.name: {
            int(path.name): pickle.loads(path.read_bytes()) for path in sorted((folder / scenario.name).glob("[0-9]*"))
        }
        for scenario in found
    }


def main(folder: Path) -> None:
    """Run all scenarios, one after the other."""
    for entry in json.loads((folder / "scenarios.json").read_text()):
        run(Scenario(**entry), folder / entry["name"])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
