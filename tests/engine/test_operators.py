"""Operators of torch on sharded parameters and gradients have the results of whole tensors, or are refused.

Values, scalars, writes, writes through views, and gradients in a loss of which every rank has another one.
"""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from mics_strategy import shard
from tests.engine.operator_sweep import Found, sweep_gradients, sweep_values
from tests.ranks import RankContext, RankPool

RESHAPES = {
    "as_strided_",
    "resize_",
    "resize_as_",
    "resize__",  # its variant in place
    "resize_as__",
    "squeeze_",
    "t_",
    "transpose_",
    "unsqueeze_",
    "swapaxes_",
    "swapdims_",
    "squeeze",
}
REFUSED = RESHAPES | {"stft", "nanquantile", "nn.functional.dropout3d_"}  # which use one of them inside
REFUSED |= {"map_", "numpy"}  # by torch; of which writes would be lost
REFUSED_ON_A_ROW = {"addbmm_"}  # torch itself would write the result over one row that it has expanded
REFUSED_IN_BACKWARDS = {"cumprod", "nanquantile", "nn.functional.pad", "stft"}  # written for this rank's gradient
NO_RULE = (
    "sharding strategy",
    "got mixed torch.Tensor",
    "as_strided not",
    "flatten unevenly",
)  # torch 2.11, in backwards
ROUNDED = ("gradient of bfloat16 ()", "gradient of half ()") if torch.__version__ < "2.12" else ()  # then averaged


def _check(found: list[Found], refused: set[str], least: int) -> None:
    for of_rank in found:
        assert [name for name in of_rank.wrong if name not in ROUNDED] == []
        unexpected = {name: text for name, text in of_rank.refused.items() if name not in refused}
        if torch.__version__ < "2.12" and refused is REFUSED_IN_BACKWARDS:
            unexpected = {name: text for name, text in unexpected.items() if not any(rule in text for rule in NO_RULE)}
        assert unexpected == {}
        assert of_rank.num_right >= least


@pytest.mark.parametrize(
    ("preset", "form"),
    [("zero3", "first"), ("zero3", "row"), ("zero3", "view"), ("ddp", "first"), ("zero3", "methods")],
)
def test_some_operators_have_the_values_of_a_plain_tensor(ranks: RankPool, preset: str, form: str) -> None:
    _check(ranks(2, sweep_values, preset, 20, form), REFUSED, least=30 if form == "row" else 55)


def test_some_operators_have_the_mean_gradient_of_a_plain_tensor(ranks: RankPool) -> None:
    _check(ranks(2, sweep_gradients, "zero3", 20, "first"), REFUSED_IN_BACKWARDS, least=25)


ELEMENTWISE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "average": lambda a, b: a.lerp(b, 0.1),
    "average_in_place": lambda a, b: a.lerp_(b, 0.1),
    "sum_with_factor": lambda a, b: torch.add(a, b, alpha=2),
    "bits": lambda a, b: a > b,
    "copy": lambda a, b: torch.zeros_like(a, dtype=torch.float64).copy_(a.double()).mul_(3),
    "zeroed_in_place": lambda a, b: a.zero_(),
}


def _elementwise(ctx: RankContext) -> dict[str, tuple[bool, int]]:
    """Whether results, their types and their shards are right, by operation; and how often torch's rule is asked."""
    weight = nn.Linear(4, 3, bias=False).weight  # the last rank of two has one row
    model = nn.ParameterDict({"a": weight, "b": nn.Parameter(weight.detach().flip(0))})
    plain = {name: value.detach().clone() for name, value in model.items()}
    shard(model, "zero3")
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    found = {}
    for name, operation in ELEMENTWISE.items():
        expected = operation(*(value.clone() for value in plain.values()))
        sharded: list[Any] = [value.detach().clone() for value in model.values()]
        with mock.patch.object(propagator, "propagate", wraps=propagator.propagate) as propagate:
            result: Any = operation(*sharded)
        is_right = torch.equal(result.full_tensor(), expected) and result.dtype == expected.dtype
        found[name] = is_right and result.placements == model["a"].placements, propagate.call_count
    return found


def test_elementwise_operations_run_on_the_parts_without_a_rule_of_torch(ranks: RankPool) -> None:
    conversions = {"copy": 1}  # to another type
    expected = {name: (True, conversions.get(name, 0)) for name in ELEMENTWISE}
    assert ranks(2, _elementwise) == [expected] * 2


def _columns_and_rows(ctx: RankContext) -> bool:
    """Whether tensors of two layouts are not added part by part."""
    plain = torch.arange(16.0).view(4, 4)
    model = nn.ParameterDict({"a": nn.Parameter(plain.clone())})
    shard(model, "zero3")
    rows: Any = model["a"].detach()
    return torch.equal((rows + rows.t()).full_tensor(), plain + plain.t())


def test_tensors_of_two_layouts_are_not_added_part_by_part(ranks: RankPool) -> None:
    assert ranks(2, _columns_and_rows) == [True, True]


@pytest.mark.weekly
@pytest.mark.parametrize(
    ("preset", "num_ranks", "form", "every", "least"),
    [
        ("zero3", 3, "first", 1, 900),
        ("zero3", 2, "row", 1, 700),
        ("zero3", 2, "view", 2, 300),
        ("mics", 4, "second", 2, 300),
        ("zero3", 2, "methods", 1, 2000),
    ],
)
def test_every_operator_has_the_values_of_a_plain_tensor(
    ranks: RankPool, preset: str, num_ranks: int, form: str, every: int, least: int
) -> None:
    nodes = {"ranks_per_node": 2} if num_ranks == 4 else {}
    found = ranks(num_ranks, sweep_values, preset, every, form, **nodes)
    _check(found, REFUSED | REFUSED_ON_A_ROW if form == "row" else REFUSED, least)


@pytest.mark.weekly
@pytest.mark.parametrize(("preset", "num_ranks", "form"), [("mics", 4, "first"), ("zero3", 2, "row")])
def test_every_operator_has_the_mean_gradient_of_a_plain_tensor(
    ranks: RankPool, preset: str, num_ranks: int, form: str
) -> None:
    nodes = {"ranks_per_node": 2} if num_ranks == 4 else {}
    _check(ranks(num_ranks, sweep_gradients, preset, 1, form, **nodes), REFUSED_IN_BACKWARDS, least=400)
