"""Is a rank that stays slower than the others named, and no other one?"""

import contextlib
import io
import re
import time

import torch
from torch import nn

from mics_strategy import ConfigError, ShardConfig, Sharded, StragglerWatch, Topology, shard
from tests.ranks import RankContext, RankPool, assert_refused, refusal

SLOW_S = 0.3  # beside some milliseconds of a step
SLOW_RANK = 2


class Training:
    """A small model, whose steps are printed into a string."""

    def __init__(self, ctx: RankContext) -> None:
        torch.manual_seed(0)
        self.rank = ctx.rank
        self.model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        config = ShardConfig.preset("mics", topology=Topology(ranks_per_node=2))
        self.sharded: Sharded = shard(self.model, config, units=[nn.Linear])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.printed = io.StringIO()

    def watch(self, in_a_row: int = 2) -> StragglerWatch:
        return StragglerWatch(self.sharded, self.optimizer, slower_by=4.0, in_a_row=in_a_row, steps=1, every=2)

    def run(self, steps: int, *, has_slow_rank: bool) -> None:
        with contextlib.redirect_stdout(self.printed):
            for _ in range(steps):
                time.sleep(SLOW_S if has_slow_rank and self.rank == SLOW_RANK else 0.0)
                self.model(torch.ones(2, 8)).square().mean().backward()
                self.optimizer.step()
                self.optimizer.zero_grad()


def named(watch: StragglerWatch) -> list[tuple[int, str]]:
    return [(slow.rank, str(slow.reason)) for slow in watch.slow]


def slow_for_a_while(ctx: RankContext) -> tuple[list[list[tuple[int, str]]], str]:
    """Who is named from time to time: a rank is slow, keeps up, and is slow again."""
    training = Training(ctx)
    watch = training.watch()
    found = []
    for has_slow_rank in (False, True, True, True, False, True, True):
        training.run(2, has_slow_rank=has_slow_rank)  # from the second time on, a window is the first step of both
        found.append(named(watch))
    watch.close()
    training.run(4, has_slow_rank=True)
    assert named(watch) == found[-1]
    assert training.sharded.internals.engine.ranges.recorder is None
    return found, training.printed.getvalue()


def test_a_rank_is_named_once_it_was_slow_in_several_windows(ranks: RankPool) -> None:
    by_rank = ranks(4, slow_for_a_while, ranks_per_node=2)
    slow = [(SLOW_RANK, "data")]
    for found, _ in by_rank:
        assert found == [[], [], slow, slow, [], [], slow]
    lines = by_rank[0][1].splitlines()
    assert len(lines) == 2
    for line in lines:
        assert re.fullmatch(
            r"`StragglerWatch`: step \d+: rank 2 on \S+ stays slow: .* more .* in data \(data\)\.", line
        )
    assert [printed for _, printed in by_rank[1:]] == [""] * 3


def beside_a_profile(ctx: RankContext) -> tuple[int, list[tuple[int, str]], list[tuple[int, str]]]:
    """Steps of a profile that begins within a window and lasts over two more, and who is named then and later."""
    training = Training(ctx)
    watch = training.watch(in_a_row=1)
    training.run(2, has_slow_rank=True)
    profile = training.sharded.profile(steps=4)
    training.run(4, has_slow_rank=True)
    while_profiled = named(watch)
    training.run(4, has_slow_rank=True)
    watch.close()
    return profile.result.num_steps, while_profiled, named(watch)


def test_a_profile_takes_the_place_of_windows(ranks: RankPool) -> None:
    assert ranks(4, beside_a_profile, ranks_per_node=2) == [(4, [], [(SLOW_RANK, "data")])] * 4


def weights_of(ctx: RankContext, is_watched: bool) -> list[torch.Tensor]:
    training = Training(ctx)
    if is_watched:
        training.watch()
    training.run(5, has_slow_rank=False)
    return [parameter.to_local().clone() for parameter in training.sharded.internals.parameters]


def test_the_training_is_as_without(ranks: RankPool) -> None:
    watched, plain = (ranks(4, weights_of, is_watched, ranks_per_node=2) for is_watched in (True, False))
    for one, other in zip(watched, plain, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def mistakes(ctx: RankContext) -> list[object]:
    training = Training(ctx)
    wrong = [{"slower_by": 1.0}, {"in_a_row": 0}, {"steps": 0}, {"steps": 5, "every": 5}, {"every": 50 + ctx.rank}]
    return [
        refusal(ctx, lambda _, options=options: StragglerWatch(training.sharded, training.optimizer, **options))
        for options in wrong
    ]


def test_mistakes_are_refused_on_every_rank(ranks: RankPool) -> None:
    expected = ["slower_by=1.0", "in_a_row=0", "steps=0", "every=5", "`every` differs between ranks: 50 on rank 0"]
    by_rank = ranks(4, mistakes, ranks_per_node=2)
    for errors, match in zip(zip(*by_rank, strict=True), expected, strict=True):
        assert_refused(errors, ConfigError, match)
