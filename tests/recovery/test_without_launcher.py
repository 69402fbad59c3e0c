"""Does a job grow whose store is in one of its own processes, as without torchrun?"""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import gc, os, sys, time
import torch
import torch.distributed as dist
from torch import nn
from mics_strategy import Recovery, Topology, shard

dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
sharded = shard(model, "ddp", units=[nn.Linear], topology=Topology(ranks_per_node=1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
recovery = Recovery(sharded, [optimizer], join=os.environ.get("JOIN"), allows_one_copy=True)
deadline_s, num_steps = time.monotonic() + 60, 0
while dist.get_world_size() < 3 or num_steps < 3:  # three steps together
    assert time.monotonic() < deadline_s
    with recovery.attempt():
        num_steps += dist.get_world_size() == 3
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    gc.collect()  # what else holds the first groups, and their store
    print("steps", sharded.steps_done, flush=True)
    time.sleep(0.05)
recovery.close()
print("ended with", dist.get_world_size(), flush=True)
"""


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return str(free.getsockname()[1])


@pytest.mark.slow
def test_a_newcomer_joins_a_job_without_a_launcher() -> None:
    port = free_port()
    jobs = [
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": port},
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": port},
        {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": free_port(), "JOIN": f"localhost:{port}"},
    ]
    usual = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MASTER_ADDR": "localhost", "LOCAL_WORLD_SIZE": "1"}
    ranks: list[subprocess.Popen[str]] = []
    try:
        for job in jobs:
            if "JOIN" in job:
                assert any(line == "steps 20\n" for line in ranks[0].stdout)
            ranks.append(
                subprocess.Popen(
                    [sys.executable, "-c", SCRIPT], env=os.environ | usual | job, stdout=subprocess.PIPE, text=True
                )
            )
        printed = [rank.communicate(timeout=100)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert [text.splitlines()[-1] for text in printed] == ["ended with 3"] * 3
