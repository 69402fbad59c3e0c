"""Do Trainer, Fabric and Accelerate pass outer steps through, save all islands, and resume?"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mics_strategy import CheckpointError, MiCSError, load_weights, save_checkpoint
from tests.accelerate import test_checkpoints as accelerate_jobs
from tests.accelerate.runs import run as run_accelerate
from tests.engine.training import wholes
from tests.lightning.fabric_runs import launched
from tests.lightning.fabric_runs import mics as fabric_mics
from tests.lightning.fabric_runs import train as fabric_train
from tests.lightning.modules import Net, Regression, loader
from tests.lightning.runs import mics, run, trainer, whole
from tests.outer.plain import Rounds
from tests.outer.test_outer_steps import config_of, run_step, start
from tests.ranks import RankContext, RankPool

EVERY = 2


def groups_of(found: list[dict[str, Tensor]]) -> list[int]:
    """For each rank, the first rank that holds the same parameters."""
    same = [[all(torch.equal(one[name], other[name]) for name in one) for other in found] for one in found]
    return [row.index(True) for row in same]


class ManualRegression(Regression):
    """Steps in its own loop."""

    def __init__(self) -> None:
        super().__init__("adamw")
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


def fit_to_the_end(ctx: RankContext, steps: int, manual: bool) -> dict[str, Tensor]:
    """Parameters behind a training in fragments, which nothing has finished but the Trainer."""
    strategy = mics("mics", outer_every=3, outer_fragments=2, outer_delay=1)
    fitting = trainer(ctx, strategy, max_epochs=steps)
    fitting.fit(ManualRegression() if manual else Regression("adamw"), loader(8))
    return whole(fitting)


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
@pytest.mark.parametrize("steps", [4, 5])
def test_a_trainer_leaves_one_model(ranks: RankPool, steps: int, manual: bool) -> None:
    assert groups_of(run(ranks, 4, fit_to_the_end, steps, manual, ranks_per_node=2)) == [0, 0, 0, 0]


def fit(ctx: RankContext, steps: int, folder: str, **options: Any) -> dict[str, Tensor]:
    """`steps` epochs of one optimizer step, from the checkpoint in the folder, or saved there if there is none."""
    strategy = mics("mics", outer_every=EVERY, state_dict_type="sharded")
    resumed = Path(folder).exists()
    fitting = trainer(ctx, strategy, max_epochs=steps, gradient_clip_val=0.5, **options)
    fitting.fit(Regression("adam_scheduler"), loader(8), ckpt_path=folder if resumed else None)
    if not resumed:
        fitting.save_checkpoint(folder)
    return whole(fitting)


@pytest.mark.parametrize("saved", [3, 4])
def test_a_trainer_steps_in_islands_and_resumes_bit_by_bit(ranks: RankPool, tmp_path: Path, saved: int) -> None:
    first = run(ranks, 4, fit, saved, str(tmp_path / "saved"), ranks_per_node=2)
    assert groups_of(first) == ([0, 0, 2, 2] if saved == 3 else [0, 0, 0, 0])
    uninterrupted = run(ranks, 4, fit, 7, str(tmp_path / "other"), ranks_per_node=2)
    resumed = run(ranks, 4, fit, 7, str(tmp_path / "saved"), ranks_per_node=2)
    for found, expected in zip(resumed, uninterrupted, strict=True):
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def refused_at_start(ctx: RankContext, folder: str) -> str:
    fitting = trainer(
        ctx, mics("mics", outer_every=EVERY), max_steps=1, enable_checkpointing=True, default_root_dir=folder
    )
    try:
        fitting.fit(Regression("adamw"), loader())
    except MiCSError as error:
        return str(error)
    return ""


def test_a_trainer_that_would_save_one_file_is_refused_before_it_trains(ranks: RankPool, tmp_path: Path) -> None:
    words = "ModelCheckpoint would fail at its first save. Use state_dict_type='sharded'"
    assert all(words in text for text in run(ranks, 4, refused_at_start, str(tmp_path), ranks_per_node=2))


def saves_whole(ctx: RankContext, path: str) -> str:
    fitting = trainer(ctx, mics("mics", outer_every=EVERY), max_steps=1)
    fitting.fit(Regression("adamw"), loader())
    try:
        fitting.save_checkpoint(path)
    except MiCSError as error:
        fitting.save_checkpoint(path, weights_only=True)
        return str(error)
    return ""


def test_one_file_of_a_trainer_holds_weights_alone(ranks: RankPool, tmp_path: Path) -> None:
    words = "islands have different optimizer states, of which one state dict holds one. Use a sharded checkpoint"
    assert all(words in text for text in run(ranks, 4, saves_whole, str(tmp_path / "one.ckpt"), ranks_per_node=2))
    assert (tmp_path / "one.ckpt").is_file()


def in_fabric(ctx: RankContext, folder: str, first: bool) -> dict[str, Tensor]:
    """Three steps and a save, or three steps from there."""
    fabric = launched(ctx, fabric_mics("mics", outer_every=EVERY, state_dict_type="sharded"))
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = fabric.setup(model, optimizer)
    if not first:
        fabric.load(folder, {"model": model, "optimizer": optimizer})
    fabric_train(fabric, model, optimizer, 24)
    if first:
        fabric.save(folder, {"model": model, "optimizer": optimizer})
        fabric_train(fabric, model, optimizer, 24)
    return wholes(dict(model.module.named_parameters()))


def test_fabric_resumes_islands(ranks: RankPool, tmp_path: Path) -> None:
    whole_run = run(ranks, 4, in_fabric, str(tmp_path / "saved"), True, ranks_per_node=2)
    resumed = run(ranks, 4, in_fabric, str(tmp_path / "saved"), False, ranks_per_node=2)
    assert groups_of(whole_run) == [0, 0, 0, 0]
    for found, expected in zip(resumed, whole_run, strict=True):
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def in_accelerate(ctx: RankContext, folder: str, every: int, first: bool) -> dict[str, Any]:
    """Three steps with a gradient scaler and a save, then three more."""
    job = accelerate_jobs.Run("mics", state_dict_type="SHARDED_STATE_DICT", outer_every=every)
    job.steps(0, 3) if first else job.steps(5, 6)
    if not first:
        job.acc.load_state(folder)
        job.steps(3, 6)
        return job.end()
    job.acc.save_state(folder)
    job.steps(3, 6)
    return job.end()


def test_accelerate_resumes_islands_after_an_outer_step(ranks: RankPool, tmp_path: Path) -> None:
    found = [
        run_accelerate(ranks, 4, in_accelerate, str(tmp_path / "state"), 3, first, ranks_per_node=2)
        for first in (True, False)
    ]
    assert groups_of([of_rank["values"] for of_rank in found[0]]) == [0, 0, 0, 0]
    for own, other in zip(*found, strict=True):
        accelerate_jobs.assert_same_end(own, other)


def refused_in_accelerate(ctx: RankContext, folder: str) -> str:
    try:
        in_accelerate(ctx, folder, 2, True)
    except CheckpointError as error:
        return str(error)
    return ""


def test_accelerate_refuses_to_save_between_outer_steps(ranks: RankPool, tmp_path: Path) -> None:
    found = run_accelerate(ranks, 4, refused_in_accelerate, str(tmp_path / "state"), ranks_per_node=2)
    assert all("Nothing was saved: optimizers are saved without `" in text for text in found)
    assert all("1 steps after an outer step" in text for text in found)


def weights_loaded(ctx: RankContext, folder: Path) -> tuple[bool, bool]:
    """Whether a job of islands begins a round with the weights, and whether it refuses a part of them in a round."""
    rounds = Rounds(every=2, steps=4)
    trained = model, sharded, _ = start(config_of("mics", rounds, 2), rounds)
    save_checkpoint(folder, sharded)
    saved = wholes(dict(model.named_parameters()))
    run_step(ctx, rounds, trained, 0)
    load_weights(folder, sharded)
    is_loaded = all(torch.equal(value, saved[name]) for name, value in wholes(dict(model.named_parameters())).items())
    run_step(ctx, rounds, trained, 0)
    try:
        load_weights(folder, sharded, strict=False, rename=lambda name: "scale" if name == "model.scale" else None)
    except MiCSError as error:
        return is_loaded, "was loaded 1 steps after an outer step" in str(error)
    return is_loaded, False


def test_loaded_weights_begin_a_round(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks(4, weights_loaded, tmp_path / "weights") == [(True, True)] * 4
