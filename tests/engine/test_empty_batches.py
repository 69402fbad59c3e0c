"""A rank that skips a backward, as for an empty batch, is named soon.

No training goes wrong without an error.
"""

import pytest
import torch
from torch import Tensor, nn

from mics_strategy import LifecycleError, ShardConfig, Topology, shard
from tests.ranks import RankContext, RankPool, raises_on_every_rank

SOON_S = 20.0  # the timeout of the process group; ranks of a busy machine need a few seconds


class Layers(nn.Module):
    """Four equal layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


def train_with_an_empty_batch(ctx: RankContext, preset: str, kind: str) -> list[float]:
    """In step 1 rank 1 has no loss; every rank's parameters at the end."""
    torch.manual_seed(0)
    model = Layers()
    config = ShardConfig.preset(preset, topology=Topology(ranks_per_node=ctx.ranks_per_node))
    shard(model, config, units=[nn.Linear])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        is_empty = step == 1 and (ctx.rank == 1 or kind == "skipped by all")
        outputs = model(torch.full((2, 6), 1.0 + ctx.rank + step))
        if not is_empty:
            outputs.square().mean().backward()
        elif kind == "zero":
            (outputs.sum() * 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.full_tensor().sum().item() for parameter in model.parameters()]


@pytest.mark.wide(every=3)
@pytest.mark.parametrize(
    ("preset", "world_size", "per_node"),
    [("mics", 2, 2), ("mics", 4, 2), ("zero3", 4, 2), ("zero2", 4, 2), ("ddp", 4, 2), ("zero1", 2, 2)],
)
def test_a_skipped_backward_raises_with_a_remedy(ranks: RankPool, preset: str, world_size: int, per_node: int) -> None:
    raises_on_every_rank(
        lambda: ranks(
            world_size, train_with_an_empty_batch, preset, "skipped", ranks_per_node=per_node, timeout_s=SOON_S
        ),
        LifecycleError,
        r"[Rr]ank \d has (begun|run) \d (backward passes|optimizer steps)(.|\n)*\(outputs.sum\(\) \* 0\).backward\(\)",
    )


@pytest.mark.parametrize("preset", ["mics", "zero2", "ddp"])
def test_the_advice_is_right(ranks: RankPool, preset: str) -> None:
    torch.manual_seed(0)
    plain = Layers()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        for rank in range(2):
            outputs = plain(torch.full((2, 6), 1.0 + rank + step))
            (outputs.square().mean() / 2 * (step != 1 or rank != 1)).backward()
        optimizer.step()
    expected = [parameter.sum().item() for parameter in plain.parameters()]
    for found in ranks(2, train_with_an_empty_batch, preset, "zero"):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("preset", ["mics", "zero2", "ddp"])
def test_all_ranks_may_skip_a_backward_together(ranks: RankPool, preset: str) -> None:
    first, second = ranks(2, train_with_an_empty_batch, preset, "skipped by all")
    assert first == second
