"""Rank 0 of many ranks that are not there.

The process group that torch's own tests use stands in for the others. What it gathers is this rank's shard again and
again, copied on the stream on which a gather would run; a reduction keeps what this rank has.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.gpu_model import Block, Shape
from benchmarks.gpu_training import Trained
from mics_strategy import ShardConfig, Topology, shard
from mics_strategy.comm.process_groups import ProcessGroups

WARM_UP = 3  # the order of units is known after the first step, all memory taken after the second
_PER_NODE = 8


@contextmanager
def pretended_ranks(world_size: int) -> Iterator[None]:
    """A default process group of `world_size` ranks of which only rank 0 runs; the others say what it says."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def same_on_all_ranks(value: object, _caller: str = "") -> list[object]:
        return [value] * world_size

    with ExitStack() as stack:
        for module in ("comm.process_groups", "comm.consensus", "engine.step", "engine.setup.materialize"):
            stack.enter_context(mock.patch(f"mics_strategy.{module}.gather_objects", same_on_all_ranks))
        # No rank sends the other digests, which make the sums 0.
        stack.enter_context(mock.patch.object(ProcessGroups, "desync_digest", 0))
        stack.enter_context(mock.patch("mics_strategy.engine.rank_agreement.zero_sum", return_value=0))
        stack.enter_context(mock.patch("mics_strategy.engine.rank_agreement.digest_weight", return_value=0))
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
        try:
            yield
        finally:
            dist.destroy_process_group()


def topology_of(world_size: int) -> Topology:
    """Nodes of 8 ranks."""
    return Topology(ranks_per_node=min(_PER_NODE, world_size))


def config_of(preset: str, world_size: int, *, overlap: str = "all") -> ShardConfig:
    """A preset with bf16 parameters and, where partitions have a size, one of a node."""
    topology = topology_of(world_size)
    return ShardConfig.preset(preset, partition_size="node", param_dtype="bfloat16", overlap=overlap, topology=topology)


def sharded(shape: Shape, device: torch.device, config: ShardConfig) -> tuple[Trained, int]:
    """A sharded model that was never whole, and the bytes that its engine says it allocated."""
    model = shape.model("meta")
    handle = shard(model, config, units=[Block], device=device)
    return Trained(model), handle.memory.total_bytes
