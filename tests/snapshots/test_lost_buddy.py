"""Does a rank end when its buddy dies in the middle of a large message?"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import os, signal, sys
import torch
import torch.distributed as dist
from torch import nn
from mics_strategy import CheckpointError, CommunicationError, MemorySnapshots, Topology, shard
from mics_strategy.snapshots.buddy import BuddyExchange

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
model = nn.Sequential(*[nn.Linear(1600, 1600) for _ in range(3)])
sharded = shard(model, "zero3", units=[nn.Linear], topology=Topology(ranks_per_node=1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
os.mkdir(f"{folder}/node{rank}")
snapshots = MemorySnapshots(sharded, [optimizer], every=1, job="a-job", folder=f"{folder}/node{rank}")
wait, num_waits = BuddyExchange._wait, 0

def wait_or_die(self, works):
    global num_waits
    num_waits += 1
    if rank == 1 and num_waits == 4:  # behind its sizes and reports: chunks of four megabytes
        os.kill(os.getpid(), signal.SIGKILL)
    wait(self, works)

BuddyExchange._wait = wait_or_die
try:
    while True:
        model(torch.ones(4, 1600)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        snapshots.after_step()
except (CommunicationError, CheckpointError):  # in a step, or in front of the next snapshot
    print("raised", flush=True)
"""


@pytest.mark.slow
def test_a_rank_ends_whose_buddy_is_killed_in_the_middle_of_a_chunk(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([sys.executable, "-c", SCRIPT, str(rank), str(tmp_path)], env=env, stdout=-1, text=True)
        for rank in range(2)
    ]
    try:
        printed = ranks[0].communicate(timeout=90)[0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert printed.splitlines()[-1] == "raised"
    assert [rank.returncode for rank in ranks] == [0, -signal.SIGKILL]
