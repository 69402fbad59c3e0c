"""Are checkpoints that cannot be written or read refused, on every rank and with a reason?"""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.plugins import TorchCheckpointIO
from torch import Tensor

from mics_strategy import CheckpointError
from tests.lightning.modules import Plain, Regression, loader
from tests.lightning.runs import mics, run, trainer
from tests.ranks import RankContext, RankError, RankPool, raises_on_every_rank

PATH = "model.ckpt"


def _resumes_weights_only(ctx: RankContext) -> None:
    path = ctx.tmp_path / PATH
    fitting = trainer(ctx, "mics", max_steps=1)
    fitting.fit(Regression(), loader())
    fitting.save_checkpoint(path, weights_only=True)
    trainer(ctx, "mics").fit(Regression(), loader(), ckpt_path=path)


def test_resuming_from_weights_alone_says_so(ranks: RankPool) -> None:
    raises_on_every_rank(lambda: run(ranks, 2, _resumes_weights_only), KeyError, "contains only the model")


def _fails_to_save(ctx: RankContext, path: str, storage_options: Any) -> None:
    fitting = trainer(ctx, "mics", max_steps=1)
    fitting.fit(Plain(), loader())
    fitting.save_checkpoint(path, storage_options=storage_options)


def test_a_directory_in_the_way_is_refused_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    raises_on_every_rank(
        lambda: run(ranks, 2, _fails_to_save, str(tmp_path), None), IsADirectoryError, "is a directory"
    )


def test_storage_options_are_refused_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / PATH)
    raises_on_every_rank(lambda: run(ranks, 2, _fails_to_save, path, {"a": 1}), TypeError, "storage_options")


class BrokenIO(TorchCheckpointIO):
    """A full disk."""

    def save_checkpoint(self, *_: Any, **__: Any) -> None:
        raise OSError("no space left")


def _disk_full(ctx: RankContext) -> str:
    fitting = trainer(ctx, "mics", max_steps=1, plugins=[BrokenIO()])
    fitting.fit(Plain(), loader())
    try:
        fitting.save_checkpoint(ctx.tmp_path / PATH)
    except (OSError, CheckpointError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_failure_to_write_reaches_every_rank(ranks: RankPool) -> None:
    first, second = run(ranks, 2, _disk_full)
    assert first == "OSError: no space left"
    assert second.startswith("CheckpointError: Rank 0 could not write")


def _load(ctx: RankContext, path: str, options: dict[str, Any], module: Any) -> None:
    trainer(ctx, mics(**options)).fit(module, loader(8), ckpt_path=path)


def test_paths_that_are_no_checkpoint_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.ckpt")
    not_finished = "is not a finished checkpoint"
    raises_on_every_rank(lambda: run(ranks, 2, _load, str(tmp_path), {}, Plain()), CheckpointError, not_finished)
    raises_on_every_rank(lambda: run(ranks, 2, _load, missing, {}, Plain()), FileNotFoundError, "missing.ckpt")


class TwoOptimizers(Regression):
    """With manual optimization, one optimizer for each half."""

    automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.manual_backward(self(batch[0]).sum())
        for optimizer in self.optimizers():
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.layers.parameters(), 0.1), torch.optim.SGD(self.head.parameters(), 0.1)


def _other_optimizers(ctx: RankContext, saves: type[Regression], resumes: type[Regression]) -> None:
    path = ctx.tmp_path / PATH
    saving = trainer(ctx, "mics", max_steps=2)
    saving.fit(saves(), loader())
    saving.save_checkpoint(path)
    trainer(ctx, "mics").fit(resumes(), loader(), ckpt_path=path)


@pytest.mark.parametrize(("saves", "resumes"), [(Regression, TwoOptimizers), (TwoOptimizers, Regression)])
def test_another_number_of_optimizers_is_refused(ranks: RankPool, saves: Any, resumes: Any) -> None:
    raises_on_every_rank(
        lambda: run(ranks, 2, _other_optimizers, saves, resumes), CheckpointError, "holds . optimizers.*returned ."
    )


class Hyper:
    """Something that is no plain data."""


class WithObject(Plain):
    """Saves an object."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["hyper"] = Hyper()


def _with_object(ctx: RankContext, options: dict[str, Any], weights_only: bool | None = None) -> None:
    path = ctx.tmp_path / PATH
    saving = trainer(ctx, "mics", max_steps=1)
    saving.fit(WithObject(), loader())
    saving.save_checkpoint(path)
    trainer(ctx, mics(**options)).fit(Plain(), loader(8), ckpt_path=path, weights_only=weights_only)


def test_objects_in_a_checkpoint_need_permission(ranks: RankPool) -> None:
    refused = "not plain data.*`weights_only=False` of the Trainer's method"
    raises_on_every_rank(lambda: run(ranks, 2, _with_object, {}), CheckpointError, refused)
    raises_on_every_rank(lambda: run(ranks, 2, _with_object, {"load_weights_only": True}), CheckpointError, refused)
    run(ranks, 2, _with_object, {"load_weights_only": False})
    run(ranks, 2, _with_object, {}, False)
    run(ranks, 2, _with_object, {"load_weights_only": True}, False)


class Failing(Plain):
    """Fails in its third step, on rank 1 or on all."""

    everywhere = True

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 2 and (self.everywhere or self.global_rank == 1):
            raise ValueError("bad batch")
        return super().training_step(batch, batch_idx)


def _fail(ctx: RankContext, everywhere: bool) -> None:
    module = Failing()
    module.everywhere = everywhere
    callback = OnExceptionCheckpoint(ctx.tmp_path, "last_words")
    failing = trainer(ctx, mics(timeout=timedelta(seconds=3)), callbacks=[callback], enable_checkpointing=True)
    failing.fit(module, loader())


def _last_words(ctx: RankContext) -> list[str]:
    with pytest.raises(ValueError, match="bad batch"):
        _fail(ctx, everywhere=True)
    return [path.name for path in ctx.tmp_path.glob("*.ckpt")]


def test_an_exception_everywhere_can_still_be_followed_by_a_checkpoint(ranks: RankPool) -> None:
    assert run(ranks, 2, _last_words) == [["last_words.ckpt"]] * 2


def test_an_exception_on_one_rank_asks_for_no_checkpoint(ranks: RankPool) -> None:
    with pytest.raises(RankError) as raised:
        run(ranks, 2, _fail, False, timeout_s=30)
    error = raised.value.by_rank[1]
    assert isinstance(error, CheckpointError)
    assert "ranks [0] did not reach the save" in str(error)
    assert "bad batch" in raised.value.tracebacks[1]
