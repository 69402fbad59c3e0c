"""Training with collectives in one stage, a ring of all ranks, equals plain."""

import pytest

from mics_strategy import ShardConfig
from tests import models
from tests.engine.training import Run, assert_same_training, plain, train
from tests.ranks import RankPool

PRESETS = ("ddp", "zero1", "zero2", "zero3", "zeropp-hpz", "mics", "paro-nig", "paro-ngg", "paro-igg")
OF_8 = ("zero3", "zeropp-hpz", "mics", "paro-ngg")


@pytest.mark.wide(every=5)
@pytest.mark.parametrize(
    ("world_size", "per_node", "preset"),
    [
        *((4, 2, preset) for preset in PRESETS),
        *((8, 4, preset) for preset in OF_8),
        *((8, 2, preset) for preset in OF_8),
    ],
)
def test_one_stage_trains_as_plain(ranks: RankPool, world_size: int, per_node: int, preset: str) -> None:
    run = Run(case=models.transformer, config=ShardConfig.preset(preset, hierarchical=False), accumulation=2)
    outcomes = ranks(world_size, train, run, ranks_per_node=per_node)
    assert_same_training(outcomes, plain(run, world_size))
