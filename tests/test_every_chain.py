"""Does every allowed combination of scopes train as plain, and send what was planned?

Of 8 ranks half of them are tried, of 16 a sixth.

One training takes steps of 1, 2 and 1 micro-steps, so both ways of accumulating, and the change between them, are seen.
"""

from collections import Counter
from dataclasses import dataclass, field
from functools import cache

import pytest
from torch import Tensor

from mics_strategy import ShardConfig
from tests import models
from tests.engine.chains import REAL, SIMULATED, chains
from tests.engine.counting import CountC10d, Kind, planned_kinds
from tests.engine.training import OPTIMIZERS, Run, assert_same, start
from tests.ranks import RankContext, RankPool, simulate
from tests.reference import Trace, train_reference

MICRO_STEPS = (1, 2, 1)
OPTIMIZER = "momentum"


@dataclass(slots=True)
class Seen:
    """What one rank saw of one chain."""

    grads: dict[str, Tensor] = field(default_factory=dict)  # of the step with several micro-steps
    parameters: dict[str, Tensor] = field(default_factory=dict)


def _train(ctx: RankContext, config: ShardConfig) -> Seen:
    training, seen = start(ctx, Run(case=models.scalar, config=config, optimizer=OPTIMIZER)), Seen()
    for step, micro_steps in enumerate(MICRO_STEPS):
        for micro in range(micro_steps):
            (training.loss(step, micro) / micro_steps).backward()
        if micro_steps > 1:
            seen.grads = training.grads()
        training.optimizer.step()
        training.optimizer.zero_grad()
    seen.parameters = training.parameters()
    return seen


def _count(ctx: RankContext, config: ShardConfig) -> list[tuple[Counter[Kind], Counter[Kind]]]:
    """Issued and planned collectives of every step but the first."""
    training, found = start(ctx, Run(case=models.scalar, config=config)), []
    for step, micro_steps in enumerate(MICRO_STEPS):
        with CountC10d() as counted:
            for micro in range(micro_steps):
                training.loss(step, micro).backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
        found.append((counted.kinds, planned_kinds(training.sharded.plan)))
    return found[1:]


def _train_all(ctx: RankContext, configs: list[ShardConfig]) -> list[Seen]:
    return [_train(ctx, config) for config in configs]


def _count_all(ctx: RankContext, configs: list[ShardConfig]) -> list[list[tuple[Counter[Kind], Counter[Kind]]]]:
    return [_count(ctx, config) for config in configs]


@cache
def _plain(world_size: int) -> Trace:
    case = models.scalar()
    batches = [
        [[case.batch(step, micro, rank) for rank in range(world_size)] for micro in range(micro_steps)]
        for step, micro_steps in enumerate(MICRO_STEPS)
    ]
    return train_reference(case.build(), batches, OPTIMIZERS[OPTIMIZER], loss_fn=case.loss)


def _check(configs: list[ShardConfig], by_rank: list[list[Seen]]) -> None:
    trace = _plain(len(by_rank))
    for of_rank in by_rank:
        for config, seen in zip(configs, of_rank, strict=True):
            try:
                assert_same(seen.grads, trace.grads[1])
                assert_same(seen.parameters, trace.parameters)
            except AssertionError as error:
                raise AssertionError(f"{config}: {error}") from error


def test_the_chains_are_all_there() -> None:
    """Counted by hand for the degrees 1, 2 and 4: 18 chains with the optimizer on 4 ranks, 6 on 2, 1 on 1."""
    assert [len(list(chains(*topology))) for topology in REAL] == [1, 25, 25, 25]
    assert [len(list(chains(*topology))) for topology in SIMULATED] == [65, 140, 140]


@pytest.mark.wide(every=3)
@pytest.mark.parametrize(("nodes", "per_node"), REAL)
def test_every_chain_of_real_ranks_trains_as_plain(ranks: RankPool, nodes: int, per_node: int) -> None:
    configs = list(chains(nodes, per_node))
    _check(configs, ranks(nodes * per_node, _train_all, configs, ranks_per_node=per_node))
    print(f"{len(configs)} chains on {nodes} nodes of {per_node} ranks")


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "per_node"), REAL)
def test_every_chain_of_real_ranks_sends_what_was_planned(ranks: RankPool, nodes: int, per_node: int) -> None:
    configs = list(chains(nodes, per_node))
    for of_rank in ranks(nodes * per_node, _count_all, configs, ranks_per_node=per_node):
        for config, found in zip(configs, of_rank, strict=True):
            assert all(issued == planned for issued, planned in found), config


def _simulate(ctx: RankContext, nodes: int, per_node: int, configs: list[ShardConfig]) -> int:
    """Job of a process that simulates all ranks itself. Returns the number of chains that were right."""
    mine = configs[ctx.rank :: ctx.world_size]
    _check(mine, simulate(nodes * per_node, _train_all, mine, ranks_per_node=per_node))
    return len(mine)


def _portions() -> list[tuple[int, int, list[ShardConfig]]]:
    """Half of the chains of 8 ranks; of 16, which take long, a sixth: another one of each topology."""
    portions = []
    for first, topology in enumerate(SIMULATED):
        configs = list(chains(*topology))
        configs = configs[first :: 6 if topology[0] * topology[1] > 8 else 2]
        portions += [(*topology, configs[start : start + 35]) for start in range(0, len(configs), 35)]
    return portions


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "per_node", "configs"), _portions())
def test_chains_of_simulated_ranks_train_as_plain(
    ranks: RankPool, nodes: int, per_node: int, configs: list[ShardConfig]
) -> None:
    done = ranks(2, _simulate, nodes, per_node, configs, default_group=False)
    assert sum(done) == len(configs)
    print(f"{len(configs)} chains on {nodes} nodes of {per_node} simulated ranks")
