"""Loops and jobs that outer steps did not have in mind."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mics_strategy import Codec, ConfigError, MiCSError, ShardConfig, Topology, load_checkpoint, save_checkpoint, shard
from mics_strategy.comm.route import NEVER
from mics_strategy.outer.target import outer_of
from mics_strategy.tuning import autotune, coalesce
from tests.outer.plain import Net, Rounds, batch, loss_of
from tests.outer.test_outer_steps import config_of, run_step, start
from tests.ranks import RankContext, RankPool, simulate

ROUNDS = Rounds(every=2, steps=6)
SYNCHRONOUS = ShardConfig.preset("mics", topology=Topology(ranks_per_node=2), partition_size=2)


def steps(ctx: RankContext, model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
    for step in numbers:
        loss_of(model, batch(step, 0, ctx.rank), 1).backward()
        optimizer.step()
        optimizer.zero_grad()


def sgd(model: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=lr)


def two_models(ctx: RankContext) -> bool:
    trained = start(config_of("mics", ROUNDS, 2), ROUNDS)
    model = Net()
    shard(model, SYNCHRONOUS, units=[nn.Linear])
    optimizer = sgd(model)
    for step in range(6):
        run_step(ctx, ROUNDS, trained, step)
        steps(ctx, model, optimizer, range(step, step + 1))
    return True


def test_a_synchronous_model_trains_beside_one_of_islands(ranks: RankPool) -> None:
    assert all(ranks(4, two_models))


def load_part(ctx: RankContext) -> float:
    """A layer is loaded by itself behind an outer step; the next round begins with it."""
    model = Net()
    shard(model, config_of("ddp", ROUNDS, 2), units=[nn.Linear])
    optimizer = sgd(model, lr=1e-9)
    steps(ctx, model, optimizer, range(2))
    model.first.load_state_dict({"weight": torch.full((7, 5), 100.0).double(), "bias": torch.zeros(7).double()})
    steps(ctx, model, optimizer, range(2, 4))
    return float(model.first.weight.detach().mean())


def test_a_part_that_is_loaded_begins_a_round(ranks: RankPool) -> None:
    assert ranks(4, load_part) == pytest.approx([100.0] * 4, abs=1e-3)  # an outer step had made 133 of it


def shorter_round(ctx: RankContext, path: Path, every: int) -> int:
    rounds = Rounds(every=every, steps=6)
    trained = _, sharded, optimizer = start(config_of("mics", rounds, 2), rounds)
    if every == 3:
        for step in range(2):
            run_step(ctx, rounds, trained, step)
        save_checkpoint(path, sharded, [optimizer])
    else:
        load_checkpoint(path, sharded, [optimizer])
        run_step(ctx, rounds, trained, 2)
    outer = outer_of(sharded)
    assert outer is not None
    return outer.num_in_round


def test_a_round_that_was_longer_ends_at_the_next_step(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks(4, shorter_round, tmp_path / "saved", 3) == [2] * 4
    assert ranks(4, shorter_round, tmp_path / "saved", 2) == [0] * 4


class WithExtraState(Net):
    def get_extra_state(self) -> int:
        return 1

    def set_extra_state(self, state: int) -> None:
        assert state == 1


def another_head(ctx: RankContext, path: Path, is_first: bool) -> float:
    """Saved between outer steps, and loaded in a round, by a model with a head more."""
    model = WithExtraState()
    if not is_first:
        model.head = nn.Linear(5, 5).double()
    sharded = shard(model, config_of("mics", ROUNDS, 2), units=[nn.Linear])
    optimizer = sgd(model)
    if not is_first:
        steps(ctx, model, optimizer, range(1))
        load_checkpoint(path, sharded, [optimizer], strict=False)
        steps(ctx, model, optimizer, range(3, 4))
        return float(model.head.weight.detach().abs().sum())
    steps(ctx, model, optimizer, range(3))
    save_checkpoint(path, sharded, [optimizer])
    return 1.0


def test_a_model_with_another_head_continues_the_round(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks(4, another_head, tmp_path / "saved", True) == [1.0] * 4
    assert all(value > 0 for value in ranks(4, another_head, tmp_path / "saved", False))


def save_apart(ctx: RankContext, path: Path) -> str:
    rounds = Rounds(every=3, steps=6)
    trained = _, sharded, optimizer = start(config_of("mics", rounds, 2), rounds)
    for step in range(1 + ctx.rank // 2):
        run_step(ctx, rounds, trained, step)
    try:
        save_checkpoint(path, sharded, [optimizer])
    except MiCSError as error:
        return str(error)
    return ""


def test_islands_at_different_steps_do_not_save(ranks: RankPool, tmp_path: Path) -> None:
    words = "rank 0 has run 1 steps, 1 of them since the last outer step, and rank 2 2, 2 of them"
    assert all(words in text for text in ranks(4, save_apart, tmp_path / "saved"))
    assert not (tmp_path / "saved").exists()


def shard_linears(ctx: RankContext, fields: dict[str, Any]) -> int:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    topology = Topology(ranks_per_node=2, nodes_per_switch=2 if ctx.world_size == 8 else 0)
    sharded = shard(model, ShardConfig.preset("mics", topology=topology, outer_every=2, **fields), units=[nn.Linear])
    return sharded.internals.groups.resources.num_groups


@pytest.mark.parametrize(
    ("module", "fields", "num_ranks"),
    [
        (coalesce, {"coalesce": "auto"}, 4),
        (autotune, {"hierarchical": "auto", "partition_size": 4, "coalesce": False}, 8),
    ],
    ids=["coalesce", "hierarchical"],
)
def test_rank_0_chooses_for_all_islands(
    module: Any, fields: dict[str, Any], num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where what each island has in its cache would differ."""
    found = iter([NEVER, *[65536] * 100])
    monkeypatch.setattr(module, "backend_key", lambda group, device: "a backend")
    monkeypatch.setattr(module, "load_cached", lambda key: next(found))
    monkeypatch.setattr(module, "store_result", lambda *_: None)
    assert len(set(simulate(num_ranks, shard_linears, fields, ranks_per_node=2))) == 1


def test_a_codec_that_rounds_at_random_is_refused() -> None:
    with pytest.raises(ConfigError, match="the same shard would step on different sums"):
        ShardConfig.preset("mics", outer_every=2, outer_codec=Codec(bits=8, rounding="stochastic"))
