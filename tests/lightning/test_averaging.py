"""Is every callback that averages the weights refused before it copies the model, and does one written by hand work?"""

from typing import Any

import lightning.pytorch.callbacks
import pytest
import pytorch_lightning.callbacks
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from mics_strategy.errors import ConfigError
from tests.lightning.modules import WIDTH, Plain, Regression, loader
from tests.lightning.runs import assert_same, full, run, trainer, whole
from tests.ranks import RankContext, RankPool, raises_on_every_rank

NAMESPACES = {"lightning.pytorch": lightning.pytorch, "pytorch_lightning": pytorch_lightning}
CALLBACKS: dict[str, dict[str, Any]] = {
    "StochasticWeightAveraging": {"swa_lrs": 0.1},
    "WeightAveraging": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
    "EMAWeightAveraging": {"decay": 0.9},
}
namespaces = pytest.mark.parametrize("namespace", NAMESPACES)
callbacks = pytest.mark.parametrize("callback", CALLBACKS)


def _refusal(name: str) -> str:
    return f"`{name}` copies the full model.*does not work on shards. Average each rank's shards in your own callback"


def _make(namespace: str, callback: str, own_name: str | None) -> Any:
    cls = getattr(NAMESPACES[namespace].callbacks, callback)
    return (type(own_name, (cls,), {}) if own_name else cls)(**CALLBACKS[callback])


class _OtherPlain(pytorch_lightning.LightningModule):
    """`Plain`, written for `pytorch_lightning`."""

    training_step, configure_optimizers = Plain.training_step, Plain.configure_optimizers

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 2)


def _fit(ctx: RankContext, namespace: str, callback: str, own_name: str | None) -> None:
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    place = {"accelerator": "cpu", "devices": ctx.ranks_per_node, "num_nodes": ctx.num_nodes, "max_epochs": 2}
    asked = [_make(namespace, callback, own_name)]
    fitting = NAMESPACES[namespace].Trainer(strategy="mics", callbacks=asked, **place, **quiet)
    fitting.fit(Plain() if namespace == "lightning.pytorch" else _OtherPlain(), loader())


@namespaces
@callbacks
def test_an_averaging_callback_is_refused_on_every_rank(ranks: RankPool, namespace: str, callback: str) -> None:
    job = (_fit, namespace, callback, None)
    raises_on_every_rank(lambda: run(ranks, 2, *job), ConfigError, _refusal(callback))


@namespaces
@callbacks
def test_a_subclass_of_an_averaging_callback_is_refused(ranks: RankPool, namespace: str, callback: str) -> None:
    job = (_fit, namespace, callback, "MyAverage")
    raises_on_every_rank(lambda: run(ranks, 2, *job), ConfigError, _refusal("MyAverage"))


class _BringsItsOwn(Regression):
    def configure_callbacks(self) -> Any:
        return _make("lightning.pytorch", "EMAWeightAveraging", None)


def _fit_with_own_callback(ctx: RankContext) -> None:
    trainer(ctx, "mics").fit(_BringsItsOwn(), loader())


def test_an_averaging_callback_of_the_module_is_refused(ranks: RankPool) -> None:
    raises_on_every_rank(lambda: run(ranks, 2, _fit_with_own_callback), ConfigError, _refusal("EMAWeightAveraging"))


class _Average(Callback):
    """An exponential average of whatever the parameters are, which validation uses."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.values = [parameter.detach().clone() for parameter in pl_module.parameters()]
        self.losses: list[float] = []

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        for value, parameter in zip(self.values, pl_module.parameters(), strict=True):
            value.lerp_(parameter.detach(), 0.2)

    @torch.no_grad()
    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        for value, parameter in zip(self.values, pl_module.parameters(), strict=True):
            kept = parameter.detach().clone()
            parameter.copy_(value)
            value.copy_(kept)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.losses.append(trainer.callback_metrics["val_loss"].item())
        self.on_validation_epoch_start(trainer, pl_module)


def _fitted_with_average(ctx: RankContext, strategy: str) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses of the validations, the average and the parameters."""
    average = _Average()
    fitting = trainer(ctx, strategy, callbacks=[average], max_epochs=2, val_check_interval=0.5)
    fitting.fit(Regression("adamw"), loader(), loader(8))
    names = [name for name, _ in fitting.lightning_module.named_parameters()]
    averages = {name: full(value) for name, value in zip(names, average.values, strict=True)}
    return average.losses, averages, whole(fitting)


def test_an_average_kept_by_a_callback_of_the_user_is_that_of_ddp(ranks: RankPool) -> None:
    expected = run(ranks, 4, _fitted_with_average, "ddp", ranks_per_node=2)
    for found, reference in zip(run(ranks, 4, _fitted_with_average, "mics", ranks_per_node=2), expected, strict=True):
        assert len(found[0]) == 4
        assert found[0] == pytest.approx(reference[0], rel=1e-5)
        assert_same(found[1], reference[1])
        assert_same(found[2], reference[2])
        assert any(not torch.allclose(value, found[2][name], atol=1e-4) for name, value in found[1].items())
