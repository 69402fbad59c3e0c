"""Does a Trainer continue from its snapshot in host memory as from its own checkpoint of the same place?"""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from mics_strategy import ConfigError, MemorySnapshots
from tests.lightning.fabric_runs import launched, values
from tests.lightning.fabric_runs import mics as fabric_mics
from tests.lightning.modules import Regression
from tests.lightning.runs import mics, run, trainer, whole
from tests.ranks import RankContext, RankPool

NUM_EPOCHS, DIES_AT, EVERY = 3, 8, 3


class Dropping(Regression):
    """Dropout, a scheduler, and a list of the data that each step has seen."""

    def __init__(self) -> None:
        super().__init__("adam_scheduler")
        self.dropout = nn.Dropout(0.5)
        self.seen: list[tuple[int, float]] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.dropout(self.layers(self.dropout(x)))))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.seen.append((self.trainer.global_step, batch[0].sum().item()))
        return super().training_step(batch, batch_idx)


class Dies(Callback):
    """Raises on every rank behind a step."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == DIES_AT:
            trainer.strategy._snapshots.finish()
            raise RuntimeError("of a script")


class Saves(Callback):
    """Writes the Trainer's own checkpoint behind the step of the snapshot."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == DIES_AT // EVERY * EVERY:
            trainer.save_checkpoint("own.ckpt")


def data() -> DataLoader[Any]:
    values = torch.arange(32 * 6, dtype=torch.float32).view(32, 6) / 64
    return DataLoader(TensorDataset(values, values.sum(1, keepdim=True)), batch_size=4, shuffle=True)


def fit(ctx: RankContext, recovery: Any, *callbacks: Callback, ckpt_path: str | None = None) -> Any:
    torch.manual_seed(7)
    module = Dropping()
    strategy = mics("zero3", recovery=recovery)
    fitting = trainer(ctx, strategy, max_epochs=NUM_EPOCHS, callbacks=list(callbacks))
    fitting.fit(module, data(), ckpt_path=ckpt_path)
    return module.seen, {name: value.clone() for name, value in whole(fitting).items()}, fitting.global_step


def die_and_continue(ctx: RankContext, folder: str) -> Any:
    options = {"every": EVERY, "job": "a-job", "folder": folder}
    uninterrupted = fit(ctx, "none", Saves())
    with pytest.raises(RuntimeError, match="of a script"):
        fit(ctx, options, Dies())
    continued = fit(ctx, options)
    from_checkpoint = fit(ctx, "none", ckpt_path="own.ckpt")
    again = fit(ctx, options)
    return uninterrupted, continued, from_checkpoint, again


def test_a_fit_continues_as_from_its_own_checkpoint(ranks: RankPool, tmp_path: Path) -> None:
    """Loops, scheduler, data and random states; and a fit that has ended leaves no snapshot."""
    for uninterrupted, continued, from_checkpoint, again in run(ranks, 2, die_and_continue, str(tmp_path)):
        seen, weights, num_steps = continued
        assert num_steps == uninterrupted[2] == 12
        assert seen[0][0] == 6
        assert seen == from_checkpoint[0]
        assert all(torch.equal(weights[name], value) for name, value in from_checkpoint[1].items())
        assert again[0] == uninterrupted[0]
        assert all(torch.equal(again[1][name], value) for name, value in uninterrupted[1].items())
    assert list(tmp_path.glob("mics_strategy-*/*")) == []


@pytest.mark.parametrize("recovery", ["disk", {"keep": True}])
def test_another_recovery_is_refused(recovery: Any) -> None:
    with pytest.raises(ConfigError, match=r"recovery=.*'memory'.*every"):
        mics("mics", recovery=recovery)


def fabric_steps(
    ctx: RankContext, folder: str, job: str, stop_at: int
) -> tuple[list[tuple[int, float]], dict[str, Tensor]]:
    """Steps of a loop with Fabric, until one; the snapshots stay where it is not the last."""
    torch.manual_seed(3)
    fabric = launched(ctx, fabric_mics("zero3", units=[nn.Linear]))
    model, optimizer = fabric.setup(*with_adamw(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))))
    handle = fabric.strategy.sharded_of(model)
    snapshots = MemorySnapshots(handle, [optimizer.optimizer], every=4, job=job, folder=folder)
    step, seen = snapshots.load({"step": 0})["step"], []
    while step < stop_at:
        batch = torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * step + ctx.rank))
        loss = model(batch).square().mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        seen.append((step, loss.item()))
        step += 1
        snapshots.after_step({"step": step})
    snapshots.close(keep=stop_at < 8)
    return seen, values(model)


def with_adamw(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def fabric_dies_and_continues(ctx: RankContext, folder: str) -> Any:
    return [fabric_steps(ctx, folder, job, stop_at) for job, stop_at in (("whole", 8), ("dies", 6), ("dies", 8))]


def test_a_loop_with_fabric_continues(ranks: RankPool, tmp_path: Path) -> None:
    for whole_run, _, continued in run(ranks, 2, fabric_dies_and_continues, str(tmp_path)):
        assert [step for step, _ in continued[0]] == [4, 5, 6, 7]
        assert continued[0] == whole_run[0][4:]
        assert all(torch.equal(continued[1][name], value) for name, value in whole_run[1].items())
