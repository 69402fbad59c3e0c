"""Four ranks on one GPU, with real sums: gloo moves CUDA tensors (NCCL refuses two ranks on a device).

``python -m tests.gpu.real_sums PRESET [OPTIONS]`` trains as plain PyTorch does, or ends with an error. Streams, events,
autograd's thread and every line of the CUDA branches run; only NCCL itself and its overlap do not.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from mics_strategy import ShardConfig, Topology, shard
from tests import models
from tests.reference import train_reference

WORLD, STEPS, MICRO_STEPS = 4, 3, 2


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def rank_main(rank: int, store: str, preset: str, options: dict[str, Any]) -> None:
    """One rank: train, and compare its own rows."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    case = models.transformer()
    expected = train_reference(case.build(), case.batches(STEPS, MICRO_STEPS, WORLD), sgd, loss_fn=case.loss).parameters
    with mock.patch("mics_strategy.api.target_device", return_value=device):
        model = case.build()
        # one stage and no groups of tensors: gloo has neither `all_to_all` of lists nor a sound coalesced gather
        config = ShardConfig.preset(
            preset,
            topology=Topology(ranks_per_node=2),
            partition_size="node",
            hierarchical=False,
            coalesce=False,
            **options,
        )
        sharded = shard(model, config, units=case.units)
    optimizer = sgd(list(model.parameters()))
    for step in range(STEPS):
        for micro in range(MICRO_STEPS):
            batch = {name: value.to(device) for name, value in case.batch(step, micro, rank).items()}
            with sharded.micro_step(micro, of=MICRO_STEPS):
                (case.loss(model, batch) / MICRO_STEPS).backward()
        sharded.clip_grad_norm_(1e9)
        optimizer.step()
        optimizer.zero_grad()
    for parameter in sharded.internals.parameters:
        rows = parameter.mics_slice.narrow(expected[parameter.mics_name], parameter.mics_index)
        torch.testing.assert_close(parameter.local.detach().cpu(), rows, rtol=1e-4, atol=1e-5)
    dist.barrier()
    dist.destroy_process_group()


def main(preset: str, options: str = "{}") -> None:
    """Train on all ranks."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (str(Path(folder, "store")), preset, json.loads(options)), nprocs=WORLD)
    print("equal")


if __name__ == "__main__":
    main(*sys.argv[1:])
