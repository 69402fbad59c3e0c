"""Every preset on eight real ranks trains as plain and sends its plan."""

import pytest

from mics_strategy import ShardConfig
from tests import models
from tests.engine.counting import CountC10d, planned_kinds
from tests.engine.training import Run, assert_same, plain, start
from tests.ranks import RankContext, RankPool

PRESETS = [*(preset for preset in ShardConfig.PRESETS if preset.startswith("paro-")), "zeropp-hpz"]


def of_amsp(per_node: int) -> list[ShardConfig]:
    """Its choices for 7 B, 13 B and 30 B parameters: a node for OS.

    Half a node for P and G; a node, and all for OS.
    """
    half = per_node // 2
    degrees = [(1, 1, per_node), (half, half, per_node), (per_node, per_node, 8)]
    return [ShardConfig(params=p, grads=g, optimizer=o) for p, g, o in degrees]


def train_and_count(ctx: RankContext, configs: list[ShardConfig], accumulation: int) -> list[tuple[bool, dict]]:
    """Whether the steps after the first sent what was planned, and the parameters."""
    found = []
    for config in configs:
        training, as_planned = start(ctx, Run(case=models.scalar, config=config, accumulation=accumulation)), True
        for step in range(3):
            with CountC10d() as counted:
                training.step(step)
            as_planned &= step == 0 or counted.kinds == planned_kinds(training.sharded.plan)
        found.append((as_planned, training.parameters()))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("per_node", "accumulation"), [(2, 1), (4, 3)])
def test_every_preset_on_eight_ranks(ranks: RankPool, per_node: int, accumulation: int) -> None:
    configs = [*map(ShardConfig.preset, PRESETS), *of_amsp(per_node)]
    expected = plain(Run(case=models.scalar, config=configs[0], accumulation=accumulation), 8).parameters
    for of_rank in ranks(8, train_and_count, configs, accumulation, ranks_per_node=per_node):
        for config, (as_planned, parameters) in zip(configs, of_rank, strict=True):
            assert as_planned, config
            assert_same(parameters, expected)
