"""A job that trains a little and saves after every step, to be killed; started by `test_kill` as torchrun would."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from mics_strategy import ShardConfig, shard
from mics_strategy.checkpoint.save import finish_saves, save_checkpoint


def value_after(step: int) -> float:
    """What every parameter holds after `step` steps."""
    return float(step)


def main(folder: Path, steps: int) -> None:
    """Every parameter grows by one in a step; the step's number is in the name and in `extra`, too."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(4)))
    sharded = shard(model, ShardConfig.preset("mics"), units=[nn.Linear])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for step in range(1, steps + 1):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(value_after(step))
        path = folder / ("last" if step % 2 else f"step-{step}")
        save_checkpoint(path, sharded, [optimizer], {"step": step}, asynchronous=step % 3 == 0)
        if dist.get_rank() == 0:
            print(step, flush=True)
    finish_saves(sharded)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
