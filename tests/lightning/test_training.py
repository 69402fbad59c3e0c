"""Does training with the Trainer equal plain data parallel training?"""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import nn
from torch.utils.checkpoint import checkpoint

from mics_strategy import ShardConfig
from tests.lightning.modules import Layer, Regression, loader
from tests.lightning.runs import assert_same, fitted, full, mics, run, trainer, whole
from tests.ranks import RankContext, RankPool


def _like_ddp(
    ctx: RankContext, config: str, overrides: dict[str, Any], optimizer: str, options: dict[str, Any]
) -> list[float]:
    expected_module, module = Regression(optimizer), Regression(optimizer)
    expected = fitted(ctx, "ddp", expected_module, loader(), **options)
    found = fitted(ctx, mics(config, **overrides), module, loader(), **options)
    assert_same(found, expected)
    torch.testing.assert_close(torch.tensor(module.losses), torch.tensor(expected_module.losses))
    return module.losses


@pytest.mark.wide(every=3)
@pytest.mark.parametrize("config", ["ddp", "zero1", "zero2", "zero3", "mics", "paro-iig"])
def test_every_kind_of_preset_equals_ddp(ranks: RankPool, config: str) -> None:
    losses = run(ranks, 4, _like_ddp, config, {}, "sgd", {}, ranks_per_node=2)
    assert losses[0] != losses[1]  # each rank has its own data


def _all_like_ddp(ctx: RankContext, configs: list[str]) -> None:
    options: dict[str, Any] = {"accumulate_grad_batches": 3, "max_epochs": 2, "gradient_clip_val": 0.05}
    expected = fitted(ctx, "ddp", Regression("adamw"), loader(), **options)
    for config in configs:
        assert_same(fitted(ctx, mics(config), Regression("adamw"), loader(), **options), expected)


@pytest.mark.weekly
def test_every_preset_accumulates_and_clips_as_ddp(ranks: RankPool) -> None:
    """But for those that round what they send."""
    exact = [name for name in ShardConfig.PRESETS if ShardConfig.preset(name).weight_codec == "none"]
    run(ranks, 4, _all_like_ddp, [*exact, "auto"], ranks_per_node=2)


@pytest.mark.wide(every=2)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_partition_size_equals_ddp(ranks: RankPool, size: int) -> None:
    run(ranks, 4, _like_ddp, "mics", {"partition_size": size}, "adam_scheduler", {"max_epochs": 2})


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping_equals_ddp(ranks: RankPool, algorithm: str) -> None:
    options = {"gradient_clip_val": 0.05, "gradient_clip_algorithm": algorithm}
    run(ranks, 4, _like_ddp, "mics", {}, "sgd", options, ranks_per_node=2)


def test_accumulation_with_an_incomplete_window_equals_ddp(ranks: RankPool) -> None:
    options = {"accumulate_grad_batches": 3, "max_epochs": 2, "gradient_clip_val": 0.05}
    run(ranks, 4, _like_ddp, "mics", {}, "sgd", options, ranks_per_node=2)


def test_one_rank_equals_ddp(ranks: RankPool) -> None:
    run(ranks, 1, _like_ddp, "mics", {}, "sgd", {})


class _Batches(Callback):
    """Keeps what a rank has trained on."""

    def __init__(self) -> None:
        self.seen: list[list[torch.Tensor]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.seen.append(batch)


def _with_batches(ctx: RankContext) -> tuple[list[list[torch.Tensor]], dict[str, torch.Tensor]]:
    batches = _Batches()
    return batches.seen, fitted(ctx, "mics", Regression(), loader(), gradient_clip_val=0.05, callbacks=[batches])


def test_training_equals_one_process_with_the_whole_batch(ranks: RankPool) -> None:
    results = run(ranks, 4, _with_batches, ranks_per_node=2)
    alone = Regression()
    optimizer = alone.configure_optimizers()
    for parts in zip(*(seen for seen, _ in results), strict=True):
        optimizer.zero_grad()
        alone.loss([torch.cat(column) for column in zip(*parts, strict=True)]).backward()
        nn.utils.clip_grad_norm_(alone.parameters(), 0.05)
        optimizer.step()
    for _, found in results:
        assert_same(found, dict(alone.named_parameters()))


class _Recomputing(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class _WithRecomputation(Regression):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.__class__ = _Recomputing


class _WithUnusedForward(Regression):
    """Runs a forward with gradients whose result it does not use, as for a metric."""

    def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        self(batch[0])
        return super().loss(batch)


class _Tied(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.layers[2].up.weight = self.layers[0].up.weight


def _variant_like_plain_ddp(ctx: RankContext, kind: type[Regression]) -> None:
    assert_same(fitted(ctx, "mics", kind(), loader()), fitted(ctx, "ddp", kind(), loader()))


@pytest.mark.parametrize("kind", [_WithRecomputation, _Tied, _WithUnusedForward])
def test_awkward_modules_equal_ddp(ranks: RankPool, kind: type[Regression]) -> None:
    run(ranks, 2, _variant_like_plain_ddp, kind)


class _Observer(Callback):
    """Writes down gradients and their norm before every step."""

    def __init__(self) -> None:
        self.norms: list[Any] = []
        self.grads: list[dict[str, torch.Tensor]] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.grads.append({name: full(p.grad) for name, p in pl_module.named_parameters()})
        norm = nn.utils.clip_grad_norm_(pl_module.parameters(), 1e9)
        self.norms.append(full(norm).item())


def _gradients(
    ctx: RankContext, strategy: str, options: dict[str, Any]
) -> tuple[list[dict[str, torch.Tensor]], list[float]]:
    observer = _Observer()
    fitted(ctx, strategy, Regression(), loader(), callbacks=[observer], **options)
    return observer.grads, observer.norms


def test_gradients_and_norms_are_equal_on_all_ranks_and_equal_ddp(ranks: RankPool) -> None:
    options = {"accumulate_grad_batches": 2}
    expected = run(ranks, 4, _gradients, "ddp", options, ranks_per_node=2)
    found = run(ranks, 4, _gradients, "mics", options, ranks_per_node=2)
    for grads, norms in found:
        assert norms == pytest.approx(expected[0][1], rel=1e-5)
        for step, expected_step in zip(grads, expected[0][0], strict=True):
            assert_same(step, expected_step)


def _shards(ctx: RankContext) -> dict[str, torch.Tensor]:
    fitting = trainer(ctx, mics("mics", partition_size=2))
    fitting.fit(Regression("adamw"), loader())
    return {name: p.to_local().detach().clone() for name, p in fitting.lightning_module.named_parameters()}


def test_replicas_are_bitwise_equal_after_training(ranks: RankPool) -> None:
    shards = run(ranks, 4, _shards)
    for rank in (0, 1):
        for name, shard in shards[rank].items():
            assert torch.equal(shard, shards[rank + 2][name]), name


class _SchedulerSpy(Callback):
    def __init__(self) -> None:
        self.zero_grads = 0
        self.steps = 0

    def on_before_zero_grad(self, *_: Any) -> None:
        self.zero_grads += 1

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.steps += 1


def _scheduled_accumulation(ctx: RankContext, strategy: str) -> tuple[int, int, dict[str, torch.Tensor]]:
    spy = _SchedulerSpy()
    callbacks = [GradientAccumulationScheduler({0: 1, 1: 3, 2: 4}), spy]
    parameters = fitted(ctx, strategy, Regression(), loader(), max_epochs=3, callbacks=callbacks)
    return spy.zero_grads, spy.steps, parameters


def test_scheduled_accumulation_steps_and_clears_as_often_as_ddp(ranks: RankPool) -> None:
    for expected, found in zip(
        run(ranks, 2, _scheduled_accumulation, "ddp"), run(ranks, 2, _scheduled_accumulation, "mics"), strict=True
    ):
        assert found[:2] == expected[:2]
        assert_same(found[2], expected[2])


class _HookOrder(Callback):
    """Every hook of the Trainer, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_"):
            self.calls.append(name)
        return super().__getattribute__(name)


def _hooks(ctx: RankContext, strategy: str) -> list[str]:
    order = _HookOrder()
    fitting = trainer(ctx, strategy, callbacks=[order], limit_train_batches=3, accumulate_grad_batches=2)
    fitting.fit(Regression(), loader(), loader(8))
    return order.calls


def test_hooks_come_in_the_order_of_ddp(ranks: RankPool) -> None:
    assert run(ranks, 2, _hooks, "mics") == run(ranks, 2, _hooks, "ddp")


class _Abandons(Regression):
    """Skips the rest of the first epoch in the middle of a window."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.current_epoch == 0 and batch_idx == 5 else None


def _abandoned_window(ctx: RankContext, strategy: str) -> dict[str, torch.Tensor]:
    return fitted(ctx, strategy, _Abandons(), loader(), max_epochs=2, accumulate_grad_batches=4)


def test_an_abandoned_window_leaves_nothing_behind(ranks: RankPool) -> None:
    expected = run(ranks, 2, _abandoned_window, "ddp")
    for found, reference in zip(run(ranks, 2, _abandoned_window, "mics"), expected, strict=True):
        assert_same(found, reference)


class _Stops(Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.should_stop = batch_idx == 2


def _stopped_and_continued(ctx: RankContext, strategy: str) -> dict[str, torch.Tensor]:
    module = Regression()
    trainer(ctx, strategy, callbacks=[_Stops()], accumulate_grad_batches=2).fit(module, loader())
    again = trainer(ctx, strategy, accumulate_grad_batches=2, limit_train_batches=4)
    again.fit(module, loader())
    return whole(again)


def test_a_fit_stopped_in_the_middle_of_a_window_can_be_followed_by_another(ranks: RankPool) -> None:
    expected = run(ranks, 2, _stopped_and_continued, "ddp")
    for found, reference in zip(run(ranks, 2, _stopped_and_continued, "mics"), expected, strict=True):
        assert_same(found, reference)


def _validation_inside_a_window(ctx: RankContext, strategy: str) -> tuple[float, dict[str, torch.Tensor]]:
    module = Regression()
    fitting = trainer(ctx, strategy, accumulate_grad_batches=4, val_check_interval=3)
    fitting.fit(module, loader(), loader(12))
    return fitting.callback_metrics["val_loss"].item(), whole(fitting)


def test_validation_in_the_middle_of_a_window_keeps_its_gradients(ranks: RankPool) -> None:
    expected = run(ranks, 2, _validation_inside_a_window, "ddp")
    for found, reference in zip(run(ranks, 2, _validation_inside_a_window, "mics"), expected, strict=True):
        assert found[0] == pytest.approx(reference[0], rel=1e-5)
        assert_same(found[1], reference[1])
