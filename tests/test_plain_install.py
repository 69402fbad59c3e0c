"""Does the core run where nothing is installed but what it requires?"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TRAINING = """
import importlib, pathlib, re, sys, tomllib
from importlib import metadata

def required_by(name, found):
    if name not in found:
        found.add(name)
        for requirement in metadata.requires(name) or ():
            if ";" not in requirement:  # neither an extra nor of another system
                required_by(re.match(r"[\\w.-]+", requirement)[0].lower().replace("_", "-"), found)
    return found

core = tomllib.loads(pathlib.Path(sys.argv[2]).read_text())["project"]["dependencies"]  # of now, not of the install
names = {"mics-strategy"}.union(*(required_by(re.match(r"\\w+", name)[0].replace("_", "-"), set()) for name in core))
for module, distributions in metadata.packages_distributions().items():
    if not names & {name.lower().replace("_", "-") for name in distributions}:
        sys.modules[module] = None  # its import raises ModuleNotFoundError
assert sys.modules["lightning"] is sys.modules["transformers"] is sys.modules["yaml"] is None

import torch
import torch.distributed as dist
from torch import nn

import mics_strategy
from mics_strategy.cli import main

folder = sys.argv[1]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=int(sys.argv[3]), world_size=2)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
sharded = mics_strategy.shard(model, "zero3")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for _ in range(3):
    loss = model(torch.ones(2, 4)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
assert losses[0] > losses[1] > losses[2] > 0, losses
mics_strategy.save_checkpoint(f"{folder}/step-3", sharded, [optimizer])
mics_strategy.load_checkpoint(f"{folder}/step-3", sharded, [optimizer])
rank = dist.get_rank()
dist.destroy_process_group()
if rank == 1:
    sys.exit()
model = ["llama-7b", "--cluster", "p4d.24xlarge"]
batch = ["--nodes", "2", "--seq-len", "512", "--global-batch", "16", "--micro-batch", "1"]
for framework, name in (("lightning", "MiCSStrategy"), ("accelerate", "MiCSPlugin")):
    try:
        getattr(importlib.import_module(f"mics_strategy.{framework}"), name)
    except ModuleNotFoundError as error:
        assert "which is not installed. Run `pip install" in str(error), error
    else:
        raise AssertionError(framework)
assert main(["estimate", *model]) == main(["inspect", f"{folder}/step-3"]) == 0
assert main(["simulate", "--model", *model, *batch, "--preset", "mics", "--recompute", "no"]) == 0
print("all done")
"""


@pytest.mark.interpreter
def test_the_core_trains_saves_and_plans_with_what_it_requires_alone(tmp_path: Path) -> None:
    root = Path(__file__).parents[1]
    env = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", TRAINING, str(tmp_path), str(root / "pyproject.toml")]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    children = [subprocess.Popen([*command, str(rank)], env=env, cwd=tmp_path, **pipes) for rank in range(2)]
    (printed, problems), (_, other_problems) = [child.communicate(timeout=300) for child in children]
    assert [child.returncode for child in children] == [0, 0], problems + other_problems
    assert printed.strip().splitlines()[-1:] == ["all done"]
