"""Do the tools around training work on a sharded model: summary, tuner, plain loading, the other namespace?"""

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelSummary
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.model_summary import summarize
from torch import Tensor, nn

from mics_strategy.errors import ConfigError, LifecycleError
from tests.lightning.modules import WIDTH, Plain, Regression, loader
from tests.lightning.runs import assert_same, fitted, full, mics, run, trainer, whole
from tests.ranks import RankContext, RankPool, raises_on_every_rank


class _Summary(Callback):
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.summary = summarize(pl_module, max_depth=2)


def _summarised(ctx: RankContext, strategy: str) -> tuple[int, int, list[str]]:
    module = Regression()
    module.example_input_array = torch.ones(2, WIDTH)  # makes the summary run a forward
    summary = _Summary()
    trainer(ctx, strategy, max_steps=1, callbacks=[ModelSummary(), summary], enable_model_summary=True).fit(
        module, loader()
    )
    found = summary.summary
    return found.total_parameters, found.trainable_parameters, [str(size) for size in found.out_sizes]


def test_the_summary_counts_whole_parameters(ranks: RankPool) -> None:
    assert run(ranks, 2, _summarised, "mics") == run(ranks, 2, _summarised, "ddp")


def _tuned(ctx: RankContext) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    module = Regression()
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    module.lr = 0.1
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=module.lr)
    tuning = trainer(ctx, "mics")
    found = Tuner(tuning).lr_find(module, loader(), num_training=6, update_attr=False)
    return found.results["loss"], before, whole(tuning)


def test_a_learning_rate_is_found_and_the_weights_are_restored(ranks: RankPool) -> None:
    results = run(ranks, 2, _tuned)
    assert results[0][0]  # the losses of the search
    for _, before, after in results:
        assert_same(after, before, tolerance=0)


def _with_loggers(ctx: RankContext) -> list[str]:
    options = {"logger": CSVLogger(ctx.tmp_path), "log_every_n_steps": 1, "max_epochs": 3}
    callbacks = [LearningRateMonitor(), EarlyStopping("val_loss", patience=1, min_delta=100.0)]
    stopping = trainer(ctx, "mics", callbacks=callbacks, **options)
    stopping.fit(Regression(), loader(8), loader(8))
    return [str(stopping.current_epoch), *sorted(stopping.callback_metrics)]


def test_loggers_and_early_stopping_work(ranks: RankPool) -> None:
    assert run(ranks, 2, _with_loggers) == [["2", "lr-SGD", "val_loss"]] * 2


class HalfFrozen(Regression):
    """Its layers are frozen from the beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


class _Unfreezing(Callback):
    """Of which nobody can know what it will do."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.layers.requires_grad_(trainer.current_epoch > 0)


def _unfreezes(ctx: RankContext) -> None:
    trainer(ctx, "mics", max_epochs=3, callbacks=[_Unfreezing()]).fit(HalfFrozen(), loader(8))


def test_unfreezing_what_was_frozen_when_sharded_is_refused(ranks: RankPool) -> None:
    raises_on_every_rank(lambda: run(ranks, 2, _unfreezes), LifecycleError, "was frozen when the model was sharded")


class Bfgs(Regression):
    """Needs its whole parameters, and several closures a step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


def _bfgs(ctx: RankContext) -> None:
    fitted(ctx, "mics", Bfgs(), loader(16))


def test_an_optimizer_that_needs_whole_tensors_is_refused(ranks: RankPool) -> None:
    raises_on_every_rank(lambda: run(ranks, 2, _bfgs), ConfigError, "LBFGS needs whole tensors")


def _saved(ctx: RankContext, path: str) -> dict[str, Tensor]:
    saving = trainer(ctx, "mics", max_steps=2)
    saving.fit(Regression("adamw"), loader())
    saving.save_checkpoint(path)
    return whole(saving)


def test_a_plain_module_loads_the_checkpoint(ranks: RankPool, tmp_path: Path) -> None:
    expected = run(ranks, 2, _saved, str(tmp_path / "model.ckpt"))[0]
    plain = Regression.load_from_checkpoint(tmp_path / "model.ckpt")
    assert_same({name: p.detach() for name, p in plain.named_parameters()}, expected, tolerance=0)


class Larger(Regression):
    """Has a layer that the checkpoint does not know, and lacks one that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(2, 2)
        del self.offset
        self.offset = torch.zeros(2)


def _loads(ctx: RankContext, path: str, strict: bool) -> Tensor:
    module = Larger()
    module.strict_loading = strict
    trainer(ctx, "mics").validate(module, loader(4), ckpt_path=path, verbose=False)
    return full(module.head.weight)


def test_other_keys_are_refused_or_left_out_as_asked(ranks: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "model.ckpt")
    saved = run(ranks, 2, _saved, path)[0]
    raises_on_every_rank(lambda: run(ranks, 2, _loads, path, True), RuntimeError, r"Missing key.*extra\.weight")
    for weight in run(ranks, 2, _loads, path, False):
        assert torch.equal(weight, saved["head.weight"])


class OfOtherNamespace(pytorch_lightning.LightningModule):
    """Written for `pytorch_lightning`."""

    forward, loss, configure_optimizers = Regression.forward, Regression.loss, Regression.configure_optimizers
    optimizer_name = "sgd"

    def __init__(self) -> None:
        super().__init__()
        for name, child in Regression().named_children():
            self.add_module(name, child)
        self.offset = nn.Parameter(Regression().offset.detach())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)


def _in_other_namespace(ctx: RankContext) -> dict[str, Tensor]:
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    place = {"accelerator": "cpu", "devices": ctx.ranks_per_node, "num_nodes": ctx.num_nodes, "max_epochs": 1}
    fitting = pytorch_lightning.Trainer(strategy="mics", **place, **quiet)
    module = OfOtherNamespace()
    fitting.fit(module, loader())
    return {name: full(p) for name, p in module.named_parameters()}


def _in_this_namespace(ctx: RankContext) -> dict[str, Tensor]:
    return fitted(ctx, "mics", Regression(), loader())


def test_both_namespaces_train_alike(ranks: RankPool) -> None:
    found, expected = run(ranks, 2, _in_other_namespace)[0], run(ranks, 2, _in_this_namespace)[0]
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def _predicted(ctx: RankContext) -> list[Tensor]:
    return trainer(ctx, "mics").predict(Regression(), loader(8), return_predictions=True)


def test_predictions_are_those_of_the_plain_module(ranks: RankPool) -> None:
    plain = Regression()
    with torch.no_grad():
        expected = torch.cat([plain(batch[0]) + plain.offset for batch in loader(8, batch_size=1)])
    found = [torch.cat(predictions) for predictions in run(ranks, 2, _predicted)]
    torch.testing.assert_close(torch.stack(found, dim=1).flatten(0, 1), expected)


def _with_options(ctx: RankContext, options: dict[str, Any]) -> dict[str, Tensor]:
    return fitted(ctx, "mics", Regression(), loader(8), **options)


@pytest.mark.parametrize(
    "options",
    [{"detect_anomaly": True}, {"profiler": "simple"}, {"overfit_batches": 2}, {"deterministic": True}],
    ids=str,
)
def test_options_of_the_trainer_work(ranks: RankPool, options: dict[str, Any]) -> None:
    run(ranks, 2, _with_options, options)


def _in_place(ctx: RankContext, compiles: bool) -> dict[str, Tensor]:
    module = Regression()
    if compiles:
        module.compile(backend="eager")
    return fitted(ctx, mics(), module, loader(8))


def test_a_module_compiled_in_place_trains_alike(ranks: RankPool) -> None:
    assert_same(run(ranks, 1, _in_place, True)[0], run(ranks, 1, _in_place, False)[0])


def test_a_plain_module_is_not_changed_by_a_trainer_that_only_exists(one_rank: RankContext) -> None:
    module = Plain()
    trainer(one_rank, "mics")
    assert type(module.layer.weight) is nn.Parameter
