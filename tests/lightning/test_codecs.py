"""Do encoded transfers work under a Trainer, and for the share of the training that was asked for?"""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor

from mics_strategy import ConfigError
from tests.lightning.modules import Regression, loader
from tests.lightning.runs import mics, run, trainer, whole
from tests.ranks import RankContext, RankPool

CODECS = dict(grad_codec="int8", weight_codec="int8", codec_links="all")


class _Encoded(Callback):
    """Whether gradients were encoded in each optimizer step, as the plan of the step says."""

    def __init__(self) -> None:
        self.steps: list[bool] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        plan = trainer.strategy.sharded.plan
        reductions = [p for p in plan.collectives if p.collective == "reduce_scatter"]
        self.steps.append(bool(reductions) and all(p.dtype is torch.uint8 for p in reductions))


def _encoded_steps(ctx: RankContext, length: dict[str, int], until: float) -> tuple[list[bool], list[bool]]:
    """Of a fit after a validation, and of one more fit."""
    found = []
    strategy, module = mics("zero3", grad_codec_until=until, **CODECS), Regression()
    for _ in range(2):
        encoded = _Encoded()
        fitting = trainer(ctx, strategy, callbacks=[encoded], limit_train_batches=6, **length)
        fitting.validate(module, loader(8), verbose=False)
        fitting.fit(module, loader(128))
        found.append(encoded.steps)
        strategy, module = mics("zero3", grad_codec_until=until, **CODECS), Regression()
    return found[0], found[1]


@pytest.mark.parametrize("length", [{"max_steps": 6}, {"max_epochs": 1}], ids=str)
def test_a_share_of_the_trainers_steps_is_encoded(ranks: RankPool, length: dict[str, int]) -> None:
    for found in run(ranks, 4, _encoded_steps, length, 0.5, ranks_per_node=2):
        assert found == ([True] * 3 + [False] * 3,) * 2


def _resumed_steps(ctx: RankContext, kind: str) -> list[bool]:
    """Whether gradients were encoded in steps 3 to 6 of six, after a resume."""
    path, encoded = ctx.tmp_path / "two.ckpt", _Encoded()
    options = {"grad_codec_until": 0.5, "state_dict_type": kind, **CODECS}
    saving = trainer(ctx, mics("zero3", **options), max_steps=2, max_epochs=4)
    saving.fit(Regression(), loader(128))
    saving.save_checkpoint(path)
    resuming = trainer(ctx, mics("zero3", **options), max_steps=6, max_epochs=4, callbacks=[encoded])
    resuming.fit(Regression(), loader(128), ckpt_path=path)
    assert resuming.strategy.sharded.steps_done == 6
    return encoded.steps


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_the_share_is_counted_from_the_beginning_of_the_training(ranks: RankPool, kind: str) -> None:
    assert run(ranks, 2, _resumed_steps, kind) == [[True, False, False, False]] * 2


def _endless(ctx: RankContext) -> str:
    fitting = trainer(ctx, mics("zero3", grad_codec_until=0.5, **CODECS), max_epochs=-1, limit_train_batches=2)
    with pytest.raises(ConfigError, match="training has no end") as refused:
        fitting.fit(Regression(), loader(128))
    return str(refused.value)


def test_a_share_of_a_training_without_an_end_is_refused(ranks: RankPool) -> None:
    assert len(set(run(ranks, 2, _endless))) == 1


def _fit(ctx: RankContext, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    fitting = trainer(ctx, mics("zero3", **options), limit_train_batches=6)
    fitting.fit(Regression(), loader(128))
    return whole(fitting)


def test_a_fit_with_codecs_ends_near_one_without(ranks: RankPool) -> None:
    coded, *others = run(ranks, 4, _fit, CODECS, ranks_per_node=2)
    exact = run(ranks, 4, _fit, {}, ranks_per_node=2)[0]
    for name, value in exact.items():
        assert all(torch.equal(coded[name], other[name]) for other in others)
        assert not torch.equal(coded[name], value)
        torch.testing.assert_close(coded[name], value, rtol=0.05, atol=0.02)


FEEDBACK = {
    "weight_codec": {"bits": 4, "block_size": 32, "differences": True},
    "grad_codec": {"bits": 4, "block_size": 32, "feedback": True},
}


def _fitted(ctx: RankContext, path: Path, num_epochs: int, resumes: bool) -> dict[str, Tensor]:
    """Parameters after epochs of two steps; one epoch alone is saved."""
    torch.manual_seed(3)
    strategy = mics("paro-iig", state_dict_type="sharded", **FEEDBACK)
    fitting = trainer(ctx, strategy, max_epochs=num_epochs, limit_train_batches=2)
    fitting.fit(Regression(), loader(128), ckpt_path=path if resumes else None)
    if num_epochs == 1:
        fitting.save_checkpoint(path)
    left = [
        r.values.abs().sum()
        for feedback in fitting.strategy.sharded.internals.feedback
        for r in feedback.residuals.values()
    ]
    return {**whole(fitting), "residuals": torch.stack(left)}


def test_a_resumed_fit_keeps_residuals_and_references(ranks: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "one.ckpt"
    uninterrupted = run(ranks, 4, _fitted, path, 3, False, ranks_per_node=2)
    run(ranks, 4, _fitted, path, 1, False, ranks_per_node=2)
    for found, expected in zip(run(ranks, 4, _fitted, path, 3, True, ranks_per_node=2), uninterrupted, strict=True):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value)
    assert any(bool((found["residuals"] > 0).any()) for found in uninterrupted)
