"""Hooks of an optimizer's step see sharded parameters, and steps with hooks are those of the plain model."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from mics_strategy import ShardConfig
from mics_strategy.errors import ConfigError
from tests import models
from tests.engine.loops import Body, Loop, Seen, assert_same_loop
from tests.engine.optimizer.not_elementwise import Simple
from tests.engine.training import Run, presets, start
from tests.ranks import RankContext, RankPool, assert_refused, refusal

CONFIGS = [*presets(("zero1", "mics"), update_locality="element")]
RUNS = [Run(case=models.mlp, config=config) for config in [*CONFIGS, CONFIGS[0].replace(overlap="none")]]
TENSORS = Run(case=models.mlp, config=ShardConfig(optimizer_layout="tensors", update_locality="tensor"))


def params_of(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def clip(optimizer: Optimizer, *_: Any) -> None:
    """By the norm of all gradients."""
    torch.nn.utils.clip_grad_norm_(params_of(optimizer), 0.05)


def renormalize(optimizer: Optimizer, *_: Any) -> None:
    """Every tensor, by its norm."""
    with torch.no_grad():
        for p in params_of(optimizer):
            p.div_(p.norm().clamp(min=0.5))


def take_steps(loop: Loop, optimizer: Optimizer, are_global: bool = False) -> Seen:
    with ExitStack() as stack:
        if are_global:
            for handle in (register_optimizer_step_pre_hook(clip), register_optimizer_step_post_hook(renormalize)):
                stack.callback(handle.remove)
        else:
            optimizer.register_step_pre_hook(clip)
            optimizer.register_step_post_hook(renormalize)
        for step in range(3):
            loop.step(step, optimizer)
    return [loop.values()]


def of_the_optimizer(loop: Loop, make: Callable[..., Optimizer] = AdamW) -> Seen:
    return take_steps(loop, make(loop.parameters()))


def of_all_optimizers(loop: Loop) -> Seen:
    return take_steps(loop, SGD(loop.parameters(), lr=0.1), are_global=True)


def registered_between_steps(loop: Loop) -> Seen:
    """The swap's own hooks were registered before."""
    optimizer = SGD(loop.parameters(), lr=0.1)
    loop.step(0, optimizer)
    return take_steps(loop, optimizer)


def under_a_schedule(loop: Loop) -> Seen:
    optimizer = SGD(loop.parameters(), lr=0.1)
    LambdaLR(optimizer, lambda step: 0.5)  # replaces `step` of the object
    return take_steps(loop, optimizer)


def with_a_closure(loop: Loop) -> Seen:
    """A hook replaces the closure."""
    optimizer = SGD(loop.parameters(), lr=0.1)
    steps = iter(range(3))

    def closure() -> float:
        optimizer.zero_grad()
        loop.backward(next(steps))
        clip(optimizer)
        return 0.0

    optimizer.register_step_pre_hook(lambda _, args, kwargs: ((args[0], closure), kwargs))
    optimizer.register_step_post_hook(renormalize)
    for _ in range(3):
        optimizer.step(lambda: 1.0)
    return [loop.values()]


class Halving(Simple):
    """Halves its gradients, and decays its tensors around the step of its parent, which has hooks."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        params = [p for p in params_of(self) if p.grad is not None]
        for p in params:
            p.grad = p.grad * 0.5
        super().step()
        torch._foreach_clamp_max_(params, 0.5)


class HalvingByNorm(Halving):
    """Scaled by the norms of whole tensors."""

    def change(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        return p.grad * p.norm()


def of_a_step_in_a_step(loop: Loop, make: type[Simple] = Halving, are_global: bool = False) -> Seen:
    """Hooks run around the step of the parent, too."""
    Simple([nn.Parameter(torch.ones(1))])  # from now on the steps of the parent class have hooks
    return take_steps(loop, make(loop.parameters()), are_global)


def of_all_steps_in_steps(loop: Loop) -> Seen:
    return of_a_step_in_a_step(loop, are_global=True)


BODIES = [
    of_the_optimizer,
    of_all_optimizers,
    registered_between_steps,
    under_a_schedule,
    with_a_closure,
    of_a_step_in_a_step,
    of_all_steps_in_steps,
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_hooks_see_sharded_parameters(ranks: RankPool, body: Body) -> None:
    assert_same_loop(ranks, 2, RUNS, body)


def hooked_steps_on_owners(ctx: RankContext, make: type[Simple]) -> Seen:
    training = start(ctx, TENSORS)
    loop = Loop(run=TENSORS, case=training.case, model=training.model, ranks=[ctx.rank], sharded=training.sharded)
    return of_a_step_in_a_step(loop, make)


def test_hooks_see_rows_of_tensors_with_owners(ranks: RankPool) -> None:
    assert_same_loop(ranks, 2, [TENSORS], of_the_optimizer, partial(Adafactor, lr=0.1, eps=(1e-3, 1e-3)))


def test_hooks_in_a_step_on_owners_are_refused(ranks: RankPool) -> None:
    """Halved gradients would be lost."""
    found = ranks(2, refusal, hooked_steps_on_owners, HalvingByNorm)
    assert_refused(found, ConfigError, "`HalvingByNorm.step` calls the step of its parent.*owners of whole tensors")
