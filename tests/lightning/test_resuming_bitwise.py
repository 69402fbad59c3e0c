"""Does a resumed Trainer train bit for bit as the uninterrupted one, wherever it was saved?

With dropout, shuffled data, workers, accumulation and validation. Under Lightning's DDP none of these is bit for bit,
because its checkpoints hold no random states. Inside an epoch the data goes on only where the loader can: Lightning
begins the epoch of any other loader again.
"""

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from mics_strategy.lightning import MiCSFabricStrategy
from tests.lightning.fabric_runs import launched
from tests.lightning.modules import Net, Regression
from tests.lightning.runs import mics, run, trainer
from tests.ranks import RankContext, RankPool


class Continued(DataLoader):  # type: ignore[type-arg]
    """A loader that begins behind the batches that were seen. Its iterator exists from the first batch on."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.position = 0
        self.first = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        first, self.first = self.first, 0
        for index, batch in enumerate(super().__iter__()):
            if index >= first:
                self.position = index + 1
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position % len(self)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.first = state["position"]


class Dropping(Regression):
    """Dropout in every layer; the loss and the data of every batch are kept."""

    def __init__(self) -> None:
        super().__init__("adam_scheduler")
        self.dropout = nn.Dropout(0.5)
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.dropout(self.layers(self.dropout(x)))))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.seen.append(batch[0].sum().item())
        return super().training_step(batch, batch_idx)


@dataclass(frozen=True)
class Place:
    """Where a training of three epochs with four batches each is saved, and how it runs."""

    hook: str
    count: int
    options: dict[str, Any]
    loader: type = DataLoader


class Save(Callback):
    """Saves when a hook is called for the n-th time."""

    def __init__(self, place: Place, path: str) -> None:
        self.place = place
        self.path = path
        self.calls = 0

    def _called(self, trainer: Any, hook: str) -> None:
        if hook == self.place.hook and not trainer.sanity_checking:
            self.calls += 1
            if self.calls == self.place.count:
                trainer.save_checkpoint(self.path)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self._called(trainer, "batch")

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        self._called(trainer, "validation")

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        self._called(trainer, "epoch")


NO_VALIDATION: dict[str, Any] = {"limit_val_batches": 0}
TWICE: dict[str, Any] = {"val_check_interval": 2}
SANITY: dict[str, Any] = {"num_sanity_val_steps": 1}
PLACES = {
    "inside an epoch": Place("batch", 6, NO_VALIDATION, Continued),
    "inside an accumulation's epoch": Place("batch", 2, {"accumulate_grad_batches": 2, **NO_VALIDATION}, Continued),
    "inside an epoch that validates at its end": Place("batch", 6, SANITY, Continued),
    "after a validation inside an epoch": Place("validation", 1, TWICE, Continued),
    "after the last batch": Place("batch", 4, NO_VALIDATION),
    "after the last batch, before validation": Place("batch", 4, SANITY),
    "after the validation of an epoch": Place("validation", 1, SANITY),
    "after the last validation of an epoch": Place("validation", 2, TWICE),
    "at the end of an epoch": Place("epoch", 2, SANITY),
    "at the end of an epoch without validation": Place("epoch", 1, NO_VALIDATION),
}


INSIDE = PLACES["inside an epoch"]


def data(length: int = 16) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(length, 6, generator=generator), torch.randn(length, 2, generator=generator))


Result = tuple[list[float], list[float], list[list[float]]]


def fit(fitting: Any, place: Place, workers: int, path: str | None, make: Callable[[], Any] = Dropping) -> Result:
    """Losses and data of every batch, and the last parameters of this rank."""
    module = make()
    torch.manual_seed(100 + fitting.global_rank)  # the first random numbers of a resumed process are other ones
    train = place.loader(data(), batch_size=2, shuffle=True, num_workers=workers)
    fitting.fit(module, train, DataLoader(data(8), batch_size=2), ckpt_path=path)
    parameters = [parameter.to_local().flatten().tolist() for parameter in module.parameters()]
    return module.losses, module.seen, parameters


def resumed(ctx: RankContext, place: Place, kind: str, workers: int) -> tuple[Result, Result]:
    """An uninterrupted training, and the one that was resumed from its checkpoint."""
    path = str(ctx.tmp_path / "saved.ckpt")
    options = {"max_epochs": 3, **place.options}
    through = trainer(ctx, mics("mics", state_dict_type=kind), callbacks=[Save(place, path)], **options)
    expected = fit(through, place, workers, None)
    return expected, fit(trainer(ctx, mics("mics", state_dict_type=kind), **options), place, workers, path)


def assert_continues(expected: Result, found: Result) -> None:
    """The resumed training made some of the batches, with the same data, losses and parameters."""
    assert 0 < len(found[0]) < len(expected[0])
    assert found[1] == expected[1][-len(found[1]) :]
    assert found[0] == expected[0][-len(found[0]) :]
    assert found[2] == expected[2]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["full", "sharded"])
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES.keys())
def test_a_training_resumed_anywhere_is_the_uninterrupted_one(
    ranks: RankPool, place: Place, kind: str, workers: int
) -> None:
    for expected, found in run(ranks, 2, resumed, place, kind, workers):
        assert_continues(expected, found)


class DroppingElsewhere(pytorch_lightning.LightningModule):
    """The same training in the other namespace."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Dropping()
        self.losses, self.seen = self.inner.losses, self.inner.seen

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.inner.training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def kept(ctx: RankContext, name: str) -> tuple[Result, Result]:
    """An uninterrupted training, and one resumed from a checkpoint of its ModelCheckpoint."""
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    place = {"accelerator": "cpu", "devices": 2, "max_epochs": 3, "default_root_dir": ctx.tmp_path}
    other = name == "pytorch_lightning"
    make = pytorch_lightning.Trainer if other else lightning.pytorch.Trainer
    callbacks = pytorch_lightning.callbacks if other else lightning.pytorch.callbacks
    module = DroppingElsewhere if other else Dropping

    def made() -> Any:
        callback = callbacks.ModelCheckpoint(ctx.tmp_path / "kept", every_n_train_steps=3, save_top_k=-1)
        return make(strategy="mics", callbacks=[callback], limit_val_batches=0, **place, **quiet)

    expected = fit(made(), INSIDE, 0, None, module)
    return expected, fit(made(), INSIDE, 0, str(ctx.tmp_path / "kept" / "epoch=1-step=6.ckpt"), module)


@pytest.mark.parametrize("name", ["lightning.pytorch", "pytorch_lightning"])
def test_a_checkpoint_of_every_few_steps_is_resumed_in_both_namespaces(ranks: RankPool, name: str) -> None:
    for expected, found in run(ranks, 2, kept, name):
        assert_continues(expected, found)


class Stop(Callback):
    """Every rank gets the signal of a scheduler after the sixth batch."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.fit_loop.total_batch_idx == 5:
            os.kill(os.getpid(), signal.SIGTERM)


def stopped(ctx: RankContext) -> tuple[Result, Result]:
    """An uninterrupted training, and one resumed from what was saved when it was stopped."""
    options = {"max_epochs": 3, "enable_checkpointing": True, **NO_VALIDATION}
    expected = fit(trainer(ctx, mics("mics"), **options), INSIDE, 0, None)
    callbacks = [Stop(), OnExceptionCheckpoint(ctx.tmp_path, "stopped")]
    with pytest.raises(SIGTERMException):
        fit(trainer(ctx, mics("mics"), callbacks=callbacks, **options), INSIDE, 0, None)
    return expected, fit(trainer(ctx, mics("mics"), **options), INSIDE, 0, str(ctx.tmp_path / "stopped.ckpt"))


def test_a_training_stopped_by_a_signal_goes_on(ranks: RankPool) -> None:
    for expected, found in run(ranks, 2, stopped):
        assert_continues(expected, found)


class Split(Dropping):
    """Splits its data at random when it is asked for it."""

    def train_dataloader(self) -> Any:
        self.indices = torch.randperm(16).tolist()
        return DataLoader(Subset(data(), self.indices), batch_size=2)


def split(ctx: RankContext) -> tuple[list[int], list[int]]:
    path, indices = str(ctx.tmp_path / "saved.ckpt"), []
    for resumes in (False, True):
        callbacks = [] if resumes else [Save(PLACES["at the end of an epoch"], path)]
        strategy = mics("mics", state_dict_type="sharded")
        fitting = trainer(ctx, strategy, max_epochs=3, callbacks=callbacks, **NO_VALIDATION)
        module = Split()
        torch.manual_seed(5)
        fitting.fit(module, ckpt_path=path if resumes else None)
        indices.append(module.indices)
    return indices[0], indices[1]


def test_a_resumed_training_splits_its_data_as_before(ranks: RankPool) -> None:
    for before, after in run(ranks, 2, split):
        assert before == after


def fabric_losses(ctx: RankContext, seen: int) -> list[float]:
    """The losses of the batches behind those that were seen. A training that has seen none saves after two."""
    fabric = launched(ctx, MiCSFabricStrategy("mics", state_dict_type="sharded"))
    model: Any = nn.Sequential(Net(), nn.Dropout(0.5))
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=0.01))
    torch.manual_seed(100 + ctx.rank + seen)
    batches = iter(fabric.setup_dataloaders(DataLoader(data(), batch_size=2)))
    path, state, losses = ctx.tmp_path / "saved", {"model": model, "optimizer": optimizer}, []
    for _ in range(seen):
        next(batches)
    if seen:  # after the loader has drawn its seed, which it does in front of the first batch
        fabric.load(path, state)
    for x, y in batches:
        loss = nn.functional.mse_loss(model(x), y)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if not seen and len(losses) == 2:
            fabric.save(path, state)
    return losses


def fabric_both(ctx: RankContext) -> tuple[list[float], list[float]]:
    return fabric_losses(ctx, 0), fabric_losses(ctx, 2)


def test_fabric_goes_on_where_a_folder_was_saved(ranks: RankPool) -> None:
    for through, resumed_losses in run(ranks, 2, fabric_both):
        assert resumed_losses == through[2:] != []
