"""What a script keeps of `full_tensor()` and `to_local()` is its own, whatever the preset, as of a plain process."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mics_strategy import Topology, shard
from tests.ranks import RankContext, RankPool


def model_of(*, is_double: bool = True) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    model.scale = nn.Parameter(torch.tensor(0.7))
    return model.double() if is_double else model


def backward(model: nn.Module, number: float) -> None:
    (model(torch.full((2, 6), number).double()) * model.scale).square().mean().backward()


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def best_weights(model: nn.Module) -> list[Tensor]:
    """Weights that were kept are loaded back."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    best = {name: whole(value) for name, value in model.state_dict().items()}
    for step in range(3):
        backward(model, step + 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.load_state_dict(best)
    return [whole(parameter.detach()) for parameter in model.parameters()]


def kept_gradients(model: nn.Module) -> list[Tensor]:
    """Gradients of several steps are kept."""
    found = []
    for step in range(3):
        backward(model, step + 1.0)
        found += [whole(parameter.grad) for parameter in model.parameters()]
        model.zero_grad()
    return found


def scratch(model: nn.Module) -> list[Tensor]:
    """Copies are written to."""
    for parameter in model.parameters():
        whole(parameter.detach()).zero_()
    return [whole(parameter.detach()) for parameter in model.parameters()]


def average(model: nn.Module) -> list[Tensor]:
    """Averages begin with the weights, as part of a graph."""
    averages = [whole(parameter) for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    return [value.detach() for value in averages]


SCRIPTS: list[Callable[[nn.Module], list[Tensor]]] = [best_weights, kept_gradients, scratch, average]


def run(ctx: RankContext, script: Callable[[nn.Module], list[Tensor]], preset: str) -> bool:
    expected = script(model_of())
    model = model_of()
    shard(model, preset, topology=Topology(ranks_per_node=1))
    return all(torch.equal(*pair) for pair in zip(script(model), expected, strict=True))


@pytest.mark.parametrize("preset", ["mics", "ddp", "zero1"])
@pytest.mark.parametrize("script", SCRIPTS, ids=[script.__name__ for script in SCRIPTS])
def test_whole_values_that_are_kept_stay(
    ranks: RankPool, script: Callable[[nn.Module], list[Tensor]], preset: str
) -> None:
    assert all(ranks(2, run, script, preset))


def local_parts(ctx: RankContext, preset: str, with_grad: bool) -> list[bool]:
    model = model_of()
    shard(model, preset, topology=Topology(ranks_per_node=1))
    backward(model, 1.0)
    with torch.set_grad_enabled(with_grad):
        kept = [parameter.grad.to_local() for parameter in model.parameters()]
    before = [local.clone() for local in kept]
    kept[0].mul_(2.0)  # before that it is the gradient
    is_alias = torch.equal(model.weight.grad.to_local(), 2.0 * before[0])
    model.zero_grad()
    backward(model, 3.0)
    return [is_alias, torch.equal(kept[0], 2.0 * before[0]), *map(torch.equal, kept[1:], before[1:])]


@pytest.mark.parametrize("preset", ["mics", "ddp"])
@pytest.mark.parametrize("with_grad", [True, False])
def test_a_local_part_of_a_gradient_is_the_gradient_until_that_is_cleared(
    ranks: RankPool, preset: str, with_grad: bool
) -> None:
    assert ranks(2, local_parts, preset, with_grad) == [[True] * 4] * 2


def written_parts(ctx: RankContext, preset: str) -> list[bool]:
    model = model_of()
    shard(model, preset, topology=Topology(ranks_per_node=1))
    before = [whole(parameter.detach()) for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.to_local().data.mul_(2.0)
    return [torch.equal(whole(p.detach()), 2.0 * b) for p, b in zip(model.parameters(), before, strict=True)]


@pytest.mark.parametrize("preset", ["mics", "ddp", "zero3"])
def test_a_local_part_of_a_parameter_is_the_parameter(ranks: RankPool, preset: str) -> None:
    assert ranks(2, written_parts, preset) == [[True] * 3] * 2
