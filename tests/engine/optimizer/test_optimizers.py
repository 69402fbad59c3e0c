"""Any torch optimizer, used in any way, steps as on the plain model."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from mics_strategy import ShardConfig, shard
from mics_strategy.errors import ConfigError
from tests import models
from tests.engine.training import (
    OPTIMIZERS,
    Run,
    assert_same,
    plain,
    start,
    train_without_reading,
    wholes,
)
from tests.ranks import RankContext, RankPool, raises_on_every_rank
from tests.reference import train_reference

IIG = ShardConfig.preset("paro-iig")
MakeOptimizer = Callable[[nn.Module], Optimizer]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizer_steps_as_on_the_plain_model(ranks: RankPool, optimizer: str) -> None:
    run = Run(case=models.scalar, config=ShardConfig(), optimizer=optimizer, steps=4)
    for parameters in ranks(2, train_without_reading, run):
        assert_same(parameters, plain(run, 2).parameters)


def test_every_optimizer_of_torch_is_tested() -> None:
    """Here, or below among those that are refused, or for another reason left out."""
    tried = {make.func.__name__ for make in OPTIMIZERS.values()} | {"Muon", "Adafactor", "LBFGS"}
    left_out = {"Optimizer", "SparseAdam", "Rprop"}  # a base class; sparse gradients; steps by the sign of rounding
    assert {name for name in torch.optim.__all__ if name[0].isupper()} == tried | left_out


@pytest.mark.parametrize("optimizer", ["momentum", "adamw_foreach", "adamw_fused", "adamw_single"])
def test_optimizer_steps_on_a_larger_scope_than_the_parameters(ranks: RankPool, optimizer: str) -> None:
    run = Run(case=models.transformer, config=IIG, optimizer=optimizer, accumulation=2)
    for parameters in ranks(4, train_without_reading, run, ranks_per_node=2):
        assert_same(parameters, plain(run, 4).parameters)


def in_groups(parameters: list[nn.Parameter]) -> Optimizer:
    decayed = [p for p in parameters if p.dim() > 1]
    rest = [p for p in parameters if p.dim() <= 1]
    return AdamW([{"params": decayed, "weight_decay": 0.3}, {"params": rest, "lr": 0.001}], lr=0.01, eps=1e-3)


def with_a_group_added(parameters: list[nn.Parameter]) -> Optimizer:
    optimizer = SGD(parameters[:2], lr=0.1, momentum=0.5)
    optimizer.add_param_group({"params": parameters[2:], "lr": 0.02})
    return optimizer


def maximising(parameters: list[nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=0.01, maximize=True)


def amsgrad(parameters: list[nn.Parameter]) -> Optimizer:
    return torch.optim.Adam(parameters, lr=0.01, eps=1e-3, amsgrad=True)


MAKERS = pytest.mark.parametrize(
    "make", [in_groups, with_a_group_added, maximising, amsgrad], ids=lambda make: make.__name__
)


def train_with(ctx: RankContext, run: Run, make: Callable[[list[nn.Parameter]], Optimizer]) -> dict[str, Tensor]:
    training = start(ctx, run)
    training.optimizer = make(list(training.model.parameters()))
    for step in range(run.steps):
        training.step(step)
    return training.parameters()


def adopt_and_train(ctx: RankContext, run: Run, make: Callable[[list[nn.Parameter]], Optimizer]) -> dict[str, Tensor]:
    """The optimizer is built, and takes a step, before the model is sharded."""
    case = run.case()
    model = case.build()
    optimizer = make(list(model.parameters()))
    for rank in range(ctx.world_size):
        (case.loss(model, case.batch(0, 0, rank)) / ctx.world_size).backward()
    optimizer.step()
    optimizer.zero_grad()
    sharded = shard(model, run.config, units=case.units)
    assert sharded.adopt(optimizer) is optimizer
    for step in range(1, run.steps):
        case.loss(model, case.batch(step, 0, ctx.rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return wholes(dict(model.named_parameters()))


def _plain_with(run: Run, world_size: int, make: Callable[[list[nn.Parameter]], Optimizer]) -> dict[str, Tensor]:
    case = run.case()
    batches = case.batches(run.steps, run.accumulation, world_size)
    return train_reference(case.build(), batches, make, loss_fn=case.loss).parameters


@MAKERS
def test_optimizer_built_after_sharding_keeps_its_options(ranks: RankPool, make: object) -> None:
    run = Run(case=models.mlp, config=ShardConfig())
    assert_same(ranks(2, train_with, run, make)[1], _plain_with(run, 2, make))


@MAKERS
def test_adopted_optimizer_keeps_its_options_and_states(ranks: RankPool, make: object) -> None:
    run = Run(case=models.mlp, config=ShardConfig(), steps=4)
    assert_same(ranks(2, adopt_and_train, run, make)[1], _plain_with(run, 2, make))


@pytest.mark.parametrize("optimizer", ["momentum", "adamw_fused", "adagrad", "nadam"])
def test_adopted_states_of_tiny_parameters_are_kept(ranks: RankPool, optimizer: str) -> None:
    run = Run(case=models.scalar, config=IIG, steps=3, optimizer=optimizer)
    found = ranks(4, adopt_and_train, run, OPTIMIZERS[optimizer], ranks_per_node=2)
    assert_same(found[3], plain(run, 4).parameters)


def train_with_closure(ctx: RankContext, run: Run) -> tuple[dict[str, Tensor], float]:
    training = start(ctx, run)
    losses = []

    def closure() -> Tensor:
        training.optimizer.zero_grad()
        loss = training.loss(len(losses))
        loss.backward()
        training.sharded.clip_grad_norm_(0.5)
        return loss

    for step in range(run.steps):
        as_keyword = {"closure": closure} if step % 2 else {}
        losses.append(training.optimizer.step(*([] if as_keyword else [closure]), **as_keyword).item())
    return training.parameters(), losses[-1]


def test_closure_runs_on_the_sharded_model(ranks: RankPool) -> None:
    run = Run(case=models.mlp, config=ShardConfig(), clip=0.5)
    trace = plain(run, 2)
    for rank, (parameters, loss) in enumerate(ranks(2, train_with_closure, run)):
        assert_same(parameters, trace.parameters)
        assert loss == pytest.approx(trace.losses_by_rank[-1][rank], rel=1e-5)


def one_cycle(optimizer: Optimizer) -> OneCycleLR:
    return OneCycleLR(optimizer, max_lr=0.2, total_steps=5)


def train_with_scheduler(ctx: RankContext, run: Run) -> dict[str, Tensor]:
    training = start(ctx, run)
    scheduler = one_cycle(training.optimizer)
    for step in range(run.steps):
        training.step(step)
        scheduler.step()
    return training.parameters()


def test_scheduler_changes_rate_and_momentum(ranks: RankPool) -> None:
    run = Run(case=models.mlp, config=ShardConfig(), steps=4)
    case = models.mlp()
    trace = train_reference(
        case.build(),
        case.batches(4, 1, 2),
        OPTIMIZERS["momentum"],
        loss_fn=case.loss,
        make_scheduler=one_cycle,
    )
    assert_same(ranks(2, train_with_scheduler, run)[0], trace.parameters)


def train_with_two_optimizers(ctx: RankContext, run: Run) -> dict[str, Tensor]:
    """The second steps every other time; its window is twice as long."""
    training = start(ctx, run)
    parameters = list(training.model.parameters())
    often, rarely = SGD(parameters[:3], lr=0.1), OPTIMIZERS["adamw"](parameters[3:])
    for step in range(run.steps):
        training.loss(step).backward()
        often.step()
        often.zero_grad()
        if step % 2:
            rarely.step()
            rarely.zero_grad()
    return training.parameters()


def plain_with_two_optimizers(run: Run, world_size: int) -> dict[str, Tensor]:
    case = run.case()
    model = case.build()
    parameters = list(model.parameters())
    often, rarely = SGD(parameters[:3], lr=0.1), OPTIMIZERS["adamw"](parameters[3:])
    for step in range(run.steps):
        for rank in range(world_size):
            (case.loss(model, case.batch(step, 0, rank)) / world_size).backward()
        often.step()
        often.zero_grad()
        if step % 2:
            rarely.step()
            rarely.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("preset", ["ddp", "zero1", "zero2", "mics", "paro-iig"])
def test_two_optimizers_step_at_their_own_pace(ranks: RankPool, preset: str) -> None:
    run = Run(case=models.mlp, config=ShardConfig.preset(preset), steps=4)
    found = ranks(4, train_with_two_optimizers, run, ranks_per_node=2)
    assert_same(found[0], plain_with_two_optimizers(run, 4))


def train_two_models(ctx: RankContext, config: ShardConfig, is_joint: bool) -> dict[str, Tensor]:
    """Two sharded models in one loss, with one optimizer for both or one each."""
    case = models.mlp()
    pair = nn.ModuleList([case.build(), case.build()])
    for model in pair:
        shard(model, config, units=case.units)
    sets = [list(pair.parameters())] if is_joint else [list(model.parameters()) for model in pair]
    optimizers = [SGD(parameters, lr=0.1) for parameters in sets]
    for step in range(3):
        batch = case.batch(step, 0, ctx.rank)
        (case.loss(pair[0], batch) + 3 * case.loss(pair[1], batch)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return wholes(dict(pair.named_parameters()))


def _two_plain_models(world_size: int) -> dict[str, Tensor]:
    case = models.mlp()
    pair = nn.ModuleList([case.build(), case.build()])
    optimizer = SGD(pair.parameters(), lr=0.1)
    for step in range(3):
        for rank in range(world_size):
            batch = case.batch(step, 0, rank)
            ((case.loss(pair[0], batch) + 3 * case.loss(pair[1], batch)) / world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in pair.named_parameters()}


@pytest.mark.parametrize("preset", ["ddp", "mics", "zero1"])
@pytest.mark.parametrize("is_joint", [False, True], ids=["an-optimizer-each", "one-optimizer"])
def test_two_sharded_models_train_together(ranks: RankPool, preset: str, is_joint: bool) -> None:
    found = ranks(2, train_two_models, ShardConfig.preset(preset), is_joint)
    assert_same(found[1], _two_plain_models(2))


def build(ctx: RankContext, run: Run, make: Callable[[list[nn.Parameter]], Optimizer]) -> None:
    training = start(ctx, run)
    optimizer = make(list(training.model.parameters()))
    training.loss(0).backward()
    optimizer.step(lambda: training.loss(0)) if isinstance(optimizer, LBFGS) else optimizer.step()


def muon(parameters: list[nn.Parameter]) -> Optimizer:
    return torch.optim.Muon([p for p in parameters if p.dim() == 2])


@pytest.mark.parametrize("make", [muon, torch.optim.Adafactor], ids=["Muon", "Adafactor"])
def test_optimizer_that_needs_whole_tensors_is_refused(ranks: RankPool, make: object) -> None:
    run = Run(case=models.mlp, config=ShardConfig())
    raises_on_every_rank(lambda: ranks(2, build, run, make), ConfigError, "whole tensors.*'ddp'")


@pytest.mark.parametrize("make", [muon, partial(torch.optim.Adafactor, lr=0.1)], ids=["Muon", "Adafactor"])
def test_optimizer_that_needs_whole_tensors_steps_on_whole_ones(ranks: RankPool, make: object) -> None:
    run = Run(case=models.mlp, config=ShardConfig.preset("ddp"))
    assert_same(ranks(2, train_with, run, make)[0], _plain_with(run, 2, make), 1e-5)


@pytest.mark.parametrize("preset", ["ddp", "mics"])
def test_an_optimizer_with_its_own_list_of_parameters_is_refused(ranks: RankPool, preset: str) -> None:
    run = Run(case=models.mlp, config=ShardConfig.preset(preset))
    raises_on_every_rank(lambda: ranks(2, build, run, LBFGS), ConfigError, "LBFGS needs whole tensors of all")
