"""A job with `init_process_group("nccl")`: objects travel as tensors on the current device, which must be the rank's.

NCCL refuses two ranks that use one GPU, and the current device of each rank is number 0 at first.
"""

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from mics_strategy import shard
from tests.cuda_harness.machine import Machine
from tests.cuda_harness.runs import WIDTH, Layer, Tower, Training, config_of
from tests.cuda_harness.simulated_ranks import simulate_gpus
from tests.rank_report import RankContext

RANKS, PER_NODE = 4, 2
Devices = Counter[int]  # object collectives of one rank, by the current device


def _job(ctx: RankContext, machine: Machine, devices: dict[int, Devices], preset: str, sets_device: bool) -> None:
    """Shard, train, gather weights."""
    devices[ctx.rank] = Counter()
    with mock.patch.object(torch.cuda, "set_device", torch.cuda.set_device if sets_device else lambda _: None):
        model = Tower(buffers=(100,))
        sharded = shard(model, config_of(preset, ranks_per_node=PER_NODE), units=[Layer])
        optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(model.parameters())]
        batch = torch.randn(4, WIDTH).to(machine.device)
        Training(model, sharded, optimizers, machine, batch).step()
        sharded.full_state_dict()


def _devices_of_objects(preset: str, *, sets_device: bool = True) -> dict[int, Devices]:
    devices: dict[int, Devices] = {}

    def of_nccl(group: Any = None) -> str:
        devices[dist.get_rank()][torch.cuda.current_device()] += 1
        return "cuda"  # the device type of the only backend; objects are moved to the current one

    with mock.patch.object(dist.distributed_c10d, "_get_object_coll_device", of_nccl):
        simulate_gpus(RANKS, _job, devices, preset, sets_device, ranks_per_node=PER_NODE, one_device=False)
    return devices


@pytest.mark.parametrize("preset", ["mics", "ddp"])
def test_objects_travel_on_the_gpu_of_their_rank(preset: str) -> None:
    devices = _devices_of_objects(preset)
    assert [set(devices[rank]) for rank in range(RANKS)] == [{rank % PER_NODE} for rank in range(RANKS)]
    assert all(min(found.values()) >= 4 for found in devices.values())


def test_objects_on_the_first_gpu_of_all_ranks_are_found() -> None:
    devices = _devices_of_objects("mics", sets_device=False)
    assert [set(devices[rank]) for rank in range(RANKS)] == [{0}] * RANKS
