"""Checkpoints of islands: as many resume bit by bit, others load what is the same on all."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mics_strategy import CheckpointError, MiCSError, load_checkpoint, save_checkpoint
from mics_strategy.outer.target import outer_of
from tests.engine.training import wholes
from tests.outer.plain import Rounds, train_islands
from tests.outer.test_outer_steps import FIELDS, LAYOUTS, check, config_of, run_step, start
from tests.ranks import RankContext, RankPool, raises_on_every_rank

ROUNDS = Rounds(every=3, steps=8)
Job = tuple[str, int, dict[str, Any]]  # name of a configuration, ranks of a node, further fields


def train(ctx: RankContext, job: Job, path: Path, first: int, last: int, saves: tuple[int, ...]) -> list[Any]:
    """Parameters after each step; starts from the checkpoint of step `first` unless that is 0."""
    name, per_node, fields = job
    trained = model, sharded, optimizer = start(config_of(name, ROUNDS, per_node).replace(**fields), ROUNDS)
    found: list[Any] = [None] * first
    if first:
        run_step(ctx, ROUNDS, trained, 99)  # states that loading must replace
        load_checkpoint(path / str(first), sharded, [optimizer])
        assert sharded.steps_done == first
    for step in range(first, last):
        if step in saves:
            save_checkpoint(path / str(step), sharded, [optimizer], asynchronous=step % 2 == 1).wait()
        run_step(ctx, ROUNDS, trained, step)
        found.append((wholes(dict(model.named_parameters())), _outer_values(sharded)))
    if last in saves:
        save_checkpoint(path / str(last), sharded, [optimizer])
    return found


def _outer_values(sharded: Any) -> list[Tensor]:
    outer = outer_of(sharded)
    return [] if outer is None else [t.clone() for b in outer.buckets for t in (b.anchor, b.momentum)]


@pytest.mark.parametrize("name", FIELDS)
def test_as_many_islands_resume_bit_by_bit_at_any_step(ranks: RankPool, tmp_path: Path, name: str) -> None:
    whole = ranks(4, train, (name, 2, {}), tmp_path, 0, 8, (3, 4, 5))
    for saved in (3, 4, 5):
        resumed = ranks(4, train, (name, 2, {}), tmp_path, saved, 8, ())
        for expected, found in zip(whole, resumed, strict=True):
            for (values, outer), (found_values, found_outer) in zip(expected[saved:], found[saved:], strict=True):
                assert all(torch.equal(found_values[key], value) for key, value in values.items())
                assert all(torch.equal(one, other) for one, other in zip(outer, found_outer, strict=True))


@pytest.mark.parametrize(("saved_by", "loaded_by"), [("mics", "ddp"), ("ddp", "mics"), ("zero1", "mics")])
def test_islands_resume_with_other_scopes(ranks: RankPool, tmp_path: Path, saved_by: str, loaded_by: str) -> None:
    ranks(4, train, (saved_by, 2, {}), tmp_path, 0, 4, (4,))
    found = ranks(4, train, (loaded_by, 2, {}), tmp_path, 4, 8, ())
    expected = train_islands(ROUNDS, LAYOUTS["2x2"])
    check([of_rank[4:] for of_rank in found], expected[4:], LAYOUTS["2x2"])


def saved_parameters(ctx: RankContext, job: Job, path: Path) -> tuple[dict[str, Tensor], int | None]:
    """What a job has after it has loaded a checkpoint; it then trains a step."""
    name, per_node, fields = job
    trained = model, sharded, optimizer = start(config_of(name, ROUNDS, per_node).replace(**fields), ROUNDS)
    load_checkpoint(path, sharded, [optimizer])
    found = wholes(dict(model.named_parameters()))
    outer = outer_of(sharded)
    for step in range(4):
        run_step(ctx, ROUNDS, trained, step)
    return found, None if outer is None else outer.num_in_round


OFF = {"outer_every": 0, "outer_lr": 0.7, "outer_momentum": 0.5}


@pytest.mark.parametrize(
    ("world", "job", "left"),
    [(4, ("mics", 1, {}), 1), (4, ("mics", 2, OFF), None), (2, ("ddp", 1, {}), 1), (1, ("ddp", 1, OFF), None)],
    ids=["four islands", "synchronous", "two ranks", "one rank"],
)
def test_what_was_saved_after_an_outer_step_loads_anywhere(
    ranks: RankPool, tmp_path: Path, world: int, job: Job, left: int | None
) -> None:
    whole = ranks(4, train, ("mics", 2, {}), tmp_path, 0, 3, (3,))
    for values, num_in_round in ranks(world, saved_parameters, job, tmp_path / "3"):
        assert all(torch.equal(values[name], value) for name, value in whole[0][2][0].items())
        assert num_in_round == left


@pytest.mark.parametrize("job", [("mics", 1, {}), ("mics", 2, OFF)], ids=["four islands", "synchronous"])
def test_other_islands_are_refused_between_outer_steps(ranks: RankPool, tmp_path: Path, job: Job) -> None:
    ranks(4, train, ("mics", 2, {}), tmp_path, 0, 5, (5,))
    raises_on_every_rank(
        lambda: ranks(4, saved_parameters, job, tmp_path / "5"),
        CheckpointError,
        r"saved 2 steps after an outer step, when the parameters of its 2 islands differed, and this job",
    )


@pytest.mark.parametrize("per_node", [1, 2])
def test_a_synchronous_training_continues_on_islands(ranks: RankPool, tmp_path: Path, per_node: int) -> None:
    whole = ranks(4, train, ("mics", 2, OFF), tmp_path, 0, 4, (4,))
    for values, num_in_round in ranks(4, saved_parameters, ("mics", per_node, {}), tmp_path / "4"):
        assert all(torch.equal(values[name], value) for name, value in whole[0][3][0].items())
        assert num_in_round == 1


def saves_parts(ctx: RankContext, path: Path, what: str) -> str:
    """What is refused when it is saved or loaded in parts between outer steps."""
    trained = model, sharded, optimizer = start(config_of("mics", ROUNDS, 2), ROUNDS)
    run_step(ctx, ROUNDS, trained, 0)
    try:
        if what == "optimizer":
            save_checkpoint(path, sharded, {"optimizer": optimizer}, model_state={})
        elif what == "whole":
            sharded.full_optimizer_state_dict(optimizer)
        else:
            save_checkpoint(path, sharded, [optimizer])
            other = start(config_of("mics", ROUNDS, 2), ROUNDS)
            load_checkpoint(path, other[1])  # the first island's weights, on all
            run_step(ctx, ROUNDS, other, 0)
            run_step(ctx, ROUNDS, other, 1)
            assert outer_of(other[1]).num_in_round == 2
            state = {name: value + ctx.rank // 2 for name, value in wholes(dict(model.named_parameters())).items()}
            other[0].load_state_dict(state)
            run_step(ctx, ROUNDS, other, 1)
    except MiCSError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("optimizer", "CheckpointError: Nothing was saved: optimizers are saved without `"),
        ("whole", "CheckpointError: `outer_every` is set, and islands have different optimizer states"),
        ("weights", "LifecycleError: Islands begin a round with different parameters"),
    ],
)
def test_a_part_of_the_islands_states_is_refused(ranks: RankPool, tmp_path: Path, what: str, words: str) -> None:
    assert all(words in message for message in ranks(4, saves_parts, tmp_path / "saved", what))
