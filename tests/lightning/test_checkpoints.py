"""Are checkpoints ordinary files that any strategy reads, and is reading them lazy and strict?"""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins import TorchCheckpointIO
from torch import Tensor

from mics_strategy.errors import CheckpointError
from tests.lightning.modules import Plain, Regression, loader
from tests.lightning.runs import assert_same, mics, run, trainer, whole
from tests.ranks import RankContext, RankError, RankPool, raises_on_every_rank

PATH = "model.ckpt"


def _save(ctx: RankContext, strategy: Any, path: str, options: dict[str, Any]) -> dict[str, Tensor]:
    fitting = trainer(ctx, strategy, **{"max_steps": 4, "accumulate_grad_batches": 2, **options})
    fitting.fit(Regression("adam_scheduler"), loader())
    fitting.save_checkpoint(path)
    return whole(fitting)


class _AtStart(Callback):
    """Notes what training starts with."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.parameters = whole(trainer)
        self.global_step = trainer.global_step


def _resume(
    ctx: RankContext, strategy: Any, path: str, options: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    start = _AtStart()
    fitting = trainer(
        ctx,
        strategy,
        **{"max_steps": 8, "max_epochs": 4, "accumulate_grad_batches": 2, "callbacks": [start], **options},
    )
    fitting.fit(Regression("adam_scheduler"), loader(), ckpt_path=path)
    assert start.global_step == 4
    return start.parameters, whole(fitting)


def _saved(ranks: RankPool, tmp_path: Path, strategy: str, world_size: int = 4, **options: Any) -> dict[str, Any]:
    run(ranks, world_size, _save, strategy, str(tmp_path / PATH), {}, **options)
    return torch.load(tmp_path / PATH, weights_only=True)


def test_a_checkpoint_is_the_one_that_ddp_writes(ranks: RankPool, tmp_path: Path) -> None:
    found = _saved(ranks, tmp_path, "mics", ranks_per_node=2)
    expected = _saved(ranks, tmp_path, "ddp", ranks_per_node=2)
    assert found.keys() == expected.keys()
    assert_same(found["state_dict"], expected["state_dict"])
    assert list(found["state_dict"]) == list(Regression().state_dict())
    for mine, theirs in zip(found["optimizer_states"], expected["optimizer_states"], strict=True):
        assert mine["param_groups"] == theirs["param_groups"]
        assert mine["state"].keys() == theirs["state"].keys()
        for index, state in theirs["state"].items():
            assert_same(mine["state"][index], state)
    assert found["loops"] == expected["loops"]
    assert found["lr_schedulers"] == expected["lr_schedulers"]


@pytest.mark.parametrize(("saves", "resumes"), [("mics", "ddp"), ("ddp", "mics"), ("mics", "mics")])
def test_training_resumes_from_each_others_checkpoints_exactly(
    ranks: RankPool, tmp_path: Path, saves: str, resumes: str
) -> None:
    path = str(tmp_path / PATH)
    saved = run(ranks, 2, _save, saves, path, {})
    found = run(ranks, 2, _resume, resumes, path, {})
    expected = run(ranks, 2, _resume, "ddp", path, {})
    for (start, end), before, (_, after) in zip(found, saved, expected, strict=True):
        assert_same(start, before, tolerance=0)
        assert_same(end, after)


class SameData(Regression):
    """Sees the same batch on every rank, so that the number of ranks does not matter."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.global_step)
        return self.loss([torch.randn(4, 6, generator=generator), torch.randn(4, 2, generator=generator)])


def _same_data(ctx: RankContext, overrides: dict[str, Any], path: str, resumes: bool, steps: int) -> dict[str, Tensor]:
    fitting = trainer(ctx, mics("mics", **overrides), max_steps=steps, max_epochs=9, gradient_clip_val=0.1)
    fitting.fit(SameData("adamw"), loader(), ckpt_path=path if resumes else None)
    fitting.save_checkpoint(path)
    return whole(fitting)


@pytest.mark.parametrize(
    ("before", "after"),
    [((4, 2), (2, 1)), ((4, 2), (2, 2)), ((2, 2), (4, 2)), ((4, 4), (4, 1)), ((3, 3), (4, 2))],
    ids=lambda pair: f"{pair[0]} ranks by {pair[1]}",
)
def test_training_resumes_with_other_ranks_and_partitions(
    ranks: RankPool, tmp_path: Path, before: Any, after: Any
) -> None:
    path = str(tmp_path / PATH)
    run(ranks, before[0], _same_data, {"partition_size": before[1]}, path, False, 3)
    found = run(ranks, after[0], _same_data, {"partition_size": after[1]}, path, True, 6)
    expected = run(ranks, 1, _same_data, {}, str(tmp_path / "other"), False, 6)
    assert_same(found[0], expected[0])


class _ReadsWeights(Regression):
    """Sees and changes the weights before they are loaded."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        weight = checkpoint["state_dict"]["head.bias"]
        self.seen = type(weight), PATH in Path("/proc/self/maps").read_text()
        checkpoint["state_dict"]["head.bias"] = torch.full_like(weight, 7.0)


def _edited(ctx: RankContext, path: str) -> tuple[Any, Tensor]:
    module = _ReadsWeights()
    testing = trainer(ctx, "mics")
    testing.validate(module, loader(4), ckpt_path=path, verbose=False)
    return module.seen, whole(testing)["head.bias"]


def test_hooks_see_the_mapped_weights_and_may_change_them(ranks: RankPool, tmp_path: Path) -> None:
    _saved(ranks, tmp_path, "mics", 2)
    for (kind, is_mapped), bias in run(ranks, 2, _edited, str(tmp_path / PATH)):
        assert kind is Tensor
        assert is_mapped
        assert bias.tolist() == [7.0, 7.0]


def _stages(ctx: RankContext, outer_inference_mode: bool) -> list[float]:
    path, weights = str(ctx.tmp_path / PATH), str(ctx.tmp_path / "weights.ckpt")
    module = Regression("adamw")
    training = trainer(ctx, "mics")
    training.fit(module, loader(16), loader(8))
    training.test(module, loader(8), verbose=False)
    training.save_checkpoint(path)
    training.save_checkpoint(weights, weights_only=True)
    handle = training.strategy.sharded
    results = []
    with torch.inference_mode(outer_inference_mode):
        for checkpoint in (None, path, weights):
            results += [training.validate(module, loader(8), ckpt_path=checkpoint, verbose=False)[0]["val_loss"]]
            training.test(module, loader(8), ckpt_path=checkpoint, verbose=False)
            training.predict(module, loader(8), ckpt_path=checkpoint)
        fresh = trainer(ctx, "mics")
        results += [fresh.validate(Regression("adamw"), loader(8), ckpt_path=weights, verbose=False)[0]["val_loss"]]
    assert training.strategy.sharded is handle
    training.fit_loop.max_epochs = 2
    training.fit(module, loader(16))  # still trainable
    return results


@pytest.mark.parametrize("outer_inference_mode", [False, True], ids=["", "inside inference_mode"])
def test_all_stages_follow_one_another_with_and_without_checkpoints(
    ranks: RankPool, outer_inference_mode: bool
) -> None:
    for results in run(ranks, 2, _stages, outer_inference_mode):
        assert results == pytest.approx([results[0]] * 4)


def _model_checkpoints(ctx: RankContext, strategy: str) -> tuple[list[str], str, str]:
    directory = ctx.tmp_path / "kept"
    callback = ModelCheckpoint(directory, "{epoch}", monitor="val_loss", save_top_k=2, save_last=True)
    fitting = trainer(ctx, strategy, max_epochs=4, callbacks=[callback], enable_checkpointing=True)
    fitting.fit(Regression(), loader(), loader(8))
    fitting.strategy.barrier()
    return (
        sorted(p.name for p in directory.iterdir()),
        Path(callback.best_model_path).name,
        Path(callback.last_model_path).name,
    )


def test_model_checkpoint_keeps_the_same_files_as_with_ddp(ranks: RankPool) -> None:
    assert run(ranks, 2, _model_checkpoints, "mics") == run(ranks, 2, _model_checkpoints, "ddp")


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
    raises_on_every_rank(lambda: run(ranks, 2, _load, str(tmp_path), {}, Plain()), CheckpointError, "is a directory")
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
        lambda: run(ranks, 2, _other_optimizers, saves, resumes), CheckpointError, "holds . optimizers.*made ."
    )


class Compiled(Regression):
    """Its layers are compiled in place, its head by a wrapper."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.compile(backend="eager")
        self.head = torch.compile(self.head, backend="eager")


def _compiled(ctx: RankContext, strategy: str, path: str) -> list[str]:
    module = Compiled()
    fitting = trainer(ctx, strategy, max_steps=2)
    fitting.fit(module, loader())
    fitting.save_checkpoint(path)
    return list(Compiled().state_dict())


def test_names_of_compiled_modules_are_those_of_ddp(ranks: RankPool, tmp_path: Path) -> None:
    checkpoints = {}
    for strategy in ("mics", "ddp"):
        (names, _) = run(ranks, 2, _compiled, strategy, str(tmp_path / strategy))
        checkpoints[strategy] = torch.load(tmp_path / strategy, weights_only=True)["state_dict"]
        assert list(checkpoints[strategy]) == names
    assert_same(checkpoints["mics"], checkpoints["ddp"])
    assert "layers.0.up.weight" in checkpoints["mics"]


class Hyper:
    """Something that is no plain data."""


class WithObject(Plain):
    """Saves an object."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["hyper"] = Hyper()


def _with_object(ctx: RankContext, options: dict[str, Any]) -> None:
    path = ctx.tmp_path / PATH
    saving = trainer(ctx, "mics", max_steps=1)
    saving.fit(WithObject(), loader())
    saving.save_checkpoint(path)
    trainer(ctx, mics(**options)).fit(Plain(), loader(8), ckpt_path=path)


def test_objects_in_a_checkpoint_need_permission(ranks: RankPool) -> None:
    refused = "load_weights_only=False"
    raises_on_every_rank(lambda: run(ranks, 2, _with_object, {}), CheckpointError, refused)
    raises_on_every_rank(lambda: run(ranks, 2, _with_object, {"load_weights_only": True}), CheckpointError, refused)
    run(ranks, 2, _with_object, {"load_weights_only": False})


class Memory(TorchCheckpointIO):
    """Keeps checkpoints by path, whatever it looks like."""

    paths: list[Any]

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        self.paths = [*getattr(self, "paths", []), path]


def _remote(ctx: RankContext) -> list[Any]:
    memory = Memory()
    saving = trainer(ctx, "mics", max_steps=1, plugins=[memory])
    saving.fit(Plain(), loader())
    saving.save_checkpoint("gs://bucket/a//b.ckpt")
    return getattr(memory, "paths", [])


def test_remote_paths_are_passed_on_as_they_are(ranks: RankPool) -> None:
    assert run(ranks, 2, _remote) == [["gs://bucket/a//b.ckpt"], []]


class Failing(Plain):
    """Fails in its third step, on rank 1 or on all."""

    everywhere = True

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 2 and (self.everywhere or self.global_rank == 1):
            raise ValueError("bad batch")
        return super().training_step(batch, batch_idx)


def _fails(ctx: RankContext, everywhere: bool) -> list[str]:
    module = Failing()
    module.everywhere = everywhere
    callback = OnExceptionCheckpoint(ctx.tmp_path, "last_words")
    try:
        failing = trainer(ctx, mics(timeout=timedelta(seconds=3)), callbacks=[callback], enable_checkpointing=True)
        failing.fit(module, loader())
    except Exception as error:
        errors = [type(error).__name__, type(error.__context__).__name__]
    return [*errors, *sorted(p.name for p in ctx.tmp_path.iterdir() if p.suffix == ".ckpt")]


def test_an_exception_everywhere_can_still_be_followed_by_a_checkpoint(ranks: RankPool) -> None:
    for errors in run(ranks, 2, _fails, True):
        assert errors[0] == "ValueError"
        assert errors[-1] == "last_words.ckpt"


def test_an_exception_on_one_rank_asks_for_no_checkpoint(ranks: RankPool) -> None:
    with pytest.raises(RankError) as raised:
        run(ranks, 2, _fails_here, timeout_s=30)
    error = raised.value.by_rank[1]
    assert isinstance(error, CheckpointError)
    assert "ranks [0] did not reach it" in str(error)
    assert "bad batch" in raised.value.tracebacks[1]


def _fails_here(ctx: RankContext) -> None:
    module = Failing()
    module.everywhere = False
    callback = OnExceptionCheckpoint(ctx.tmp_path, "last_words")
    strategy = mics(timeout=timedelta(seconds=3))
    trainer(ctx, strategy, callbacks=[callback], enable_checkpointing=True).fit(module, loader())
