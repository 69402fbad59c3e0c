"""FSDP2's scenarios of state dicts: values are the shards, and loading writes into them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from mics_strategy import Sharded, shard
from tests.engine.training import assert_identical, whole, wholes
from tests.fsdp2_parity.models import MLP
from tests.fsdp2_parity.runner import PLACEMENTS
from tests.rank_report import RankContext


def nested(width: int) -> nn.Module:
    torch.manual_seed(42)
    return nn.Sequential(MLP(width), nn.Sequential(MLP(width), nn.Linear(width, width)), MLP(width))


def built(width: int, placement: str = "reshard") -> tuple[nn.Module, Sharded]:
    model = nested(width)
    return model, shard(model, PLACEMENTS[placement], units=[MLP, nn.Linear])


def pointers(state: dict[str, Any]) -> dict[str, int]:
    return {name: value.to_local().data_ptr() for name, value in state.items()}


def save_and_load(ctx: RankContext, placement: str) -> None:
    """Of widths that divide by the ranks and of those that do not, before and after a forward."""
    for width in (2, 3, 4, 5):
        model, _ = built(width, placement)
        for _ in range(2):
            state = model.state_dict()
            assert list(state) == list(nested(width).state_dict())
            assert all(isinstance(value, DTensor) for value in state.values())
            assert pointers(state) == pointers(dict(model.named_parameters()))
            before = pointers(state)
            model.load_state_dict({name: torch.full_like(value, 7.0) for name, value in state.items()})
            assert all(bool((whole(p) == 7).all()) for p in model.parameters())
            assert pointers(dict(model.named_parameters())) == before
            expected = nested(width)
            with torch.no_grad():
                for parameter in expected.parameters():
                    parameter.fill_(7.0)
            torch.testing.assert_close(model(torch.ones(2, width)), expected(torch.ones(2, width)))


def cached(ctx: RankContext) -> None:
    """A state dict that is kept shows what training does."""
    model, _ = built(3)
    state = model.state_dict()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(3):
        model(torch.full((2, 3), 1.0 + step + ctx.rank)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert_identical(
            wholes(state),
            wholes(dict(model.named_parameters())),
        )
    assert not torch.equal(whole(state["2.out_proj.bias"]), dict(nested(3).state_dict())["2.out_proj.bias"])


def full_on_rank_zero(ctx: RankContext) -> None:
    _, handle = built(5)
    state = handle.full_state_dict()
    assert list(state) == (list(nested(5).state_dict()) if ctx.rank == 0 else [])
    assert_identical(state, nested(5).state_dict() if ctx.rank == 0 else {})


def loaded_in_parts(ctx: RankContext) -> None:
    """Each part of a state dict is loaded by itself, and none touches the other parameters."""
    model, _ = built(3)
    for number, (name, value) in enumerate(model.state_dict().items()):
        result = model.load_state_dict({name: torch.full_like(value, float(number))}, strict=False)
        assert name not in result.missing_keys
    for number, parameter in enumerate(model.parameters()):
        assert bool((whole(parameter) == number).all())


def loaded_whole(ctx: RankContext) -> None:
    """A plain state dict reaches the shards through the handle."""
    model, handle = built(5)
    plain = {name: torch.randn(value.shape) for name, value in nested(5).state_dict().items()}
    handle.load_full_state_dict(plain)
    assert_identical(wholes(dict(model.named_parameters())), plain)


def assigned(ctx: RankContext) -> None:
    model, _ = built(4)
    parameters = list(model.parameters())
    state = {name: 2 * value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    model(torch.ones(2, 4))


Fact = Callable[[RankContext], None]
FACTS: dict[str, tuple[int, Fact]] = {
    "values are the shards, loading writes into them": (2, partial(save_and_load, placement="reshard")),
    "the same where parameters stay whole": (2, partial(save_and_load, placement="keep")),
    "the same on two nodes": (4, partial(save_and_load, placement="hybrid")),
    "a state dict that is kept follows the training": (2, cached),
    "the full state dict is on rank 0 alone": (2, full_on_rank_zero),
    "parts are loaded one by one": (2, loaded_in_parts),
    "a plain state dict is loaded through the handle": (2, loaded_whole),
    "`load_state_dict(assign=True)` copies": (2, assigned),
}
