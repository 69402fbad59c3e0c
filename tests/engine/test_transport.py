"""Bytes counted by the kernel, and bytes read from peers, equal `traffic()`."""

import os
import socket
import struct
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mics_strategy import ShardConfig, Topology, shard
from mics_strategy.comm import peer_memory
from tests.ranks import RankContext, RankPool

BYTES_ACKED = 120  # offset in Linux's struct tcp_info, a u64


def bytes_sent() -> int:
    """Bytes that peers have acknowledged on all TCP connections of this process."""
    total = 0
    for path in Path("/proc/self/fd").iterdir():
        if path.is_symlink() and os.readlink(path).startswith("socket:"):
            with socket.socket(fileno=os.dup(int(path.name))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    total += struct.unpack_from("Q", info, BYTES_ACKED)[0]
    return total


def count_third_step(ctx: RankContext, preset: str, options: dict[str, str]) -> tuple[int, int, int, int]:
    """Bytes by the kernel, bytes read, and bytes by `traffic()`.

    The latter in all, and between nodes.
    """
    read: list[int] = []
    read_into = peer_memory.read_into

    def counted(out: torch.Tensor, process: int, address: int) -> None:
        read_into(out, process, address)
        read.append(out.numel() * out.itemsize)

    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))
    config = ShardConfig.preset(preset, topology=Topology(ranks_per_node=2), **options)
    sharded = shard(model, config, units=[nn.Linear])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        dist.barrier()
        before = bytes_sent()
        read.clear()
        with mock.patch.object(peer_memory, "read_into", counted):
            for _ in range(2):
                model(torch.ones(2, 1024)).sum().backward()
            optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
    said = sum(row.sent_bytes for row in sharded.traffic())
    between = sum(row.sent_bytes for row in sharded.traffic() if "inter_node" in row.axis)
    deadline_s = time.monotonic() + 5.0
    while bytes_sent() - before + sum(read) < said and time.monotonic() < deadline_s:
        time.sleep(0.01)  # the last ones have arrived, but may not be acknowledged yet
    return bytes_sent() - before, sum(read), said, between


@pytest.mark.parametrize("preset", ["ddp", "zero1", "zero2", "zero3", "mics", "hsdp", "paro-iig", "paro-nig"])
@pytest.mark.parametrize("options", [{}, {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16"}], ids=["fp32", "bf16"])
def test_bytes_counted_by_the_kernel_equal_traffic(ranks: RankPool, preset: str, options: dict[str, str]) -> None:
    for counted, read, said, between in ranks(4, count_third_step, preset, options):
        assert said > 4_000_000
        assert counted >= between
        assert said <= counted + read <= 1.01 * said  # above it, the headers of messages
