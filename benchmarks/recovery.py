"""What recovery costs where no rank dies: steps in attempts beside steps without, in pairs of windows.

``torchrun --nproc-per-node 4 -m benchmarks.recovery``: four ranks on two nodes, which one machine simulates.
"""

import argparse
import contextlib
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn

from mics_strategy import Recovery, Topology, shard


def main() -> None:
    """Print the ratio of step times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=512, help="of six linear layers")
    parser.add_argument("--samples", type=int, default=32, help="of a rank in a step")
    parser.add_argument("--windows", type=int, default=20, help="pairs of windows")
    parser.add_argument("--steps", type=int, default=20, help="steps of a window")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(args.width, args.width), nn.Tanh())]
    model = nn.Sequential(*layers)
    sharded = shard(model, "mics", units=[nn.Linear], topology=Topology(ranks_per_node=dist.get_world_size() // 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = torch.randn(args.samples, args.width)

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def window_s(recovery: Recovery | None) -> float:
        dist.barrier()
        times_s = []
        for _ in range(args.steps):
            start_s = time.perf_counter()
            with contextlib.nullcontext() if recovery is None else recovery.attempt():
                step()
            times_s.append(time.perf_counter() - start_s)
        return statistics.median(times_s)

    window_s(None)
    pairs = []
    for _ in range(args.windows):
        recovery = Recovery(sharded, [optimizer])
        with_s = window_s(recovery)
        recovery.close()
        pairs.append((with_s, window_s(None)))
    if dist.get_rank() == 0:
        ratios = sorted(with_s / without_s for with_s, without_s in pairs)
        low, median, high = (ratios[len(ratios) * quarter // 4] for quarter in (1, 2, 3))
        without_ms = 1e3 * statistics.median(pair[1] for pair in pairs)
        print(f"step without recovery: {without_ms:.2f} ms")
        print(f"ratio in {len(pairs)} pairs of windows: median {median:.3f}, quartiles {low:.3f} to {high:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
