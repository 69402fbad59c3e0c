"""Several sharded models in one process, each with its own scopes, in any order."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mics_strategy import ShardConfig, Sharded, Topology, shard
from tests import models
from tests.engine.training import assert_same, wholes
from tests.ranks import RankContext, RankPool

PAIRS = [("mics", "zero3"), ("ddp", "mics"), ("zero1", "zeropp-hpz"), ("paro-iig", "paro-iig"), ("zero3", "zero2")]
Shard = Callable[[nn.Module, str], Sharded | None]
Weights = dict[str, Tensor]


def _batch(step: int, rank: int) -> Tensor:
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(100 * step + rank))


def _actor_and_critic(presets: tuple[str, str], make: Shard, ranks: list[int], one_optimizer: bool) -> Weights:
    """The critic judges what the actor does.

    Each learns from the other, and the critic takes two steps to one.
    """
    actor, critic = models.mlp().build(), nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    torch.manual_seed(3)
    for parameter in critic.parameters():
        nn.init.normal_(parameter)
    for model, preset in zip((actor, critic), presets, strict=True):
        make(model, preset)
    both = [*actor.parameters(), *critic.parameters()]
    optimizers = [
        torch.optim.AdamW(group, lr=0.01, eps=1e-3)
        for group in ([both] if one_optimizer else [actor.parameters(), critic.parameters()])
    ]
    for step in range(3):
        for rank in ranks:
            x = _batch(step, rank)
            actions = actor(x)
            judged = critic(actions.detach())
            score = critic(actions)
            (judged.square().mean() / len(ranks)).backward()
            (score.mean() / len(ranks)).backward()
        for optimizer in optimizers:
            optimizer.step()
        for rank in ranks:
            (critic(_batch(step + 50, rank)[:, :3]).square().mean() / len(ranks)).backward()
        optimizers[-1].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    return wholes({f"{i}.{name}": p for i, model in enumerate((actor, critic)) for name, p in model.named_parameters()})


def _sharded(model: nn.Module, preset: str) -> Sharded:
    return shard(model, ShardConfig.preset(preset, topology=Topology(ranks_per_node=2)), units=[nn.Linear])


def train(ctx: RankContext, presets: tuple[str, str], one_optimizer: bool) -> Weights:
    return _actor_and_critic(presets, _sharded, [ctx.rank], one_optimizer)


@pytest.mark.parametrize("presets", PAIRS, ids=str)
@pytest.mark.parametrize("one_optimizer", [True, False])
def test_actor_and_critic_train_as_plain(ranks: RankPool, presets: tuple[str, str], one_optimizer: bool) -> None:
    expected = _actor_and_critic(presets, lambda *_: None, list(range(4)), one_optimizer)
    for found in ranks(4, train, presets, one_optimizer, ranks_per_node=2):
        assert_same(found, expected)


def train_declared(ctx: RankContext, presets: tuple[str, str]) -> Weights:
    """Both second hops overlap the other model's backward, in shared groups."""
    pair = [models.mlp().build() for _ in presets]
    handles = [_sharded(model, preset) for model, preset in zip(pair, presets, strict=True)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in pair]
    for step in range(3):
        losses = [model(_batch(step, ctx.rank)).square().mean() for model in pair]
        with handles[0].micro_step(0, of=1), handles[1].micro_step(0, of=1):
            losses[1].backward()
            losses[0].backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return wholes({f"{i}.{name}": p for i, model in enumerate(pair) for name, p in model.named_parameters()})


@pytest.mark.parametrize("preset", ["mics", "zero3", "zero1", "paro-iig"])
def test_twins_with_second_hops_under_each_other_stay_equal_to_plain_ones(ranks: RankPool, preset: str) -> None:
    model = models.mlp().build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        for rank in range(4):
            (model(_batch(step, rank)).square().mean() / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = {f"{i}.{name}": p.detach() for i in range(2) for name, p in model.named_parameters()}
    for found in ranks(4, train_declared, (preset, preset), ranks_per_node=2):
        assert_same(found, expected)


def count_groups(ctx: RankContext) -> list[int]:
    """Process groups after each of three models."""
    kept, counts = [], []
    for preset in ("mics", "mics", "zero3"):
        kept.append(_sharded(models.mlp().build(), preset))
        counts.append(len(dist.distributed_c10d._world.pg_map))
    return counts


def test_models_share_process_groups_of_the_same_role(ranks: RankPool) -> None:
    for one, two, with_another_scope in ranks(4, count_groups, ranks_per_node=2):
        assert two == one + 1 < with_another_scope  # all-reduces have a group of each model's own


def _one_default_group_after_another(ctx: RankContext) -> list[tuple[Tensor, Tensor]]:
    """Norms of parameters, and the plain ones, in two jobs of a process whose groups have other names."""
    found = []
    for job in range(2):
        store = dist.FileStore(str(ctx.tmp_path / f"store-{job}"), ctx.world_size)
        dist.init_process_group("gloo", store=store, rank=ctx.rank, world_size=ctx.world_size)
        for _ in range(job):
            dist.new_group([0, 1])  # as a script makes them: later groups get other numbers
        model = models.mlp().build()
        plain = torch.stack([parameter.detach().norm() for parameter in model.parameters()])
        shard(model, ShardConfig.preset("mics", partition_size=2))
        norms = torch.tensor([float(parameter.detach().norm()) for parameter in model.parameters()])
        found.append((plain, norms))
        dist.barrier()
        dist.destroy_process_group()
    return found


def test_operations_use_the_groups_of_the_present_default_group(ranks: RankPool) -> None:
    for of_rank in ranks(4, _one_default_group_after_another, default_group=False):
        for plain, sharded in of_rank:
            torch.testing.assert_close(sharded, plain)
