"""Checkpoints around several units, on ranks whose losses see different ones: one order of collectives."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tests import models
from tests.engine.recomputed import BUILDS, Nest, Shift, Unseen
from tests.engine.training import Run, assert_same_training, plain, presets, train_each
from tests.models import Batch, Case, Residual
from tests.ranks import RankPool

UNSEEN: tuple[Unseen, ...] = ((), (1, 2), (0, 1, 2, 3, 4, 5), (5,), (2, 3, 4), (0, 4, 5))


def unseen_on_some_ranks(build: Callable[[], nn.Module]) -> Case:
    vectors = models.unused()

    def seeded() -> nn.Module:
        torch.manual_seed(5)
        return build()

    def batch(step: int, micro: int, rank: int) -> Batch:
        return {"x": vectors.batch(step, micro, rank)["x"], "unseen": UNSEEN[(step + micro + rank) % len(UNSEEN)]}

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["x"], batch["unseen"]).square().mean()

    return Case(build=seeded, batch=batch, loss=loss, units=(Residual, Nest, Shift))


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("overlap", ["all", "none"])
def test_ranks_whose_losses_see_different_recomputed_units(ranks: RankPool, build: str, overlap: str) -> None:
    configs = presets(("zeropp-hpz", "paro-igg"), overlap=overlap)
    case = partial(unseen_on_some_ranks, BUILDS[build])
    runs = [Run(case=case, config=config, accumulation=2, steps=3, signal=True) for config in configs]
    for outcomes in zip(*ranks(4, train_each, runs, ranks_per_node=2, timeout_s=60.0), strict=True):
        assert_same_training(list(outcomes), plain(runs[0], 4))
