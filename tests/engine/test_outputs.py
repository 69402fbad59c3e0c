"""Units that return their own parameters.

Other units overwrite the slot before the output is used.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mics_strategy import ShardConfig, shard
from mics_strategy.errors import LifecycleError
from tests.ranks import RankContext, RankError, RankPool
from tests.seeds import seed_generators

WIDTH = 12


@dataclass
class Wrapped:
    """An output that torch's trees do not know."""

    value: Tensor


FORMS: dict[str, Callable[[Tensor], Any]] = {
    "parameter": lambda gain: gain,
    "view": lambda gain: gain[:, :WIDTH],
    "tuple": lambda gain: (gain, None),
    "dict": lambda gain: {"value": gain.T.T},
    "detached": lambda gain: gain.detach(),
    "dataclass": Wrapped,
}


class Gain(nn.Module):
    """A layer that gives away what it has."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.gain = nn.Parameter(torch.randn(1, WIDTH))
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self) -> Any:
        return FORMS[self.form](self.gain)


class Layer(nn.Module):
    """An ordinary one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


class Model(nn.Module):
    """Uses what layers have given away when others have run."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.gains = nn.ModuleList(Gain(form) for _ in range(4))
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        given = [gain() for gain in self.gains]
        for each, layer in zip(given, self.layers, strict=True):
            if isinstance(each, tuple):
                each = each[0]
            elif isinstance(each, dict):
                each = each["value"]
            elif isinstance(each, Wrapped):
                each = each.value
            x = layer(x) * each
        return x.square().mean()


def trained(ctx: RankContext, form: str, preset: str) -> list[tuple[str, Tensor | None, Tensor | None]]:
    """Every parameter's gradient beside the plain model's, in the second step."""
    models = []
    for _ in range(2):
        seed_generators()
        models.append(Model(form))
    plain, model = models
    shard(model, ShardConfig.preset(preset), units=[Gain, Layer])
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        for each in models:
            each.zero_grad()
            each(x).backward()
    pairs = zip(plain.named_parameters(), model.parameters(), strict=True)
    return [(name, one.grad, None if other.grad is None else other.grad.full_tensor()) for (name, one), other in pairs]


@pytest.mark.parametrize(
    ("form", "preset"),
    [*((form, "zero3") for form in FORMS if form != "dataclass"), ("view", "mics"), ("parameter", "ddp")],
)
def test_parameters_that_a_unit_returns_are_used_as_in_the_plain_model(ranks: RankPool, form: str, preset: str) -> None:
    for gradients in ranks(4, trained, form, preset, ranks_per_node=2):
        assert any(expected is not None for _, expected, _ in gradients)
        for name, expected, found in gradients:
            assert (expected is None) == (found is None), name
            if expected is not None:
                torch.testing.assert_close(found, expected, msg=name)


def test_a_parameter_in_a_container_that_cannot_be_rebuilt_is_refused(ranks: RankPool) -> None:
    with pytest.raises(RankError) as failure:
        ranks(2, trained, "dataclass", "zero3")
    for error in failure.value.by_rank.values():
        assert isinstance(error, LifecycleError)
        assert "`gains.0` returns a parameter of its own, or a view of one, inside a Wrapped" in str(error)
