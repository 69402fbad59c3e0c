"""What `restart_on_loss` refuses, on every rank, before any group is destroyed."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mics_strategy import ConfigError, Recovery, Topology, restart_on_loss, shard
from tests.ranks import RankContext, RankPool

CASES: dict[str, tuple[dict[str, Any], str]] = {
    "no time": ({"lost_after_s": 0}, "lost_after_s=0"),
    "a negative wait": ({"wait_for_node_s": -1.0}, "wait_for_node_s=-1.0"),
    "a wait that is too long": ({"wait_for_node_s": 1e9}, "less than the timeout of the default group"),
    "no address": ({"join": "here"}, "join='here'"),
}


def never() -> None:
    raise AssertionError("the training has begun")


def refused(ctx: RankContext, options: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as raised:
        restart_on_loss(never, **options)
    dist.barrier()  # the default group is as it was
    return str(raised.value)


@pytest.mark.parametrize(("options", "problem"), CASES.values(), ids=CASES)
def test_wrong_options_are_refused(options: dict[str, Any], problem: str, ranks: RankPool) -> None:
    for text in ranks(2, refused, options):
        assert problem in text


def wrong_on_one(ctx: RankContext) -> str:
    return refused(ctx, {"lost_after_s": 5.0 if ctx.rank else -1.0})


def test_all_ranks_refuse_what_one_refuses(ranks: RankPool) -> None:
    assert all("lost_after_s=-1.0" in text and "found on rank 0" in text for text in ranks(2, wrong_on_one))


def unequal(ctx: RankContext) -> str:
    return refused(ctx, {"wait_for_node_s": float(ctx.rank)})


def test_ranks_must_agree(ranks: RankPool) -> None:
    assert all("`wait_for_node_s` differs between ranks" in text for text in ranks(2, unequal))


def beside_recovery(ctx: RankContext) -> str:
    model = nn.Linear(4, 4)
    sharded = shard(model, "ddp", topology=Topology(ranks_per_node=1))
    recovery = Recovery(sharded, [torch.optim.SGD(model.parameters(), lr=0.1)])
    try:
        return refused(ctx, {})
    finally:
        recovery.close()


def test_one_way_to_go_on_is_enough(ranks: RankPool) -> None:
    assert all("already uses `Recovery` or `restart_on_loss`" in text for text in ranks(2, beside_recovery))


def on_nccl(ctx: RankContext) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend_config", lambda *_: "cpu:gloo,cuda:nccl")
        return refused(ctx, {})


def test_nccl_is_refused_with_what_to_use(ranks: RankPool) -> None:
    assert all("needs gloo" in text and "torchrun --max-restarts" in text for text in ranks(2, on_nccl))
