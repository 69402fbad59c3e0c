"""Is everything as it was whoever has saved, in whatever form, and whoever loads?

Six presets, with every kind of scope among them, write on 1, 2 and 4 ranks the same state in four forms; each form is
loaded on 1, 2 and 4 ranks by presets and nodes that rotate, so that all meet over the whole matrix.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mics_strategy import ShardConfig, Topology, load_checkpoint, save_checkpoint
from mics_strategy.checkpoint.export import Export, export_safetensors
from tests import models
from tests.engine.training import Run, Training, assert_identical, start, whole, wholes
from tests.ranks import RankContext, RankPool

pytestmark = pytest.mark.slow

PRESETS = ("ddp", "zero1", "zero3", "zeropp-hpz", "mics", "paro-nig")
LAYOUTS = ((1, 1), (2, 1), (4, 2))  # ranks, ranks of a node
FORMS = ("sharded", "asynchronous", "full", "safetensors")
LOADING = {1: (1,), 2: (1, 2), 4: (1, 2, 4)}  # ranks of a node, by ranks
State = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Saved:
    """One state in all forms.

    Attributes:
        folder: Holds them, and what they should be.
        run: The training that wrote them.
    """

    folder: Path
    run: Run


def run_of(preset: str, ranks_per_node: int) -> Run:
    config = ShardConfig.preset(preset, topology=Topology(ranks_per_node=ranks_per_node))
    return Run(case=models.mlp, config=config, optimizer="adamw")


def state_of(training: Training) -> State:
    """Parameters, buffers and states of the optimizer, whole, by names."""
    found = wholes(training.model.state_dict())
    for name, parameter in training.model.named_parameters():
        states = training.optimizer.state[parameter]
        found |= {f"{name}:{key}": whole(torch.as_tensor(value)) for key, value in states.items()}
    return found


def save_each(ctx: RankContext, each: list[Saved]) -> None:
    """Job: train two steps and save in every form, one training after the other."""
    for saved in each:
        training = start(ctx, saved.run)
        training.step(0)
        training.step(1)
        optimizers, folder = [training.optimizer], saved.folder
        save_checkpoint(folder / "sharded", training.sharded, optimizers)
        pending = save_checkpoint(folder / "asynchronous", training.sharded, optimizers, asynchronous=True)
        expected = state_of(training)
        full = training.sharded.full_state_dict(), training.sharded.full_optimizer_state_dict(training.optimizer)
        training.step(2)  # while it writes
        pending.wait()
        if ctx.rank == 0:
            torch.save(full, folder / "full")
            torch.save(expected, folder / "expected")
            export_safetensors(folder / "sharded", Export(folder=folder / "safetensors"))


def load_each(ctx: RankContext, pairs: list[tuple[Saved, Run]]) -> int:
    """Job: load every form of each into another training, which is what was saved; how many were."""
    count = 0
    for saved, run in pairs:
        training = start(ctx, run)
        expected = torch.load(saved.folder / "expected")
        for form in FORMS:
            training.step(5)  # away from what was loaded
            load(training, saved.folder / form, form)
            found = state_of(training)
            names = [name for name in expected if form != "safetensors" or ":" not in name]
            assert_identical({name: found[name] for name in names}, {name: expected[name] for name in names})
            assert sum(":" in name for name in names) == (0 if form == "safetensors" else 3 * len(found) // 4)
            count += 1
    return count


def load(training: Training, path: Path, form: str) -> None:
    sharded = training.sharded
    if form in ("sharded", "asynchronous"):
        load_checkpoint(path, sharded, [training.optimizer])
    elif form == "safetensors":
        sharded.load_full_state_dict(load_file(path / "model.safetensors"))
    else:
        model, states = torch.load(path)
        sharded.load_full_state_dict(model)
        sharded.load_full_optimizer_state_dict(training.optimizer, states)


def pairs_for(world_size: int, everything: list[Saved]) -> Iterator[tuple[Saved, Run]]:
    """What is loaded on so many ranks: everything, by presets and nodes that rotate."""
    nodes = LOADING[world_size]
    for number, saved in enumerate(everything):
        preset = PRESETS[(number * 5 + number // len(PRESETS) + world_size) % len(PRESETS)]
        yield saved, run_of(preset, nodes[number % len(nodes)])


@pytest.mark.weekly
def test_every_form_loads_everywhere(ranks: RankPool, tmp_path: Path) -> None:
    everything = []
    for world_size, ranks_per_node in LAYOUTS:
        of_layout = []
        for preset in PRESETS:
            folder = tmp_path / f"{world_size}-{ranks_per_node}-{preset}"
            folder.mkdir()
            of_layout.append(Saved(folder, run_of(preset, ranks_per_node)))
        ranks(world_size, save_each, of_layout)
        everything += of_layout
    for world_size in LOADING:
        counts = ranks(world_size, load_each, list(pairs_for(world_size, everything)))
        assert counts == [len(FORMS) * len(everything)] * world_size
