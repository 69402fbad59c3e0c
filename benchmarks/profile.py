"""What does recording a step cost?

``torchrun --nproc-per-node 2 -m benchmarks.profile --width 512 --layers 4`` trains a small model on gloo. Rounds of
steps that are recorded and rounds of steps that are not take turns in one run; rank 0 prints the ratio of their medians
and how many marks a step has. Wall time is that of a step between barriers; CPU time, of all threads of rank 0, says
more on a machine that other processes use. The gather after the last recorded step is not counted.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from io import StringIO

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mics_strategy import Sharded, shard

Cost = tuple[float, float]  # wall and CPU seconds of a step


class Layer(nn.Module):
    """x + two layers; one unit."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """As the class says."""
        out: Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    options = parser().parse_args(arguments)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(options.width) for _ in range(options.layers)))
    sharded = shard(model, options.preset, units=[Layer])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = torch.randn(options.batch, options.width)

    def step() -> Cost:
        dist.barrier()
        start_s, cpu_start_s = time.perf_counter(), time.process_time()
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - start_s, time.process_time() - cpu_start_s

    plain, recorded, num_marks = measure(sharded, step, options.rounds, options.steps)
    if dist.get_rank() == 0:
        for position, name in enumerate(("wall", "CPU")):
            before, after = (statistics.median(cost[position] for cost in costs) for costs in (plain, recorded))
            print(
                f"{name} time: {before * 1e3:.2f} ms a step, recorded {after * 1e3:.2f} ms, ratio {after / before:.4f}"
            )
        print(f"{num_marks:.0f} marks a step")
    dist.barrier()
    dist.destroy_process_group()
    return 0


def measure(
    sharded: Sharded, step: Callable[[], Cost], rounds: int, steps: int
) -> tuple[list[Cost], list[Cost], float]:
    """Costs of plain and of recorded steps, and marks of a recorded step."""
    plain: list[Cost] = []
    recorded: list[Cost] = []
    num_marks = 0
    for _ in range(steps):
        step()
    for _ in range(rounds):
        plain += [step() for _ in range(steps)]
        with redirect_stdout(StringIO()):
            profile = sharded.profile(steps + 1)
            recorded += [step() for _ in range(steps)]
            step()
        num_marks = len(profile.result.own_rows[0].intervals)
    return plain, recorded, num_marks / (steps + 1)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.profile", description=__doc__)
    options.add_argument("--width", type=int, default=512)
    options.add_argument("--layers", type=int, default=4)
    options.add_argument("--batch", type=int, default=256, help="rows of a rank")
    options.add_argument("--rounds", type=int, default=8)
    options.add_argument("--steps", type=int, default=10, help="of a round")
    options.add_argument("--preset", default="zero3")
    return options


if __name__ == "__main__":
    sys.exit(main())
