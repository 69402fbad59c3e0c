"""An unsharded model equals torch's data parallelism bit for bit.

Replicas are equal.
"""

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from mics_strategy import ShardConfig
from tests import models
from tests.engine.training import OPTIMIZERS, Run, assert_identical, start, train_without_reading
from tests.ranks import RankContext, RankPool

pytestmark = [pytest.mark.wide, pytest.mark.one_job]

UNSHARDED = {"ddp": ShardConfig.preset("ddp"), "mics": ShardConfig.preset("mics", partition_size=1)}
cases = pytest.mark.parametrize(
    "case",
    [models.mlp, models.transformer, models.conv_bn, models.tied, models.frozen, models.scalar, models.shared],
    ids=lambda case: case.__name__,
)


def train_torch(ctx: RankContext, run: Run) -> dict[str, Tensor]:
    case = run.case()
    model = case.build()
    parallel = DistributedDataParallel(model)
    optimizer = OPTIMIZERS[run.optimizer]([p for p in model.parameters() if p.requires_grad])
    for step in range(run.steps):
        for micro in range(run.accumulation):
            is_last = micro == run.accumulation - 1
            parallel.require_backward_grad_sync = is_last
            (case.loss(parallel, case.batch(step, micro, ctx.rank)) / run.accumulation).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@cases
@pytest.mark.parametrize("config", UNSHARDED.values(), ids=UNSHARDED)
@pytest.mark.parametrize("accumulation", [1, 3])
def test_unsharded_training_is_torchs_bit_for_bit(
    ranks: RankPool, case: object, config: ShardConfig, accumulation: int
) -> None:
    run = Run(case=case, config=config, optimizer="adamw", accumulation=accumulation)
    assert_identical(ranks(2, train_without_reading, run)[0], ranks(2, train_torch, run)[0])


@pytest.mark.parametrize("preset", ["zero1", "zero2", "zero3"])
def test_sharded_training_on_two_ranks_is_torchs_bit_for_bit(ranks: RankPool, preset: str) -> None:
    """Sums of two have one order."""
    run = Run(case=models.transformer, config=ShardConfig.preset(preset), optimizer="adamw")
    assert_identical(ranks(2, train_without_reading, run)[0], ranks(2, train_torch, run)[0])


def local_shards(ctx: RankContext, run: Run) -> tuple[list[int], list[Tensor], list[Tensor]]:
    """Ranks with the same shard, the shards, and the unsharded parameters."""
    training = start(ctx, run)
    for step in range(run.steps):
        training.step(step)
    outputs = [training.model(training.case.batch(9, 9, 9)["x"]).detach()]
    span = training.sharded.scopes.span(training.sharded.scopes.optimizer, ctx.world_size)
    return span.group_ranks(ctx.rank), [p.to_local().detach() for p in training.model.parameters()], outputs


@pytest.mark.parametrize("options", [{}, {"reduce_dtype": "bfloat16"}, {"param_dtype": "bfloat16"}], ids=str)
@pytest.mark.parametrize("preset", ["ddp", "mics", "paro-nni"])
def test_replicas_hold_the_same_bits(ranks: RankPool, preset: str, options: dict) -> None:
    config = ShardConfig.preset(preset, **options)
    run = Run(case=models.transformer, config=config, accumulation=2, optimizer="adamw")
    results = ranks(4, local_shards, run, ranks_per_node=2)
    for members, shards, outputs in results:
        for member in members:
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(shards, results[member][1], strict=True))
        assert torch.equal(outputs[0], results[0][2][0])


def start_from_other_weights(ctx: RankContext, run: Run) -> list[Tensor]:
    torch.manual_seed(ctx.rank)
    training = start(ctx, run.replace(case=other_weights))
    return list(training.parameters().values())


def other_weights() -> models.Case:
    case = models.mlp()
    return models.Case(
        build=lambda: torch.nn.Sequential(torch.nn.Linear(5, 9), torch.nn.Linear(9, 3)),
        batch=case.batch,
        loss=case.loss,
        units=(torch.nn.Linear,),
    )


@pytest.mark.parametrize("preset", ["ddp", "mics", "paro-iig"])
def test_all_ranks_start_from_the_first_ranks_values(ranks: RankPool, preset: str) -> None:
    results = ranks(4, start_from_other_weights, Run(case=models.mlp, config=ShardConfig.preset(preset)))
    torch.manual_seed(0)
    expected = [p.detach() for p in other_weights().build().parameters()]
    for found in [expected, *results]:
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
