"""How much of the package does a plain training load? Options bring their own files, where they are used."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LOADED = 24_017  # lines, which may only fall, of the files that the trainings below load: 28,711 before it was counted
WITHOUT = (  # what they do without
    *("accelerate", "checkpoint", "cli", "outer", "recovery"),
    *("engine.optimizer.delayed", "engine.profile.stragglers", "comm.codecs.triton_codec"),
    *("planner.choice", "planner.cluster", "planner.scope_search", "planner.simulator", "planner.solver"),
)
TRAINING = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from mics_strategy import Topology, shard

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=int(sys.argv[2]), world_size=4)
nodes = Topology(ranks_per_node=2)
for preset, dtype in zip(("mics", "zero1", "zero2", "zero3", "paro-nig", "paro-iig"), ("auto", "bfloat16") * 3):
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    sharded = shard(model, preset, units=[nn.Linear], topology=nodes, param_dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = [parameter.to_local().clone() for parameter in model.parameters()]
    for _ in range(2):
        model(torch.ones(2, 8)).float().square().mean().backward()
        sharded.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert any(not torch.equal(a, b.to_local()) for a, b in zip(before, model.parameters()) if a.numel())
print(*sorted(name for name in sys.modules if name.partition(".")[0] == "mics_strategy"))
dist.destroy_process_group()
"""


@pytest.mark.interpreter
def test_a_plain_training_loads_no_more_than_before(tmp_path: Path) -> None:
    """Who lets it load more raises the number here and says in the commit why."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    children = [
        subprocess.Popen(
            [sys.executable, "-c", TRAINING, str(tmp_path / "store"), str(rank)],
            env=env,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(4)
    ]
    outputs = [child.communicate(timeout=300) for child in children]
    assert [child.returncode for child in children] == [0] * 4, [problems for _, problems in outputs]
    names = outputs[0][0].splitlines()[-1].split()
    loaded = {name.removeprefix("mics_strategy").removeprefix(".") for name in names}
    assert {"api", "engine.step", "comm.queue"} <= loaded
    assert [name for name in sorted(loaded) if name in WITHOUT or name.partition(".")[0] in WITHOUT] == []
    assert _lines(loaded) <= LOADED
    assert _lines(loaded) > LOADED - 200, f"lower the number to {_lines(loaded)}"


def _lines(modules: set[str]) -> int:
    """Lines of modules and packages by their names below the package."""
    folder = ROOT / "mics_strategy"
    paths = [folder / name.replace(".", "/") for name in modules]
    files = [path / "__init__.py" if path.is_dir() else path.with_suffix(".py") for path in paths]
    return sum(len(file.read_text().splitlines()) for file in files)
