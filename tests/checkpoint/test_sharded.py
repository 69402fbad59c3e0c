"""Is everything as it was, on the same or on other ranks, when a sharded checkpoint is loaded?"""

import errno
import os
import random
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.optim import Muon

from mics_strategy import CheckpointError, ConfigError, ShardConfig, Topology
from mics_strategy.checkpoint.load import load_checkpoint
from mics_strategy.checkpoint.save import PendingSave, finish_saves, save_checkpoint
from mics_strategy.checkpoint.save_planner import ShardedSavePlanner
from mics_strategy.checkpoint.state import local_state
from tests import models
from tests.engine.training import Run, Training, assert_identical, start, whole, wholes
from tests.ranks import RankContext, RankPool, raises_on_every_rank


def run_of(preset: str, **options: Any) -> Run:
    nodes = Topology(ranks_per_node=options.pop("ranks_per_node", 2))
    config = ShardConfig.preset(preset, topology=nodes, **options)
    return Run(case=models.transformer, config=config, optimizer="adamw", accumulation=2)


def state_of(training: Training) -> dict[str, Tensor]:
    """Parameters, buffers and the optimizer's states, whole, by names."""
    found = wholes(training.model.state_dict())
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


@pytest.mark.wide(every=2)
@pytest.mark.parametrize(("preset", "asynchronous"), [("mics", False), ("zero1", True), ("paro-igg", True)])
def test_loads_what_was_saved(ranks: RankPool, tmp_path: Path, preset: str, asynchronous: bool) -> None:
    path = tmp_path / "step-2"
    saved = ranks(4, save_after, run_of(preset), 2, path, asynchronous)[0]
    for world, other in ((4, preset), (2, "zero3"), (1, "mics")):
        for found, extra, steps in ranks(world, load_and_tell, run_of(other, ranks_per_node=min(2, world)), path):
            assert_identical(found, saved)
            assert extra == {"step": 2, "note": "here"}
            assert steps == 2


def muon_run(preset: str, layout: str, ranks_per_node: int = 2) -> Run:
    return run_of(preset, optimizer_layout=layout, ranks_per_node=ranks_per_node)


def with_muon(training: Training) -> Training:
    training.optimizer = Muon([p for p in training.model.parameters() if p.dim() == 2], lr=0.05)
    return training


def save_muon(ctx: RankContext, run: Run, path: Path) -> dict[str, Tensor]:
    training = with_muon(start(ctx, run))
    for step in range(2):
        training.step(step)
    save_checkpoint(path, training.sharded, [training.optimizer])
    return muon_state(training)


def muon_state(training: Training) -> dict[str, Tensor]:
    """Parameters, and momenta by the plain optimizer's state dict; on rank 0."""
    found = wholes(training.model.state_dict())
    states = training.sharded.full_optimizer_state_dict(training.optimizer).get("state", {})
    return found | {f"{number}:{key}": value for number, of in states.items() for key, value in of.items()}


def load_muon(ctx: RankContext, run: Run, path: Path) -> dict[str, Tensor]:
    training = with_muon(start(ctx, run))
    load_checkpoint(path, training.sharded, [training.optimizer])
    return muon_state(training)


@pytest.mark.wide(every=2)
@pytest.mark.parametrize(
    ("world", "preset", "layout"), [(4, "zero3", "tensors"), (2, "mics", "tensors"), (1, "mics", "rows")]
)
def test_whole_tensors_load_on_other_ranks(
    ranks: RankPool, tmp_path: Path, world: int, preset: str, layout: str
) -> None:
    """The rank that owned a tensor alone had its momentum."""
    path = tmp_path / "step-2"
    saved = ranks(4, save_muon, muon_run("mics", "tensors"), path)[0]
    found = ranks(world, load_muon, muon_run(preset, layout, min(2, world)), path)[0]
    assert_identical(found, saved)
    assert any(name.endswith("momentum_buffer") for name in found)


@pytest.mark.wide(every=2)
@pytest.mark.parametrize("preset", ["mics", "zeropp-hpz", "paro-nig"])
def test_training_goes_on_as_if_it_had_not_stopped(ranks: RankPool, tmp_path: Path, preset: str) -> None:
    run = run_of(preset)
    through = ranks(4, train_through, run, tmp_path / "step-2")
    for found, expected in zip(ranks(4, train_on, run, tmp_path / "step-2"), through, strict=True):
        assert_identical(found[0], expected[0])
        assert found[1:] == expected[1:]


def train_through(ctx: RankContext, run: Run, path: Path) -> tuple[dict[str, Tensor], float, float, float]:
    """Four steps, saved after two; and the random numbers that would come."""
    training = start(ctx, run)
    torch.manual_seed(ctx.rank)
    random.seed(ctx.rank)
    np.random.seed(ctx.rank)
    for step in range(4):
        training.step(step)
        if step == 1:
            save_checkpoint(path, training.sharded, [training.optimizer], asynchronous=True)
    finish_saves(training.sharded)
    return training.parameters(), *random_numbers()


def train_on(ctx: RankContext, run: Run, path: Path) -> tuple[dict[str, Tensor], float, float, float]:
    training = start(ctx, run)
    load_checkpoint(path, training.sharded, [training.optimizer])
    for step in range(2, 4):
        training.step(step)
    return training.parameters(), *random_numbers()


def random_numbers() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), np.random.rand()


def random_after_loading(ctx: RankContext, run: Run, path: Path) -> tuple[float, float, float]:
    training = start(ctx, run)
    load_checkpoint(path, training.sharded, [training.optimizer])
    return random_numbers()


def test_random_numbers_differ_between_ranks_and_not_between_resumes(ranks: RankPool, tmp_path: Path) -> None:
    ranks(4, save_after, run_of("mics"), 1, tmp_path / "one", False)
    first, second = (ranks(2, random_after_loading, run_of("mics"), tmp_path / "one") for _ in range(2))
    assert first == second
    assert len({number for numbers in first for number in numbers}) == 6


def load_other(ctx: RankContext, run: Run, path: Path, strict: bool) -> dict[str, Tensor]:
    training = start(ctx, run)
    load_checkpoint(path, training.sharded, [training.optimizer], strict=strict)
    return state_of(training)


def test_another_models_checkpoint_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2, save_after, run_of("mics"), 1, tmp_path / "one", False)
    other = run_of("mics").replace(case=models.mlp)
    raises_on_every_rank(
        lambda: ranks(2, load_other, other, tmp_path / "one", True),
        CheckpointError,
        "The model: .*not in the checkpoint",
    )


def refused_by_another_kind(ctx: RankContext, run: Run, path: Path, saved: str, other: str) -> list[str]:
    """Errors of loading the folder, and the same states in full."""
    writer, reader = (start(ctx, run.replace(optimizer=kind)) for kind in (saved, other))
    writer.step(0)
    save_checkpoint(path, writer.sharded, [writer.optimizer])
    box = [writer.sharded.full_optimizer_state_dict(writer.optimizer)]
    dist.broadcast_object_list(box)
    before, errors = reader.parameters(), []
    for load in (
        lambda: load_checkpoint(path, reader.sharded, [reader.optimizer]),
        lambda: reader.sharded.load_full_optimizer_state_dict(reader.optimizer, box[0]),
    ):
        with pytest.raises(CheckpointError) as caught:
            load()
        errors.append(str(caught.value))
    assert_identical(reader.parameters(), before)
    assert not reader.optimizer.state
    return errors


@pytest.mark.parametrize(
    ("saved", "other", "words"),
    [
        ("adamw", "momentum", ("not those of SGD, which has `dampening`, `momentum`", "`betas`, `capturable`")),
        ("momentum", "adamw", ("not those of AdamW, which has `betas`, `eps`", "`dampening`, `differentiable`")),
    ],
)
def test_states_of_another_kind_of_optimizer_are_refused(
    ranks: RankPool, tmp_path: Path, saved: str, other: str, words: tuple[str, str]
) -> None:
    for errors in ranks(2, refused_by_another_kind, run_of("mics"), tmp_path / "saved", saved, other):
        for error in errors:
            assert all(word in error for word in words), error


def save_frozen(ctx: RankContext, run: Run, path: Path) -> dict[str, Tensor]:
    """Only biases and vectors were trained."""
    training = start_partly(ctx, run, lambda p: p.dim() < 2)
    training.step(0)
    save_checkpoint(path, training.sharded, [training.optimizer])
    return state_of(training)


def start_partly(ctx: RankContext, run: Run, is_trained: Callable[[Tensor], bool]) -> Training:
    case = run.case()

    def build() -> torch.nn.Module:
        model = case.build()
        for parameter in model.parameters():
            parameter.requires_grad_(is_trained(parameter))
        return model

    return start(ctx, run.replace(case=lambda: replace(case, build=build)))


def load_unfrozen(ctx: RankContext, run: Run, path: Path, strict: bool) -> tuple[dict[str, Tensor], int]:
    """All are trained now; how many have states."""
    training = start(ctx, run)
    load_checkpoint(path, training.sharded, [training.optimizer], strict=strict)
    found = state_of(training), len(training.optimizer.state)
    training.step(1)
    return found


def test_an_unfrozen_model_loads_when_asked_not_to_be_strict(ranks: RankPool, tmp_path: Path) -> None:
    run, path = run_of("mics"), tmp_path / "one"
    saved = ranks(2, save_frozen, run, path)[0]
    raises_on_every_rank(lambda: ranks(2, load_unfrozen, run, path, True), CheckpointError, "AdamW: .*not in the check")
    for found, num_states in ranks(2, load_unfrozen, run, path, False):
        assert_identical(found, saved)
        assert num_states == sum(name.endswith(":exp_avg") for name in saved)


def one_rank_fails(ctx: RankContext, run: Run, path: Path, asynchronous: bool) -> None:
    """The second save, in which rank 1's disk is full."""
    training = start(ctx, run)
    training.step(0)
    save_checkpoint(path, training.sharded, [training.optimizer])
    full = RuntimeError(
        "[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598"
    )  # as torch's writer does
    full.__context__ = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    patch = mock.patch.object(FileSystemWriter, "write_data", side_effect=full) if ctx.rank == 1 else nullcontext()
    with patch:
        training.step(1)
        save_checkpoint(path, training.sharded, [training.optimizer], asynchronous=asynchronous).wait()


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_full_disk_is_told_on_every_rank_and_leaves_the_older_one(
    ranks: RankPool, tmp_path: Path, asynchronous: bool
) -> None:
    run, path = run_of("mics"), tmp_path / "last"
    raises_on_every_rank(
        lambda: ranks(2, one_rank_fails, run, path, asynchronous),
        CheckpointError,
        r"Rank 1 could not write.*No space left on device \(\[enforce fail",
    )
    assert [entry.name for entry in tmp_path.iterdir()] == ["last"]
    assert [found[2] for found in ranks(2, load_and_tell, run, path)] == [1, 1]


def names_written(ctx: RankContext, run: Run, path: Path) -> tuple[list[str], int]:
    """Names of the pieces that this rank writes, and their bytes."""
    training = start(ctx, run)
    training.step(0)
    pieces = ShardedSavePlanner(local_state(training.sharded, [training.optimizer]))
    items = pieces.plan.items
    num_bytes = sum(
        i.tensor_data.chunk.sizes.numel() * i.tensor_data.properties.dtype.itemsize for i in items if i.tensor_data
    )
    return [f"{item.index.fqn} {item.index.offset}" for item in items], num_bytes


@pytest.mark.parametrize("preset", ["mics", "zero3", "ddp"])
def test_every_piece_is_written_once_and_ranks_share_them(ranks: RankPool, tmp_path: Path, preset: str) -> None:
    found = ranks(4, names_written, run_of(preset), tmp_path)
    names = [name for of_rank, _ in found for name in of_rank]
    assert len(names) == len(set(names))
    whole_bytes = sum(num_bytes for _, num_bytes in found)
    assert max(num_bytes for _, num_bytes in found) < 0.6 * whole_bytes


def save_and_leave(ctx: RankContext, run: Run, path: Path) -> None:
    """As a script that ends right after its last save."""
    training = start(ctx, run)
    training.step(0)
    started = threading.Event()
    write = PendingSave.run

    def late(pending: PendingSave, job: Any) -> None:
        started.wait(20.0)
        write(pending, job)

    with mock.patch.object(PendingSave, "run", late):
        pending = save_checkpoint(path, training.sharded, [training.optimizer], asynchronous=True)
    dist.barrier()
    dist.destroy_process_group()
    started.set()
    pending.wait()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # which the job ends


def test_a_save_goes_on_when_the_process_groups_are_gone(ranks: RankPool, tmp_path: Path) -> None:
    run, path = run_of("mics"), tmp_path / "last"
    ranks(2, save_and_leave, run, path)
    assert [found[2] for found in ranks(2, load_and_tell_only, run, path)] == [1, 1]


def load_and_tell_only(ctx: RankContext, run: Run, path: Path) -> tuple[dict[str, Tensor], dict[str, Any], int]:
    training = start(ctx, run)
    extra = load_checkpoint(path, training.sharded, [training.optimizer])
    return state_of(training), extra, training.sharded.steps_done


def save_what_ranks_do_not_share(ctx: RankContext, path: Path) -> None:
    training = start(ctx, run_of("mics"))
    state = dict(training.model.state_dict()) | ({"note": torch.ones(1)} if ctx.rank == 0 else {})
    save_checkpoint(path, training.sharded, model_state=state)


def test_names_that_not_all_ranks_have_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    raises_on_every_rank(
        lambda: ranks(2, save_what_ranks_do_not_share, tmp_path / "one"),
        ConfigError,
        "The names in `model_state` differ between ranks: note not on rank 1. Pass",
    )


def save_averages(ctx: RankContext, path: Path, on_all_ranks: bool) -> None:
    training = start(ctx, run_of("mics"))
    average = {name: parameter.detach().clone() for name, parameter in training.model.named_parameters()}
    extra = {"average": average if on_all_ranks or ctx.rank == 0 else {}}
    save_checkpoint(path, training.sharded, extra=extra, asynchronous=on_all_ranks)
    finish_saves(training.sharded)
    loaded = load_checkpoint(path, training.sharded)["average"]
    for name, value in average.items():
        assert torch.equal(loaded[name], value.full_tensor())


def test_sharded_extras_are_saved_whole_and_passed_by_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2, save_averages, tmp_path / "one", True)
    raises_on_every_rank(
        lambda: ranks(2, save_averages, tmp_path / "two", False), CheckpointError, "pass the same state on all ranks"
    )


def save_what_cannot_be_pickled(ctx: RankContext, path: Path) -> None:
    training = start(ctx, run_of("mics"))
    extra = {"hook": lambda: None} if ctx.rank == 0 else {}
    save_checkpoint(path, training.sharded, extra=extra, asynchronous=True)


def test_extras_that_cannot_be_written_are_told_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    raises_on_every_rank(
        lambda: ranks(2, save_what_cannot_be_pickled, tmp_path / "one"), CheckpointError, "Nothing was"
    )
    assert list(tmp_path.iterdir()) == []


def save_twice(ctx: RankContext, run: Run, folder: Path) -> list[dict[str, Tensor]]:
    """Two asynchronous saves, and what they should hold; the second copies into the memory of the first."""
    training, found = start(ctx, run), []
    for step in range(2):
        training.step(step)
        found.append(state_of(training))
        save_checkpoint(folder / str(step), training.sharded, [training.optimizer], asynchronous=True)
    finish_saves(training.sharded)
    return found


def test_copies_of_the_next_save_do_not_reach_the_one_before(ranks: RankPool, tmp_path: Path) -> None:
    run = run_of("mics")
    saved = ranks(2, save_twice, run, tmp_path)[0]
    for number, expected in enumerate(saved):
        assert_identical(ranks(2, load_and_tell, run, tmp_path / str(number))[0][0], expected)
