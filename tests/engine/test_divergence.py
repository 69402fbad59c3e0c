"""Detection of ranks that run different units of equal size.

They would otherwise receive each other's parameters.
"""

import logging
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from mics_strategy import (
    LifecycleError,
    ShardConfig,
    Sharded,
    Topology,
    load_checkpoint,
    load_newest_checkpoint,
    save_checkpoint,
    shard,
)
from mics_strategy.comm import watched_work
from tests.ranks import RankContext, RankError, RankPool

STRAIGHT, SWAPPED = (0, 1, 2, 3), (0, 2, 1, 3)


class Layers(nn.Module):
    """Four equal layers, run in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor, order: tuple[int, ...]) -> Tensor:
        for index in order:
            x = self.layers[index](x).tanh()
        return x


def _train(ctx: RankContext, preset: str, order: tuple[int, ...], other: tuple[int, ...]) -> int:
    """In the second step rank 2 runs the layers in the order `other`.

    Returns the number of the last step.
    """
    model = Layers()
    config = ShardConfig.preset(preset, topology=Topology(ranks_per_node=2), overlap={"reduce"})
    shard(model, config, units=[nn.Linear])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        own = STRAIGHT if step != 1 else other if ctx.rank == 2 else order
        model(torch.ones(2, 6), own).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return step


@pytest.mark.parametrize("preset", ["zero3", "mics", "paro-iig"])
def test_ranks_that_run_layers_in_different_orders_raise(ranks: RankPool, preset: str) -> None:
    with pytest.raises(RankError) as failure:
        ranks(4, _train, preset, STRAIGHT, SWAPPED, timeout_s=20.0)
    errors = list(failure.value.by_rank.values())
    assert len(errors) == 4
    for error in errors:
        assert isinstance(error, LifecycleError)
        for words in ("layers.1", "layers.2", "rank 2", "the same order"):
            assert words in str(error)


@pytest.mark.parametrize("preset", ["zero3", "mics", "paro-iig"])
@pytest.mark.parametrize("order", [SWAPPED, (3, 1), (2,)])
def test_another_order_that_all_ranks_share_is_right(ranks: RankPool, preset: str, order: tuple[int, ...]) -> None:
    assert ranks(4, _train, preset, order, order, timeout_s=20.0) == [2, 2, 2, 2]


@pytest.mark.parametrize(
    ("preset", "other"),
    [(preset, other) for preset in ("ddp", "zero1") for other in (SWAPPED, (3, 1), (2,))]
    + [("zero2", (1, 3)), ("zero2", (2,))],
)
def test_each_rank_may_choose_units_if_parameters_are_not_sharded(
    ranks: RankPool, preset: str, other: tuple[int, ...]
) -> None:
    assert ranks(4, _train, preset, STRAIGHT, other, timeout_s=20.0) == [2, 2, 2, 2]


def _evaluate_then_train(ctx: RankContext) -> None:
    model = Layers()
    shard(model, "zero3", units=[nn.Linear])
    with torch.no_grad():
        model(torch.ones(2, 6), SWAPPED if ctx.rank else STRAIGHT)
    model(torch.ones(2, 6), STRAIGHT).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_divergence_in_evaluation_raises_in_training(ranks: RankPool) -> None:
    with pytest.raises(
        RankError, match=r"Ranks diverged.*layers.1 \(collective 1 of its queue\).*layers.2.*Remove any evalua"
    ):
        ranks(2, _evaluate_then_train, timeout_s=20.0)


def _gather_another_unit_unnoticed(ctx: RankContext, preset: str) -> int:
    """As on NCCL, whose messages bear no names: rank 1 has gathered another unit that was taken for that of the others.

    Returns the number of the last step.
    """
    model = Layers()
    sharded = shard(model, preset, units=[nn.Linear], topology=Topology(ranks_per_node=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        model(torch.ones(2, 6), STRAIGHT).sum().backward()
        if step == 1 and ctx.rank == 1:
            sharded._groups.param_comm.transports[0].fingerprint.update("all-gather layers.3")
        optimizer.step()
        optimizer.zero_grad()
    return step


@pytest.mark.parametrize("preset", ["zero3", "mics"])
def test_another_unit_that_was_gathered_unnoticed_is_told_in_front_of_the_step(ranks: RankPool, preset: str) -> None:
    with pytest.raises(RankError, match=r"their data is mixed up: in collective .*rank 1 sent `all-gather layers.3`"):
        ranks(4, _gather_another_unit_unnoticed, preset, ranks_per_node=2, timeout_s=20.0)


def _read_between_two_models(ctx: RankContext) -> None:
    """As in the training of two networks against each other."""
    one, other = Layers(), Layers()
    for model in (one, other):
        shard(model, "zero3", units=[nn.Linear])
        model(torch.ones(2, 6), STRAIGHT).sum().backward()
    with mock.patch.object(watched_work, "STALL_CHECK_S", 0.3):
        if ctx.rank == 0:
            other.layers[0].weight.norm()
        one(torch.ones(2, 6), STRAIGHT).sum().backward()


def test_a_value_that_one_rank_alone_reads_is_told_where_the_others_run_another_model(ranks: RankPool) -> None:
    with pytest.raises(
        RankError, match=r"rank 0 for the reduction of .*layers.0.weight.*rank 1 for the all-gather"
    ) as failure:
        ranks(2, _read_between_two_models, timeout_s=20.0)
    assert {type(error) for error in failure.value.by_rank.values()} == {LifecycleError}


def _read_behind_the_last_step(ctx: RankContext) -> list[str]:
    """The warnings of rank 0, which waits while the others do something that the engine does not know."""
    model = Layers()
    shard(model, "zero3", units=[nn.Linear])
    messages: list[str] = []
    logger = logging.getLogger("mics_strategy.comm.desync")
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger.addHandler(handler)
    limits = {"STALL_CHECK_S": 0.1, "LONG_WAIT_S": 0.2}
    with mock.patch.multiple(watched_work, **limits):
        if ctx.rank:
            time.sleep(2.0)
        model.layers[0].weight.norm()
    logger.removeHandler(handler)
    return messages


def test_a_rank_that_reads_long_before_the_others_warns_and_goes_on(ranks: RankPool) -> None:
    [message], *others = ranks(2, _read_behind_the_last_step, timeout_s=20.0)
    assert others == [[]]
    assert re.search(r"Rank 0 waits for the reduction .* take part: rank 1\..*let all ranks do so", message)


READS: dict[str, Callable[[Any], object]] = {
    "norm": lambda weight: float(weight.norm()),
    "norm of the gradient": lambda weight: weight.grad.norm(),
    "full_tensor": lambda weight: weight.full_tensor(),
    "in a loss": lambda weight: weight.full_tensor().sum().backward(),
}


def _read_on_rank_0(ctx: RankContext, preset: str, read: str) -> None:
    model = Layers()
    shard(model, ShardConfig.preset(preset, topology=Topology(ranks_per_node=2)), units=[nn.Linear])
    model(torch.ones(2, 6), STRAIGHT).sum().backward()
    with mock.patch.object(watched_work, "STALL_CHECK_S", 0.3):  # ranks begin to wait at about the same time
        if ctx.rank == 0:
            READS[read](model.layers[2].weight)
        model(torch.ones(2, 6), STRAIGHT).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()


def _weights_alone_on_rank_1(ctx: RankContext, preset: str) -> None:
    model = Layers()
    shard(model, ShardConfig.preset(preset, topology=Topology(ranks_per_node=2)), units=[nn.Linear])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mock.patch.object(watched_work, "STALL_CHECK_S", 0.3):
        for step in range(2):
            loss = model(torch.ones(2, 6), STRAIGHT).sum()
            if (ctx.rank, step) == (1, 1):  # as of a batch that is skipped
                loss = torch.stack([parameter.sum() for parameter in model.parameters()]).sum() * 0
            loss.backward()
            optimizer.step()


@pytest.mark.parametrize("preset", ["ddp", "mics"])
def test_a_loss_of_weights_on_one_rank_alone_is_told_on_every_rank(ranks: RankPool, preset: str) -> None:
    with pytest.raises(RankError) as failure:
        ranks(2, _weights_alone_on_rank_1, preset, ranks_per_node=2, timeout_s=20.0)
    assert [type(error) for error in failure.value.by_rank.values()] == [LifecycleError] * 2


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("preset", ["zero3", "mics"])
def test_a_value_that_one_rank_alone_reads_is_told_on_every_rank(ranks: RankPool, preset: str, read: str) -> None:
    with pytest.raises(RankError) as failure:
        ranks(4, _read_on_rank_0, preset, read, timeout_s=20.0)
    assert len(failure.value.by_rank) == 4
    for error in failure.value.by_rank.values():
        assert isinstance(error, LifecycleError)
        assert re.search(r"rank 0 for the (gather|reduction|agreement).*`full_tensor\(\)`.*if rank == 0:", str(error))


CALLS: dict[str, Callable[[Path, Sharded], object]] = {
    "save_checkpoint": save_checkpoint,
    "load_checkpoint": load_checkpoint,
    "load_newest_checkpoint": load_newest_checkpoint,
    "full_state_dict": lambda _, sharded: sharded.full_state_dict(),
    "full_optimizer_state_dict": lambda _, sharded: sharded.full_optimizer_state_dict(
        torch.optim.SGD(sharded.model.parameters())
    ),
}


def _call_on_rank_0(ctx: RankContext, path: Path, name: str) -> None:
    model = Layers()
    sharded = shard(model, "zero3", units=[nn.Linear])
    with mock.patch.object(watched_work, "STALL_CHECK_S", 0.3):
        if ctx.rank == 0:
            CALLS[name](path, sharded)
        model(torch.ones(2, 6), STRAIGHT)


@pytest.mark.parametrize("name", CALLS)
def test_a_state_of_one_rank_alone_is_told_on_every_rank(ranks: RankPool, tmp_path: Path, name: str) -> None:
    with pytest.raises(RankError) as failure:
        ranks(2, _call_on_rank_0, tmp_path, name, timeout_s=20.0)
    assert len(failure.value.by_rank) == 2
    for error in failure.value.by_rank.values():
        assert isinstance(error, LifecycleError)
        assert f"rank 0 for the agreement on {name} (call it on every rank)" in str(error)
