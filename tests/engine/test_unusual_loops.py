"""Training loops for which the engine was not designed train as plain."""

from functools import lru_cache

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad  # before any model is sharded, as scripts do

from mics_strategy import ShardConfig, shard
from mics_strategy.errors import LifecycleError
from tests.engine import unusual
from tests.ranks import RankContext, RankPool, raises_on_every_rank
from tests.seeds import seed_generators

SETTINGS = {
    "mics": ShardConfig.preset("mics"),
    "mics, 3 ahead": ShardConfig.preset("mics", prefetch=3),
    "zero3": ShardConfig.preset("zero3"),
    "zeropp-hpz": ShardConfig.preset("zeropp-hpz"),
    "zero2": ShardConfig.preset("zero2"),
    "ddp": ShardConfig.preset("ddp"),
    "paro-nig": ShardConfig.preset("paro-nig"),
    "no overlap": ShardConfig.preset("mics", overlap="none"),
}


@lru_cache
def expected(name: str) -> dict[str, Tensor]:
    return unusual.reference(unusual.LOOPS[name], 4)


def loops_of(setting: str) -> list[str]:
    """All for the first setting, a seventh for each of the others."""
    place = list(SETTINGS).index(setting)
    return list(unusual.LOOPS) if place == 0 else list(unusual.LOOPS)[place - 1 :: 7]


@pytest.mark.wide(every=3)
@pytest.mark.parametrize("setting", SETTINGS)
def test_unusual_loops_train_as_a_plain_process_does(ranks: RankPool, setting: str) -> None:
    names = loops_of(setting)
    results = ranks(4, unusual.train, names, SETTINGS[setting], ranks_per_node=2)
    for name in names:
        for of_rank in results:
            assert not of_rank[name].error, name
            for key, value in of_rank[name].parameters.items():
                torch.testing.assert_close(value, expected(name)[key], rtol=1e-9, atol=1e-11, msg=f"{name}: {key}")


class Gain(nn.Module):
    """Keeps something that it computes from a parameter of its own, which is frozen."""

    kept: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(unusual.WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.kept = x * self.gain
        return x + 1


def left_by_an_attribute(ctx: RankContext) -> None:
    model = nn.Sequential(nn.Linear(unusual.WIDTH, unusual.WIDTH), *[Gain() for _ in range(5)])
    shard(model, "zero3", units=[Gain])
    model(torch.ones(2, unusual.WIDTH))
    model[1].kept.sum().backward()


def features_of_the_first_block(ctx: RankContext) -> None:
    model = unusual.Stack(count=6)
    shard(model, "zero3", units=[unusual.Block])
    model.order = [1, 2, 0, 3, 4, 5]
    unusual.features(model, torch.ones(2, unusual.WIDTH), 0)


def test_features_of_trainable_units_that_are_resharded_are_refused(ranks: RankPool) -> None:
    raises_on_every_rank(
        lambda: ranks(2, features_of_the_first_block),
        LifecycleError,
        match="Return that tensor from the unit's forward",
    )


def test_a_backward_that_enters_past_all_modules_is_refused(ranks: RankPool) -> None:
    raises_on_every_rank(
        lambda: ranks(2, left_by_an_attribute),
        LifecycleError,
        match="needed the parameters of unit `1 .frozen.` when they were not",
    )


def asked_for_a_gradient(ctx: RankContext, **options: bool) -> None:
    model = unusual.Stack()
    shard(model, "mics", units=[unusual.Block])
    grad(model(torch.ones(2, unusual.WIDTH)).sum(), list(model.parameters()), **options)


def asked_for_an_unused_gradient(ctx: RankContext) -> None:
    asked_for_a_gradient(ctx, allow_unused=True)


def asked_for_zeros(ctx: RankContext) -> None:
    asked_for_a_gradient(ctx, materialize_grads=True)


@pytest.mark.parametrize("job", [asked_for_a_gradient, asked_for_an_unused_gradient, asked_for_zeros])
def test_local_gradients_of_sharded_parameters_are_refused(ranks: RankPool, job: object) -> None:
    raises_on_every_rank(
        lambda: ranks(2, job), LifecycleError, match="gradient of the sharded parameter `inner.weight`.*backward"
    )


class Step(nn.Module):
    """A function whose fixed point is looked for."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return (0.3 * self.inner(z) + self.outer(x)).tanh()


class Equilibrium(nn.Module):
    """A deep equilibrium layer: its backward solves for the gradient in a loop of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.step = Step()

    def forward(self, x: Tensor) -> Tensor:
        z = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(5):
                z = self.step(z, x)
        z = self.step(z, x)
        start = z.detach().requires_grad_()
        end = self.step(start, x)

        def solve(grad: Tensor) -> Tensor:
            solution = grad
            for _ in range(5):
                solution = torch.autograd.grad(end, start, solution, retain_graph=True)[0] + grad
            return solution

        z.register_hook(solve)
        return z


def trained_equilibrium(ctx: RankContext, unit: type[nn.Module]) -> float:
    models = []
    for _ in range(2):
        seed_generators()
        models.append(nn.Sequential(*(Equilibrium() for _ in range(4))).double())
    shard(models[0], "zero3", units=[unit])
    for model in models:
        model(torch.ones(2, 4, dtype=torch.float64)).square().sum().backward()
    pairs = zip(*(model.parameters() for model in models), strict=True)
    return max(float((p.grad.full_tensor() - r.grad).abs().max()) for p, r in pairs)


@pytest.mark.parametrize("unit", [Step, Equilibrium])
def test_a_deep_equilibrium_trains_as_the_plain_one(ranks: RankPool, unit: type[nn.Module]) -> None:
    assert max(ranks(2, trained_equilibrium, unit)) < 1e-12


def gradient_of_a_penalty(ctx: RankContext) -> Tensor:
    model = unusual.Stack()
    shard(model, "mics", units=[unusual.Block])
    weight = model.head.weight
    (gradient,) = torch.autograd.grad(weight.square().sum(), [weight])
    return (gradient - 2 * weight).abs().max().full_tensor().detach()


def test_gradients_of_results_computed_from_sharded_parameters_are_available(ranks: RankPool) -> None:
    for difference in ranks(2, gradient_of_a_penalty):
        assert difference == 0
