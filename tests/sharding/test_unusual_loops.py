"""Is every loop right that the engine's authors did not have in mind?"""

from functools import lru_cache

import pytest
import torch
from torch import Tensor

from mics_strategy import ShardConfig
from tests.ranks import RankPool
from tests.sharding import unusual

SETTINGS = {
    "mics": ShardConfig.preset("mics"),
    "mics, 3 ahead": ShardConfig.preset("mics", prefetch=3),
    "zero3": ShardConfig.preset("zero3"),
    "zeropp": ShardConfig.preset("zeropp"),
    "zero2": ShardConfig.preset("zero2"),
    "ddp": ShardConfig.preset("ddp"),
    "paro-nig": ShardConfig.preset("paro-nig"),
    "no overlap": ShardConfig.preset("mics", overlap="none"),
}


@lru_cache
def expected(name: str) -> dict[str, Tensor]:
    return unusual.reference(name, 4)


def loops_of(setting: str) -> list[str]:
    """All for the first setting, a quarter for each of the others: another one for each of four."""
    place = list(SETTINGS).index(setting)
    return list(unusual.LOOPS) if place == 0 else list(unusual.LOOPS)[place % 4 :: 4]


@pytest.mark.parametrize("setting", SETTINGS)
def test_unusual_loops_train_as_a_plain_process_does(ranks: RankPool, setting: str) -> None:
    names = loops_of(setting)
    results = ranks(4, unusual.train, names, SETTINGS[setting], ranks_per_node=2)
    for name in names:
        for of_rank in results:
            assert not of_rank[name].error, name
            for key, value in of_rank[name].parameters.items():
                torch.testing.assert_close(value, expected(name)[key], rtol=1e-9, atol=1e-11, msg=f"{name}: {key}")
