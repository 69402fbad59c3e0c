"""Gradients reduced in place are bitwise equal to those of the flat buffer."""

import gc
import os
import signal
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from mics_strategy import ShardConfig, Sharded, Topology, shard
from mics_strategy.comm.peer_memory import readv
from mics_strategy.comm.placement import full_tensor
from mics_strategy.engine import zero_copy
from mics_strategy.engine.grad_bucket import GradBucket
from mics_strategy.engine.lifecycle import GradFlag, GradFlags
from mics_strategy.engine.memory import GradCopies
from mics_strategy.engine.zero_copy import PeerReadGrads
from mics_strategy.errors import CommunicationError
from tests.engine.training import forget_meshes
from tests.ranks import RankContext, RankError, RankPool

READ = readv.read_into
COLLECT = GradBucket.add
STEPS = 3
WIDTH = 12


class Awkward(nn.Module):
    """Rows that leave no rest, and some that do; fewer rows than ranks.

    Columns that are cut; a number.
    """

    def __init__(self) -> None:
        super().__init__()
        self.even = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.uneven = nn.Parameter(torch.randn(WIDTH + 7, WIDTH))
        self.row = nn.Parameter(torch.randn(1, WIDTH))
        self.few = nn.Parameter(torch.randn(2))
        self.number = nn.Parameter(torch.randn(()))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(x @ self.even) @ self.uneven.t()
        return x + hidden[:, :WIDTH] * self.row * self.number + self.few.sum()


class Skipping(Awkward):
    """Its wide parameter is used by rank 0 alone, and by nobody in the second step."""

    def __init__(self) -> None:
        super().__init__()
        self.sometimes = nn.Parameter(torch.randn(4, WIDTH))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        is_used = torch.distributed.get_rank() == 0 and self.calls not in (3, 4)
        return super().forward(x) + (self.sometimes.sum(0) if is_used else 0.0)


class Graph(Awkward):
    """Nothing about it is special; its gradients shall be part of a graph."""


def flat_only(*_: object) -> None:
    """In place of `plan_in_place_reduce`: all gradients take the flat form."""


def collect_halves(self: GradBucket, position: int, grad: Tensor) -> None:
    """In place of `collect`: every gradient arrives twice."""
    for _ in range(2):
        COLLECT(self, position, grad / 2)


def trained(
    ctx: RankContext, block: type[nn.Module], preset: str, per_node: int, how: str
) -> tuple[dict[str, Tensor], Counter[str]]:
    """Parameters after some steps, and numbers of kept and of copied gradients."""
    forget_meshes()
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), block(), block())
    dtypes = {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16"} if how.endswith("bf16") else {}
    config = ShardConfig.preset(preset, topology=Topology(ranks_per_node=per_node), **dtypes)
    counts: Counter[str] = Counter()
    select, copy = PeerReadGrads.select, GradCopies.copy

    def counted_select(self: PeerReadGrads, grads: dict[int, Tensor], flags: GradFlags) -> dict[int, Tensor]:
        kept = select(self, grads, flags)
        counts["kept"] += len(kept)
        return kept

    def counted_copy(
        self: GradCopies, flat: Tensor, grads: dict[int, Tensor], added: GradFlag, flags: GradFlags
    ) -> None:
        counts["copied"] += len(grads)
        copy(self, flat, grads, added, flags)

    def late(out: readv.Target, process: int, addresses: Sequence[int]) -> None:
        time.sleep(0.01 * (ctx.rank % 2))
        READ(out, process, addresses)

    with ExitStack() as patched:
        patched.enter_context(mock.patch.object(PeerReadGrads, "select", counted_select))
        patched.enter_context(mock.patch.object(GradCopies, "copy", counted_copy))
        if how.startswith("flat"):
            patched.enter_context(mock.patch("mics_strategy.engine.grad_bucket.plan_in_place_reduce", flat_only))
        if how == "in halves":
            patched.enter_context(mock.patch.object(GradBucket, "add", collect_halves))
        if how == "short descriptors":
            patched.enter_context(mock.patch.object(zero_copy, "IOV_MAX", 1))
        if how == "late":
            patched.enter_context(mock.patch.object(readv, "read_into", late))
        sharded = shard(model, config, units=[block])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        for step in range(STEPS):
            _backward(ctx, model, sharded, step, is_in_graph=block is Graph)
            optimizer.step()
            optimizer.zero_grad()
    return {name: full_tensor(p).clone() for name, p in model.named_parameters()}, counts


def _backward(ctx: RankContext, model: nn.Module, sharded: Sharded, step: int, *, is_in_graph: bool) -> None:
    for micro in range(2):
        torch.manual_seed(100 * step + 10 * micro + ctx.rank)
        with sharded.micro_step(micro, of=2):
            loss = model(torch.randn(3, WIDTH, requires_grad=True)).square().mean()
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Using backward.. with create_graph", UserWarning)
                loss.backward(create_graph=is_in_graph)
            del loss
    gc.collect()


@pytest.mark.parametrize(
    ("block", "world", "preset", "how"),
    [
        (Awkward, 2, "zero3", "in place"),
        (Awkward, 6, "mics", "late"),
        (Awkward, 4, "paro-nig", "in place"),
        (Skipping, 4, "mics", "in place"),
        (Awkward, 4, "mics", "in halves"),
        (Graph, 4, "mics", "in place"),
        (Awkward, 2, "zero3", "short descriptors"),
        (Awkward, 4, "mics", "in place bf16"),
    ],
)
def test_zero_copy_reductions_are_bitwise_equal(
    ranks: RankPool, block: type[nn.Module], world: int, preset: str, how: str
) -> None:
    per_node, flat = world if preset == "zero3" else world // 2, "flat bf16" if how.endswith("bf16") else "flat"
    one, other = (ranks(world, trained, block, preset, per_node, each, ranks_per_node=per_node) for each in (how, flat))
    for (found, counts), (expected, flat_counts) in zip(one, other, strict=True):
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert flat_counts["kept"] == 0
        assert (counts["kept"] > 0) == (block is not Graph and how not in ("short descriptors", "in halves"))
        if how in ("in place", "late") and block is not Graph:
            assert counts["copied"] < flat_counts["copied"] / 3


def has_memory(pid: int) -> bool:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) > 0
    except (FileNotFoundError, ProcessLookupError):
        return False


def lose_a_rank(ctx: RankContext) -> None:
    """Rank 1 dies when rank 0 is about to read a gradient of it."""
    pid_file = ctx.tmp_path / "pid"
    if ctx.rank == 1:
        pid_file.write_text(str(os.getpid()))
    model = nn.Sequential(Awkward(), Awkward())
    shard(model, ShardConfig.preset("zero3", topology=Topology(ranks_per_node=2)), units=[Awkward])

    def read_into(out: readv.Target, process: int, addresses: Sequence[int]) -> None:
        if isinstance(out, readv.GatherTarget):
            dying = int(pid_file.read_text())
            os.kill(dying, signal.SIGKILL)
            while has_memory(dying):  # it takes a while, in which it can still be read
                time.sleep(0.001)
        READ(out, process, addresses)

    with mock.patch.object(readv, "read_into", read_into if ctx.rank == 0 else READ):
        for _ in range(2):
            model(torch.ones(3, WIDTH)).sum().backward()


def test_when_a_rank_dies_during_a_peer_memory_read_the_other_names_the_collective(ranks: RankPool) -> None:
    with pytest.raises(RankError) as failure:
        ranks(2, lose_a_rank, ranks_per_node=2, timeout_s=20.0)
    error = failure.value.by_rank[0]
    assert isinstance(error, CommunicationError)
    assert "rank 1" in str(error)
    assert "Reduce-scatter of 1" in str(error)
