"""Does torchrun's restart find the snapshots, and a new job not?"""

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests.snapshots.job import (
    EVERYBODY,
    ROOT,
    TIMEOUT_S,
    Kill,
    Scenario,
    agent_command,
    agent_environment,
    begins_of,
    launch,
    losses_of,
    write,
)

pytestmark = pytest.mark.slow

DIES = [Kill(attempt=0, ranks=[EVERYBODY], at=8)]


def test_a_restart_by_torchrun_continues(tmp_path: Path) -> None:
    """All ranks die. The same script under another torchrun begins from the beginning."""
    for name, kills in (("dies", DIES), ("reference", [])):
        done = launch(Scenario(name=name, nodes=[[0]], kills=kills), tmp_path / name)
        assert done.returncode == 0, done.stderr[-3000:]
    assert begins_of(tmp_path / "dies") == {0: 0, 1: 6}
    assert "the job is new" in done.stdout
    assert losses_of(tmp_path / "dies", 2) == losses_of(tmp_path / "reference", 2)


def test_a_restart_by_hand_needs_the_jobs_name(tmp_path: Path) -> None:
    scenario = Scenario(name="by-hand", nodes=[[0]], kills=DIES, job="by-hand")
    assert launch(scenario, tmp_path / "by-hand").returncode != 0
    done = launch(scenario, tmp_path / "by-hand", attempt=1)
    assert done.returncode == 0, done.stderr[-3000:]
    assert begins_of(tmp_path / "by-hand") == {0: 0, 1: 6}
    assert "the newest is of step 6" in done.stdout


def children_of(pid: int) -> list[int]:
    """The processes that a process has started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def node_of(worker: int) -> int:
    """The node of a rank, by its environment."""
    entries = Path(f"/proc/{worker}/environ").read_bytes().split(b"\0")
    return int(dict(entry.split(b"=", 1) for entry in entries if entry)[b"GROUP_RANK"])


@pytest.mark.weekly
def test_a_node_with_a_new_launcher_takes_the_place_of_a_lost_one(tmp_path: Path) -> None:
    """Of two agents one is killed with its ranks, and its memory is lost; another agent joins."""
    folder = tmp_path / "agents"
    scenario = Scenario(
        name="agents", num_steps=16, step_s=0.5, kills=[Kill(attempt=9, ranks=[0], at=0)]
    )  # one restart
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    options = ["--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-id", "agents"]
    options += ["--rdzv-endpoint", f"localhost:{port}"]
    options += ["--rdzv-conf", "join_timeout=100,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"]
    command = agent_command(scenario, write(scenario, folder), *options)
    agents: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        output = (tmp_path / f"agent{len(agents)}").open("wb")
        agents.append(subprocess.Popen(command, cwd=ROOT, env=agent_environment(), stdout=output, stderr=output))
        output.close()

    try:
        start()
        start()
        wait_for_step(9, folder)  # in front of which the snapshot of step 6 was waited for
        workers = children_of(agents[1].pid)
        lost = node_of(workers[0])
        for pid in (agents[1].pid, *workers):
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder / f"node{lost}")
        start()
        assert agents[0].wait(TIMEOUT_S) == 0, (tmp_path / "agent0").read_text()[-3000:]
        assert agents[2].wait(TIMEOUT_S) == 0, (tmp_path / "agent2").read_text()[-3000:]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    *_, last = sorted(folder.glob("begins-*"), key=lambda path: path.stat().st_mtime)
    assert int(last.read_text().split()[0]) >= 6


def wait_for_step(step: int, folder: Path) -> None:
    """Wait until rank 0 has run a step."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline_s:
        if losses_of(folder, 1)[0].get(step) is not None:
            return
        time.sleep(0.05)
    raise AssertionError(f"step {step} was not reached")
