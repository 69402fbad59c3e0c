"""Do the ways of starting ranks work with Fabric, with real processes?"""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor

from tests.interpreters import python_path
from tests.lightning.fabric_runs import launched, train, values
from tests.lightning.modules import Net
from tests.lightning.runs import assert_same, run
from tests.ranks import RankContext, RankPool

ROOT = Path(__file__).parents[2]
LAUNCHING = 'Fabric(strategy="mics", accelerator="cpu", devices=2); fabric.launch()'
SCRIPT = f"""
import torch
from lightning.fabric import Fabric
from tests.lightning.modules import Net, loader

if __name__ == "__main__":
    fabric = {LAUNCHING}
    net = Net()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.05))
    for x, y in fabric.setup_dataloaders(loader()):
        fabric.backward(torch.nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    fabric.save("script.ckpt", dict(net=model))
"""


def _trained(fabric: Any) -> dict[str, Tensor]:
    net = Net()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.05))
    train(fabric, model, optimizer)
    return values(model)


def _with_ddp(ctx: RankContext) -> dict[str, Tensor]:
    return _trained(launched(ctx, "ddp"))


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
FABRIC_RUN = [str(Path(sys.executable).parent / "fabric"), "run", "--strategy=mics", "--accelerator=cpu", "--devices=2"]


@pytest.mark.wide
@pytest.mark.slow
@pytest.mark.parametrize(
    ("start", "launching"),
    [([], LAUNCHING), (TORCHRUN, LAUNCHING), (FABRIC_RUN, "Fabric()")],
    ids=["script", "torchrun", "fabric run"],
)
def test_a_script_runs_on_the_ranks_that_it_or_a_launcher_starts(
    ranks: RankPool, tmp_path: Path, start: list[str], launching: str
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.replace(LAUNCHING, launching))
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {k: v for k, v in os.environ.items() if k not in names}
    env = {**kept, "PYTHONPATH": python_path(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *start, "script.py"]
    script = subprocess.Popen(command, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        _, errors = script.communicate()
    finally:
        if script.poll() is None:
            os.killpg(script.pid, signal.SIGKILL)
            script.wait()
    assert script.returncode == 0, errors
    found = torch.load(tmp_path / "script.ckpt", weights_only=True)["net"]
    expected = run(ranks, 2, _with_ddp)[0]
    assert_same({f"0.{name}": value for name, value in found.items()}, expected)


def _as_lists(fabric: Any) -> dict[str, Any]:
    return {name: value.tolist() for name, value in _trained(fabric).items()}  # tensors end with their process


def _from_this_process(ctx: RankContext, name: str) -> dict[str, Any]:
    for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
        os.environ.pop(variable, None)
    return Fabric(strategy=name, accelerator="cpu", devices=2).launch(_as_lists)


@pytest.mark.parametrize("name", ["mics_fork", pytest.param("mics_spawn", marks=pytest.mark.slow)])
def test_what_a_function_returns_comes_back_to_the_process_that_started_the_ranks(ranks: RankPool, name: str) -> None:
    (found,) = run(ranks, 1, _from_this_process, name, default_group=False)
    assert_same({n: torch.tensor(v) for n, v in found.items()}, run(ranks, 2, _with_ddp)[0])
