"""Is a checkpoint that is not whole refused on every rank, with the file's name, and the newest whole one found?"""

import contextlib
import io
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mics_strategy import CheckpointError
from mics_strategy.checkpoint.load import load_checkpoint, load_newest_checkpoint
from mics_strategy.checkpoint.manifest import NAME
from mics_strategy.checkpoint.save import save_checkpoint
from tests.checkpoint.test_sharded import run_of, state_of
from tests.engine.training import Run, assert_identical, start
from tests.ranks import RankContext, RankPool, assert_refused, refusal


def save_three(ctx: RankContext, run: Run, folder: Path) -> list[dict[str, torch.Tensor]]:
    """Checkpoints after one, two and three steps."""
    training, found = start(ctx, run), []
    for step in range(3):
        training.step(step)
        save_checkpoint(folder / f"step-{step + 1}", training.sharded, [training.optimizer])
        found.append(state_of(training))
    return found


def load(ctx: RankContext, run: Run, path: Path) -> None:
    training = start(ctx, run)
    load_checkpoint(path, training.sharded, [training.optimizer])


def resume(ctx: RankContext, run: Run, folder: Path) -> tuple[Any, dict[str, torch.Tensor], str, int]:
    training, text = start(ctx, run), io.StringIO()
    with contextlib.redirect_stdout(text):
        extra = load_newest_checkpoint(folder, training.sharded, [training.optimizer])
    return extra, state_of(training), text.getvalue(), training.sharded.steps_done


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


DAMAGE: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "a flipped bit": ("__1_0.distcp", flip, "right size, but other bytes"),
    "a truncated file": ("__0_0.distcp", truncate, "bytes, but had"),
    "a missing file": ("__1_0.distcp", Path.unlink, "No such file"),
    "a missing description": (".metadata", Path.unlink, "No such file"),
    "a truncated description": (".metadata", truncate, "bytes, but had"),
    "a truncated manifest": (NAME, truncate, "not a complete manifest"),
    "other extras": ("meta.pt", flip, "right size, but other bytes"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_found_and_the_newest_whole_one_loaded(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    name, damage, words = DAMAGE[kind]
    run = run_of("mics", ranks_per_node=1)
    saved = ranks(2, save_three, run, tmp_path)[0]
    damage(tmp_path / "step-3" / name)
    errors = ranks(2, refusal, load, run, tmp_path / "step-3")
    assert_refused(errors, CheckpointError, rf"step-3/{re.escape(name)}.*{words}")
    for rank, (extra, found, said, steps) in enumerate(ranks(2, resume, run, tmp_path)):
        assert (extra, steps) == ({}, 2)
        assert_identical(found, saved[1])
        assert (f"Skipped: `{tmp_path}/step-3/{name}`" in said) == (rank == 0)
