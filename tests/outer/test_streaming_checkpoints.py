"""Checkpoints while outer steps are in flight: what is in flight is saved."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mics_strategy import CheckpointError, MiCSError, finish_delayed, load_checkpoint, save_checkpoint
from mics_strategy.outer.target import outer_of
from tests.engine.training import wholes
from tests.outer.plain import Rounds, train_islands
from tests.outer.test_outer_checkpoints import OFF
from tests.outer.test_outer_steps import FIELDS, LAYOUTS, check, config_of, run_step, start
from tests.ranks import RankContext, RankPool, raises_on_every_rank

ROUNDS = Rounds(every=4, steps=10, fragments=3, delay=2)
DELAYED = Rounds(every=4, steps=10, delay=2)
STREAMING_OFF = {**OFF, "outer_fragments": 1, "outer_delay": 0}
SAVED = range(3, 9)  # steps in front of which checkpoints are saved: a whole round and more
Job = tuple[str, int, dict[str, Any]]  # name of a configuration, ranks of a node, further fields


def train(ctx: RankContext, job: Job, rounds: Rounds, path: Path, first: int, saves: tuple[int, ...]) -> list[Any]:
    """Parameters and outer state after each step; starts from the checkpoint of step `first` unless that is 0."""
    name, per_node, fields = job
    trained = model, sharded, optimizer = start(config_of(name, rounds, per_node).replace(**fields), rounds)
    found: list[Any] = [None] * first
    if first:
        for step in range(90, 94):
            run_step(ctx, rounds, trained, step)  # states that loading must replace, and outer steps in flight
        load_checkpoint(path / str(first), sharded, [optimizer])
    for step in range(first, rounds.steps):
        if step in saves:
            save_checkpoint(path / str(step), sharded, [optimizer], asynchronous=step % 2 == 1).wait()
        run_step(ctx, rounds, trained, step)
        outer = outer_of(sharded)
        assert outer is not None
        state = [each.clone() for bucket in outer.buckets for each in (bucket.anchor, bucket.momentum)]
        found.append((wholes(dict(model.named_parameters())), state))
    return found


@pytest.mark.wide(every=2)
@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("rounds", [ROUNDS, DELAYED], ids=["both", "delay"])
def test_as_many_islands_resume_bit_by_bit_at_any_step(
    ranks: RankPool, tmp_path: Path, name: str, rounds: Rounds
) -> None:
    whole = ranks(4, train, (name, 2, {}), rounds, tmp_path, 0, (*SAVED,))
    for saved in SAVED:
        resumed = ranks(4, train, (name, 2, {}), rounds, tmp_path, saved, ())
        for expected, found in zip(whole, resumed, strict=True):
            for (values, outer), (found_values, found_outer) in zip(expected[saved:], found[saved:], strict=True):
                assert all(torch.equal(found_values[key], value) for key, value in values.items())
                assert all(torch.equal(one, other) for one, other in zip(outer, found_outer, strict=True))


@pytest.mark.parametrize(("saved_by", "loaded_by"), [("mics", "ddp"), ("ddp", "mics"), ("zero1", "mics")])
def test_islands_resume_with_other_scopes(ranks: RankPool, tmp_path: Path, saved_by: str, loaded_by: str) -> None:
    ranks(4, train, (saved_by, 2, {}), ROUNDS, tmp_path, 0, (6,))
    found = ranks(4, train, (loaded_by, 2, {}), ROUNDS, tmp_path, 6, ())
    expected = train_islands(ROUNDS, LAYOUTS["2x2"])
    check([of_rank[6:] for of_rank in found], expected[6:], LAYOUTS["2x2"])


def saved_again(ctx: RankContext, rounds: Rounds, other: Rounds, path: Path) -> list[Any]:
    """What a job with other rounds has after the steps that follow, and its steps in flight when it had loaded."""
    trained = model, sharded, optimizer = start(config_of("mics", other, 2), other)
    load_checkpoint(path, sharded, [optimizer])
    outer = outer_of(sharded)
    assert outer is not None
    ages = [bucket.age for bucket in outer.buckets if bucket.is_in_flight]
    for step in range(6, 16):
        run_step(ctx, rounds, trained, step)
    assert not any(bucket.is_in_flight and bucket.age >= other.delay for bucket in outer.buckets)
    finish_delayed(sharded)
    return [ages, wholes(dict(model.named_parameters()))]


@pytest.mark.parametrize(
    "other",
    [
        Rounds(every=4, steps=4, fragments=3, delay=3),
        Rounds(every=2, steps=4, delay=1),
        Rounds(every=9, steps=4, delay=1),
    ],
    ids=["longer", "all at once", "rounds"],
)
def test_other_fragments_and_delays_continue_what_is_in_flight(ranks: RankPool, tmp_path: Path, other: Rounds) -> None:
    ranks(4, train, ("mics", 2, {}), ROUNDS, tmp_path, 0, (6,))
    found = ranks(4, saved_again, ROUNDS, other, tmp_path / "6")
    assert found[0][0]
    assert all(torch.equal(value, found[0][1][key]) for of_rank in found for key, value in of_rank[1].items())


def loads(ctx: RankContext, job: Job, rounds: Rounds, path: Path) -> dict[str, Tensor]:
    """What a job has after it has loaded a checkpoint; it then trains a few steps."""
    name, per_node, fields = job
    trained = model, sharded, optimizer = start(config_of(name, rounds, per_node).replace(**fields), rounds)
    load_checkpoint(path, sharded, [optimizer])
    found = wholes(dict(model.named_parameters()))
    for step in range(5):
        run_step(ctx, rounds, trained, step)
    return found


PLAIN = Rounds(every=4, steps=4)


@pytest.mark.parametrize(
    ("job", "rounds", "words"),
    [
        (("mics", 1, {}), ROUNDS, r"saved 2 steps after an outer step, when the parameters of its 2 islands differed"),
        (("mics", 2, STREAMING_OFF), PLAIN, r"behind `finish_delayed`\), load one that was saved there"),
        (("mics", 2, {}), PLAIN, r"in flight, and `outer_delay=0` has no memory for them. Load it with the"),
    ],
    ids=["four islands", "synchronous", "without a delay"],
)
def test_a_job_that_cannot_continue_is_refused(
    ranks: RankPool, tmp_path: Path, job: Job, rounds: Rounds, words: str
) -> None:
    ranks(4, train, ("mics", 2, {}), ROUNDS, tmp_path, 0, (6,))
    raises_on_every_rank(lambda: ranks(4, loads, job, rounds, tmp_path / "6"), CheckpointError, words)


def finishes(ctx: RankContext, rounds: Rounds, path: Path) -> dict[str, Tensor]:
    trained = model, sharded, optimizer = start(config_of("mics", rounds, 2), rounds)
    for step in range(6):
        run_step(ctx, rounds, trained, step)
    finish_delayed(sharded)
    save_checkpoint(path, sharded, [optimizer])
    return wholes(dict(model.named_parameters()))


@pytest.mark.parametrize(
    ("world", "job", "rounds"),
    [(4, ("mics", 1, {}), ROUNDS), (4, ("mics", 2, STREAMING_OFF), PLAIN), (2, ("ddp", 1, {}), PLAIN)],
    ids=["four islands", "synchronous", "two ranks without a delay"],
)
def test_what_was_saved_behind_the_end_loads_anywhere(
    ranks: RankPool, tmp_path: Path, world: int, job: Job, rounds: Rounds
) -> None:
    saved = ranks(4, finishes, ROUNDS, tmp_path / "saved")
    for values in ranks(world, loads, job, rounds, tmp_path / "saved"):
        assert all(torch.equal(values[name], value) for name, value in saved[0].items())


def test_older_versions_refuse_what_they_would_leave_out(ranks: RankPool, tmp_path: Path) -> None:
    """Format 3 has islands that differ, format 4 what is in flight between them."""
    ranks(4, train, ("mics", 2, {}), DELAYED, tmp_path, 0, (3, 5))
    formats = [json.loads((tmp_path / step / "manifest.json").read_text())["format"] for step in ("3", "5")]
    assert formats == [3, 4]


def loads_in_flight(ctx: RankContext, rounds: Rounds) -> tuple[str, list[float]]:
    """A part of a state dict is refused; a whole one drops what is in flight and begins a round."""
    trained = model, sharded, _ = start(config_of("mics", rounds, 2), rounds)
    for step in range(5):
        run_step(ctx, rounds, trained, step)
    state = {name: torch.full_like(value, 0.1) for name, value in wholes(dict(model.named_parameters())).items()}
    message = ""
    try:
        model.load_state_dict({"scale": state["scale"]}, strict=False)
    except MiCSError as error:
        message = str(error)
    model.load_state_dict(state)
    outer = outer_of(sharded)
    assert outer is not None
    assert not any(bucket.is_in_flight for bucket in outer.buckets)
    assert outer.num_in_round == 0
    run_step(ctx, rounds, trained, 5)
    return message, [bucket.anchor.mean().item() for bucket in outer.buckets]


def test_a_loaded_state_dict_drops_what_is_in_flight(ranks: RankPool) -> None:
    for message, means in ranks(4, loads_in_flight, DELAYED):
        assert "was loaded 1 steps after an outer step, when the islands' parameters differ" in message
        assert "Load it behind `finish_delayed(sharded)`, or load all parameters" in message
        assert all(0 < mean <= 0.1001 for mean in means)
