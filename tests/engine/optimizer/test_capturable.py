"""Optimizers with counters on the GPU, for CUDA graphs, step as on a plain model.

World 1 on NCCL: no second rank. On a CPU torch refuses them (`test_optimizer_states.py`).
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]

NAMES = ("Adadelta", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop")
SCRIPT = """
import copy
import itertools
import sys

import torch
import torch.distributed as dist
from mics_strategy import ShardConfig, shard
from tests import models

path, preset, *names = sys.argv[1:]
dist.init_process_group("nccl", init_method=f"file://{path}", rank=0, world_size=1)
for name, is_foreach in itertools.product(names, (False, True)):
    case = models.scalar()
    plain, model = case.build().cuda(), case.build()
    shard(model, ShardConfig.preset(preset), units=case.units)
    make = getattr(torch.optim, name)
    optimizers = [make(each.parameters(), lr=0.01, capturable=True, foreach=is_foreach) for each in (plain, model)]
    for step in range(4):
        batch = {key: value.cuda() for key, value in case.batch(step, 0, 0).items()}
        for each, optimizer in zip((plain, model), optimizers):
            case.loss(each, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert all(state["step"].is_cuda for state in optimizers[1].state.values())
    for expected, found in zip(plain.parameters(), model.parameters()):
        torch.testing.assert_close(found.full_tensor(), expected, rtol=1e-5, atol=1e-6, msg=name)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("preset", ["ddp", "mics"])
def test_capturable_optimizers_step_as_on_the_plain_model(tmp_path: Path, preset: str) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "store"), preset, *NAMES]
    done = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
