"""Does the callback record a Trainer's steps, and leave files, metrics and a finished training?"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger
from torch import nn

from mics_strategy import ConfigError, LifecycleError
from mics_strategy.lightning import MiCSProfile, profile_callback_for
from tests.lightning.fabric_runs import launched
from tests.lightning.modules import Regression, loader
from tests.lightning.runs import mics, run, trainer
from tests.ranks import RankContext, RankPool, assert_refused, refusal


class Memory(Logger):
    """Keeps what it receives."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: dict[int, dict[str, float]] = {}

    name = version = "memory"  # type: ignore[assignment]

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.logged.setdefault(step or 0, {}).update(metrics)

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass


def fit(ctx: RankContext, callback: Any, steps: int = 8, **options: Any) -> dict[int, dict[str, float]]:
    memory = Memory()
    fitting = trainer(ctx, mics("mics"), callbacks=[callback], logger=memory, max_steps=steps, max_epochs=-1, **options)
    fitting.fit(Regression(), loader(128))
    return memory.logged


def profiled(ctx: RankContext, folder: str, accumulate: int) -> tuple[int, list[str], list[str]]:
    callback = MiCSProfile(steps=2, skip=3, folder=folder)
    logged = fit(ctx, callback, accumulate_grad_batches=accumulate)
    result = callback.profile.result
    keys = [key for metrics in logged.values() for key in metrics if key.startswith("mics/")]
    row = [interval.key for interval in result.timeline.rows_of(ctx.rank)[0].intervals if interval.key.name != "engine"]
    return result.num_steps, keys, [key.name for key in row if key.name in ("data", "loss", "step")]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_callback_records_writes_and_logs(ranks: RankPool, tmp_path: Path, accumulate: int) -> None:
    for steps, keys, row in run(ranks, 2, profiled, str(tmp_path), accumulate):
        assert steps == 2
        assert sorted(set(keys)) == sorted(keys)
        assert {"mics/step_s", "mics/wait_s", "mics/data_s"} <= set(keys)
        one_step = [*["data", "loss"] * accumulate, "step"]
        assert [name for before, name in zip(["", *row], row, strict=False) if name != before] == 2 * one_step
    assert sorted(path.name for path in tmp_path.iterdir()) == ["profile.txt", "trace.json"]
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert "Profiled 2 steps" in (tmp_path / "profile.txt").read_text()


def ended_early(ctx: RankContext, folder: str, steps: int) -> int | str:
    callback = MiCSProfile(steps=5, skip=2, folder=folder)
    fit(ctx, callback, steps)
    try:
        return int(callback.profile.result.num_steps)
    except LifecycleError as error:
        return str(error)


def test_a_training_that_ends_early_has_the_steps_so_far(ranks: RankPool, tmp_path: Path) -> None:
    assert run(ranks, 2, ended_early, str(tmp_path), 5) == [3, 3]
    assert all("was cancelled" in str(message) for message in run(ranks, 2, ended_early, str(tmp_path), 2))


class Failing(Regression):
    """Raises in its fourth batch."""

    def training_step(self, batch: Any, index: int) -> Any:
        if index == 3:
            raise ZeroDivisionError
        return super().training_step(batch, index)


def failed(ctx: RankContext, folder: str) -> bool:
    callback = MiCSProfile(steps=5, skip=1, folder=folder)
    fitting = trainer(ctx, mics("mics"), callbacks=[callback])
    with pytest.raises(ZeroDivisionError):
        fitting.fit(Failing(), loader(128))
    return bool(callback.profile.is_recording)


def test_an_exception_ends_the_recording(ranks: RankPool, tmp_path: Path) -> None:
    assert run(ranks, 1, failed, str(tmp_path)) == [False]


def other_strategy(ctx: RankContext) -> None:
    Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[MiCSProfile(skip=0)],
        max_steps=1,
    ).fit(Regression(), loader(128))


def refused_strategy(ctx: RankContext) -> Any:
    return refusal(ctx, other_strategy)


def test_other_strategies_are_refused(ranks: RankPool) -> None:
    assert_refused(run(ranks, 1, refused_strategy), ConfigError, "SingleDeviceStrategy")


def test_malformed_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="steps=0"):
        MiCSProfile(steps=0)
    with pytest.raises(ConfigError, match="skip=-1"):
        MiCSProfile(skip=-1)
    with pytest.raises(ConfigError, match="namespace"):
        profile_callback_for("torch")


def in_fabric(ctx: RankContext) -> int:
    fabric = launched(ctx)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    profile = fabric.strategy.sharded_of(model).profile(steps=2)
    for _ in range(2):
        fabric.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
    return int(profile.result.num_steps)


def test_a_plain_call_records_in_fabric(ranks: RankPool) -> None:
    assert run(ranks, 2, in_fabric) == [2, 2]
