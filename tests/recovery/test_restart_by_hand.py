"""Trainings without this package's engine and without a launcher, whose ranks raise, die and come back."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.recovery.restart_job import ROOT
from tests.recovery.test_without_launcher import free_port

pytestmark = pytest.mark.slow
SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from mics_strategy import MemorySnapshots, restart_on_loss, shard

folder, first_rank = Path(sys.argv[1]), os.environ["RANK"]
(folder / first_rank).mkdir(exist_ok=True)

def reduced(step):
    loss = torch.tensor(float(step))
    dist.all_reduce(loss)
    return loss.item()

def wait_for(mark):
    deadline_s = time.monotonic() + 60
    while not (folder / mark).exists():
        assert time.monotonic() < deadline_s, mark
        time.sleep(0.02)

def raises():
    total = 0.0
    for step in range(6):
        if first_rank == "1" and step == 3:
            raise ValueError("of a script")
        total = reduced(step)
    return total, os.environ["WORLD_SIZE"], os.environ["LOCAL_WORLD_SIZE"]

def all_raise():
    print("trains", flush=True)
    reduced(1)
    raise KeyError("of all scripts")

def comes_back():
    model = torch.nn.Linear(2, 2)
    sharded = shard(model, "ddp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    snapshots = MemorySnapshots(sharded, [optimizer], every=2, folder=folder / os.environ["PLACE"])
    step = snapshots.load({"step": 0})["step"]
    while step < 8 or dist.get_world_size() < 2:
        if os.environ["PLACE"] == "1" and step == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        if dist.get_world_size() == 1:
            (folder / "alone").touch()
            assert step < 3000
            time.sleep(0.02)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        snapshots.after_step({"step": step})
    snapshots.close()
    return dist.get_world_size()

dist.init_process_group("gloo")
try:
    print("returned", restart_on_loss(globals()[sys.argv[2]], join=os.environ.get("JOIN")), flush=True)
except (ValueError, KeyError) as error:
    print("raised", error, flush=True)
    if sys.argv[2] == "raises":
        wait_for("done")  # this process lives on
(folder / "done").touch()
"""


def start(folder: Path, name: str, port: str, rank: int, **others: str) -> subprocess.Popen[str]:
    """One process of a job of two, each a node if GROUP_RANK says so."""
    usual = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    (folder / others.get("PLACE", "0")).mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder), name],
        env=os.environ | usual | place | others,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def outputs(processes: list[subprocess.Popen[str]]) -> list[str]:
    try:
        return [process.communicate(timeout=100)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("is_one_node", [False, True])
def test_the_others_go_on_while_one_that_has_raised_lives_on(is_one_node: bool, tmp_path: Path) -> None:
    port = free_port()
    groups = ["0", "0"] if is_one_node else ["0", "1"]
    texts = outputs([start(tmp_path, "raises", port, rank, GROUP_RANK=groups[rank]) for rank in range(2)])
    assert "returned (5.0, '1', '1')" in texts[0], texts
    assert "processes 1 are gone (" in texts[0]
    assert "gone ()" not in texts[0]
    assert "raised of a script" in texts[1]


def test_where_all_raise_each_raises_its_own_error(tmp_path: Path) -> None:
    port = free_port()
    texts = outputs([start(tmp_path, "all_raise", port, rank, GROUP_RANK=str(rank)) for rank in range(2)])
    for text in texts:
        assert "raised 'of all scripts'" in text, texts
        assert text.count("trains") <= 2


def test_a_rank_that_is_left_alone_lets_in_the_node_that_comes_back(tmp_path: Path) -> None:
    port = free_port()
    processes = [start(tmp_path, "comes_back", port, rank, GROUP_RANK=str(rank), PLACE=str(rank)) for rank in range(2)]
    deadline_s = time.monotonic() + 60
    while not (tmp_path / "alone").exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    join = {"JOIN": f"localhost:{port}", "GROUP_RANK": "2", "PLACE": "2", "WORLD_SIZE": "1"}
    processes.append(start(tmp_path, "comes_back", free_port(), 0, **join))
    texts = outputs(processes)
    assert [texts[number].splitlines()[-1] for number in (0, 2)] == ["returned 2"] * 2, texts
    assert "processes 2 have joined (" in texts[0]
