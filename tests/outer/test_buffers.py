"""Running statistics are those of an island's first rank in a round, and of rank 0 after an outer step."""

import pytest
import torch
from torch import nn

from mics_strategy import ShardConfig, Topology, shard
from tests.ranks import RankContext, RankPool


def means(ctx: RankContext, preset: str, evaluated: bool, delay: int = 0) -> list[float]:
    """The running mean of this rank, as evaluated or as it is after each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    config = ShardConfig.preset(preset, topology=Topology(ranks_per_node=2), outer_every=2, outer_delay=delay)
    sharded = shard(model, config, units=[nn.Linear])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    found = []
    for _ in range(4):
        inputs = torch.full((4, 2), float(1 + ctx.rank)) + torch.randn(4, 2) * 0.1
        model(inputs).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if evaluated:
            model.eval()
            model(inputs)
            model.train()
        found.append(model[1].running_mean[0].item())
    assert sharded.buffers is not None
    return found


@pytest.mark.parametrize("preset", ["mics", "ddp"])
def test_buffers_are_an_islands_in_a_round_and_rank_0s_after_an_outer_step(ranks: RankPool, preset: str) -> None:
    first, second, third, fourth = ranks(4, means, preset, True)
    assert first == second
    assert third == fourth
    assert [one == other for one, other in zip(first, third, strict=True)] == [False, True, False, True]


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("preset", ["mics", "ddp"])
def test_the_last_step_of_a_round_broadcasts_buffers_without_an_evaluation(
    ranks: RankPool, preset: str, delay: int
) -> None:
    found = ranks(4, means, preset, False, delay)
    assert len({of_rank[1] for of_rank in found}) == 1
    assert found[0][2] != found[2][2]


class Table(nn.Module):
    """A large buffer that the first forward fills, with the mean of its rank's inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.register_buffer("table", torch.zeros(20_000))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not self.table[0]:
            self.table.fill_(inputs.mean())
        return self.layer(inputs)


def tables(ctx: RankContext) -> list[float]:
    """The first number of the table after each step."""
    model = Table()
    shard(model, ShardConfig.preset("mics", topology=Topology(ranks_per_node=2), outer_every=2), units=[nn.Linear])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    found = []
    for _ in range(2):
        model(torch.full((4, 2), float(1 + ctx.rank))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(model.table[0].item())
    return found


def test_a_large_buffer_that_has_not_changed_since_it_was_sent_in_the_island_is_sent_to_all(ranks: RankPool) -> None:
    assert ranks(4, tables) == [[1.0, 1.0], [2.0, 1.0], [3.0, 1.0], [4.0, 1.0]]
