"""Ranks that skip layers, where parameters are whole: loops in which a rank's own gradients do not say what is due."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mics_strategy import ShardConfig, shard
from mics_strategy.errors import LifecycleError
from tests.engine.training import wholes
from tests.engine.unusual import Block, Stack, batch
from tests.ranks import RankContext, RankPool, raises_on_every_rank

RANKS, NUM_STEPS = 4, 3
ALL = frozenset(range(RANKS))
Parameters = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank's model; the last rank skips a block where it shall."""

    model: Stack
    rank: int
    skipped: int = 1

    def loss(self, step: int, *, skips: bool = True) -> Tensor:
        self.model.order = [0, 1, 2, 3]
        if skips and self.rank == RANKS - 1:
            self.model.order.remove(self.skipped)
        return self.model(batch(step, self.rank)).square().mean()


def first_in_first_out(rank: Rank, step: int) -> None:
    losses = [rank.loss(step), rank.loss(step + 50)]
    for loss in losses:
        loss.backward()


def last_in_first_out(rank: Rank, step: int) -> None:
    losses = [rank.loss(step), rank.loss(step + 50)]
    for loss in reversed(losses):
        loss.backward()


def second_loss_in_between(rank: Rank, step: int) -> None:
    first = rank.loss(step, skips=False)
    rank.loss(step + 50).backward()
    rank.loss(step + 90)
    first.backward()


def third_forward_in_between(rank: Rank, step: int) -> None:
    first, second = rank.loss(step, skips=False), rank.loss(step + 50)
    second.backward()
    third = rank.loss(step + 90)
    first.backward()
    third.backward()


def sum_of_two(rank: Rank, step: int) -> None:
    (rank.loss(step) + rank.loss(step + 50)).backward()


BODIES: list[Callable[[Rank, int], None]] = [
    first_in_first_out,
    last_in_first_out,
    second_loss_in_between,
    third_forward_in_between,
    sum_of_two,
]
CONFIGS = {
    "zero2": ShardConfig.preset("zero2"),
    "zero2, no overlap": ShardConfig.preset("zero2", overlap="none"),
    "paro-nig": ShardConfig.preset("paro-nig"),
    "zero1": ShardConfig.preset("zero1"),
}
CHECKPOINTS: dict[str, dict[int, bool]] = {
    "stored": {},
    "reentrant": {0: True, 1: True, 2: True, 3: True},
}
CELLS = [
    (body, config, checkpointed)
    for body, config, checkpointed in product(BODIES, CONFIGS, CHECKPOINTS)
    if body is not sum_of_two or checkpointed == "stored" or config == "zero1"  # the others are refused, see below
]


def built(checkpointed: dict[int, bool]) -> Stack:
    torch.manual_seed(5)
    model = Stack().double()
    model.checkpointed = checkpointed
    return model


def expected(body: Callable[[Rank, int], None], checkpointed: dict[int, bool]) -> Parameters:
    """Plain models, one for each rank, with the mean of their gradients."""
    models = [built(checkpointed) for _ in range(RANKS)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
    for step in range(NUM_STEPS):
        for rank, model in enumerate(models):
            body(Rank(model, rank), step)
        for copies in zip(*(model.parameters() for model in models), strict=True):
            mean = sum(copy.grad for copy in copies if copy.grad is not None) / RANKS
            for copy in copies:
                copy.grad = torch.as_tensor(mean).clone()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {name: each.detach() for name, each in models[0].named_parameters()}


def train(ctx: RankContext, body: Any, config: ShardConfig, checkpointed: dict[int, bool]) -> Parameters:
    model = built(checkpointed)
    shard(model, config, units=[Block])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(NUM_STEPS):
        body(Rank(model, ctx.rank), step)
        optimizer.step()
        optimizer.zero_grad()
    return wholes(dict(model.named_parameters()))


def check(results: list[Parameters], parameters: Parameters) -> None:
    for of_rank in results:
        for name, value in of_rank.items():
            torch.testing.assert_close(value, parameters[name], rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.wide(every=6)
@pytest.mark.parametrize(("body", "config", "checkpointed"), CELLS)
def test_several_losses(ranks: RankPool, body: Any, config: str, checkpointed: str) -> None:
    blocks = CHECKPOINTS[checkpointed]
    check(ranks(RANKS, train, body, CONFIGS[config], blocks, ranks_per_node=2, timeout_s=60.0), expected(body, blocks))


def sum_of_two_without_the_first_block(rank: Rank, step: int) -> None:
    sum_of_two(Rank(rank.model, rank.rank, skipped=0), step)


@pytest.mark.parametrize(
    ("body", "blocks"),
    [(sum_of_two, CHECKPOINTS["reentrant"]), (sum_of_two_without_the_first_block, {0: True})],
    ids=["all", "first"],  # what is left over is waited for inside the backward; behind it
)
def test_blocks_that_one_backward_recomputes_twice_are_refused(ranks: RankPool, body: Any, blocks: Any) -> None:
    """Their gradients come twice, on ranks that do not skip them."""
    raises_on_every_rank(
        lambda: ranks(RANKS, train, body, CONFIGS["zero2"], blocks, ranks_per_node=2, timeout_s=60.0),
        LifecycleError,
        match="use_reentrant=False",
    )


class Fails(torch.autograd.Function):
    """Raises in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise ArithmeticError("no gradient today")


@contextmanager
def fails_behind(module: nn.Module) -> Iterator[None]:
    """A backward that fails when it has passed a module, and a loop that goes on."""
    hook = module.register_forward_pre_hook(lambda _, inputs: (Fails.apply(inputs[0]),))
    with pytest.raises(ArithmeticError):
        yield
    hook.remove()


def train_with_failures(
    ctx: RankContext, failing: frozenset[int], place: str, config: ShardConfig, num_before: int
) -> Parameters:
    """Before each step, a backward that fails behind a module on some ranks, and whose gradients are dropped."""
    model = built({})
    shard(model, config, units=[Block])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    rank = Rank(model, ctx.rank, skipped=3)
    for step in range(NUM_STEPS):
        if step >= num_before:
            with fails_behind(model.get_submodule(place)) if ctx.rank in failing else nullcontext():
                rank.loss(step + 90).backward()
            optimizer.zero_grad()
        rank.loss(step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return wholes(dict(model.named_parameters()))


def step_with_a_failure(rank: Rank, failing: frozenset[int], place: str) -> None:
    """Three micro-steps, of which the second fails on some ranks. No block is skipped unless it is `rank.skipped`."""
    for micro_step in range(3):
        does_fail = micro_step == 1 and rank.rank in failing
        with fails_behind(rank.model.get_submodule(place)) if does_fail else nullcontext():
            rank.loss(micro_step, skips=rank.skipped >= 0).backward()


def gradients(ctx: RankContext, config: ShardConfig, failing: frozenset[int], place: str, skipped: int) -> Parameters:
    model = built({})
    shard(model, config, units=[Block])
    step_with_a_failure(Rank(model, ctx.rank, skipped), failing, place)
    return wholes({name: each.grad for name, each in model.named_parameters()})


@pytest.mark.wide(every=5)
@pytest.mark.parametrize("place", ["head", "blocks.1"])
@pytest.mark.parametrize(
    ("config", "failing", "skipped"),
    [
        *[(config, failing, 3) for config in CONFIGS for failing in (ALL, frozenset({0}))],
        *[(config, ALL, -1) for config in ("mics", "zero3", "zeropp-hpz")],
    ],
)
def test_what_has_arrived_before_a_failure_counts(
    ranks: RankPool, config: str, failing: frozenset[int], skipped: int, place: str
) -> None:
    """As torch leaves it on parameters, in a window that goes on."""
    expected_sums: Parameters = {}
    for rank in range(RANKS):
        model = built({})
        step_with_a_failure(Rank(model, rank, skipped), failing, place)
        for name, each in model.named_parameters():
            if each.grad is not None:
                expected_sums[name] = expected_sums.get(name, torch.zeros_like(each)) + each.grad / RANKS
    shard_config = CONFIGS.get(config) or ShardConfig.preset(config)
    check(
        ranks(RANKS, gradients, shard_config, failing, place, skipped, ranks_per_node=2, timeout_s=60.0), expected_sums
    )


def one_loss(rank: Rank, step: int) -> None:
    Rank(rank.model, rank.rank, skipped=3).loss(step).backward()


@pytest.mark.wide(every=6)
@pytest.mark.parametrize("num_before", [0, 2], ids=["at first", "later"])
@pytest.mark.parametrize("config", ["zero2", "zero2, no overlap", "paro-nig"])
@pytest.mark.parametrize("place", ["head", "blocks.1"])
@pytest.mark.parametrize("failing", [ALL, frozenset({0})], ids=["all", "first"])
def test_a_backward_that_fails(
    ranks: RankPool, failing: frozenset[int], place: str, config: str, num_before: int
) -> None:
    results = ranks(
        RANKS, train_with_failures, failing, place, CONFIGS[config], num_before, ranks_per_node=2, timeout_s=60.0
    )
    check(results, expected(one_loss, {}))
