"""States of tensors with an owner: memory, saving, loading and adopting."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from mics_strategy import ShardConfig, shard
from tests import models
from tests.engine.optimizer.test_owner_exchange import Make, adafactor, begin, layout, plain_with
from tests.engine.training import Run, assert_same, wholes
from tests.ranks import RankContext, RankPool


def states(ctx: RankContext) -> tuple[int, dict[str, int], int]:
    """Bytes of optimizer states, of the engine by purpose, and of owned parameters."""
    training = begin(ctx, Run(case=models.transformer, config=layout("zero3")), adafactor)
    training.step(0)
    swap = training.sharded._step_hooks.swap_of(training.optimizer)
    owned = sum(4 * p.numel() for p in training.model.parameters() if swap.owner_of(p) == ctx.rank)
    tensors = [v for state in training.optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    return sum(4 * tensor.numel() for tensor in tensors), dict(training.sharded.memory.bytes_by_purpose), owned


def test_states_are_on_the_owners_only(ranks: RankPool) -> None:
    case = models.transformer()
    model = case.build()
    optimizer = adafactor(list(model.parameters()))
    case.loss(model, case.batch(0, 0, 0)).backward()
    optimizer.step()
    plain = sum(4 * v.numel() for state in optimizer.state.values() for v in state.values())
    found = ranks(4, states)
    assert sum(state_bytes for state_bytes, _, _ in found) == plain
    for _, purposes, owned in found:
        assert purposes["owned tensors"] == 2 * owned
    assert sum(owned for _, _, owned in found) == sum(4 * p.numel() for p in model.parameters())


def save_and_go_on(ctx: RankContext, run: Run, later: Run, make: Make) -> tuple[Any, dict[str, Tensor]]:
    """Two steps, then the rest on another model with other sharding.

    The states are saved and loaded in between.
    """
    first = begin(ctx, run, make)
    for step in range(2):
        first.step(step)
    weights, found = first.sharded.full_state_dict(), first.sharded.full_optimizer_state_dict(first.optimizer)
    weights, everywhere = _from_rank_zero((weights, found))
    second = begin(ctx, later, make)
    second.sharded.load_full_state_dict(weights)
    second.sharded.load_full_optimizer_state_dict(second.optimizer, everywhere)
    for step in range(2, run.steps):
        second.step(step)
    return found, second.parameters()


def _from_rank_zero(value: Any) -> Any:
    values = [value]
    torch.distributed.broadcast_object_list(values, src=0)
    return values[0]


CONFIGS = {"tensors": layout("zero3"), "tensors of a node": layout("mics"), "whole": ShardConfig.preset("ddp")}


@pytest.mark.wide(every=2)
@pytest.mark.parametrize(("before", "after"), [*pairwise([*CONFIGS, "tensors"]), ("tensors of a node", "tensors")])
def test_states_are_the_plain_ones_and_go_anywhere(ranks: RankPool, before: str, after: str) -> None:
    run = Run(case=models.transformer, config=CONFIGS[before], steps=4)
    found = ranks(4, save_and_go_on, run, run.replace(config=CONFIGS[after]), adafactor, ranks_per_node=2)
    case = run.case()
    model, expected = case.build(), plain_with(run, 4, adafactor)
    optimizer = adafactor(list(model.parameters()))
    for step in range(2):
        optimizer.zero_grad()
        for rank in range(4):
            (case.loss(model, case.batch(step, 0, rank)) / 4).backward()
        optimizer.step()
    for rank, (saved, parameters) in enumerate(found):
        assert_same(parameters, expected, 1e-5)
        assert bool(saved) is (rank == 0)
    saved = found[0][0]
    for index, state in optimizer.state_dict()["state"].items():
        assert_same(saved["state"][index], state, 1e-5)


def adopt_after_steps(ctx: RankContext, config: ShardConfig, make: Make) -> dict[str, Tensor]:
    case = models.transformer()
    model = case.build()
    optimizer = make(list(model.parameters()))
    for rank in range(ctx.world_size):
        (case.loss(model, case.batch(0, 0, rank)) / ctx.world_size).backward()
    optimizer.step()
    optimizer.zero_grad()
    shard(model, config, units=case.units).adopt(optimizer)
    for step in (1, 2):
        case.loss(model, case.batch(step, 0, ctx.rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return wholes(dict(model.named_parameters()))


def test_adopted_states_go_to_the_owners(ranks: RankPool) -> None:
    found = ranks(4, adopt_after_steps, layout("zero3"), adafactor)
    assert_same(found[1], plain_with(Run(case=models.transformer, config=layout()), 4, adafactor), 1e-5)


def go_on_with_another(ctx: RankContext, config: ShardConfig, make: Make) -> dict[str, Tensor]:
    """Another optimizer of the same model takes over the states of the first."""
    case = models.transformer()
    model = case.build()
    shard(model, config, units=case.units)
    optimizer = make(list(model.parameters()))
    for step in range(3):
        case.loss(model, case.batch(step, 0, ctx.rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step < 2:
            state, optimizer = optimizer.state_dict(), make(list(model.parameters()))
            optimizer.load_state_dict(state)
    return wholes(dict(model.named_parameters()))


def test_a_second_optimizer_has_the_owners_of_the_first(ranks: RankPool) -> None:
    found = ranks(4, go_on_with_another, layout("zero3"), adafactor)
    assert_same(found[1], plain_with(Run(case=models.transformer, config=layout()), 4, adafactor), 1e-5)
