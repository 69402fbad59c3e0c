"""Does a model on a GPU train as the plain one? World 1 on NCCL: streams and devices, but no second rank.

On a machine without a GPU these are skipped, and nothing is claimed about GPUs.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]

SCRIPT = """
import sys

import torch
import torch.distributed as dist
from mics_strategy import ShardConfig, shard
from tests import models

path, preset, dtype = sys.argv[1:]
dist.init_process_group("nccl", init_method=f"file://{path}", rank=0, world_size=1)
case = models.transformer()
reference, model = case.build().cuda(), case.build()
shard(model, ShardConfig.preset(preset, param_dtype=dtype), units=case.units)
optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (reference, model)]
for step in range(3):
    for micro in range(2):
        batch = {name: value.cuda() for name, value in case.batch(step, micro, 0).items()}
        with torch.autocast("cuda", torch.bfloat16, enabled=dtype != "float32"):
            losses = [case.loss(reference, batch)]
        losses.append(case.loss(model, batch))
        for loss in losses:
            (loss / 2).backward()
        tolerance = 1e-4 if dtype == "float32" else 3e-2
        torch.testing.assert_close(losses[1].float(), losses[0].float(), rtol=tolerance, atol=tolerance)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
assert all(parameter.device.type == "cuda" for parameter in model.parameters())
dist.destroy_process_group()
"""


@pytest.mark.parametrize("preset", ["ddp", "zero3", "mics"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_trains_as_the_plain_model(tmp_path: Path, preset: str, dtype: str) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "store"), preset, dtype]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr
