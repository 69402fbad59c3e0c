"""What happens to gradients that no optimizer step has used when a checkpoint is made?"""

import io
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import WriteItem

from mics_strategy.checkpoint import atomic
from mics_strategy.checkpoint.load import load_checkpoint
from mics_strategy.checkpoint.save import finish_saves, save_checkpoint
from mics_strategy.checkpoint.save_planner import ShardedSavePlanner
from mics_strategy.cli import main
from tests.checkpoint.test_sharded import run_of
from tests.engine.training import Run, Training, assert_identical, start
from tests.ranks import RankContext, RankPool


class Listener(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@contextmanager
def listening() -> Iterator[list[str]]:
    listener, log = Listener(), logging.getLogger("mics_strategy")
    log.addHandler(listener)
    try:
        yield listener.said
    finally:
        log.removeHandler(listener)


def pending_of(path: Path) -> int:
    return atomic.read_manifest(path).pending_micro_steps


def save(training: Training, path: Path) -> int:
    """Micro-steps that the manifest says are pending."""
    save_checkpoint(path, training.sharded, [training.optimizer])
    torch.distributed.barrier()
    return pending_of(path)


def save_at_every_turn(ctx: RankContext, run: Run, folder: Path) -> tuple[list[int], list[str]]:
    """What manifests say, before a step, after it, in one accumulation, in the next after one was given up."""
    training, found = start(ctx, run), []
    with listening() as said:
        found.append(save(training, folder / "new"))
        training.backward(0)
        training.optimizer.step()
        found.append(save(training, folder / "stepped"))
        training.optimizer.zero_grad()
        found.append(save(training, folder / "cleared"))
        assert said == []
        for micro in range(3):
            training.loss(1, micro).backward()
            found.append(save(training, folder / "inside"))
        training.optimizer.zero_grad()
        found.append(save(training, folder / "given up"))
        training.loss(1, 0).backward()
        _ = [p.grad for p in training.model.parameters()]  # finished, and still not used
        found.append(save(training, folder / "again"))
        training.optimizer.step()
        found.append(save(training, folder / "used"))
    return found, said


@pytest.mark.wide(every=3)
@pytest.mark.parametrize("preset", ["mics", "ddp", "zero1", "zero3"])
def test_unused_gradients_are_counted_and_told_once(ranks: RankPool, tmp_path: Path, preset: str) -> None:
    first, second = ranks(2, save_at_every_turn, run_of(preset), tmp_path)
    assert first[0] == second[0] == [0, 0, 0, 1, 2, 3, 0, 1, 0]
    assert second[1] == []
    [said] = first[1]
    assert "after 1 micro-steps whose gradients no optimizer step has used" in said
    assert "Save right after an optimizer step" in said


def save_and_train_before_it_is_written(ctx: RankContext, run: Run, path: Path) -> dict[str, Tensor]:
    """Parameters at the moment of the save, whose write waits for two more steps."""
    training, may_write = start(ctx, run), threading.Event()
    training.step(0)
    found = training.parameters()
    resolve = ShardedSavePlanner.resolve_data

    def resolve_later(planner: ShardedSavePlanner, item: WriteItem) -> Tensor | io.BytesIO:
        assert may_write.wait(20.0)
        return resolve(planner, item)

    with mock.patch.object(ShardedSavePlanner, "resolve_data", resolve_later):
        save_checkpoint(path, training.sharded, [training.optimizer], asynchronous=True)
        training.step(1)
        training.step(2)
        may_write.set()
        finish_saves(training.sharded)
    return found


def load(ctx: RankContext, run: Run, path: Path) -> dict[str, Tensor]:
    training = start(ctx, run)
    load_checkpoint(path, training.sharded, [training.optimizer])
    return training.parameters()


def test_an_asynchronous_save_holds_the_values_of_its_moment(ranks: RankPool, tmp_path: Path) -> None:
    run, path = run_of("mics"), tmp_path / "step-1"
    saved = ranks(2, save_and_train_before_it_is_written, run, path)
    for found, expected in zip(ranks(2, load, run, path), saved, strict=True):
        assert_identical(found, expected)


def train_through(ctx: RankContext, run: Run, path: Path | None) -> dict[str, Tensor]:
    """Two steps of three micro-steps; saved after the fifth, if at all."""
    training = start(ctx, run)
    for step in range(2):
        for micro in range(3):
            training.loss(step, micro).backward()
            if (step, micro) == (1, 1) and path is not None:
                save_checkpoint(path, training.sharded, [training.optimizer], {"step": step}, asynchronous=True)
        training.optimizer.step()
        training.optimizer.zero_grad()
    finish_saves(training.sharded)
    return training.parameters()


def train_on(ctx: RankContext, run: Run, path: Path) -> tuple[dict[str, Tensor], list[str]]:
    """The accumulation that was not finished, from its beginning."""
    training = start(ctx, run)
    with listening() as said:
        step = load_checkpoint(path, training.sharded, [training.optimizer])["step"]
    assert training.sharded.internals.pending_micro_steps == 0
    for micro in range(3):
        training.loss(step, micro).backward()
    training.optimizer.step()
    return training.parameters(), said


def test_an_accumulation_that_was_cut_may_be_repeated(
    ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Saving in it changes nothing; who starts it anew ends where training would have been, bit by bit."""
    run, path = run_of("mics"), tmp_path / "step-1"
    expected = ranks(2, train_through, run, None)
    for found, other in zip(ranks(2, train_through, run, path), expected, strict=True):
        assert_identical(found, other)
    resumed = ranks(2, train_on, run, path)
    for (found, _), other in zip(resumed, expected, strict=True):
        assert_identical(found, other)
    [said], quiet = (said for _, said in resumed)
    assert f"`{path}` was saved after 2 micro-steps of an unfinished accumulation" in said
    assert quiet == []
    assert main(["inspect", str(path)]) == 0
    assert "step 1 and 2 unfinished micro-steps, written by 2 ranks" in capsys.readouterr().out
