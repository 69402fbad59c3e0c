"""Issued traffic equals the plan on 512 ranks.

One of the ranks runs here, on a transport that sends nothing.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from mics_strategy import ShardConfig, Topology, shard
from mics_strategy.comm import process_groups
from tests.engine.counting import CountC10d, planned_kinds
from tests.ranks import RankContext, RankPool

WORLD_SIZE, PER_NODE = 512, 8


def _equal_on_all_ranks(value: object, _caller: str = "") -> list[object]:
    """What 512 ranks with the same script and configuration say.

    The fake transport cannot bring it.
    """
    return [value] * WORLD_SIZE


def count_presets(ctx: RankContext, presets: list[str], rank: int) -> list[str]:
    """The presets whose second step issues something else than its plan."""
    wrong = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_groups, "gather_objects", _equal_on_all_ranks)
        patch.setattr("mics_strategy.comm.consensus.gather_objects", _equal_on_all_ranks)
        patch.setattr(process_groups.ProcessGroups, "desync_digest", 0)  # the others' would make the sums 0
        patch.setattr("mics_strategy.engine.rank_agreement.digest_weight", lambda *_: 0)
        patch.setattr("mics_strategy.engine.rank_agreement.zero_sum", lambda *_: 0)
        patch.setattr("mics_strategy.engine.setup.materialize.gather_objects", _equal_on_all_ranks)
        for preset in presets:
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD_SIZE)
            model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
            config = ShardConfig.preset(preset, topology=Topology(ranks_per_node=PER_NODE))
            sharded = shard(model, config, units=[nn.Linear], device="cpu")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            for _ in range(2):
                with CountC10d() as counted:
                    for _ in range(3):
                        model(torch.zeros(1, 32)).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            if counted.kinds != planned_kinds(sharded.plan) or not counted.kinds:
                wrong.append(preset)
            dist.destroy_process_group()
    return wrong


@pytest.mark.wide(every=5)
@pytest.mark.parametrize("rank", [0, 9, 511])
def test_every_preset_sends_what_was_planned(ranks: RankPool, rank: int) -> None:
    assert ranks(1, count_presets, list(ShardConfig.PRESETS), rank, default_group=False) == [[]]
