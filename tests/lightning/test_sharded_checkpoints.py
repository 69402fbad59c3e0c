"""Is a checkpoint that every rank writes to as good for the Trainer as one file?"""

import errno
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.distributed.tensor import DTensor

from mics_strategy import CheckpointError, ConfigError
from mics_strategy.checkpoint import atomic
from tests.lightning.modules import Regression, loader
from tests.lightning.runs import assert_same, mics, run, trainer, whole
from tests.lightning.test_checkpoints import _AtStart
from tests.ranks import RankContext, RankPool, raises_on_every_rank

PATH = "step-4.ckpt"


def save(ctx: RankContext, overrides: dict[str, Any], path: str) -> dict[str, Tensor]:
    options = {"state_dict_type": "sharded", **overrides}
    fitting = trainer(ctx, mics("mics", **options), max_steps=4, accumulate_grad_batches=2)
    fitting.fit(Regression("adam_scheduler"), loader())
    fitting.save_checkpoint(path)
    fitting.strategy.finish_saves()
    return whole(fitting)


def resume(ctx: RankContext, strategy: Any, path: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    at_start = _AtStart()
    options = {"max_steps": 8, "max_epochs": 4, "accumulate_grad_batches": 2, "callbacks": [at_start]}
    fitting = trainer(ctx, strategy, **options)
    fitting.fit(Regression("adam_scheduler"), loader(), ckpt_path=path)
    assert at_start.global_step == 4
    return at_start.parameters, whole(fitting)


def resume_ours(ctx: RankContext, overrides: dict[str, Any], path: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    return resume(ctx, mics("mics", **{"state_dict_type": "sharded", **overrides}), path)


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [{}, {"save_asynchronously": True}], ids=["sync", "async"])
def test_resumes_exactly_and_as_from_one_file(ranks: RankPool, tmp_path: Path, overrides: dict[str, Any]) -> None:
    """Lightning's tool makes one file of the folder, which DDP reads."""
    path, one = tmp_path / PATH, tmp_path / "one.ckpt"
    saved = run(ranks, 2, save, overrides, str(path))
    assert {entry.name for entry in path.iterdir()} >= {".metadata", "meta.pt", "manifest.json", "__0_0.distcp"}
    found = run(ranks, 2, resume_ours, overrides, str(path))
    tool = [sys.executable, "-m", "lightning.pytorch.utilities.consolidate_checkpoint"]
    subprocess.run([*tool, str(path), "--output_file", str(one)], check=True)
    expected = run(ranks, 2, resume, "ddp", str(one))
    for (start, end), before, (_, after) in zip(found, saved, expected, strict=True):
        assert_same(start, before, tolerance=0)
        assert_same(end, after)


@pytest.mark.parametrize(("ranks_before", "ranks_after"), [(2, 4), (2, 1)])
def test_loads_on_other_ranks(ranks: RankPool, tmp_path: Path, ranks_before: int, ranks_after: int) -> None:
    path = str(tmp_path / PATH)
    saved = run(ranks, ranks_before, save, {"partition_size": 2}, path)[0]
    for start, _ in run(ranks, ranks_after, resume_ours, {"partition_size": 1}, path):
        assert_same(start, saved, tolerance=0)


class OnlyHead(Regression):
    """Leaves everything else out of its checkpoints, and changes what it reads."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert all(isinstance(value, DTensor) for value in checkpoint["state_dict"].values())
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name: value for name, value in state.items() if name.startswith("head.")}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = sorted(checkpoint["state_dict"])
        checkpoint["state_dict"]["head.bias"] = torch.zeros_like(checkpoint["state_dict"]["head.bias"])


def hooks(ctx: RankContext, path: str) -> tuple[list[str], Tensor, bool]:
    module = OnlyHead("adamw")
    fitting = trainer(ctx, mics("mics", state_dict_type="sharded"), max_steps=2)
    fitting.fit(module, loader())
    fitting.save_checkpoint(path, weights_only=True)
    before = whole(fitting)
    fresh = OnlyHead("adamw")
    fresh.strict_loading = False
    testing = trainer(ctx, mics("mics", state_dict_type="sharded"))
    testing.validate(fresh, loader(4), ckpt_path=path, verbose=False)
    after = whole(testing)
    return fresh.seen, after["head.bias"], torch.equal(after["head.weight"], before["head.weight"])


def test_hooks_see_shards_and_may_change_them(ranks: RankPool, tmp_path: Path) -> None:
    for seen, bias, is_read in run(ranks, 2, hooks, str(tmp_path / PATH)):
        assert seen == ["head.bias", "head.weight"]
        assert not bias.any()
        assert is_read


def kept(ctx: RankContext, save_last: Any) -> tuple[list[str], str, float]:
    directory = ctx.tmp_path / "kept"
    callback = ModelCheckpoint(directory, "{epoch}", monitor="val_loss", save_top_k=2, save_last=save_last)
    strategy = mics("mics", state_dict_type="sharded")
    fitting = trainer(ctx, strategy, max_epochs=4, callbacks=[callback], enable_checkpointing=True)
    fitting.fit(Regression(), loader(), loader(8))
    fitting.strategy.barrier()
    again = trainer(ctx, mics("mics"))
    result = again.validate(Regression(), loader(8), ckpt_path=callback.best_model_path, verbose=False)
    assert (directory / "last.ckpt").is_symlink() == (save_last == "link")
    return sorted(p.name for p in directory.iterdir()), Path(callback.best_model_path).name, result[0]["val_loss"]


def keeping_one(ctx: RankContext, fails_from: int) -> tuple[list[list[str]], str]:
    """What is whole whenever a newer checkpoint is about to be written; and how the last save ended."""
    directory, seen = ctx.tmp_path / "kept", []
    callback = ModelCheckpoint(directory, "step={step}", auto_insert_metric_name=False, every_n_train_steps=1)
    fitting = trainer(
        ctx,
        mics("mics", state_dict_type="sharded", save_asynchronously=True),
        max_steps=5,
        callbacks=[callback],
        enable_checkpointing=True,
    )
    publish = atomic.commit

    def noted(draft: Path, path: Path) -> None:
        seen.append(sorted(p.name for p in directory.iterdir() if atomic.is_checkpoint(p) and p != draft))
        if len(seen) >= fails_from:
            raise OSError(errno.ENOSPC, "No space left on device")
        publish(draft, path)

    ended = ""
    with mock.patch.object(atomic, "commit", noted):
        try:
            fitting.fit(Regression(), loader())
        except CheckpointError as error:
            ended = str(error)
    return [*seen, sorted(p.name for p in directory.iterdir())], ended


def test_the_older_checkpoint_goes_when_the_newer_is_whole(ranks: RankPool) -> None:
    (seen, ended), (_, other) = run(ranks, 2, keeping_one, 99)
    assert seen == [[], *([f"step={step}.ckpt"] for step in range(1, 5)), ["step=5.ckpt"]]
    assert ended == other == ""


def test_the_older_checkpoint_stays_when_the_newer_failed(ranks: RankPool) -> None:
    results = run(ranks, 2, keeping_one, 3)
    assert all("No space left" in ended for _, ended in results)
    (at_rank_0, *_), (at_rank_1, *_) = [seen[::-1] for seen, _ in results]
    assert at_rank_0 == ["step=2.ckpt"]
    assert at_rank_1[-1] == "step=2.ckpt"  # rank 0 may still remove the draft
    assert len(at_rank_1) <= 2


def resume_from_folder(ctx: RankContext, folder: str) -> tuple[int, str]:
    at_start = _AtStart()
    fitting = trainer(ctx, mics("mics", state_dict_type="sharded"), max_steps=4, callbacks=[at_start])
    try:
        fitting.fit(Regression("adam_scheduler"), loader(), ckpt_path=folder)
    except CheckpointError as error:
        return -1, str(error)
    return at_start.global_step, ""


def save_two(ctx: RankContext, folder: str) -> None:
    callback = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    options = {"max_steps": 2, "callbacks": [callback], "enable_checkpointing": True}
    fitting = trainer(ctx, mics("mics", state_dict_type="sharded"), **options)
    fitting.fit(Regression("adam_scheduler"), loader())


def test_a_folder_of_checkpoints_means_the_newest_whole_one(ranks: RankPool, tmp_path: Path) -> None:
    run(ranks, 2, save_two, str(tmp_path))
    assert run(ranks, 2, resume_from_folder, str(tmp_path)) == [(2, "")] * 2
    (tmp_path / "step=2.ckpt" / "__0_0.distcp").write_bytes(b"damaged")
    assert run(ranks, 2, resume_from_folder, str(tmp_path)) == [(1, "")] * 2
    (tmp_path / "step=1.ckpt" / "meta.pt").unlink()
    for _, ended in run(ranks, 2, resume_from_folder, str(tmp_path)):
        assert "None of the 2 checkpoints" in ended


@pytest.mark.parametrize("save_last", [True, "link"])
def test_model_checkpoint_keeps_and_removes_folders(ranks: RankPool, save_last: Any) -> None:
    for names, best, loss in run(ranks, 2, kept, save_last):
        assert len(names) == 3
        assert {best, "last.ckpt"} <= set(names)
        assert loss > 0


def test_asynchronous_saves_of_one_file_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"`state_dict_type='full'`.*`state_dict_type='sharded'`"):
        mics("mics", save_asynchronously=True)
    with pytest.raises(ConfigError, match=r"`state_dict_type='half'` is not supported"):
        mics("mics", state_dict_type="half")


def damaged(ctx: RankContext, path: str) -> None:
    trainer(ctx, mics("mics")).validate(Regression(), loader(4), ckpt_path=path, verbose=False)


def test_a_damaged_folder_is_named(ranks: RankPool, tmp_path: Path) -> None:
    run(ranks, 2, save, {}, str(tmp_path / PATH))
    (tmp_path / PATH / "__1_0.distcp").unlink()
    raises_on_every_rank(
        lambda: run(ranks, 2, damaged, str(tmp_path / PATH)), CheckpointError, r"__1_0\.distcp` cannot be read"
    )
