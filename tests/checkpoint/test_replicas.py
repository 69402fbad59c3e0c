"""Is every piece written once, and does no rank write more than its share?"""

import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.planner import WriteItem
from torch.testing._internal.distributed.fake_pg import FakeStore

from mics_strategy import CheckpointError, ShardConfig, Topology, load_checkpoint, save_checkpoint, shard
from mics_strategy.checkpoint.save_planner import SaveItem, ShardedSavePlanner, items_to_write
from mics_strategy.checkpoint.state import ReplicaId, local_state
from tests.checkpoint.test_sharded import run_of
from tests.engine.training import start
from tests.ranks import RankContext, RankPool, raises_on_every_rank

WORLD_SIZE, PER_NODE = 512, 8


@pytest.mark.parametrize("count", [1, 2, 7, 64])
def test_copies_share_the_bytes(count: int) -> None:
    chance = random.Random(count)
    sizes = {f"layer.{number}": chance.choice([0, 4, 1000, 50_000]) for number in range(40)}
    by_copy = [
        items_to_write(SaveItem(name, size, ReplicaId(index, count)) for name, size in sizes.items())
        for index in range(count)
    ]
    assert sorted(name for names in by_copy for name in names) == sorted(sizes)
    share = sum(sizes.values()) / count
    assert max(sum(sizes[name] for name in names) for names in by_copy) <= share + max(sizes.values())


def test_the_order_does_not_matter() -> None:
    pieces = [SaveItem(f"layer.{number}", number % 3, ReplicaId(number % 2, 2)) for number in range(20)]
    assert items_to_write(pieces) == items_to_write(reversed(pieces))


def _same_on_all_ranks(value: object, _caller: str = "") -> list[object]:
    """The values of 512 ranks with the same script and configuration; the fake transport exchanges none."""
    return [value] * WORLD_SIZE


def planned(ctx: RankContext, ranks: range) -> list[list[tuple[str, int]]]:
    """Name and bytes of every item that each of `ranks`, of 512, would write. Nothing is trained or written."""
    plans = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("comm.process_groups", "comm.consensus", "engine.setup.materialize"):
            patch.setattr(f"mics_strategy.{name}.gather_objects", _same_on_all_ranks)
        for rank in ranks:
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD_SIZE)
            model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(12)))
            config = ShardConfig.preset("mics", topology=Topology(ranks_per_node=PER_NODE))
            sharded = shard(model, config, units=[nn.Linear], device="cpu")
            optimizer = torch.optim.AdamW(model.parameters())
            for p in model.parameters():
                optimizer.state[p] = {key: p.like_self(torch.zeros_like(p.local)) for key in ("exp_avg", "exp_avg_sq")}
            items = ShardedSavePlanner(local_state(sharded, [optimizer])).plan.items
            plans.append([(item.index.fqn, _num_bytes(item)) for item in items if item.tensor_data is not None])
            dist.destroy_process_group()
    return plans


def _num_bytes(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize


def test_of_512_ranks_none_writes_twice_or_more_than_its_share(ranks: RankPool) -> None:
    """All 64 ranks that hold one shard."""
    holders = range(7, WORLD_SIZE, PER_NODE)
    (by_rank,) = ranks(1, planned, holders, default_group=False)
    names = [name for items in by_rank for name, _ in items]
    assert len(names) == len(set(names)) == 3 * 24  # weights and biases, with both moments
    sizes = [sum(num_bytes for _, num_bytes in items) for items in by_rank]
    assert sum(sizes) == 3 * 4 * 12 * (16 + 1) * 16 // PER_NODE
    assert max(sizes) <= sum(sizes) / len(holders) + 4 * 16 * 16 // PER_NODE


def save_without(ctx: RankContext, preset: str, path: Path) -> None:
    """Rank 1 has no states of the largest parameter."""
    training = start(ctx, run_of(preset))
    training.step(0)
    if ctx.rank == 1:
        training.optimizer.state.pop(max(training.model.parameters(), key=lambda parameter: parameter.numel()))
    save_checkpoint(path, training.sharded, [training.optimizer])


@pytest.mark.parametrize(("preset", "ranks_of_it"), [("ddp", "0, 1, 2, 3"), ("mics", "1, 3")])
def test_copies_that_differ_are_refused(ranks: RankPool, tmp_path: Path, preset: str, ranks_of_it: str) -> None:
    """Each rank computes who writes what. With different pieces the ranks would not agree, and some would be lost."""
    raises_on_every_rank(
        lambda: ranks(4, save_without, preset, tmp_path / "one"),
        CheckpointError,
        rf"Nothing was saved: ranks {ranks_of_it} should hold the same state.*optimizer_0\.state\..*\.exp_avg",
    )
    assert list(tmp_path.iterdir()) == []


class Scaled(nn.Module):
    """A layer with a gain, which is a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.gain = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + self.gain) + torch.tanh(self.layer(x))


def save_and_load_scalars(ctx: RankContext, config: ShardConfig, path: Path) -> list[torch.Tensor]:
    """Gains of this rank, outputs before and after the load, and of a training that goes on without and with it."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Scaled() for _ in range(4)))
    sharded = shard(model, config, units=[Scaled])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    inputs = torch.randn(3, 4, generator=torch.Generator().manual_seed(ctx.rank))

    def train() -> None:
        for _ in range(12):
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    train()
    gains = torch.stack([block.gain.detach().to_local() for block in model])
    save_checkpoint(path, sharded, [optimizer])
    with torch.no_grad():
        before = model(inputs)
    train()
    continued = model(inputs).detach()
    load_checkpoint(path, sharded, [optimizer])
    with torch.no_grad():
        after = model(inputs)
    train()
    return [gains, before, after, continued, model(inputs).detach()]


@pytest.mark.parametrize(
    "config",
    [ShardConfig.preset("zeropp"), ShardConfig.preset("zero3", grad_codec="int4", codec_links="all")],
    ids=["zeropp", "zero3"],
)
def test_forwards_after_a_load_use_the_scalars_that_were_saved(
    ranks: RankPool, tmp_path: Path, config: ShardConfig
) -> None:
    """Although the copies of ranks differ in their last bits, as sums of encoded gradients do."""
    results = ranks(4, save_and_load_scalars, config, tmp_path, ranks_per_node=2)
    assert not all(torch.equal(gains, results[0][0]) for gains, *_ in results), "equal copies: the test shows nothing"
    for _, before, after, continued, resumed in results:
        assert torch.equal(before, after)
        assert torch.equal(continued, resumed)
