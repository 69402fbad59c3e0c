"""Is a resumed Trainer where it would have been: in an accumulation, in an epoch, with every kind of state?"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torchao.optim import AdamW8bit

from mics_strategy.checkpoint import atomic
from tests.checkpoint.test_pending import listening
from tests.engine.optimizer.test_quantized_states import eagerly
from tests.lightning.modules import Regression
from tests.lightning.runs import assert_same, mics, run, trainer, whole
from tests.ranks import RankContext, RankPool


class Resumable:
    """Four batches of this rank's own, with a position that goes into checkpoints."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.position = 0

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[list[Tensor]]:
        for index in range(self.position % len(self), len(self)):
            self.position = index + 1
            generator = torch.Generator().manual_seed(10 * index + self.rank)
            yield [torch.randn(4, 6, generator=generator), torch.randn(4, 2, generator=generator)]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class SaveAfter(Callback):
    """Saves after a batch, in the middle of everything."""

    def __init__(self, batch: int, path: str) -> None:
        self.batch = batch
        self.path = path

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if self.path and trainer.fit_loop.total_batch_idx + 1 == self.batch:
            trainer.save_checkpoint(self.path)


def fit(
    ctx: RankContext, strategy: Any, callback: Callback | None, resumed: str | None
) -> tuple[dict[str, Tensor], list[str]]:
    options = {"max_epochs": 2, "accumulate_grad_batches": 2, "callbacks": [] if callback is None else [callback]}
    fitting = trainer(ctx, strategy, **options)
    with listening() as messages:
        fitting.fit(Regression("adam_scheduler"), Resumable(ctx.rank), ckpt_path=resumed)
        if hasattr(fitting.strategy, "finish_saves"):
            fitting.strategy.finish_saves()
    return whole(fitting), messages


def fit_ours(ctx: RankContext, kind: str, path: str, saves_after: int | None) -> tuple[dict[str, Tensor], list[str]]:
    """With a save after so many batches, or else from it."""
    callback = None if saves_after is None else SaveAfter(saves_after, path)
    return fit(ctx, mics("mics", state_dict_type=kind), callback, None if saves_after is not None else path)


def fit_ddp(ctx: RankContext, path: str, saves_after: int | None) -> tuple[dict[str, Tensor], list[str]]:
    callback = None if saves_after is None else SaveAfter(saves_after, path)
    return fit(ctx, "ddp", callback, None if saves_after is not None else path)


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_a_save_inside_an_accumulation_is_told_and_resumes_as_with_ddp(
    ranks: RankPool, tmp_path: Path, kind: str
) -> None:
    """Gradients since the last step are not in it, as they are not in DDP's."""
    ours, theirs = str(tmp_path / "ours.ckpt"), str(tmp_path / "theirs.ckpt")
    saved = run(ranks, 2, fit_ours, kind, ours, 3)
    assert ["1 micro-steps whose gradients" in message for _, messages in saved for message in messages] == [True]
    run(ranks, 2, fit_ddp, theirs, 3)
    expected = run(ranks, 2, fit_ddp, theirs, None)
    found = run(ranks, 2, fit_ours, kind, ours, None)
    for (parameters, _), (reference, _) in zip(found, expected, strict=True):
        assert_same(parameters, reference)
    if kind == "sharded":
        assert atomic.read_manifest(Path(ours)).pending_micro_steps == 1
        assert ["of an unfinished accumulation" in message for _, messages in found for message in messages] == [True]


def test_a_save_after_a_step_says_nothing(ranks: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "one.ckpt")
    through = run(ranks, 2, fit_ours, "sharded", path, 2)
    resumed = run(ranks, 2, fit_ours, "sharded", path, None)
    assert atomic.read_manifest(Path(path)).pending_micro_steps == 0
    for (end, messages), (found, resumed_messages) in zip(through, resumed, strict=True):
        assert messages == resumed_messages == []
        assert_same(found, end, tolerance=0)


class Noisy(Regression):
    """With dropout, and the numbers of the batches that it has seen."""

    def __init__(self) -> None:
        super().__init__("adam_scheduler")
        self.dropout = nn.Dropout(0.3)
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.dropout(self.layers(x))))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.seen.append(batch_idx)
        return super().training_step(batch, batch_idx)


def everything(
    ctx: RankContext, path: str, resumes: bool
) -> tuple[dict[str, Tensor], list[int], Any, list[float], float, float]:
    """fp16 with a scaler, a scheduler, dropout, two epochs; saved after the second of four batches."""
    torch.manual_seed(100 + ctx.rank)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    callback = SaveAfter(2, "" if resumes else path)
    module = Noisy()
    fitting = trainer(
        ctx, mics("mics", state_dict_type="sharded"), max_epochs=2, plugins=[plugin], callbacks=[callback]
    )
    fitting.fit(module, Resumable(ctx.rank), ckpt_path=path if resumes else None)
    losses = module.losses if resumes else module.losses[2:]
    seen = module.seen if resumes else module.seen[2:]
    rate = fitting.optimizers[0].param_groups[0]["lr"]
    return whole(fitting), seen, plugin.state_dict(), losses, rate, torch.rand(()).item()


def test_everything_goes_on_in_the_middle_of_an_epoch(ranks: RankPool, tmp_path: Path) -> None:
    """Bit by bit: losses, parameters, scale, rate, dropout, and which batches are seen."""
    path = str(tmp_path / "one.ckpt")
    through = run(ranks, 2, everything, path, False)
    for found, expected in zip(run(ranks, 2, everything, path, True), through, strict=True):
        assert_same(found[0], expected[0], tolerance=0)
        assert found[1:] == expected[1:]
        assert found[1] == [2, 3, 0, 1, 2, 3]


class Wide(Regression):
    """With matrices that are large enough to be quantized."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(8)
            self.layers = nn.Sequential(nn.Linear(6, 4096), nn.Tanh(), nn.Linear(4096, 6))

    def configure_optimizers(self) -> Any:
        return AdamW8bit(self.parameters(), lr=0.01)


def quantized(ctx: RankContext, kind: str, path: str, resumes: bool) -> tuple[dict[str, Tensor], int]:
    callback = SaveAfter(2, "" if resumes else path)
    fitting = trainer(ctx, mics("mics", state_dict_type=kind), callbacks=[callback])
    with eagerly():
        fitting.fit(Wide(), Resumable(ctx.rank), ckpt_path=path if resumes else None)
    states = [value for state in fitting.optimizers[0].state.values() for value in state.values()]
    return whole(fitting), sum(hasattr(value.to_local(), "codes") for value in states if hasattr(value, "to_local"))


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_quantized_states_go_on(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    path = str(tmp_path / "one.ckpt")
    through = run(ranks, 2, quantized, kind, path, False)
    for (found, count), (expected, before) in zip(run(ranks, 2, quantized, kind, path, True), through, strict=True):
        assert_same(found, expected, tolerance=0)
        assert count == before == 4
