"""Models of units that non-reentrant checkpoints recompute, several at a time."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.models import Residual

WIDTH = 5
Unseen = tuple[int, ...]


class Layers(nn.Module):
    """Layers that all run; the loss does not see those that are unseen.

    Args:
        count: Number of layers.
        span: Layers in each checkpoint; 0 recomputes none.
        ends_with_op: Whether each checkpoint ends with an operator whose backward reads what it has saved.
        nests: Whether each layer has a checkpoint of its own inside of these.
    """

    def __init__(self, count: int, span: int, *, ends_with_op: bool = False, nests: bool = False) -> None:
        super().__init__()
        self.inlet = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Residual(WIDTH, 7) for _ in range(count))
        self.span = span
        self.ends_with_op = ends_with_op
        self.nests = nests

    def forward(self, x: Tensor, unseen: Unseen = ()) -> Tensor:
        x = self.inlet(x)
        for first in range(0, len(self.layers), self.span or len(self.layers)):
            run = partial(self.run, first, unseen)
            x = checkpoint(run, x, use_reentrant=False) if self.span else run(x)
        return x

    def run(self, first: int, unseen: Unseen, x: Tensor) -> Tensor:
        for index in range(first, min(first + (self.span or len(self.layers)), len(self.layers))):
            layer = self.layers[index]
            out = checkpoint(layer, x, use_reentrant=False) if self.nests else layer(x)
            x = x if index in unseen else out
        return x.tanh() if self.ends_with_op else x


class Nest(Layers):
    """A unit around two units."""


class Nests(nn.Module):
    """Recomputed units around units; unseen are units inside, or the whole unit.

    Args:
        span: Units in each checkpoint inside of the unit; 0 for none.
    """

    def __init__(self, span: int = 0) -> None:
        super().__init__()
        self.inlet = nn.Linear(WIDTH, WIDTH)
        self.nests = nn.ModuleList(Nest(2, span) for _ in range(3))

    def forward(self, x: Tensor, unseen: Unseen = ()) -> Tensor:
        x = self.inlet(x)
        for index, nest in enumerate(self.nests):
            inner = tuple(number - 2 * index for number in unseen if number // 2 == index)
            out = checkpoint(nest, x, inner, use_reentrant=False)
            x = x if len(inner) == 2 else out
        return x


class Shift(nn.Module):
    """A unit whose forward saves nothing for the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.full((WIDTH,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


def ending_with_shifts() -> nn.Module:
    model = Layers(6, 3)
    for index in (2, 5):
        model.layers[index] = Shift()
    return model


BUILDS: dict[str, Callable[[], nn.Module]] = {
    "around_one": partial(Layers, 6, 1),
    "around_one_and_operator": partial(Layers, 6, 1, ends_with_op=True),
    "around_two": partial(Layers, 6, 2),
    "around_two_and_operator": partial(Layers, 6, 2, ends_with_op=True),
    "around_three": partial(Layers, 6, 3),
    "around_three_and_each": partial(Layers, 6, 3, nests=True),
    "around_two_and_shift": ending_with_shifts,
    "around_all": partial(Layers, 6, 6),
    "around_nested": Nests,
    "around_nested_twice": partial(Nests, 1),
}
