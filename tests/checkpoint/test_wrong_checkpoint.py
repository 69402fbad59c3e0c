"""Where there is no checkpoint, or one of another model, is that said, with what helps?"""

import contextlib
import io
from pathlib import Path

from torch import nn

from mics_strategy import CheckpointError, load_checkpoint, load_newest_checkpoint, save_checkpoint, shard
from tests.ranks import RankContext, RankPool, assert_refused, refusal


def without_checkpoint(ctx: RankContext, folder: Path) -> str:
    """Job: what a rank prints that looks for the newest checkpoint where there is none."""
    sharded = shard(nn.Linear(4, 4), "zero3")
    save_checkpoint(folder / "one", sharded)
    (folder / "empty").mkdir(exist_ok=True)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for name in ("absent", "empty", "one"):
            assert load_newest_checkpoint(folder / name, sharded) is None
    return printed.getvalue()


def test_a_start_without_a_checkpoint_says_why_there_is_none(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks(2, without_checkpoint, tmp_path)
    absent, empty, itself = first.splitlines()
    assert absent == f"No checkpoint is loaded: `{tmp_path / 'absent'}` does not exist."
    assert empty == f"No checkpoint is loaded: `{tmp_path / 'empty'}` holds none."
    assert "one` is a checkpoint itself; pass the folder that holds it" in itself
    assert second == ""


def of_another_model(ctx: RankContext, folder: Path, model: nn.Module) -> None:
    save_checkpoint(folder, shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "zero3"))
    load_checkpoint(folder, shard(model, "zero3"))


def test_a_checkpoint_with_other_shapes_is_refused_with_the_shapes(ranks: RankPool, tmp_path: Path) -> None:
    wider = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 4))
    errors = ranks(2, refusal, of_another_model, tmp_path / "one", wider)
    both = r"`0.weight` has shape \[8, 4\] in the model and \[4, 4\] in the checkpoint, `0.bias` has .*"
    assert_refused(errors, CheckpointError, rf"{both} \(3 of the 4 tensors that both have\). Build the model")
    assert all("strict=False" not in str(error) for error in errors)


def test_not_strict_is_advised_where_it_loads_something(ranks: RankPool, tmp_path: Path) -> None:
    deeper = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    errors = ranks(2, refusal, of_another_model, tmp_path / "one", deeper)
    assert_refused(errors, CheckpointError, "The model: 2.bias, 2.weight not in the checkpoint.*`strict=False`")
    errors = ranks(2, refusal, of_another_model, tmp_path / "one", nn.Linear(4, 4))
    assert_refused(errors, CheckpointError, r"The model: bias, weight not in the checkpoint.*as they were saved\.$")


def load(ctx: RankContext, path: Path) -> None:
    load_checkpoint(path, shard(nn.Linear(4, 4), "zero3"))


def test_a_path_that_does_not_exist_is_not_taken_for_a_damaged_one(ranks: RankPool, tmp_path: Path) -> None:
    errors = ranks(2, refusal, load, tmp_path / "absent")
    assert_refused(errors, CheckpointError, "absent` does not exist. Pass the folder of a checkpoint")
