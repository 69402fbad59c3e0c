"""Does the Trainer train with an optimizer that needs whole tensors, and go on from its checkpoints?"""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from mics_strategy import ConfigError
from tests.lightning.modules import Regression, loader
from tests.lightning.runs import assert_same, fitted, mics, run, trainer, whole
from tests.ranks import RankContext, RankPool, raises_on_every_rank

OPTIONS = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}


def _strategy(name: str) -> Any:
    return "ddp" if name == "ddp" else mics(name, optimizer_layout="tensors")


def _fit(ctx: RankContext, strategy: str) -> dict[str, Tensor]:
    return fitted(ctx, _strategy(strategy), Regression("adafactor"), loader(), max_epochs=2, **OPTIONS)


@pytest.mark.wide(every=3)
@pytest.mark.parametrize("config", ["zero1", "zero3", "mics", "paro-iig"])
def test_training_equals_ddp(ranks: RankPool, config: str) -> None:
    expected = run(ranks, 4, _fit, "ddp", ranks_per_node=2)
    for rank, found in enumerate(run(ranks, 4, _fit, config, ranks_per_node=2)):
        assert_same(found, expected[rank], 1e-5)


def _save_and_resume(ctx: RankContext, saves: str, resumes: str, path: str) -> dict[str, Tensor]:
    first = trainer(ctx, _strategy(saves), max_epochs=1, **OPTIONS)
    first.fit(Regression("adafactor"), loader())
    first.save_checkpoint(path)
    second = trainer(ctx, _strategy(resumes), max_epochs=2, **OPTIONS)
    second.fit(Regression("adafactor"), loader(), ckpt_path=path)
    return whole(second)


@pytest.mark.wide(every=2)
@pytest.mark.parametrize(("saves", "resumes"), [("mics", "zero3"), ("ddp", "mics"), ("mics", "ddp")])
def test_training_goes_on_from_a_checkpoint(ranks: RankPool, tmp_path: Path, saves: str, resumes: str) -> None:
    expected = run(ranks, 4, _fit, "ddp", ranks_per_node=2)
    path = str(tmp_path / "model.ckpt")
    assert_same(run(ranks, 4, _save_and_resume, saves, resumes, path, ranks_per_node=2)[2], expected[2], 1e-5)


def _fit_on_rows(ctx: RankContext) -> None:
    fitted(ctx, "mics", Regression("adafactor"), loader())


def test_rows_are_refused_before_the_first_step(ranks: RankPool) -> None:
    raises_on_every_rank(lambda: run(ranks, 2, _fit_on_rows), ConfigError, "Adafactor.*optimizer_layout='tensors'")
