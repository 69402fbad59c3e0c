"""Is every `os.PathLike` a path, wherever one is taken?"""

import os
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD

from mics_strategy import (
    OpenCheckpoint,
    atomic_checkpoint_folder,
    check_checkpoint,
    is_checkpoint,
    load_checkpoint,
    load_newest_checkpoint,
    load_weights,
    newest_checkpoint,
    remove_checkpoint,
    save_checkpoint,
    shard,
)
from tests.accelerate import runs as accelerate_runs
from tests.lightning import fabric_runs, runs
from tests.lightning.modules import Regression, loader
from tests.ranks import RankContext, RankPool


class Place:
    """No `pathlib.Path`, and nothing but a path."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def __fspath__(self) -> str:
        return self._path


def by_hand(ctx: RankContext, folder: Path) -> list[Path | None]:
    model = nn.Linear(4, 4)
    sharded, place = shard(model, "zero3"), Place(folder / "one")
    optimizers = [SGD(model.parameters())]
    save_checkpoint(place, sharded, optimizers, {"epoch": 1})
    check_checkpoint(place)
    assert load_checkpoint(place, sharded, optimizers) == OpenCheckpoint(place).extra == {"epoch": 1}
    assert load_newest_checkpoint(Place(folder), sharded, optimizers) == {"epoch": 1}
    assert not load_weights(place, sharded).missing_keys
    with atomic_checkpoint_folder(Place(folder / "two"), [sharded]) as draft:
        (draft / f"{ctx.rank}").write_text("here")
    found = [newest_checkpoint(Place(folder))]
    torch.distributed.barrier()
    if ctx.rank == 0:
        assert is_checkpoint(Place(folder / "two"))
        assert remove_checkpoint(Place(folder / "two"))
    return found


def test_by_hand(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks(2, by_hand, tmp_path) == [[tmp_path / "two"]] * 2
    assert os.listdir(tmp_path) == ["one"]


def with_trainer(ctx: RankContext, folder: Path, form: str) -> None:
    place = Place(folder / "model.ckpt")
    first = runs.trainer(ctx, runs.mics(state_dict_type=form), max_steps=2)
    first.fit(Regression(), loader())
    first.save_checkpoint(place)
    expected = runs.whole(first)
    second = runs.trainer(ctx, runs.mics(state_dict_type=form), max_steps=2)
    second.fit(Regression(), loader(), ckpt_path=place)
    assert second.global_step == 2
    runs.assert_same(runs.whole(second), expected)
    first.strategy.remove_checkpoint(place)


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_with_a_trainer(ranks: RankPool, tmp_path: Path, form: str) -> None:
    runs.run(ranks, 2, with_trainer, tmp_path, form)
    assert os.listdir(tmp_path) == []


def with_fabric(ctx: RankContext, folder: Path, form: str) -> None:
    fabric = fabric_runs.launched(ctx, fabric_runs.mics(state_dict_type=form))
    model = fabric.setup_module(nn.Linear(4, 4))
    place = Place(folder / "model.ckpt")
    fabric.save(place, {"model": model, "epoch": 3})
    state = {"model": model, "epoch": 0}
    fabric.load(place, state)
    assert state["epoch"] == 3


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_with_fabric(ranks: RankPool, tmp_path: Path, form: str) -> None:
    runs.run(ranks, 2, with_fabric, tmp_path, form)
    assert os.listdir(tmp_path) == ["model.ckpt"]


def with_accelerate(ctx: RankContext, folder: Path) -> None:
    accelerator = accelerate_runs.accelerator()
    model = nn.Linear(4, 4)
    accelerator.prepare(model, SGD(model.parameters()))
    accelerator.save_state(Place(folder / "state"))
    accelerator.load_state(Place(folder / "state"))


def test_with_accelerate(ranks: RankPool, tmp_path: Path) -> None:
    accelerate_runs.run(ranks, 2, with_accelerate, tmp_path)
    assert os.listdir(tmp_path) == ["state"]
