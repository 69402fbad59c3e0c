"""A rank that dies ends the job with a message, not with a hang."""

import os
import signal

import pytest
import torch

from mics_strategy import CommunicationError, ShardConfig, Topology, shard
from tests import models
from tests.ranks import RankContext, RankError, RankPool

DYING = 2


def train_until_a_rank_dies(ctx: RankContext, preset: str) -> None:
    case = models.transformer()
    model = case.build()
    shard(model, ShardConfig.preset(preset, topology=Topology(ranks_per_node=2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        for micro in range(2):
            if ctx.rank == DYING and (step, micro) == (1, 1):
                os.kill(os.getpid(), signal.SIGKILL)
            case.loss(model, case.batch(step, micro, ctx.rank)).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("preset", ["mics", "zero3", "ddp", "paro-nig"])
def test_the_others_fail_with_the_collective_and_its_ranks(ranks: RankPool, preset: str) -> None:
    with pytest.raises(RankError) as failure:
        ranks(4, train_until_a_rank_dies, preset)
    survivors = [error for rank, error in failure.value.by_rank.items() if rank != DYING]
    named = [str(error) for error in survivors if isinstance(error, CommunicationError)]
    assert named, f"no survivor says what failed: {failure.value}"
    assert any(f"{DYING}" in message.split("(ranks ")[1].split(")")[0] for message in named)
