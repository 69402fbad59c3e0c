"""Is everything as it was, on the same or on other ranks, when a sharded checkpoint is loaded?"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mics_strategy import ShardConfig, Topology
from mics_strategy.checkpoint.load import load_checkpoint
from mics_strategy.checkpoint.save import save_checkpoint
from tests import models
from tests.ranks import RankContext, RankPool
from tests.sharding.training import Run, Training, assert_identical, start, whole


def run_of(preset: str, **options: Any) -> Run:
    nodes = Topology(ranks_per_node=options.pop("ranks_per_node", 2))
    config = ShardConfig.preset(preset, topology=nodes, **options)
    return Run(case=models.transformer, config=config, optimizer="adamw", accumulation=2)


def state_of(training: Training) -> dict[str, Tensor]:
    """Parameters, buffers and the optimizer's states, whole, by names."""
    found = {name: whole(value) for name, value in training.model.state_dict().items()}
    names = {id(p): name for name, p in training.model.named_parameters()}
    for parameter, states in training.optimizer.state.items():
        for key, value in states.items():
            found[f"{names[id(parameter)]}:{key}"] = whole(value) if isinstance(value, Tensor) else torch.tensor(value)
    return dict(sorted(found.items()))


def save_after(ctx: RankContext, run: Run, steps: int, path: Path, asynchronous: bool) -> dict[str, Tensor]:
    """Train, save, go on training; what was saved."""
    training = start(ctx, run)
    for step in range(steps):
        training.step(step)
    found = state_of(training)
    pending = save_checkpoint(
        path, training.sharded, [training.optimizer], {"step": steps, "note": "here"}, asynchronous=asynchronous
    )
    for step in range(steps, steps + 2):
        training.step(step)
    pending.wait()
    return found


def load_and_tell(ctx: RankContext, run: Run, path: Path) -> tuple[dict[str, Tensor], dict[str, Any], int]:
    training = start(ctx, run)
    training.step(7)  # other values than at the beginning
    extra = load_checkpoint(path, training.sharded, [training.optimizer])
    return state_of(training), extra, training.sharded.steps_done


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("preset", ["mics", "zero3", "ddp", "zero1", "paro-igg"])
def test_loads_what_was_saved(ranks: RankPool, tmp_path: Path, preset: str, asynchronous: bool) -> None:
    path = tmp_path / "step-2"
    saved = ranks(4, save_after, run_of(preset), 2, path, asynchronous)[0]
    for world, other in ((4, preset), (2, "zero3"), (1, "mics")):
        for found, extra, steps in ranks(world, load_and_tell, run_of(other, ranks_per_node=min(2, world)), path):
            assert_identical(found, saved)
            assert extra == {"step": 2, "note": "here"}
            assert steps == 2
