"""All other ranks name a rank that does not answer, within the user's timeout."""

import os
import re
import signal
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mics_strategy import CommunicationError, ShardConfig, Topology, shard
from mics_strategy.comm.consensus import gather_objects
from mics_strategy.engine.handle import Sharded
from tests.ranks import RankContext, RankError, RankPool

TIMEOUT_S = 3.0
LIMITS = {"default_group": False, "timeout_s": TIMEOUT_S + 9.0}  # what a busy machine may add


class Layers(nn.Module):
    """Four equal layers; what `trouble` does happens in the backward of the second."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.trouble = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x).tanh()
            if index == 1 and x.requires_grad:
                x.register_hook(lambda _: self.trouble())
        return x


def init_with_timeout(ctx: RankContext) -> None:
    """As a user does. Rank 0 has the store."""
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", rank=ctx.rank, world_size=ctx.world_size, timeout=timeout)


def stall() -> None:
    Path("silent").write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)


def sharded_layers(ctx: RankContext, preset: str, options: dict[str, object]) -> tuple[Layers, Sharded]:
    """Layers in a job whose user has given a timeout."""
    init_with_timeout(ctx)
    config = ShardConfig.preset(preset, topology=Topology(ranks_per_node=ctx.ranks_per_node), **options)
    model = Layers()
    return model, shard(model, config, units=[nn.Linear])


def train_until_a_rank_stops(
    ctx: RankContext, preset: str, options: dict[str, object], silent: int, where: str
) -> None:
    """In the second step rank `silent` stalls in its backward or before clipping."""
    model, sharded = sharded_layers(ctx, preset, options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    is_second = False

    def stop() -> None:
        if ctx.rank == silent and is_second:
            stall()

    if where == "backward":
        model.trouble = stop
    for step in range(3):
        is_second = step == 1
        try:
            model(torch.ones(2, 6)).sum().backward()
            if where == "clip":
                stop()
            sharded.clip_grad_norm_(1.0)
        except CommunicationError:
            kill_the_stalled_rank(ctx)
            raise
        optimizer.step()
        optimizer.zero_grad()


def gather_objects_without_a_rank(ctx: RankContext) -> None:
    """Rank 1 stands still where all ranks compare something for the second time."""
    init_with_timeout(ctx)
    gather_objects(ctx.rank)
    if ctx.rank == 1:
        stall()
    try:
        gather_objects(ctx.rank)
    except CommunicationError:
        kill_the_stalled_rank(ctx)
        raise


def kill_the_stalled_rank(ctx: RankContext) -> None:
    """Kill it when all other ranks have written their file."""
    Path(f"timed out {ctx.rank}").touch()
    while len(list(Path().glob("timed out *"))) < ctx.world_size - 1:
        time.sleep(0.02)
    with suppress(ProcessLookupError):
        os.kill(int(Path("silent").read_text()), signal.SIGKILL)


@pytest.mark.wide(every=3)
@pytest.mark.parametrize(
    ("world_size", "per_node", "preset", "options", "silent", "where"),
    [
        (2, 1, "mics", {"hierarchical": True}, 1, "backward"),  # through sockets
        (4, 2, "zero3", {}, 2, "backward"),
        (4, 2, "ddp", {}, 3, "clip"),
        (4, 2, "mics", {}, 0, "backward"),  # in the memory of a neighbour
    ],
)
def test_all_other_ranks_name_a_stalled_rank_within_the_timeout(
    ranks: RankPool,
    world_size: int,
    per_node: int,
    preset: str,
    options: dict[str, object],
    silent: int,
    where: str,
) -> None:
    arguments = (preset, options, silent, where)
    with pytest.raises(RankError) as failure:
        ranks(world_size, train_until_a_rank_stops, *arguments, ranks_per_node=per_node, **LIMITS)
    check_all_name(silent, failure.value)


def check_all_name(silent: int, failure: RankError) -> None:
    errors = dict(failure.by_rank)
    assert isinstance(errors.pop(silent), ChildProcessError)
    assert len(errors) == failure.world_size - 1
    named = rf"No answer from (rank {silent}\b|the store of the job either, which rank {silent} )"
    for error in errors.values():
        assert isinstance(error, CommunicationError), repr(error)
        assert re.search(named, str(error)), str(error)


def test_a_rank_that_is_missing_in_a_consensus_check_is_named(ranks: RankPool) -> None:
    with pytest.raises(RankError) as failure:
        ranks(3, gather_objects_without_a_rank, **LIMITS)
    check_all_name(1, failure.value)
