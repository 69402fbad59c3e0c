"""Optimizers that are not torch's own train as on the plain model.

Schedule-free ones also write into the parameters between steps: an average is evaluated. Others run a closure in the
middle of a step, wrap an optimizer, or keep their states in a format of their own.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import schedulefree
import torch
import torch.distributed as dist
from schedulefree import AdamWScheduleFree, RAdamScheduleFree, ScheduleFreeWrapper, SGDScheduleFree
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Optimizer

from mics_strategy import ShardConfig, shard
from tests import models
from tests.engine.loops import Loop, Seen, assert_same_loop
from tests.engine.training import Run, presets, start
from tests.ranks import RankContext, RankPool

PRESETS = ("ddp", "zero1", "zero2", "mics", "paro-iig")
MakeOptimizer = Callable[..., Optimizer]

# -- schedule-free ------------------------------------------------------------------------------------------

SCHEDULE_FREE: dict[str, MakeOptimizer] = {
    "adamw": partial(AdamWScheduleFree, lr=0.01, eps=1e-3, weight_decay=0.1, warmup_steps=2, foreach=False),
    "adamw foreach": partial(AdamWScheduleFree, lr=0.01, eps=1e-3, weight_decay=0.1, warmup_steps=2, foreach=True),
    "sgd": partial(SGDScheduleFree, lr=0.1, weight_decay=0.1, foreach=False),
    "sgd foreach": partial(SGDScheduleFree, lr=0.1, foreach=True),
    "radam": partial(RAdamScheduleFree, lr=0.01, betas=(0.9, 0.9), eps=1e-3, foreach=False),
    "radam foreach": partial(RAdamScheduleFree, lr=0.01, eps=1e-3, silent_sgd_phase=False, foreach=True),
    "wrapper": lambda parameters: ScheduleFreeWrapper(SGD(parameters, lr=0.1), weight_decay_at_y=0.1),
}


def switched(loop: Loop, name: str) -> Seen:
    """Evaluation after every second step.

    Once twice, and once without a switch in between.
    """
    made, seen = SCHEDULE_FREE[name](loop.parameters()), []
    for step in range(4):
        made.train()
        loop.model.train()
        loop.step(step, made)
        if step % 2:
            made.eval()
            loop.model.eval()
            with torch.no_grad():
                seen.append({"loss": loop.loss(100 + step, 0, 0) * len(loop.ranks)})
            made.eval()
    made.train()
    return [*seen, {"loss": loop.loss(200, 0, 0).detach() * len(loop.ranks)}, loop.values()]


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", ["adamw", "sgd foreach", "radam", "wrapper"])
def test_evaluation_uses_values_written_by_the_switch(ranks: RankPool, name: str, preset: str) -> None:
    assert_same_loop(ranks, 4, [Run(case=models.mlp, config=ShardConfig.preset(preset))], switched, name)


@pytest.mark.parametrize("preset", ["ddp", "zero1", "paro-iig"])
@pytest.mark.parametrize("name", [name for name in SCHEDULE_FREE if name != "wrapper"])  # views scalars as bytes
def test_scalars_and_tiny_parameters_are_averaged_equally(ranks: RankPool, name: str, preset: str) -> None:
    assert_same_loop(ranks, 2, [Run(case=models.scalar, config=ShardConfig.preset(preset))], switched, name)


def with_a_closure(loop: Loop, make: MakeOptimizer) -> Seen:
    """Optimizers that extrapolate before the closure, outside of the swap."""
    made = make(loop.parameters(), lr=0.02)

    def closure() -> None:
        made.zero_grad()
        loop.backward(next(steps))

    steps = iter(range(3))
    for _ in range(3):
        made.step(closure)
    return [loop.values()]


@pytest.mark.parametrize("is_foreach", [False, True], ids=["single", "foreach"])
@pytest.mark.parametrize("name", ["AdamW", "SGD", "RAdam"])
def test_a_closure_may_run_in_the_middle_of_a_step(ranks: RankPool, name: str, is_foreach: bool) -> None:
    runs = [Run(case=models.scalar, config=config, accumulation=2) for config in presets(("ddp", "zero1", "mics"))]
    make = partial(getattr(schedulefree, f"{name}ScheduleFreeClosure"), foreach=is_foreach)
    assert_same_loop(ranks, 2, runs, with_a_closure, make)


def _everyones(state: dict[str, Any]) -> dict[str, Any]:
    """What rank 0 has, on every rank."""
    box = [state]
    dist.broadcast_object_list(box)
    return box[0]


def resumed(loop: Loop, name: str, mode: str, is_whole: bool) -> Seen:
    """Saved in either mode, loaded into a new optimizer, evaluated and trained on."""
    made, again = (SCHEDULE_FREE[name](loop.parameters()) for _ in range(2))
    made.train()
    loop.step(0, made)
    loop.step(1, made)
    getattr(made, mode)()
    if loop.sharded is None or not is_whole:
        again.load_state_dict(made.state_dict())
    else:
        state = _everyones(loop.sharded.full_optimizer_state_dict(made))
        loop.sharded.load_full_optimizer_state_dict(again, state)
    again.eval()
    seen = [loop.values()]
    again.train()
    loop.step(2, again)
    again.eval()
    return [*seen, loop.values()]


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("is_whole", [False, True], ids=["sharded", "whole"])
@pytest.mark.parametrize("name", ["adamw foreach", "radam"])
def test_states_are_saved_in_either_mode(ranks: RankPool, name: str, mode: str, is_whole: bool) -> None:
    runs = [Run(case=models.scalar, config=config) for config in presets(("ddp", "zero1", "paro-iig"))]
    assert_same_loop(ranks, 2, runs, resumed, name, mode, is_whole)


def adopted_in_training(loop: Loop, name: str) -> Seen:
    """After a step on the plain model, on all ranks' batches."""
    plain = replace(loop, model=loop.case.build(), ranks=range(2), sharded=None)
    made = SCHEDULE_FREE[name](plain.parameters())
    made.train()
    plain.step(0, made)
    if loop.sharded is None:
        loop = plain
    else:
        loop = replace(loop, model=plain.model, sharded=shard(plain.model, loop.run.config, units=loop.case.units))
        loop.sharded.adopt(made)
    made.eval()
    seen = [loop.values()]
    made.train()
    loop.step(1, made)
    return [*seen, loop.values()]


@pytest.mark.parametrize("name", ["adamw foreach", "sgd", "radam"])
def test_averages_are_adopted_with_their_optimizer(ranks: RankPool, name: str) -> None:
    runs = [Run(case=models.scalar, config=config) for config in presets(("ddp", "zero1", "paro-iig"))]
    assert_same_loop(ranks, 2, runs, adopted_in_training, name)


def kinds_of_averages(ctx: RankContext, run: Run) -> bool:
    training = start(ctx, run)
    optimizer = training.optimizer = SCHEDULE_FREE["adamw foreach"](training.model.parameters())
    optimizer.train()
    training.step(0)
    rows = [(p, optimizer.state[p]["z"]) for p in training.model.parameters() if p.dim()]
    return all(isinstance(z, DTensor) and (z.shape, z.placements) == (p.shape, p.placements) for p, z in rows)


def test_averages_are_sharded_as_their_parameters(ranks: RankPool) -> None:
    assert ranks(4, kinds_of_averages, Run(case=models.scalar, config=ShardConfig.preset("zero1"))) == [True] * 4


# -- in their own way ---------------------------------------------------------------------------------------


class _WritesThroughData(Optimizer):
    """Plain descent as it was written before `torch.no_grad`."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.add_(parameter.grad.data, alpha=-group["lr"])


class _NestsItsStates(Optimizer):
    """Twofold momentum, in a list and a dict."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["first"] = [torch.zeros_like(parameter)]
                    state["second"] = {"of": torch.zeros_like(parameter)}
                state["first"][0].lerp_(parameter.grad, 0.5)
                state["second"]["of"].lerp_(state["first"][0], 0.5)
                parameter.sub_(state["second"]["of"], alpha=group["lr"])


class _TwoSteps(SGD):
    """Sharpness-aware: up along the gradient, then down after another backward."""

    @torch.no_grad()
    def climb(self) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for parameter in parameters:
            self.state[parameter]["before"] = parameter.data.clone()
            parameter.add_(parameter.grad * (0.05 / norm))
        self.zero_grad()

    @torch.no_grad()
    def descend(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data = self.state[parameter].pop("before")
        self.step()
        self.zero_grad()


def in_their_own_way(loop: Loop, make: MakeOptimizer) -> Seen:
    made = make(loop.parameters())
    for step in range(3):
        loop.step(step, made)
    return [loop.values()]


def up_and_down(loop: Loop) -> Seen:
    made = _TwoSteps(loop.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        loop.backward(step)
        made.climb()
        loop.backward(step)
        made.descend()
    return [loop.values()]


@pytest.mark.parametrize("make", [_WritesThroughData, _NestsItsStates], ids=["data", "nested-states"])
def test_an_optimizer_may_be_written_as_on_plain_parameters(ranks: RankPool, make: MakeOptimizer) -> None:
    runs = [Run(case=models.scalar, config=config) for config in presets(PRESETS, update_locality="element")]
    assert_same_loop(ranks, 2, runs, in_their_own_way, make)


def test_parameters_may_be_moved_and_put_back_between_steps(ranks: RankPool) -> None:
    configs = presets(PRESETS, update_locality="element")
    runs = [Run(case=models.mlp, config=config, accumulation=2) for config in configs]
    assert_same_loop(ranks, 4, runs, up_and_down)
