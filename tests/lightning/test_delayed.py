"""Does a Trainer train with delayed second hops as a loop does, finish the last step, and resume?"""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from mics_strategy import ShardConfig, Topology, finish_delayed, shard
from tests.lightning.modules import Layer, Regression, loader
from tests.lightning.runs import assert_same, full, mics, run, trainer, whole
from tests.ranks import RankContext, RankPool

BATCHES = 5  # of two samples, for each rank


def own_batches(ctx: RankContext) -> DataLoader[Any]:
    samples = loader(BATCHES * 2 * ctx.world_size).dataset
    return DataLoader(Subset(samples, range(ctx.rank, len(samples), ctx.world_size)), batch_size=2)


def fit(
    ctx: RankContext, name: str, epochs: int, folder: str, resumed: str | None, accumulation: int
) -> dict[str, Tensor]:
    """Whole parameters; checkpoints are saved after every epoch."""
    strategy = mics("mics", second_hop="delayed", state_dict_type="sharded")
    callback = ModelCheckpoint(
        folder, every_n_train_steps=BATCHES, save_top_k=-1, save_on_train_epoch_end=False, filename="{step}"
    )
    fitting = trainer(
        ctx,
        strategy,
        max_epochs=epochs,
        gradient_clip_val=0.5,
        enable_checkpointing=True,
        callbacks=[callback],
        accumulate_grad_batches=accumulation,
        use_distributed_sampler=False,
    )
    fitting.fit(Regression(name), own_batches(ctx), ckpt_path=resumed)
    assert not finish_delayed(fitting.strategy.sharded)
    return whole(fitting)


def by_hand(ctx: RankContext, epochs: int, accumulation: int) -> dict[str, Tensor]:
    model = Regression("sgd")
    sharded = shard(
        model, ShardConfig.preset("mics", second_hop="delayed", topology=Topology(ranks_per_node=2)), units=[Layer]
    )
    sharded.register_forward_method(model, "loss")  # uses a parameter outside of the forward
    optimizer = model.configure_optimizers()

    def step() -> None:
        sharded.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(epochs):
        for number, data in enumerate(own_batches(ctx)):
            (model.loss(data) / accumulation).backward()
            if (number + 1) % accumulation == 0 or number == BATCHES - 1:
                step()
    assert finish_delayed(sharded)
    step()
    return {name: full(parameter) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("epochs", "accumulation"), [(1, 1), (2, 1), (2, 2)])
def test_a_trainer_steps_and_finishes_as_a_loop_does(
    ranks: RankPool, tmp_path: Path, epochs: int, accumulation: int
) -> None:
    found = run(ranks, 4, fit, "sgd", epochs, str(tmp_path), None, accumulation, ranks_per_node=2)
    for own, expected in zip(found, ranks(4, by_hand, epochs, accumulation), strict=True):
        assert_same(own, expected)


@pytest.mark.parametrize("saved", [5, 10])
def test_a_trainer_resumes_bit_by_bit(ranks: RankPool, tmp_path: Path, saved: int) -> None:
    uninterrupted = run(ranks, 4, fit, "adam_scheduler", 3, str(tmp_path / "first"), None, 1, ranks_per_node=2)
    resumed = str(tmp_path / "first" / f"step={saved}.ckpt")
    found: list[Any] = run(ranks, 4, fit, "adam_scheduler", 3, str(tmp_path / "second"), resumed, 1, ranks_per_node=2)
    for own, expected in zip(found, uninterrupted, strict=True):
        assert all(torch.equal(own[name], value) for name, value in expected.items())
