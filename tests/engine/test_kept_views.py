"""Rows of gradients and optimizer states that a script keeps, and writes to later, beside a plain process in fp64."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from mics_strategy import LifecycleError, shard
from tests.ranks import RankContext, RankPool, raises_on_every_rank


def _layer() -> nn.Linear:
    torch.manual_seed(0)
    model = nn.Linear(3, 7, bias=False)
    model.scale = nn.Parameter(torch.tensor(0.7))
    return model.double()


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def rows_of_a_state(model: nn.Linear, sharded: Any) -> list[Tensor]:
    """The momentum of some rows is taken away after each step, through a view of the first step."""
    optimizer = AdamW(model.parameters(), lr=0.1)
    found, rows = [], None
    for step in range(3):
        model(torch.full((2, 3), step + 1.0).double()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        rows = optimizer.state[model.weight]["exp_avg"][2:5] if rows is None else rows
        found.append(_whole(rows))
        rows[1:].zero_()
    return [*found, _whole(model.weight.detach())]


def rows_of_a_clipped_gradient(model: nn.Linear, sharded: Any) -> list[Tensor]:
    model(torch.ones(2, 3).double()).square().mean().backward()
    assert model.weight.grad is not None
    rows = model.weight.grad[2:5]
    found = [_whole(rows)]
    if sharded is None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    else:
        sharded.clip_grad_norm_(0.01)
    found.append(_whole(rows))
    rows[1:].zero_()
    return [*found, _whole(model.weight.grad)]


def rows_of_a_scaled_gradient(model: nn.Linear, sharded: Any) -> list[Tensor]:
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=64.0), AdamW(model.parameters())
    scaler.scale(model(torch.ones(2, 3).double()).square().mean()).backward()
    assert model.weight.grad is not None
    rows = model.weight.grad[2:5]
    rows.clone()  # gathers
    scaler.unscale_(optimizer)
    found = [_whole(rows)]
    rows[1:].zero_()
    return [*found, _whole(model.weight.grad)]


def views_of_scalars(model: nn.Linear, sharded: Any) -> list[Tensor]:
    """A gradient and a parameter of no dimension are set to views of themselves between two backwards."""
    scale: Any = model.scale
    found = []
    for step in range(2):
        for _ in range(2):
            (model(torch.ones(2, 3).double()).square().mean() * scale).backward()
            scale.grad = scale.grad.view_as(scale)
            scale.grad = scale.grad.flatten().view(scale.shape)
            scale.data = scale.data.view_as(scale)
        found.append(_whole(scale.grad))
        kept = scale.grad.view(())
        model.zero_grad()
        found.append(_whole(kept) * step)
    return found


def places_in_a_result(model: nn.Linear, sharded: Any) -> list[Tensor]:
    """Rows of a copy change places, by an index of the script."""
    rows = model.weight.detach()[2:6].clone()
    rows[[0, 1]] = rows[[1, 0]]
    return [_whole(rows)]


def gradient_through_places(model: nn.Linear, sharded: Any) -> list[Tensor]:
    """The same in a loss: the gradient goes through the copy, beside another part of the loss."""
    rows = model.weight[2:6].clone()
    rows[[0, 1]] = rows[[1, 0]] * 2.0
    whole = rows.full_tensor() if isinstance(rows, DTensor) else rows
    ((whole * torch.arange(12.0).view(4, 3)).sum() + model(torch.ones(2, 3).double()).sum()).backward()
    assert model.weight.grad is not None
    return [_whole(model.weight.grad)]


Script = Callable[[nn.Linear, Any], list[Tensor]]


def compare(ctx: RankContext, script: Script, preset: str) -> None:
    plain = _layer()
    ours = copy.deepcopy(plain)
    torch.testing.assert_close(script(ours, shard(ours, preset)), script(plain, None), rtol=1e-9, atol=1e-12)


@pytest.mark.one_job
@pytest.mark.parametrize("preset", ["zero3", "mics", "ddp"])
@pytest.mark.parametrize(
    "script",
    [
        rows_of_a_state,
        rows_of_a_clipped_gradient,
        rows_of_a_scaled_gradient,
        views_of_scalars,
        places_in_a_result,
        gradient_through_places,
    ],
)
def test_kept_rows_are_those_of_a_plain_tensor(ranks: RankPool, script: Script, preset: str) -> None:
    ranks(2, compare, script, preset)


def diagonal(ctx: RankContext, takes_columns: bool) -> None:
    model = _layer()
    values = model.weight.detach().clone()
    shard(model, "zero3")
    with torch.no_grad():
        for weight in (model.weight.data, values):
            weight.fill_diagonal_(3.0)
            (weight[:, 1:] if takes_columns else weight.t()).diagonal().fill_(2.0)
    torch.testing.assert_close(model.weight.full_tensor(), values)
    (model.weight.data[:, 1:] if takes_columns else model.weight.data.t()).fill_diagonal_(0.0)


@pytest.mark.parametrize("takes_columns", [False, True])
def test_strides_that_gathered_values_do_not_have_are_refused(ranks: RankPool, takes_columns: bool) -> None:
    raises_on_every_rank(lambda: ranks(2, diagonal, takes_columns), LifecycleError, r"diagonal\(\)\.fill_\(value\)")
