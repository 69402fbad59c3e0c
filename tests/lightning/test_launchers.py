"""Do the ways of starting ranks work, with real processes?"""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mics_strategy import CheckpointError
from mics_strategy.lightning import MiCSStrategy
from tests.interpreters import python_path
from tests.lightning.modules import Regression, loader
from tests.lightning.runs import assert_same, fitted, run, trainer
from tests.ranks import RankContext, RankPool

ROOT = Path(__file__).parents[2]

SCRIPT = """
import atexit, os
from pathlib import Path

@atexit.register  # the first to be registered runs last
def note_threads():
    names = [Path(task, "comm").read_text() for task in Path("/proc/self/task").iterdir()]
    Path(f"threads-{os.getpid()}").write_text(str(sum(name.startswith("pt_gloo") for name in names)))

from lightning.pytorch import Trainer
import mics_strategy
from tests.lightning.modules import Regression, loader

if __name__ == "__main__":
    trainer = Trainer(strategy="mics", accelerator="cpu", devices=2, max_epochs=1, logger=False,
                      enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)
    trainer.fit(Regression(), loader())
    trainer.save_checkpoint("script.ckpt")
"""


def _run_script(directory: Path) -> str:
    """Run it with all the ranks that it starts, and end them with it; return what went wrong."""
    (directory / "script.py").write_text(SCRIPT)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {k: v for k, v in os.environ.items() if k not in names}
    env = {**kept, "PYTHONPATH": python_path(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "script.py"]
    script = subprocess.Popen(
        command, cwd=directory, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        _, errors = script.communicate()
    finally:
        if script.poll() is None:
            os.killpg(script.pid, signal.SIGKILL)
            script.wait()
    return errors if script.returncode else ""


def _with_ddp(ctx: RankContext) -> dict[str, torch.Tensor]:
    return fitted(ctx, "ddp", Regression(), loader())


@pytest.mark.slow
def test_a_script_starts_its_ranks_by_itself(ranks: RankPool, tmp_path: Path) -> None:
    assert _run_script(tmp_path) == ""
    found = torch.load(tmp_path / "script.ckpt", weights_only=True)["state_dict"]
    assert_same(found, run(ranks, 2, _with_ddp)[0])
    assert [path.read_text() for path in tmp_path.glob("threads-*")] == ["0", "0"]


def _from_this_process(ctx: RankContext, start_method: str) -> tuple[dict[str, torch.Tensor], float, bool, Any]:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
        os.environ.pop(name, None)
    module = Regression()
    notebook = trainer(ctx, MiCSStrategy(start_method=start_method), devices=2)
    notebook.fit(module, loader(), loader(8))
    val_loss = notebook.callback_metrics["val_loss"].item()
    notebook.save_checkpoint("after.ckpt")
    saved = torch.load("after.ckpt", weights_only=True)["state_dict"]
    results = notebook.validate(module, loader(8), verbose=False)
    sharding = trainer(ctx, MiCSStrategy(start_method=start_method, state_dict_type="sharded"), devices=2)
    sharding.strategy.connect(module)
    with pytest.raises(CheckpointError, match=r"ranks have ended.*ModelCheckpoint.*state_dict_type='full'"):
        sharding.save_checkpoint("after")
    return dict(module.named_parameters()), val_loss, results[0]["val_loss"] == pytest.approx(val_loss), saved


@pytest.mark.parametrize("start_method", ["fork", pytest.param("spawn", marks=pytest.mark.weekly)])
def test_whole_weights_come_back_to_the_process_that_started_the_ranks(ranks: RankPool, start_method: str) -> None:
    options = {"timeout_s": 58, "default_group": False}
    ((parameters, _, validates_alike, saved),) = run(ranks, 1, _from_this_process, start_method, **options)
    assert validates_alike
    assert_same({name: saved[name] for name in parameters}, {name: p.detach() for name, p in parameters.items()}, 0.0)
    assert_same({name: p.detach() for name, p in parameters.items()}, run(ranks, 2, _with_ddp)[0])
