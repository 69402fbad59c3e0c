"""Is a script that resumes where it would have been, with everything that it has besides a model and an optimizer?"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR
from torch.utils.data import DistributedSampler

from mics_strategy import Codec, ShardConfig, Topology
from mics_strategy.checkpoint.load import load_newest_checkpoint
from mics_strategy.checkpoint.save import finish_saves, save_checkpoint
from tests import models
from tests.checkpoint.test_sharded import run_of, train_on, train_through
from tests.engine.training import Run, Training, assert_identical, start
from tests.models import Batch, Case
from tests.ranks import RankContext, RankPool

STEPS, NUM_SAMPLES = 8, 24


def with_dropout() -> Case:
    """Three layers; batches come from the script's own sampler."""
    plain = models.mlp()

    def build() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            return nn.Sequential(nn.Linear(5, 11), nn.Tanh(), nn.Dropout(0.4), nn.Linear(11, 7), nn.Linear(7, 3))

    return Case(build=build, batch=plain.batch, loss=plain.loss, units=(nn.Linear,))


class Positioned:
    """Indices of a shuffled epoch after another, two at a time, from a position on."""

    def __init__(self, ctx: RankContext) -> None:
        self._sampler = DistributedSampler(range(NUM_SAMPLES), ctx.world_size, ctx.rank, seed=3)
        self.state = {"epoch": 0, "position": 0}

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            self._sampler.set_epoch(self.state["epoch"])
            indices = list(self._sampler)
            while (position := self.state["position"]) < len(indices):
                self.state["position"] += 2
                yield indices[position : position + 2]
            self.state = {"epoch": self.state["epoch"] + 1, "position": 0}


def batch_of(indices: list[int]) -> Batch:
    rows = [torch.randn(8, generator=torch.Generator().manual_seed(index)) for index in indices]
    return {"x": torch.stack([row[:5] for row in rows]), "y": torch.stack([row[5:] for row in rows])}


class Script:
    """fp16 with a scaler that grows and overflows, a schedule of rates and momenta, dropout, a position in the data."""

    def __init__(self, ctx: RankContext, run: Run) -> None:
        self.training: Training = start(ctx, run)
        self.optimizer = self.training.optimizer
        self.scaler = GradScaler("cpu", init_scale=2.0**14, growth_interval=2)
        self.schedule: LRScheduler = OneCycleLR(self.optimizer, 0.02, STEPS)
        self.data = Positioned(ctx)
        self.indices = iter(self.data)
        self.records: list[Any] = []

    def step(self) -> None:
        indices = next(self.indices)
        with torch.autocast("cpu", torch.float16):
            loss = self.training.case.loss(self.training.model, batch_of(indices))
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.schedule.step()
        sharded = self.training.sharded
        reductions = [p for p in sharded.plan.collectives if "reduce" in p.collective]
        encoded = any(p.dtype is torch.uint8 for p in reductions)
        rates = self.schedule.get_last_lr()
        self.records.append((indices, loss.item(), self.scaler.get_scale(), rates, sharded.steps_done, encoded))

    def extra(self) -> dict[str, Any]:
        parts = {"scaler": self.scaler.state_dict(), "schedule": self.schedule.state_dict()}
        return {**parts, "data": dict(self.data.state)}

    def restore(self, extra: dict[str, Any]) -> None:
        self.scaler.load_state_dict(extra["scaler"])
        self.schedule.load_state_dict(extra["schedule"])
        self.data.state = dict(extra["data"])


def run_through(ctx: RankContext, run: Run, folder: Path) -> tuple[dict[str, Tensor], list[Any], float]:
    script = Script(ctx, run)
    torch.manual_seed(100 + ctx.rank)
    for step in range(STEPS):
        script.step()
        if step == 3:
            training = script.training
            save_checkpoint(folder / "4", training.sharded, [script.optimizer], script.extra(), asynchronous=True)
    finish_saves(script.training.sharded)
    return script.training.parameters(), script.records, torch.rand(()).item()


def run_on(ctx: RankContext, run: Run, folder: Path) -> tuple[dict[str, Tensor], list[Any], float]:
    script = Script(ctx, run)
    extra = load_newest_checkpoint(folder, script.training.sharded, [script.optimizer])
    assert extra is not None
    script.restore(extra)
    for _ in range(STEPS - 4):
        script.step()
    return script.training.parameters(), script.records, torch.rand(()).item()


CODECS: dict[str, Any] = {"int8": "int8", "stochastic": Codec(bits=8, rounding="stochastic")}


@pytest.mark.wide(every=2)
@pytest.mark.parametrize(("preset", "codec"), [("mics", "int8"), ("zero1", "stochastic"), ("zero3", "stochastic")])
def test_a_script_goes_on_with_all_that_it_has(ranks: RankPool, tmp_path: Path, preset: str, codec: str) -> None:
    """Bit by bit: parameters, data, losses, scale, rates, dropout, and when gradients are no longer encoded."""
    options: dict[str, Any] = {"grad_codec": CODECS[codec], "codec_links": "all", "grad_codec_until": 0.5}
    nodes = Topology(ranks_per_node=2)
    config = ShardConfig.preset(preset, training_steps=STEPS + 2, topology=nodes, **options)
    run = Run(case=with_dropout, config=config, optimizer="adamw")
    through = ranks(4, run_through, run, tmp_path)
    for found, expected in zip(ranks(4, run_on, run, tmp_path), through, strict=True):
        assert_identical(found[0], expected[0])
        assert found[1] == expected[1][4:]
        assert found[2] == expected[2]
    records = through[0][1]
    *_, encoded = zip(*records, strict=True)
    scales = [scale for _, _, scale, *_ in records]
    assert len(set(scales)) > 2
    assert (encoded[4], encoded[-1]) == (True, False)  # it ends after the resume
    assert len({loss for _, records, _ in through for _, loss, *_ in records}) > STEPS


@pytest.mark.wide(every=2)
@pytest.mark.parametrize("other", ["zero3", "ddp", "paro-nig"])
def test_training_goes_on_with_other_scopes_to_rounding(ranks: RankPool, tmp_path: Path, other: str) -> None:
    through = ranks(4, train_through, run_of("mics"), tmp_path / "step-2")
    for found, expected in zip(ranks(4, train_on, run_of(other), tmp_path / "step-2"), through, strict=True):
        assert found[0].keys() == expected[0].keys()
        for name, value in found[0].items():
            torch.testing.assert_close(value, expected[0][name], rtol=1e-5, atol=1e-6, msg=name)
        assert found[1:] == expected[1:]
