"""Models, configurations and loops drawn from seeds: nothing races, no ranks wait in a circle."""

from unittest import mock

import pytest

from mics_strategy.engine.streams import OpChain
from tests.cuda_harness.launch_order import find_circle, find_mismatch
from tests.cuda_harness.machine import Machine
from tests.cuda_harness.random_models import Drawn
from tests.cuda_harness.runs import one_of_many
from tests.cuda_harness.simulated_ranks import simulate_gpus
from tests.rank_report import RankContext

RANKS, PER_NODE = 4, 2
FEW, MANY = range(6), range(6, 60)
MAY_WAIT = ("rank_agreement.py", "module_buffers.py")  # which rank used what; whether large buffers have changed


def _alone(seed: int) -> Machine:
    with one_of_many() as machine:
        Drawn(seed, ranks_per_node=4).train(machine, num_steps=6)
    return machine


@pytest.mark.wide
@pytest.mark.parametrize("seed", [*FEW, *(pytest.param(seed, marks=pytest.mark.slow) for seed in MANY)])
def test_nothing_races_or_waits(seed: int) -> None:
    machine = _alone(seed)
    assert machine.races == []
    assert [wait for wait in machine.waits if not any(name in wait for name in MAY_WAIT)] == []


def test_a_missing_wait_is_found_with_most_seeds() -> None:
    with mock.patch.object(OpChain, "wait"):
        assert sum(bool(_alone(seed).races) for seed in FEW) >= len(FEW) // 2


def _job(ctx: RankContext, machine: Machine, seed: int) -> None:
    Drawn(seed, ranks_per_node=PER_NODE).train(machine, num_steps=4, rank=ctx.rank, reentrant=False)


@pytest.mark.wide
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))])
def test_ranks_do_not_wait_in_a_circle(seed: int) -> None:
    machines, _ = simulate_gpus(RANKS, _job, seed, ranks_per_node=PER_NODE, moves_data=False)
    launches = [machine.launches for machine in machines]
    assert find_mismatch(launches) == ""
    assert find_circle(launches) == []
    assert find_circle(launches, blocking=True) == []
    assert [machine.races for machine in machines] == [[]] * RANKS
