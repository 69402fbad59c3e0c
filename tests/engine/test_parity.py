"""Sharded training equals plain training.

The reference is one process with the whole batch. Every step's loss, gradients and gradient norm are compared, and the
parameters at the end.
"""

import pytest

from mics_strategy import ShardConfig
from tests import models
from tests.engine.training import (
    Run,
    assert_same_training,
    plain,
    root_only,
    train,
    unused_alike,
)
from tests.ranks import RankPool

pytestmark = [pytest.mark.wide, pytest.mark.one_job]

CASES = (models.mlp, models.transformer, models.conv_bn, models.tied, models.frozen, models.scalar, models.shared)
PARO = tuple(name for name in ShardConfig.PRESETS if name.startswith("paro-"))
cases = pytest.mark.parametrize("case", [*CASES, unused_alike], ids=lambda case: case.__name__)


def _check(ranks: RankPool, world_size: int, run: Run, **options: int) -> None:
    outcomes = ranks(world_size, train, run, **options)
    assert_same_training(outcomes, plain(run, world_size))


@cases
@pytest.mark.parametrize("partition_size", [1, 2, 4])
def test_partition_of_any_size_trains_as_plain(ranks: RankPool, case: object, partition_size: int) -> None:
    config = ShardConfig(partition_size=partition_size)
    _check(ranks, 4, Run(case=case, config=config), ranks_per_node=2)


@cases
def test_partition_inside_a_node_trains_as_plain(ranks: RankPool, case: object) -> None:
    _check(ranks, 4, Run(case=case, config=ShardConfig(partition_size=2), accumulation=3))


@cases
@pytest.mark.parametrize("world_size", [1, 2])
def test_small_worlds_train_as_plain(ranks: RankPool, case: object, world_size: int) -> None:
    _check(ranks, world_size, Run(case=case, config=ShardConfig.preset("zero3"), accumulation=2))


@pytest.mark.parametrize("preset", PARO)
def test_every_paro_triple_trains_as_plain(ranks: RankPool, preset: str) -> None:
    run = Run(case=models.transformer, config=ShardConfig.preset(preset), accumulation=3, optimizer="sgd")
    _check(ranks, 4, run, ranks_per_node=2)


@pytest.mark.wide(every=5)
@pytest.mark.parametrize("preset", PARO)
def test_every_paro_triple_trains_tiny_parameters_as_plain(ranks: RankPool, preset: str) -> None:
    _check(ranks, 4, Run(case=models.scalar, config=ShardConfig.preset(preset), accumulation=2), ranks_per_node=2)


@pytest.mark.parametrize("preset", ["zero2", "mics", "paro-iig"])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_accumulation_trains_as_plain(ranks: RankPool, preset: str, accumulation: int) -> None:
    run = Run(case=models.mlp, config=ShardConfig.preset(preset), accumulation=accumulation, optimizer="sgd")
    _check(ranks, 4, run, ranks_per_node=2)


@pytest.mark.parametrize("preset", ["ddp", "zero2", "mics", "paro-iig"])
def test_clipping_trains_as_plain(ranks: RankPool, preset: str) -> None:
    run = Run(case=models.tied, config=ShardConfig.preset(preset), clip=0.05, accumulation=2, optimizer="sgd")
    _check(ranks, 4, run, ranks_per_node=2)


@pytest.mark.parametrize("preset", ["ddp", "zero1", "mics", "paro-iig"])
def test_second_hop_in_every_micro_step_trains_as_plain(ranks: RankPool, preset: str) -> None:
    config = ShardConfig.preset(preset, second_hop="micro_step")
    _check(ranks, 4, Run(case=models.mlp, config=config, accumulation=3), ranks_per_node=2)


@pytest.mark.parametrize("overlap", ["none", "gather", "reduce", "second_hop", "update"])
def test_every_single_overlap_trains_as_plain(ranks: RankPool, overlap: str) -> None:
    config = ShardConfig.preset("paro-iig", overlap="none" if overlap == "none" else {overlap})
    run = Run(case=models.transformer, config=config, accumulation=2, signal=True)
    _check(ranks, 4, run, ranks_per_node=2)


@pytest.mark.parametrize("prefetch", [2, 3, 7])
@pytest.mark.parametrize("case", [models.transformer, models.shared], ids=["transformer", "shared"])
def test_every_prefetch_trains_as_plain(ranks: RankPool, case: object, prefetch: int) -> None:
    _check(ranks, 2, Run(case=case, config=ShardConfig(prefetch=prefetch), accumulation=2))


@pytest.mark.parametrize("preset", ["ddp", "zero1", "zero2", "mics", "paro-iig"])
@pytest.mark.parametrize("accumulation", [3])
def test_declared_boundaries_train_as_plain(ranks: RankPool, preset: str, accumulation: int) -> None:
    run = Run(case=models.transformer, config=ShardConfig.preset(preset), accumulation=accumulation, signal=True)
    _check(ranks, 4, run, ranks_per_node=2)


@pytest.mark.parametrize("units", [root_only, 1, 100, "auto"], ids=["root", "1", "100", "auto"])
def test_every_cut_into_units_trains_as_plain(ranks: RankPool, units: object) -> None:
    _check(ranks, 2, Run(case=models.tied, config=ShardConfig(), units=units, accumulation=2))
