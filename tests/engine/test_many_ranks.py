"""Training on 8 to 32 ranks equals plain training.

Simulated in one process, real values.
"""

import pytest

from mics_strategy import ShardConfig, Topology
from tests import models
from tests.engine.training import Outcome, Run, assert_same, plain, train, unused_alike
from tests.ranks import RankContext, simulate

PRESETS = ("ddp", "zero1", "zero2", "zero3", "mics", "paro-iig", "paro-igg", "paro-ing", "paro-gng", "paro-nii")


def _check(run: Run, world_size: int, per_node: int) -> None:
    config = run.config.replace(topology=Topology(ranks_per_node=per_node))
    results = simulate(world_size, _train_one, run.replace(config=config), ranks_per_node=per_node)
    trace = plain(run, world_size)
    for outcome in results[:: world_size - 1]:
        assert outcome.grad_norms == pytest.approx(trace.grad_norms, rel=1e-5)
        assert_same(outcome.grads[-1], trace.grads[-1])
        assert_same(outcome.parameters, trace.parameters)


def _train_one(ctx: RankContext, run: Run) -> Outcome:
    return train(ctx, run)


@pytest.mark.wide(every=2)
@pytest.mark.parametrize("preset", PRESETS)
def test_two_nodes_of_four(preset: str) -> None:
    _check(Run(case=models.scalar, config=ShardConfig.preset(preset), steps=2, accumulation=2), 8, 4)


@pytest.mark.wide(every=3)
@pytest.mark.parametrize(
    "degrees", [(1, 2, 4), (2, 2, 8), (1, 4, 16), (2, 8, 8), (4, 2, 16), (8, 8, 8), (16, 1, 16), (2, 1, 4)], ids=str
)
def test_four_nodes_of_four_in_any_chain_of_scopes(degrees: tuple[int, int, int]) -> None:
    params, grads, optimizer = degrees
    config = ShardConfig(params=params, grads=grads, optimizer=optimizer)
    _check(Run(case=unused_alike, config=config, steps=2, accumulation=2), 16, 4)


@pytest.mark.wide(every=3)
@pytest.mark.parametrize("preset", ["mics", "zero3", "paro-iig"])
def test_eight_nodes_of_four(preset: str) -> None:
    _check(Run(case=models.mlp, config=ShardConfig.preset(preset), steps=2), 32, 4)


@pytest.mark.parametrize("size", [2, 8])
def test_transformer_on_partitions_that_are_not_a_node(size: int) -> None:
    _check(Run(case=models.transformer, config=ShardConfig(partition_size=size), steps=2), 8, 4)
