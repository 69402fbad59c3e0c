"""Nodes whose windows have different numbers of backwards, or that train other units.

Within a node ranks run the same backwards. Between nodes only second hops and the update connect them: they are right,
or all ranks raise before a step that would not be.
"""

import random
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from mics_strategy import LifecycleError, ShardConfig, Sharded, Topology, shard
from tests.engine import unusual
from tests.engine.test_boundary import PREDICTED, PRESETS
from tests.engine.training import wholes
from tests.ranks import RankContext, RankPool

WORLD_SIZE = 4


def random_lengths(node: int) -> list[int]:
    choose = random.Random(node)
    return [choose.randint(1, 3) if choose.random() < 0.4 else 2 for _ in range(12)]


WINDOWS: dict[str, tuple[list[int], list[int]]] = {
    "always": ([2] * 6, [3] * 6),
    "once longer": ([2, 2, 2, 2, 2, 2, 2], [2, 2, 2, 3, 2, 2, 2]),
    "once shorter": ([2, 2, 2, 1, 2, 2, 2], [2, 2, 2, 2, 2, 2, 2]),
    "twice predicted": ([2, 2, 2, 5, 2, 2, 2], [1, 1, 1, 2, 1, 1, 1]),
    "random": (random_lengths(0), random_lengths(1)),
}
ORDERS = ([0, 1, 2, 3], [0, 1, 2, 3]), ([0, 1, 2, 3], [0, 2]), ([3, 1, 0], [0, 1, 3]), ([0, 1], [2, 3])


def batch(step: int, micro: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)
    return torch.randn(3, unusual.WIDTH, generator=generator, dtype=torch.float64)


def build() -> tuple[unusual.Stack, Callable[[], torch.optim.Optimizer]]:
    torch.manual_seed(0)
    model = unusual.Stack().double()
    return model, lambda: torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3)


def order_of(step: int, node: int, orders: tuple[list[int], list[int]]) -> list[int]:
    """All blocks in the first step, in which the global order is agreed; then those of the node."""
    return orders[node] if step else [*range(4)]


def train(
    ranks: Iterable[int],
    windows: tuple[list[int], list[int]],
    orders: tuple[list[int], list[int]],
    config: ShardConfig | None = None,
    *,
    is_declared: bool = False,
) -> tuple[list[list[Tensor]], str]:
    """Parameters after each step, up to the one that raises; its error. Steps send what is planned."""
    model, optimizer_of = build()
    sharded: Sharded | None = None if config is None else shard(model, config, units=[unusual.Block])
    optimizer = optimizer_of()
    parameters: list[list[Tensor]] = []
    for step in range(len(windows[0])):
        for rank in ranks:
            node = rank // 2
            model.order = order_of(step, node, orders)
            length = windows[node][step]
            for micro in range(length):
                is_declaring = sharded is not None and is_declared
                with sharded.micro_step(micro, of=length) if is_declaring else nullcontext():
                    loss = model(batch(step, micro, rank)).square().mean()
                    (loss if sharded is not None else loss / WORLD_SIZE).backward()
        try:
            optimizer.step()
        except LifecycleError as error:
            return parameters, str(error)
        optimizer.zero_grad()
        parameters.append([*wholes(dict(model.named_parameters())).values()])
        if sharded is not None and orders == ORDERS[0]:
            rows = sharded.traffic()
            assert [(row.count, row.sent_bytes) for row in rows] == [
                (row.planned_count, row.planned_bytes) for row in rows
            ]
    return parameters, ""


def train_sharded(ctx: RankContext, *case: Any, is_declared: bool) -> tuple[list[list[Tensor]], str]:
    return train([ctx.rank], *case, is_declared=is_declared)


def steps_as_in_one_process(
    ranks: RankPool,
    config: ShardConfig,
    windows: tuple[list[int], list[int]],
    orders: tuple[list[int], list[int]] = ORDERS[0],
    *,
    is_declared: bool = False,
) -> int:
    """Number of steps before the error, the same on all ranks; each is that of one process."""
    expected, _ = train(range(WORLD_SIZE), windows, orders)
    sharded = partial(train_sharded, is_declared=is_declared)
    num_steps = set()
    for found, error in ranks(WORLD_SIZE, sharded, windows, orders, config, ranks_per_node=2):
        assert bool(error) == (len(found) < len(expected))
        assert not error or "all ranks must train the same units" in error
        for step, (parameters, plain) in enumerate(zip(found, expected, strict=False)):
            torch.testing.assert_close(parameters, plain, rtol=1e-9, atol=1e-11, msg=f"step {step}")
        num_steps.add(len(found))
    (num,) = num_steps
    return num


@pytest.mark.parametrize("preset", [*PREDICTED, "no-second-hop-overlap"])
@pytest.mark.parametrize("windows", WINDOWS)
def test_nodes_that_declare_windows_of_their_own_train_and_send_as_planned(
    ranks: RankPool, windows: str, preset: str
) -> None:
    assert steps_as_in_one_process(ranks, PRESETS[preset], WINDOWS[windows], is_declared=True) == len(
        WINDOWS[windows][0]
    )


STEPS_WHERE_PREDICTED = {"always": 6, "once longer": 3, "once shorter": 7, "twice predicted": 7, "random": 3}


@pytest.mark.parametrize("preset", [*PREDICTED, "no-second-hop-overlap"])
@pytest.mark.parametrize("windows", WINDOWS)
def test_nodes_with_windows_of_their_own_train_or_raise_before_the_step(
    ranks: RankPool, windows: str, preset: str
) -> None:
    expected = STEPS_WHERE_PREDICTED[windows] if preset in PREDICTED else len(WINDOWS[windows][0])
    assert steps_as_in_one_process(ranks, PRESETS[preset], WINDOWS[windows]) == expected


def extra_backward_on_one_rank(ctx: RankContext, preset: str) -> str:
    """The error of a job of which one rank runs a backward after the one that all have declared to be the last."""
    model, optimizer_of = build()
    sharded = shard(model, ShardConfig.preset(preset, topology=Topology(ranks_per_node=2)), units=[unusual.Block])
    optimizer = optimizer_of()
    for step in range(3):
        with sharded.micro_step(0, of=1):
            model(batch(step, 0, ctx.rank)).square().mean().backward()
        if step == 2 and ctx.rank == 3:
            model(batch(step, 1, ctx.rank)).square().mean().backward()
        try:
            optimizer.step()
        except LifecycleError as error:
            return f"step {step}: {error}"
        optimizer.zero_grad()
    return ""


@pytest.mark.parametrize("preset", ["ddp", "zero1"])
def test_a_backward_of_one_rank_behind_the_declared_one_raises_on_all(ranks: RankPool, preset: str) -> None:
    for error in ranks(4, extra_backward_on_one_rank, preset, ranks_per_node=2):
        assert error.startswith("step 2: Ranks ran different numbers of backwards")


def drop_on_one_node(ctx: RankContext, preset: str, step_of_drop: int) -> str:
    """The error of a job of which one node drops its gradients after a predicted backward, and begins again."""
    model, optimizer_of = build()
    shard(model, PRESETS[preset], units=[unusual.Block])
    optimizer = optimizer_of()
    for step in range(4):
        model(batch(step, 0, ctx.rank)).square().mean().backward()
        if step == step_of_drop and ctx.rank >= 2:
            for parameter in model.parameters():
                parameter.grad = None
            model(batch(step, 1, ctx.rank)).square().mean().backward()
        try:
            optimizer.step()
        except LifecycleError as error:
            return str(error)
        optimizer.zero_grad()
    return ""


@pytest.mark.parametrize("preset", ["mics", "paro-iig"])
def test_gradients_that_one_node_drops_after_their_sum_has_begun_are_an_error(ranks: RankPool, preset: str) -> None:
    assert ranks(4, drop_on_one_node, preset, 1, ranks_per_node=2) == [""] * 4  # nothing was predicted
    for error in ranks(4, drop_on_one_node, preset, 3, ranks_per_node=2):
        assert "Clear gradients on all ranks or on none" in error


@pytest.mark.parametrize(
    ("orders", "num_steps"), [(ORDERS[1], 1), (ORDERS[2], 6), (ORDERS[3], 1)], ids=["fewer", "other order", "others"]
)
def test_nodes_with_units_of_their_own_raise_before_the_step(
    ranks: RankPool, orders: tuple[list[int], list[int]], num_steps: int
) -> None:
    assert steps_as_in_one_process(ranks, PRESETS["mics"], WINDOWS["always"], orders) == num_steps
