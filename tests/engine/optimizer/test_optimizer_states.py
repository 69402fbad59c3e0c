"""Optimizers keep their states when reloaded or rolled back, in any variant."""

import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LinearLR, OneCycleLR, SequentialLR

from mics_strategy import ShardConfig
from tests import models
from tests.engine.loops import Loop, Seen, assert_same_loop
from tests.engine.training import OPTIMIZERS, Run, assert_same, presets, start, unused_alike
from tests.ranks import RankContext, RankPool

PRESETS = ("ddp", "zero1", "zero2", "mics", "paro-iig")
RUNS = [Run(case=models.mlp, config=config, accumulation=2) for config in presets(PRESETS)]
UNUSED = [run.replace(case=unused_alike, optimizer="adamw") for run in RUNS]
FUSED = [run.replace(optimizer="adamw_fused") for run in RUNS]
SCALARS = [run.replace(case=models.scalar, optimizer="adamw") for run in RUNS]
EVERY_OPTIMIZER = [Run(case=models.scalar, config=ShardConfig(), optimizer=optimizer) for optimizer in OPTIMIZERS]
MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]

# -- between one step and the next --------------------------------------------------------------------------


def zeroed_in_place(loop: Loop) -> Seen:
    """Gradients are zeroed, not cleared.

    Unused parameters then move by momentum and decay.
    """
    made = loop.optimizer()
    for step in range(4):
        loop.backward(step)
        made.step()
        made.zero_grad(set_to_none=False)
    return [loop.grads(), loop.values()]


@pytest.mark.parametrize("runs", [RUNS, UNUSED], ids=["all-used", "some-unused"])
def test_gradients_may_be_zeroed_in_place(ranks: RankPool, runs: list[Run]) -> None:
    assert_same_loop(ranks, 4, runs, zeroed_in_place)


def stepped_twice(loop: Loop) -> Seen:
    """Two steps on the same gradients, which are not cleared after every step either."""
    made = loop.optimizer()
    for step in range(3):
        loop.backward(step)
        made.step()
        made.step()
        if step == 1:
            made.zero_grad()
    return [loop.values()]


@pytest.mark.parametrize("runs", [RUNS, FUSED], ids=["momentum", "adamw_fused"])
def test_an_optimizer_may_step_twice_on_the_same_gradients(ranks: RankPool, runs: list[Run]) -> None:
    assert_same_loop(ranks, 4, runs, stepped_twice)


def reloaded(loop: Loop) -> Seen:
    """An optimizer loads its own states.

    Once after a step, and once between a backward and its step.
    """
    made = loop.optimizer()
    for step in range(3):
        loop.backward(step)
        if step == 1:
            made.load_state_dict(made.state_dict())
        made.step()
        made.zero_grad()
        made.load_state_dict(made.state_dict())
    return [loop.values()]


def rolled_back(loop: Loop) -> Seen:
    """Two steps are taken, undone, and taken again with other batches."""
    made = loop.optimizer()
    loop.step(0, made)
    saved, values = copy.deepcopy(made.state_dict()), [p.detach().clone() for p in loop.parameters()]
    loop.step(1, made)
    loop.step(2, made)
    made.load_state_dict(saved)
    with torch.no_grad():
        for parameter, value in zip(loop.parameters(), values, strict=True):
            parameter.copy_(value)
    loop.step(3, made)
    loop.step(4, made)
    return [loop.values()]


def continued_by_another(loop: Loop) -> Seen:
    """A new optimizer goes on where the old one was."""
    old, new = loop.optimizer(), loop.optimizer()
    loop.step(0, old)
    new.load_state_dict(old.state_dict())
    del old
    loop.step(1, new)
    return [loop.values()]


@pytest.mark.parametrize("body", [reloaded, rolled_back, continued_by_another], ids=lambda body: body.__name__)
@pytest.mark.parametrize(
    ("world_size", "runs"), [(4, SCALARS), (2, EVERY_OPTIMIZER)], ids=["every-preset", "every-optimizer"]
)
def test_states_may_be_given_back(
    ranks: RankPool, body: Callable[[Loop], Seen], world_size: int, runs: list[Run]
) -> None:
    assert_same_loop(ranks, world_size, runs, body)


def full_state_with_late_parameters(ctx: RankContext, runs: list[Run]) -> list[dict[str, Any]]:
    """Saved while one group has states and the other, just added, has none."""
    states = []
    for run in runs:
        training = start(ctx, run)
        loop = Loop(run=run, case=training.case, model=training.model, ranks=[ctx.rank], sharded=training.sharded)
        states.append(training.sharded.full_optimizer_state_dict(_with_late_parameters(loop)))
    return states


def _with_late_parameters(loop: Loop) -> Optimizer:
    made = loop.optimizer("0.", "4.")
    loop.step(0, made)
    made.add_param_group({"params": loop.parameters("2.", "3."), "lr": 0.02})
    return made


def test_full_optimizer_states_may_be_of_some_parameters_only(ranks: RankPool) -> None:
    runs = [run.replace(optimizer="adamw") for run in RUNS]
    case = models.mlp()
    expected = _with_late_parameters(Loop(run=runs[0], case=case, model=case.build(), ranks=range(4))).state_dict()
    for found in ranks(4, full_state_with_late_parameters, runs, ranks_per_node=2)[0]:
        assert found["param_groups"] == expected["param_groups"]
        assert list(found["state"]) == list(expected["state"])
        for index, state in expected["state"].items():
            assert_same(found["state"][index], state, 2e-6)


# -- schedules ----------------------------------------------------------------------------------------------


def two_schedules(loop: Loop) -> Seen:
    """Two optimizers with different numbers of steps, each with a schedule.

    One schedule also changes the betas.
    """
    often, rarely = SGD(loop.parameters("0.", "2."), lr=0.1), AdamW(loop.parameters("3.", "4."), lr=0.01, eps=1e-3)
    cosine, cycle = CosineAnnealingLR(often, 4), OneCycleLR(rarely, max_lr=0.05, total_steps=4)
    for step in range(5):
        loop.backward(step)
        for optimizer, schedule in [(often, cosine), (rarely, cycle)][: 1 + step % 2]:
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return [loop.values()]


def schedules_in_sequence(loop: Loop) -> Seen:
    made = loop.optimizer()
    warmup, decay = LinearLR(made, 0.1, total_iters=2), ExponentialLR(made, 0.5)
    schedule = SequentialLR(made, [warmup, decay], [2])
    for step in range(4):
        loop.step(step, made)
        schedule.step()
    return [loop.values()]


@pytest.mark.parametrize("body", [two_schedules, schedules_in_sequence], ids=lambda body: body.__name__)
def test_schedules_change_rates_as_on_the_plain_model(ranks: RankPool, body: Callable[[Loop], Seen]) -> None:
    assert_same_loop(ranks, 4, RUNS, body)


# -- implementations ----------------------------------------------------------------------------------------

IMPLEMENTATIONS: dict[str, MakeOptimizer] = {
    "adadelta foreach": partial(Adadelta, lr=0.5, eps=1e-3, foreach=True),
    "adagrad foreach": partial(Adagrad, lr=0.02, eps=1e-3, foreach=True),
    "adagrad fused": partial(Adagrad, lr=0.02, eps=1e-3, fused=True),
    "adam foreach": partial(Adam, lr=0.01, eps=1e-3, amsgrad=True, foreach=True),
    "adam fused": partial(Adam, lr=0.01, eps=1e-3, amsgrad=True, fused=True),
    "adamax foreach": partial(Adamax, lr=0.01, eps=1e-3, foreach=True),
    "adamw foreach": partial(AdamW, lr=0.01, eps=1e-3, maximize=True, foreach=True),
    "adamw fused": partial(AdamW, lr=0.01, eps=1e-3, maximize=True, fused=True),
    "asgd foreach": partial(torch.optim.ASGD, lr=0.05, t0=2, foreach=True),
    "nadam foreach": partial(NAdam, lr=0.01, eps=1e-3, foreach=True),
    "radam foreach": partial(RAdam, lr=0.01, eps=1e-3, foreach=True),
    "rmsprop foreach": partial(RMSprop, lr=0.005, eps=1e-3, momentum=0.5, centered=True, foreach=True),
    "sgd foreach": partial(SGD, lr=0.05, momentum=0.9, dampening=0.1, foreach=True),
    "sgd fused": partial(SGD, lr=0.05, momentum=0.9, nesterov=True, fused=True),
}


def implemented(loop: Loop) -> Seen:
    """Every implementation in turn, each with a new optimizer on the same model."""
    seen = []
    for make in IMPLEMENTATIONS.values():
        made = make(loop.parameters())
        for step in range(2):
            loop.step(step, made)
        seen.append(loop.values())
    return seen


@pytest.mark.parametrize("preset", ["ddp", "zero1", "paro-iig"])
def test_every_implementation_steps_as_on_the_plain_model(ranks: RankPool, preset: str) -> None:
    run = Run(case=models.scalar, config=ShardConfig.preset(preset))
    assert_same_loop(ranks, 2, [run], implemented, tolerance=5e-6)


def test_every_implementation_of_torch_is_tested() -> None:
    offered = set()
    for name in {make.func.__name__ for make in OPTIMIZERS.values()}:
        options = inspect.signature(getattr(torch.optim, name)).parameters
        offered |= {f"{name.lower()} {option}" for option in ("foreach", "fused") if option in options}
    assert offered == set(IMPLEMENTATIONS)


REFUSED_BY_TORCH: dict[str, tuple[MakeOptimizer, type[Exception], str]] = {
    "differentiable": (partial(SGD, lr=0.1, differentiable=True), RuntimeError, "leaf Variable that requires grad"),
    "capturable": (partial(Adam, capturable=True), AssertionError, "must be on supported devices"),
}


def refused_then_another(loop: Loop, option: str) -> Seen:
    """A step that torch refuses changes no parameter and no gradient.

    Another optimizer then uses the gradients.
    """
    make, error, message = REFUSED_BY_TORCH[option]
    loop.backward(0)
    with pytest.raises(error, match=message):
        make(loop.parameters()).step()
    made = loop.optimizer()
    made.step()
    made.zero_grad()
    loop.step(1, made)
    return [loop.values()]


@pytest.mark.parametrize("option", REFUSED_BY_TORCH)
def test_what_torch_refuses_on_plain_parameters_it_refuses_on_sharded_ones(ranks: RankPool, option: str) -> None:
    assert_same_loop(ranks, 2, RUNS, refused_then_another, option)
