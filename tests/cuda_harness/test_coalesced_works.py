"""Is the end of several collectives in one launch known to who waits for it, whatever object torch gives for it?"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.cuda_harness.machine import Machine
from tests.cuda_harness.runs import one_of_many
from tests.cuda_harness.simulated_ranks import simulate_gpus
from tests.rank_report import RankContext

RANKS = 4


def _gather(fulls: list[torch.Tensor], shards: list[torch.Tensor]) -> Any:
    return dist.group.WORLD.allgather_into_tensor_coalesced(fulls, shards)


def _sum_shards(fulls: list[torch.Tensor], shards: list[torch.Tensor]) -> Any:
    return dist.group.WORLD.reduce_scatter_tensor_coalesced(shards, fulls)


def _sum(fulls: list[torch.Tensor], shards: list[torch.Tensor]) -> Any:
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in (*fulls, *shards):
            dist.all_reduce(tensor)
    return manager


LAUNCHES = (_gather, _sum_shards, _sum)


def _use(machine: Machine, launch: Callable[..., Any], waits: bool) -> list[float]:
    """Values of two shards and two full tensors, one more than a collective has left there."""
    shards, fulls = ([torch.ones(numel, device=machine.device) for _ in range(2)] for numel in (1, RANKS))
    work = launch(fulls, shards)
    if waits:
        work.wait()
    for tensor in (*shards, *fulls):
        tensor.add_(1)
    return [tensor.tolist()[-1] for tensor in (*shards, *fulls)]


def _simulated(ctx: RankContext, machine: Machine, launch: Callable[..., Any], waits: bool) -> list[float]:
    return _use(machine, launch, waits)


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("launch", LAUNCHES)
def test_one_of_many_knows_when_coalesced_collectives_end(launch: Callable[..., Any], waits: bool) -> None:
    with one_of_many(RANKS) as machine:
        _use(machine, launch, waits)
    assert bool(machine.races) is not waits
    assert machine.works.num_in_flight == (0 if waits else 1)


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("moves_data", [True, False])
@pytest.mark.parametrize("launch", LAUNCHES)
def test_simulated_ranks_know_when_coalesced_collectives_end(
    launch: Callable[..., Any], moves_data: bool, waits: bool
) -> None:
    machines, values = simulate_gpus(RANKS, _simulated, launch, waits, ranks_per_node=2, moves_data=moves_data)
    assert [bool(machine.races) for machine in machines] == [not waits] * RANKS
    assert [machine.works.num_in_flight for machine in machines] == [0 if waits else 1] * RANKS
    if moves_data:
        is_summed = [launch is not _gather] * 2 + [launch is _sum] * 2
        assert values == [[1.0 + (RANKS if each else 1) for each in is_summed]] * RANKS
