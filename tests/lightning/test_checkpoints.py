"""Are checkpoints ordinary files that any strategy reads, and is reading them lazy and strict?"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import TorchCheckpointIO
from torch import Tensor

from tests.lightning.modules import Plain, Regression, loader
from tests.lightning.runs import assert_same, mics, run, trainer, whole
from tests.ranks import RankContext, RankPool, raises_on_every_rank

PATH = "model.ckpt"


def _save(ctx: RankContext, strategy: Any, path: str, options: dict[str, Any]) -> dict[str, Tensor]:
    fitting = trainer(ctx, strategy, **{"max_steps": 4, "accumulate_grad_batches": 2, **options})
    fitting.fit(Regression("adam_scheduler"), loader())
    fitting.save_checkpoint(path)
    return whole(fitting)


class _AtStart(Callback):
    """Notes what training starts with."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.parameters = {name: value.clone() for name, value in whole(trainer).items()}
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
    assert found.keys() == expected.keys() | {"mics_random_states"}
    assert_same(found["state_dict"], expected["state_dict"])
    assert list(found["state_dict"]) == list(Regression().state_dict())
    for mine, theirs in zip(found["optimizer_states"], expected["optimizer_states"], strict=True):
        assert mine["param_groups"] == theirs["param_groups"]
        assert mine["state"].keys() == theirs["state"].keys()
        for index, state in theirs["state"].items():
            assert_same(mine["state"][index], state)
    assert found["loops"] == expected["loops"]
    assert found["lr_schedulers"] == expected["lr_schedulers"]


@pytest.mark.wide(every=2)
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


@pytest.mark.wide(every=2)
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


def _validate_from(ctx: RankContext, path: str, *, is_strict: bool) -> dict[str, float]:
    module = Regression()
    module.strict_loading = is_strict
    (metrics,) = trainer(ctx, "mics").validate(module, loader(), ckpt_path=path)
    return metrics


def test_a_missing_weight_is_an_error_unless_loading_is_not_strict(ranks: RankPool, tmp_path: Path) -> None:
    saved = _saved(ranks, tmp_path, "mics", world_size=2)
    kept = saved["state_dict"].pop("head.bias")
    torch.save(saved, tmp_path / PATH)
    assert kept.shape == (2,)
    assert "val_loss" in run(ranks, 2, partial(_validate_from, is_strict=False), str(tmp_path / PATH))[0]
    strictly = partial(_validate_from, is_strict=True)
    raises_on_every_rank(lambda: run(ranks, 2, strictly, str(tmp_path / PATH)), RuntimeError, match=r"head\.bias")
