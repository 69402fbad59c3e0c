"""Gradients that are sent in fp16 stay finite and equal those of FSDP2."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from mics_strategy import ShardConfig, Topology, shard
from mics_strategy.engine.grad_bucket import predivisor_of
from tests.ranks import RankContext, RankPool

LARGE = 20_000.0  # 4 of them together overflow
VALUES = [LARGE, -LARGE, 1.0, 1 / 3, 3e-5, 2.0**-24, 0.0, 7e-6]  # of each rank; the last but two halved is nothing


def _gradient(model: nn.Module, num_micro_steps: int = 1, *, reads: bool = False) -> Tensor:
    for _ in range(num_micro_steps):
        (model(torch.ones(1, 1)) * torch.tensor(VALUES) / num_micro_steps).sum().backward()
        assert not reads or model.weight.grad is not None  # which finishes it
    return model.weight.grad.full_tensor().flatten()


def our_gradients(ctx: RankContext, preset: str, options: dict[str, object]) -> list[Tensor]:
    """After one micro-step, after two, and after two of which each was finished."""
    config = ShardConfig.preset(preset, reduce_dtype="float16", topology=Topology(ranks_per_node=2), **options)
    model = nn.Linear(1, len(VALUES), bias=False)
    shard(model, config)
    found = []
    for num_micro_steps, reads in ((1, False), (2, False), (2, True)):
        found.append(_gradient(model, num_micro_steps, reads=reads).clone())
        model.zero_grad()
    return found


@pytest.mark.parametrize(
    ("preset", "options"),
    [
        ("ddp", {}),
        ("zero2", {}),
        ("mics", {}),
        ("mics", {"param_dtype": "float16"}),
        ("paro-iig", {}),
        ("zero3", {"hierarchical": True}),
        ("zero3", {"hierarchical": False}),
    ],
    ids=str,
)
def test_reductions_of_large_gradients_do_not_overflow(
    ranks: RankPool, preset: str, options: dict[str, object]
) -> None:
    for gradients in ranks(4, our_gradients, preset, options, ranks_per_node=2):
        for gradient in gradients:
            torch.testing.assert_close(gradient, torch.tensor(VALUES), rtol=2e-3, atol=2e-7)


def both_gradients(ctx: RankContext) -> tuple[Tensor, Tensor]:
    model = nn.Linear(1, len(VALUES), bias=False)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16))
    return our_gradients(ctx, "zero3", {"hierarchical": True})[0], _gradient(model)


def test_gradients_are_those_of_fsdp2(ranks: RankPool) -> None:
    for ours, theirs in ranks(4, both_gradients):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=0.0)  # torch rounds at every rank


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 6, 8, 64, 512])
def test_half_of_the_division_comes_before_the_sum(num_ranks: int) -> None:
    before = predivisor_of(torch.float16, num_ranks)
    assert num_ranks / 2 <= before * before <= 4 * num_ranks or num_ranks == before == 1
    assert predivisor_of(torch.bfloat16, num_ranks) == predivisor_of(torch.float32, num_ranks) == 1
