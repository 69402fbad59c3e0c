"""Do models that change with a checkpoint, and those without an optimizer, save and resume as with DDP?"""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, ModelPruning
from torch import Tensor, nn

from mics_strategy import ConfigError
from tests.lightning.modules import Regression, loader
from tests.lightning.runs import assert_same, mics, run, trainer, whole
from tests.ranks import RankContext, RankPool, raises_on_every_rank

STRATEGIES = ("ddp", "mics", "sharded")


def strategy(name: str) -> Any:
    return mics(state_dict_type="sharded") if name == "sharded" else name


class WithoutOptimizer(Regression):
    """Trains nothing, and saves what it is."""

    def configure_optimizers(self) -> None:
        return None


def _without_optimizer(ctx: RankContext, name: str) -> tuple[dict[str, Tensor], int]:
    for epochs, path in ((1, None), (2, f"{name}/last.ckpt")):
        saving = ModelCheckpoint(dirpath=name, save_last=True)
        fitting = trainer(ctx, strategy(name), max_epochs=epochs, callbacks=[saving], enable_checkpointing=True)
        fitting.fit(WithoutOptimizer(), loader(), ckpt_path=path)
        assert Path(name, "last.ckpt").exists()
    return whole(fitting), fitting.global_step


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", STRATEGIES[1:])
def test_a_module_without_an_optimizer_is_saved_and_resumes(ranks: RankPool, name: str) -> None:
    (expected, steps), _ = run(ranks, 2, _without_optimizer, "ddp")
    for found, own_steps in run(ranks, 2, _without_optimizer, name):
        assert own_steps == steps
        assert_same(found, expected, 0.0)


class Grown(Regression):
    """Has one more layer when a checkpoint says so; the optimizer is made for it."""

    def __init__(self, grows: bool) -> None:
        super().__init__()
        self.events: list[str] = []
        self.more = nn.Identity()
        if grows:
            self.grow()

    def grow(self) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.more = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.more(super().forward(x))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.events.append("load")
        if isinstance(self.more, nn.Identity):
            self.grow()

    def configure_optimizers(self) -> Any:
        self.events.append("optimizers")
        return super().configure_optimizers()


def _grown(ctx: RankContext, name: str) -> tuple[dict[str, Tensor], list[str]]:
    first = trainer(ctx, name)
    first.fit(Grown(grows=True), loader())
    first.save_checkpoint(f"{name}.ckpt")
    module = Grown(grows=False)
    second = trainer(ctx, name, max_epochs=2)
    second.fit(module, loader(), ckpt_path=f"{name}.ckpt")
    found = whole(second)
    assert second.validate(module, loader(8), ckpt_path=f"{name}.ckpt", verbose=False)
    return found, module.events


def test_a_module_may_change_when_it_is_loaded(ranks: RankPool) -> None:
    (expected, events), _ = run(ranks, 2, _grown, "ddp")
    assert events == ["load", "optimizers", "load"]
    for found, own_events in run(ranks, 2, _grown, "mics"):
        assert own_events == events
        assert_same(found, expected)


class Redundant(Regression):
    """With torch's own optimizer that shards its states."""

    def configure_optimizers(self) -> Any:
        from torch.distributed.optim import ZeroRedundancyOptimizer  # warns where it is imported

        return ZeroRedundancyOptimizer(self.parameters(), optimizer_class=torch.optim.Adam, lr=0.1)


def _refused(ctx: RankContext, what: str) -> None:
    callbacks = [ModelPruning("l1_unstructured", amount=0.5)] if what == "pruning" else []
    trainer(ctx, "mics", callbacks=callbacks).fit(Redundant() if what == "optimizer" else Regression(), loader())


@pytest.mark.parametrize(
    ("what", "match"),
    [
        ("pruning", r"`ModelPruning` adds masks.*torch.nn.utils.prune"),
        ("optimizer", r"ZeroRedundancyOptimizer assigns whole parameters.*Use Adam itself"),
    ],
)
def test_what_works_on_whole_parameters_is_refused(ranks: RankPool, what: str, match: str) -> None:
    raises_on_every_rank(lambda: run(ranks, 2, _refused, what), ConfigError, match)
