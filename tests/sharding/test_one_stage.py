"""Does training with collectives in one stage equal plain training, where they go round a ring of all ranks?"""

import pytest

from mics_strategy import ShardConfig
from tests import models
from tests.ranks import RankPool
from tests.sharding.training import Run, assert_same_training, plain, train

PRESETS = ("ddp", "zero1", "zero2", "zero3", "zeropp", "mics", "paro-nig", "paro-ngg", "paro-igg")


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(("world_size", "per_node"), [(4, 2), (8, 4), (8, 2)])
def test_one_stage_trains_as_plain(ranks: RankPool, preset: str, world_size: int, per_node: int) -> None:
    run = Run(case=models.transformer, config=ShardConfig.preset(preset, hierarchical=False), accumulation=2)
    outcomes = ranks(world_size, train, run, ranks_per_node=per_node)
    assert_same_training(outcomes, plain(run, world_size))
