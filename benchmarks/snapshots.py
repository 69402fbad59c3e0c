"""What snapshots in host memory cost: windows of steps with one snapshot beside windows without, in pairs.

``torchrun --nproc-per-node 2 -m benchmarks.snapshots``: two ranks, each a node, on one machine. On CPUs the background
takes cores from the training, which it does not on GPUs.
"""

import argparse
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn

from mics_strategy import MemorySnapshots, Topology, shard


def main() -> None:
    """Print the ratio of the times of windows, and what a snapshot took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="mics", help="preset of the sharding")
    parser.add_argument("--width", type=int, default=1024, help="of six linear layers")
    parser.add_argument("--batch", type=int, default=64, help="samples of a step on each rank")
    parser.add_argument("--pairs", type=int, default=10, help="pairs of windows")
    parser.add_argument("--every", type=int, default=0, help="steps of a window; default: those of every='auto'")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(args.width, args.width), nn.Tanh())]
    model = nn.Sequential(*layers)
    sharded = shard(model, args.preset, units=[nn.Linear], topology=Topology(ranks_per_node=1), hierarchical=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = torch.randn(args.batch, args.width)

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:  # of each rank, which plays a node
        snapshots = MemorySnapshots(sharded, [optimizer], folder=folder)
        for _ in range(3):  # the first allocates
            for _ in range(5):
                step()
                snapshots.count_step()
            snapshots.take({"step": 1})
            snapshots.finish()
        automatic = snapshots.interval
        every = args.every or automatic

        def window_s(*, has_snapshot: bool) -> float:
            dist.barrier()
            start_s = time.perf_counter()
            if has_snapshot:
                snapshots.take({"step": 1})
            for _ in range(every):
                step()
            snapshots.finish()
            dist.barrier()
            return time.perf_counter() - start_s

        pairs = [(window_s(has_snapshot=True), window_s(has_snapshot=False)) for _ in range(args.pairs)]
        cost = snapshots.cost
        snapshots.close()
    if dist.get_rank() == 0 and cost is not None:
        ratios = sorted(with_s / without_s for with_s, without_s in pairs)
        low, median, high = (ratios[len(ratios) * quarter // 4] for quarter in (1, 2, 3))
        step_ms = 1e3 * statistics.median(pair[1] for pair in pairs) / every
        print(f"a step takes {step_ms:.1f} ms; a snapshot every {every} steps ({automatic} with 'auto')")
        print(f"a snapshot: {cost}")
        print(f"ratio in {len(pairs)} pairs of windows: median {median:.3f}, quartiles {low:.3f} to {high:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
