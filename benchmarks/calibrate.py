"""What does `hierarchical="auto"` find on slow links?

``python -m benchmarks.calibrate --rate-mbit 100 --nodes 2 --ranks-per-node 2`` shards a small model over nodes with
such links and prints what its rank 0 says. It needs what `compare` needs; see docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence

import torch
import torch.distributed as dist

from benchmarks.launch import Launch, RankFailedError, launch
from benchmarks.testbed import TestbedError, make_testbed
from mics_strategy import shard

_TIMEOUT_S = 120.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 0 when all ranks have ended well."""
    options = parser().parse_args(arguments)
    try:
        print(calibrate_on(options.nodes, options.ranks_per_node, options.rate_mbit, options.preset))
    except (TestbedError, RankFailedError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.calibrate", description=__doc__)
    options.add_argument("--nodes", type=int, default=2)
    options.add_argument("--ranks-per-node", type=int, default=2)
    options.add_argument("--rate-mbit", type=float, default=100.0, help="of the link of each node, in each direction")
    options.add_argument("--preset", default="zero3", help="whose collectives are measured")
    return options


def calibrate_on(nodes: int, ranks_per_node: int, rate_mbit: float, preset: str) -> str:
    """What rank 0 prints on nodes with such links; nothing of it is kept for other jobs.

    Raises:
        TestbedError: Nodes cannot be made here.
        RankFailedError: A rank failed.
    """
    with (
        tempfile.TemporaryDirectory(prefix="cache-") as cache,
        make_testbed(nodes=nodes, rate_mbit=rate_mbit) as bed,
    ):
        job = Launch(
            command=[sys.executable, "-c", f"from benchmarks.calibrate import run; run({preset!r})"],
            ranks_per_node=ranks_per_node,
            timeout_s=_TIMEOUT_S,
            env={"XDG_CACHE_HOME": cache},
        )
        return launch(bed, job)[0].strip()


def run(preset: str) -> None:
    """What every rank does, under the environment of a launcher."""
    dist.init_process_group("gloo")
    shard(torch.nn.Linear(8, 8), preset)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
