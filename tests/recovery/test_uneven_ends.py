"""What happens to ranks that end the training, by `close()`, while others go on?"""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.interpreter
SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from mics_strategy import Recovery, Topology, shard

dist.init_process_group("gloo")
rank, num_steps, fails_at = dist.get_rank(), int(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
sharded = shard(model, "mics", units=[nn.Linear], topology=Topology(ranks_per_node=1))
optimizer = torch.optim.AdamW(model.parameters())
recovery = Recovery(sharded, [optimizer])
step = 0
try:
    while step < num_steps:
        with recovery.attempt() as attempt:
            model(torch.ones(2, 8)).sum().backward()
            if step == fails_at:
                raise ZeroDivisionError
            optimizer.step()
            optimizer.zero_grad()
        step += attempt.completed
finally:
    recovery.close()
print(f"rank {rank} has run {step} steps", flush=True)
"""


def run(tmp_path: Path, *arguments: tuple[int, int]) -> list[tuple[int, str, str]]:
    """Two ranks with the script's arguments for each. Returns exit codes and outputs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    children = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, *map(str, own)],
            env={**env, "RANK": str(rank)},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, own in enumerate(arguments)
    ]
    outputs = [child.communicate(timeout=120) for child in children]
    return [(child.returncode, *output) for child, output in zip(children, outputs, strict=True)]


def test_a_rank_that_counts_other_steps_raises_and_does_not_train_on_alone(tmp_path: Path) -> None:
    """Such as a newcomer whose loop has a counter of its own."""
    (code, printed, problem), (_, ended, _) = run(tmp_path, (6, -1), (3, -1))
    assert "rank 1 has run 3 steps" in ended
    assert code == 1
    assert "rank 0 has run" not in printed
    assert "Processes 1 have ended the training by `close()`, and process 0 has begun another attempt" in problem


def test_a_rank_that_fails_and_closes_does_not_end_the_training_of_the_others(tmp_path: Path) -> None:
    (code, printed, problem), (_, _, failure) = run(tmp_path, (6, -1), (6, 2))
    assert "ZeroDivisionError" in failure
    assert (code, "rank 0 has run 6 steps" in printed) == (0, True), problem
