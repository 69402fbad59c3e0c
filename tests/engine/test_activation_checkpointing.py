"""Activation checkpointing in every form: same numbers, no additional all-gather."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mics_strategy import ShardConfig, Topology
from tests.engine.training import Run, assert_same_training, plain, start, train
from tests.models import Case, Residual
from tests.ranks import RankContext, RankPool

NODES = Topology(ranks_per_node=2)
WIDTH, DEPTH = 6, 6


class Stack(nn.Module):
    """Residual layers of which `span` at a time are recomputed; 0 recomputes none."""

    def __init__(self, span: int, use_reentrant: bool) -> None:
        super().__init__()
        self.inlet = nn.Linear(4, WIDTH)
        self.layers = nn.ModuleList(Residual(WIDTH, 9) for _ in range(DEPTH))
        self.outlet = nn.Linear(WIDTH, 2)
        self.span = span
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for start_ in range(0, DEPTH, self.span or DEPTH):
            run = partial(self.run, start_)
            x = checkpoint(run, x, use_reentrant=self.use_reentrant) if self.span else run(x)
        return self.outlet(x)

    def run(self, first: int, x: Tensor) -> Tensor:
        for layer in self.layers[first : first + (self.span or DEPTH)]:
            x = layer(x)
        return x


class InsideForward(Stack):
    """The form of transformers: `forward` is recomputed inside of `__call__`."""

    def __init__(self) -> None:
        super().__init__(span=0, use_reentrant=False)
        for layer in self.layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


class Twice(Residual):
    """A layer of which one part is recomputed twice by itself, so that its gradients arrive twice in one backward."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__(width, hidden)
        self.again = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        for _ in range(2):
            x = checkpoint(self.again, x, use_reentrant=True)
        return x


class TwiceInOneUnit(Stack):
    """Each unit holds a layer whose parameters get two gradients."""

    def __init__(self) -> None:
        super().__init__(span=0, use_reentrant=True)
        self.layers = nn.ModuleList(Twice(WIDTH, 9) for _ in range(DEPTH))


def twice() -> Case:
    return _case(TwiceInOneUnit)


def stack(span: int, use_reentrant: bool) -> Case:
    return _case(lambda: Stack(span, use_reentrant))


def inside_forward() -> Case:
    return _case(InsideForward)


def _case(make: Callable[[], nn.Module]) -> Case:
    def build() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            return make()

    def batch(step: int, micro: int, rank: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
        return {"x": torch.randn(3, 4, generator=generator), "y": torch.randn(3, 2, generator=generator)}

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return (model(batch["x"]) - batch["y"]).square().mean()

    return Case(build=build, batch=batch, loss=loss, units=(Residual,))


FORMS = {
    "not_recomputed": partial(stack, 0, False),
    "around_call": partial(stack, 1, False),
    "around_two": partial(stack, 2, False),
    "around_three": partial(stack, 3, False),
    "around_all": partial(stack, DEPTH, False),
    "inside_forward": inside_forward,
    "reentrant": partial(stack, 1, True),
    "reentrant_three": partial(stack, 3, True),
}


@pytest.mark.parametrize("form", [form for form in FORMS if form != "not_recomputed"])
@pytest.mark.parametrize("preset", ["mics", "paro-iig", "zero3", "zero2"])
def test_training_is_that_of_plain_checkpointing(ranks: RankPool, form: str, preset: str) -> None:
    config = ShardConfig.preset(preset, topology=NODES)
    run = Run(case=FORMS[form], config=config, accumulation=2, clip=0.5, signal=True)
    assert_same_training(ranks(4, train, run), plain(run, 4))


@pytest.mark.parametrize("preset", ["mics", "zero1", "ddp"])
def test_two_gradients_of_one_backward_are_added(ranks: RankPool, preset: str) -> None:
    run = Run(case=twice, config=ShardConfig.preset(preset, topology=NODES), accumulation=2)
    assert_same_training(ranks(4, train, run), plain(run, 4))


def traffic_after_three_steps(ctx: RankContext, case: Callable[[], Case]) -> tuple[int, bool]:
    """Gathers sent in the third step, and whether everything was as planned."""
    training = start(ctx, Run(case=case, config=ShardConfig.preset("mics", topology=NODES), accumulation=2))
    for step in range(3):
        training.step(step)
    rows = training.sharded.traffic()
    as_planned = all(row.planned_count == row.count and row.planned_bytes == row.sent_bytes for row in rows)
    return sum(row.count for row in rows if row.collective == "all_gather"), as_planned


@pytest.mark.parametrize("form", [form for form in FORMS if form != "not_recomputed"])
def test_issued_traffic_equals_the_plan(ranks: RankPool, form: str) -> None:
    assert all(as_planned for _, as_planned in ranks(4, traffic_after_three_steps, FORMS[form]))


@pytest.mark.parametrize("form", ["around_call", "inside_forward", "reentrant"])
def test_recomputation_needs_no_additional_all_gather(ranks: RankPool, form: str) -> None:
    without = ranks(4, traffic_after_three_steps, partial(stack, 0, False))
    assert ranks(4, traffic_after_three_steps, FORMS[form]) == without
