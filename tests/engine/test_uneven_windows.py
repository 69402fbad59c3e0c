"""Nodes whose windows have different numbers of backwards, or that train other units, while the last is predicted.

Within a node ranks run the same backwards. Between nodes only second hops and the update connect them.
"""

import random
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

from mics_strategy import LifecycleError, ShardConfig, Sharded, shard
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
) -> tuple[list[list[Tensor]], list[bool]]:
    """Parameters after each step; whether each step sent what its plan says."""
    model, optimizer_of = build()
    sharded: Sharded | None = None if config is None else shard(model, config, units=[unusual.Block])
    optimizer = optimizer_of()
    parameters, is_as_planned = [], []
    for step in range(len(windows[0])):
        for rank in ranks:
            node = rank // 2
            model.order = order_of(step, node, orders)
            for micro in range(windows[node][step]):
                loss = model(batch(step, micro, rank)).square().mean()
                (loss if sharded is not None else loss / WORLD_SIZE).backward()
        optimizer.step()
        optimizer.zero_grad()
        parameters.append([*wholes(dict(model.named_parameters())).values()])
        if sharded is not None:
            rows = sharded.traffic()
            is_as_planned.append(
                all((row.count, row.sent_bytes) == (row.planned_count, row.planned_bytes) for row in rows)
            )
    return parameters, is_as_planned


def train_sharded(
    ctx: RankContext, windows: tuple[list[int], list[int]], orders: tuple[list[int], list[int]], config: ShardConfig
) -> tuple[list[list[Tensor]], list[bool]]:
    return train([ctx.rank], windows, orders, config)


def assert_trains_as_one_process(
    ranks: RankPool, config: ShardConfig, windows: tuple[list[int], list[int]], orders: tuple[list[int], list[int]]
) -> list[list[bool]]:
    """Returns whether each step sent what its plan says, by rank."""
    expected, _ = train(range(WORLD_SIZE), windows, orders)
    are_as_planned = []
    for found, is_as_planned in ranks(WORLD_SIZE, train_sharded, windows, orders, config, ranks_per_node=2):
        for step, (parameters, plain) in enumerate(zip(found, expected, strict=True)):
            torch.testing.assert_close(parameters, plain, rtol=1e-9, atol=1e-11, msg=f"step {step}")
        are_as_planned.append(is_as_planned)
    return are_as_planned


@pytest.mark.wide
@pytest.mark.parametrize("preset", [*PREDICTED, "no-second-hop-overlap"])
@pytest.mark.parametrize("windows", WINDOWS)
def test_nodes_with_windows_of_their_own_train_and_send_as_planned(ranks: RankPool, windows: str, preset: str) -> None:
    for is_as_planned in assert_trains_as_one_process(ranks, PRESETS[preset], WINDOWS[windows], ORDERS[0]):
        assert all(is_as_planned)


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


@pytest.mark.wide
@pytest.mark.parametrize("windows", ["always", "once longer", "random"])
@pytest.mark.parametrize("orders", ORDERS[1:], ids=str)
def test_nodes_with_units_of_their_own_train_as_one_process_does(
    ranks: RankPool, orders: tuple[list[int], list[int]], windows: str
) -> None:
    assert_trains_as_one_process(ranks, PRESETS["mics"], WINDOWS[windows], orders)
