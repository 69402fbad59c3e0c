"""Hooks, composable checkpoints and other methods than `forward` meet unsharded parameters, as in the plain model."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable import checkpoint
from torch.utils.checkpoint import checkpoint as functional_checkpoint

from mics_strategy import ShardConfig, Sharded, shard
from mics_strategy.engine.hooks import cast_floating
from mics_strategy.errors import ConfigError, LifecycleError
from tests.ranks import RankContext, RankPool
from tests.seeds import seed_generators

WIDTH = 6


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.linear(x).tanh()

    def project(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.gain


class Pair(nn.Module):
    """Two layers in a unit of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Layer(), Layer())
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * self.scale


class Head(nn.Module):
    """Belongs to the root's unit."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(x)

    def logits(self, x: Tensor) -> Tensor:
        return x @ self.linear.weight.t()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.pairs = nn.Sequential(Pair(), Pair(), Pair())
        self.head = Head()

    def encode(self, x: Tensor) -> Tensor:
        return self.pairs(x @ self.embed)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encode(x))


Prepare = Callable[[Any], object]
Loss = Callable[[Any, Tensor], Tensor]


def batch(step: int) -> Tensor:
    return torch.randn(3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def usual(model: Any, x: Tensor) -> Tensor:
    return model(x).square().mean()


def build() -> Any:
    seed_generators()
    return Model().double()


def largest_difference(
    prepare: Prepare, loss: Loss, preset: str, *, is_before: bool, registered: tuple[tuple[str, str], ...] = ()
) -> float:
    """Of a parameter after three steps, from the plain model's."""
    model, reference = build(), build()
    if prepare in (read_in_hooks, read_in_hooks_and_recompute):
        read_in_hooks(reference)  # recomputed, torch's composable checkpoint would run hooks on their own results
    if is_before:
        prepare(model)
    sharded = shard(model, ShardConfig.preset(preset), units=[Pair, Layer])
    if not is_before:
        prepare(model)
    for path, name in registered:
        sharded.register_forward_method(model.get_submodule(path), name)
    for each in (model, reference):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for step in range(3):
            loss(each, batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max(float((p.detach().full_tensor() - r.detach()).abs().max()) for p, r in pairs)


def recompute_layers(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, Layer):
            checkpoint(module)


def recompute_pairs(model: Any) -> None:
    for pair in model.pairs:
        checkpoint(pair)


def recompute_both(model: Any) -> None:
    recompute_pairs(model)
    recompute_layers(model)


def recompute_root(model: Any) -> None:
    checkpoint(model)


def recompute_container(model: Any) -> None:
    checkpoint(model.pairs)
    checkpoint(model.head)


def recompute_reentrant(model: Any) -> None:
    """Layers by torch's composable checkpoint, in pairs by the reentrant one."""
    recompute_layers(model)
    for pair in model.pairs:
        run = pair.layers.forward
        pair.layers.forward = lambda x, run=run: functional_checkpoint(run, x, use_reentrant=True)


def scale_by_weight(module: Any, _: Any, output: Tensor) -> Tensor:
    return output * module.gain.sum().tanh()


def shift_by_weight(module: Any, inputs: Any) -> Any:
    return (inputs[0] + module.linear.bias,)


def read_in_hooks(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, Layer):
            module.register_forward_hook(scale_by_weight)
            module.register_forward_hook(scale_by_weight, prepend=True)
            module.register_forward_pre_hook(shift_by_weight)
            module.register_forward_pre_hook(shift_by_weight, prepend=True)


def read_in_hooks_and_recompute(model: Any) -> None:
    recompute_layers(model)
    read_in_hooks(model)


PREPARATIONS: dict[str, Prepare] = {
    each.__name__: each
    for each in (
        recompute_layers,
        recompute_pairs,
        recompute_both,
        recompute_root,
        recompute_container,
        recompute_reentrant,
        read_in_hooks,
        read_in_hooks_and_recompute,
    )
}


def prepared(ctx: RankContext, preparation: str, order: str, preset: str) -> float:
    return largest_difference(PREPARATIONS[preparation], usual, preset, is_before=order == "before")


@pytest.mark.wide
@pytest.mark.one_job
@pytest.mark.parametrize("preset", ["zero3", "zero2"])
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("preparation", PREPARATIONS)
def test_hooks_and_checkpoints_train_as_in_the_plain_model(
    ranks: RankPool, preparation: str, order: str, preset: str
) -> None:
    assert max(ranks(2, prepared, preparation, order, preset)) < 1e-12


def nothing(_: Any) -> None:
    pass


def encoded(model: Any, x: Tensor) -> Tensor:
    return model.encode(x).square().mean()


def in_parts(model: Any, x: Tensor) -> Tensor:
    return model.head.logits(model.encode(x)).square().mean()


def of_units(model: Any, x: Tensor) -> Tensor:
    inner = model.pairs[1].layers[0]
    return inner.project(model.encode(x)).square().mean() + inner.project(x).sum() + model(x).square().mean()


METHODS: dict[str, tuple[Loss, tuple[tuple[str, str], ...]]] = {
    "the model's": (encoded, (("", "encode"),)),
    "of several modules": (in_parts, (("head", "logits"), ("", "encode"))),
    "units'": (of_units, (("pairs.1.layers.0", "project"), ("", "encode"))),
    "also called in a forward": (usual, (("head", "logits"), ("", "encode"))),
}


def trained_by_methods(ctx: RankContext, methods: str, preset: str) -> float:
    loss, registered = METHODS[methods]
    return largest_difference(nothing, loss, preset, is_before=True, registered=registered)


@pytest.mark.one_job
@pytest.mark.parametrize("preset", ["zero3", "ddp"])
@pytest.mark.parametrize("methods", METHODS)
def test_registered_methods_train_as_in_the_plain_model(ranks: RankPool, methods: str, preset: str) -> None:
    assert max(ranks(2, trained_by_methods, methods, preset)) < 1e-12


def sharded_model() -> tuple[Any, Sharded]:
    model = build()
    return model, shard(model, "zero3", units=[Pair, Layer])


def evaluated_by_methods(ctx: RankContext) -> tuple[list[bool], str, str]:
    """Whether evaluations are right without registration and with it; errors of a wrong name and a foreign module."""
    (model, sharded), reference = sharded_model(), build()
    errors = []
    for call in (
        lambda: sharded.register_forward_method(model, "decode"),
        lambda: sharded.register_forward_method(reference, "encode"),
    ):
        try:
            call()
        except (LifecycleError, ConfigError) as error:
            errors.append(f"{type(error).__name__}: {error}")
    with torch.no_grad():
        results = [model.encode(batch(0))]  # each operation gathers its parameter
        sharded.register_forward_method(model, "encode")
        results.append(model.encode(batch(0)))
        expected = reference.encode(batch(0))
    unknown, foreign = errors
    return [torch.allclose(result, expected) for result in results], unknown, foreign


def test_methods_evaluate_and_unknown_ones_are_refused_by_name(ranks: RankPool) -> None:
    for are_right, unknown, foreign in ranks(2, evaluated_by_methods):
        assert are_right == [True, True]
        assert "ConfigError" in unknown
        assert "`decode` of a Model, which has no such method" in unknown
        assert "no module of this sharded model" in foreign


@dataclass(frozen=True)
class Inner:
    values: list[Tensor]


@dataclass
class Inputs:
    x: Tensor
    ids: Tensor
    inner: Inner
    name: str = "inputs"


def test_tensors_in_dataclasses_are_cast() -> None:
    inputs = Inputs(torch.ones(2), torch.arange(2), Inner([torch.ones(3)]))
    (found,) = cast_floating((inputs,), torch.bfloat16)
    assert (found.x.dtype, found.ids.dtype, found.name) == (torch.bfloat16, torch.int64, "inputs")
    assert found.inner.values[0].dtype == torch.bfloat16
    assert inputs.x.dtype == inputs.inner.values[0].dtype == torch.float32


def test_a_dataclass_with_nothing_to_cast_stays_the_same_object() -> None:
    cache = Inputs(torch.ones(2, dtype=torch.bfloat16), torch.arange(2), Inner([]))
    (found,) = cast_floating((cache,), torch.bfloat16)
    assert found is cache
    assert cast_floating(Inputs, torch.bfloat16) is Inputs


class OfDataclass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Inputs) -> Inputs:
        return Inputs(self.linear(inputs.x), inputs.ids, Inner([self.linear(v) for v in inputs.inner.values]))


class Dataclasses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(OfDataclass() for _ in range(3))

    def forward(self, inputs: Inputs) -> Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return (inputs.x + sum(inputs.inner.values)).float().square().mean()


def train_on_dataclasses(ctx: RankContext) -> bool:
    model = Dataclasses()
    shard(model, ShardConfig.preset("zero3", param_dtype="bfloat16"), units=[OfDataclass])
    x = torch.ones(2, WIDTH)
    model(Inputs(x, torch.arange(2), Inner([x, x]))).backward()
    return all(parameter.grad is not None for parameter in model.parameters())


def test_mixed_precision_takes_inputs_in_dataclasses(ranks: RankPool) -> None:
    assert ranks(2, train_on_dataclasses) == [True, True]
