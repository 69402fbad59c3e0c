"""Ranks and micro-steps that use different parameters."""

from collections.abc import Iterator, Sequence
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mics_strategy import ShardConfig, Topology, shard
from mics_strategy.comm.work import QueuedWork
from mics_strategy.engine.grad_bucket import GradBucket
from mics_strategy.engine.streams import Op
from tests import models
from tests.engine.patterns import Play, play
from tests.engine.training import (
    Run,
    assert_same,
    assert_same_training,
    plain,
    presets,
    root_only,
    start,
    train,
    train_each,
    train_without_reading,
    unused_alike,
)
from tests.models import Batch, Case, Residual
from tests.ranks import RankContext, RankPool

pytestmark = [pytest.mark.wide, pytest.mark.one_job]


def _check(ranks: RankPool, world_size: int, run: Run) -> None:
    outcomes = ranks(world_size, train, run, ranks_per_node=2, timeout_s=60.0)
    assert_same_training(outcomes, plain(run, world_size))


UNSHARDED_PRESETS = ["ddp", "zero1", "zero2", "paro-nni", "paro-nii", "paro-nig", "paro-ngg"]


@pytest.mark.parametrize("preset", UNSHARDED_PRESETS)
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_may_run_different_units_if_parameters_are_not_sharded(
    ranks: RankPool, preset: str, world_size: int
) -> None:
    _check(ranks, world_size, Run(case=models.unused, config=ShardConfig.preset(preset), accumulation=2, steps=4))


@pytest.mark.parametrize("preset", UNSHARDED_PRESETS)
@pytest.mark.parametrize("accumulation", [1, 3])
def test_ranks_may_run_different_units_up_to_a_declared_boundary(
    ranks: RankPool, preset: str, accumulation: int
) -> None:
    config = ShardConfig.preset(preset)
    _check(ranks, 4, Run(case=models.unused, config=config, accumulation=accumulation, steps=4, signal=True))


class Backwards(nn.Module):
    """Layers that run from the last to the first, each on some ranks only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(6))

    def forward(self, x: Tensor, left_out: int) -> Tensor:
        for index in reversed(range(6)):
            if index % 3 != left_out:
                x = x + self.layers[index](x).tanh()
        return x


def backwards_on_some_ranks() -> Case:
    vectors = models.unused()

    def build() -> nn.Module:
        torch.manual_seed(5)
        return Backwards()

    def batch(step: int, micro: int, rank: int) -> Batch:
        chosen = {"left_out": (step + micro + rank) % 3 if step else 3}  # all ranks run all layers once
        return {"x": vectors.batch(step, micro, rank)["x"]} | chosen

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["x"], batch["left_out"]).square().mean()

    return Case(build=build, batch=batch, loss=loss, units=(nn.Linear,))


@pytest.mark.parametrize("preset", UNSHARDED_PRESETS)
@pytest.mark.parametrize("signal", [False, True], ids=["undeclared", "declared"])
def test_ranks_may_run_different_units_in_another_order_than_the_modules(
    ranks: RankPool, preset: str, signal: bool
) -> None:
    run = Run(case=backwards_on_some_ranks, config=ShardConfig.preset(preset), accumulation=2, steps=4, signal=signal)
    _check(ranks, 4, run)


@pytest.mark.parametrize("preset", ["mics", "zero3", "paro-iig", "paro-ini"])
@pytest.mark.parametrize("signal", [False, True], ids=["undeclared", "declared"])
def test_ranks_may_run_different_branches_inside_a_unit(ranks: RankPool, preset: str, signal: bool) -> None:
    config = ShardConfig.preset(preset)
    run = Run(case=models.unused, config=config, accumulation=2, steps=4, units=root_only, signal=signal)
    _check(ranks, 4, run)


@pytest.mark.parametrize("preset", ["mics", "zero3", "paro-iig"])
@pytest.mark.parametrize("signal", [False, True], ids=["undeclared", "declared"])
def test_all_ranks_may_leave_units_out_together(ranks: RankPool, preset: str, signal: bool) -> None:
    config = ShardConfig.preset(preset)
    _check(ranks, 4, Run(case=unused_alike, config=config, accumulation=2, steps=4, signal=signal))


@pytest.mark.parametrize("preset", ["ddp", "zero1", "zero2", "mics", "paro-iig"])
def test_ranks_may_use_units_whose_output_misses_the_loss(ranks: RankPool, preset: str) -> None:
    _check(ranks, 4, Run(case=detached_on_some_ranks, config=ShardConfig.preset(preset), accumulation=2))


def detached_on_some_ranks() -> Case:
    """Every rank runs the model with and without the branch.

    The loss looks at one of the outputs.
    """
    case = models.unused()

    def batch(step: int, micro: int, rank: int) -> Batch:
        return case.batch(step, micro, rank) | {"reaches": (step + rank) % 2 == 0}

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        outputs = [model(batch["x"], False), model(batch["x"], True)]
        return F.mse_loss(outputs[batch["reaches"]], batch["y"])

    return Case(build=case.build, batch=batch, loss=loss, units=(Residual,))


class Ladder(nn.Module):
    """Layers that all run; the loss sees what some of them give."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Residual(5, 7) for _ in range(5))

    def forward(self, x: Tensor, unseen: tuple[int, ...]) -> Tensor:
        for index, layer in enumerate(self.layers):
            out = layer(x)
            x = x if index in unseen else out
        return x


UNSEEN = ((), (1, 2), (0, 1, 2, 3), (4,), (2, 3, 4))


def unseen_on_some_ranks() -> Case:
    vectors = models.unused()

    def build() -> nn.Module:
        torch.manual_seed(5)
        return Ladder()

    def batch(step: int, micro: int, rank: int) -> Batch:
        return {"x": vectors.batch(step, micro, rank)["x"], "unseen": UNSEEN[(step + micro + 3 * rank) % len(UNSEEN)]}

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["x"], batch["unseen"]).square().mean()

    return Case(build=build, batch=batch, loss=loss, units=(Residual,))


@pytest.mark.parametrize("overlap", ["all", "none"])
def test_ranks_whose_losses_use_different_units_communicate_in_one_order(ranks: RankPool, overlap: str) -> None:
    configs = presets(("zero3", "zeropp-hpz", "mics", "paro-iig"), overlap=overlap)
    runs = [Run(case=unseen_on_some_ranks, config=each, accumulation=2, steps=3, signal=True) for each in configs]
    for outcomes in zip(*ranks(4, train_each, runs, ranks_per_node=2, timeout_s=60.0), strict=True):
        assert_same_training(list(outcomes), plain(runs[0], 4))


def read_then_leave_units_out(play: Play) -> None:
    """Micro-step 1 uses the branch, micro-step 0 does not."""
    play.loss(1).backward()
    play.read()
    play.loss(0).backward()


def read_then_use_other_units(play: Play) -> None:
    play.loss(0).backward()
    play.read()
    play.loss(1).backward()


@pytest.mark.parametrize("preset", ["ddp", "zero1", "zero2", "mics", "paro-iig"])
@pytest.mark.parametrize("pattern", [read_then_leave_units_out, read_then_use_other_units], ids=["fewer", "more"])
def test_window_goes_on_with_other_units_after_reading(ranks: RankPool, preset: str, pattern: object) -> None:
    run = Run(case=unused_alike, config=ShardConfig.preset(preset))
    for grads, expected in ranks(4, play, run, pattern, ranks_per_node=2, timeout_s=60.0):
        assert_same(grads, expected)


def declare_every_micro_step_last(ctx: RankContext, run: Run) -> dict[str, Tensor]:
    training = start(ctx, run)
    for step in range(run.steps):
        for micro in range(run.accumulation):
            with training.sharded.micro_step(0, of=1):
                training.loss(step, micro).backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
    return training.parameters()


def declare_no_micro_step_last(ctx: RankContext, run: Run) -> dict[str, Tensor]:
    training = start(ctx, run)
    for step in range(run.steps):
        for micro in range(run.accumulation):
            with training.sharded.micro_step(0, of=100):
                training.loss(step, micro).backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
    return training.parameters()


@pytest.mark.parametrize("job", [declare_every_micro_step_last, declare_no_micro_step_last], ids=["early", "never"])
@pytest.mark.parametrize(
    ("preset", "case"),
    [
        ("ddp", models.unused),
        ("ddp", models.transformer),
        ("zero1", models.transformer),
        ("zero2", models.transformer),
        ("mics", models.transformer),
        ("paro-iig", models.transformer),
        ("paro-iig", unused_alike),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_wrong_boundary_costs_no_correctness(ranks: RankPool, preset: str, case: object, job: object) -> None:
    run = Run(case=case, config=ShardConfig.preset(preset), accumulation=3)
    for parameters in ranks(4, job, run, ranks_per_node=2, timeout_s=60.0):
        assert_same(parameters, plain(run, 4).parameters)


def grads_of_unused(ctx: RankContext, run: Run) -> list[bool]:
    """Whether the branch has a gradient, in two steps.

    Rank 0 uses it in the first one, and no rank in the second.
    """
    training = start(ctx, run)
    found = []
    for step, use_branch in ((0, ctx.rank == 0), (1, False)):
        batch = training.batch(step) | {"use_branch": use_branch}
        training.case.loss(training.model, batch).backward()
        found.append(training.model.branch[0].up.weight.grad is not None)
        training.optimizer.step()
        training.optimizer.zero_grad()
    return found


@pytest.mark.parametrize("preset", ["ddp", "mics"])
def test_gradient_is_none_only_where_no_rank_has_one(ranks: RankPool, preset: str) -> None:
    run = Run(case=models.unused, config=ShardConfig.preset(preset), units=root_only)
    assert ranks(2, grads_of_unused, run) == [[True, False]] * 2


def test_weight_decay_leaves_parameters_without_gradient_alone(ranks: RankPool) -> None:
    run = Run(case=unused_alike, config=ShardConfig(), optimizer="adamw", steps=1)
    found = ranks(2, train_without_reading, run)[0]["branch.0.up.weight"]
    assert torch.equal(found, dict(models.unused().build().named_parameters())["branch.0.up.weight"])


class Chained(nn.Module):
    """Layers one after the other, of which some are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(6))

    def forward(self, x: Tensor, left_out: tuple[int, ...]) -> Tensor:
        for index, layer in enumerate(self.layers):
            if index not in left_out:
                x = x + layer(x).tanh()
        return x


def hops_of_a_step(ctx: RankContext) -> list[str]:
    """Collectives that this rank starts, in order."""
    torch.manual_seed(5)
    model = Chained()
    config = ShardConfig.preset("paro-nii", topology=Topology(ranks_per_node=2))
    sharded = shard(model, config, units=(nn.Linear,))
    first, second, hops = GradBucket.first_hop, GradBucket.second_hop, []

    def launch(gradient: GradBucket) -> Iterator[Op]:
        hops.append(f"first hop of {gradient.name}")
        yield from first(gradient)

    def follow(gradient: GradBucket, wire: Tensor, first_hops: Sequence[QueuedWork]) -> Iterator[Op]:
        hops.append(f"second hop of {gradient.name}")
        yield from second(gradient, wire, first_hops)

    with (
        mock.patch.object(GradBucket, "first_hop", launch),
        mock.patch.object(GradBucket, "second_hop", follow),
    ):
        for left_out in ((), ((4, 3) if ctx.rank in (0, 3) else (2,)) if ctx.rank != 1 else ()):
            hops.clear()
            with sharded.micro_step(0, of=1):
                model(torch.ones(2, 5), left_out).square().mean().backward()
            sharded.clip_grad_norm_(1.0)
    return hops


def test_ranks_with_different_gradients_start_first_and_second_hops_in_one_order(ranks: RankPool) -> None:
    first, *others = ranks(4, hops_of_a_step, ranks_per_node=2)
    assert first == [f"{which} hop of layers.{i}" for i in range(6)[::-1] for which in ("first", "second")]
    assert others == [first] * 3
