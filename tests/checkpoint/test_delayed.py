"""Does a training with delayed second hops resume with what was in flight?"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mics_strategy import load_checkpoint, save_checkpoint
from mics_strategy.engine.optimizer.delayed import delayed_of
from tests.engine.delayed_plain import Loop
from tests.engine.test_delayed import check, config_of, run_step, start, train
from tests.engine.training import wholes
from tests.ranks import RankContext, RankPool

LOOP = Loop(steps=12, accumulation=(1, 2))


def resume(ctx: RankContext, config: Any, loop: Loop, path: Path, first: int, save: bool) -> list[Any]:
    """Parameters after each step from `first` on, from a checkpoint; or up to it, which is saved."""
    trained = model, sharded, optimizer, _ = start(config, loop)
    if not save:
        for step in range(3):
            run_step(ctx, loop, trained, 50 + step)  # states that loading must replace
        load_checkpoint(path, sharded, [optimizer])
        assert sharded.steps_done == first
    found = []
    for step in range(first) if save else range(first, loop.steps):
        run_step(ctx, loop, trained, step)
        found.append((wholes(dict(model.named_parameters())), []))
    if save:
        save_checkpoint(path, sharded, [optimizer], asynchronous=first % 2 == 1).wait()
    return found


@pytest.mark.parametrize("saved", [1, 4, 7])
@pytest.mark.parametrize("name", ["mics", "zero1", "ddp", "paro-nni"])
def test_a_training_resumes_bit_by_bit(ranks: RankPool, tmp_path: Path, name: str, saved: int) -> None:
    before = ranks(4, resume, config_of(name), LOOP, tmp_path / "saved", saved, True)
    after = ranks(4, resume, config_of(name), LOOP, tmp_path / "saved", saved, False)
    check([a + b for a, b in zip(before, after, strict=True)], LOOP, name)


@pytest.mark.parametrize(("saved_by", "loaded_by"), [("mics", "zero1"), ("ddp", "mics"), ("zero1", "ddp")])
@pytest.mark.parametrize("saved", [4, 7])
def test_it_resumes_with_other_scopes(
    ranks: RankPool, tmp_path: Path, saved_by: str, loaded_by: str, saved: int
) -> None:
    before = ranks(4, resume, config_of(saved_by), LOOP, tmp_path / "saved", saved, True)
    after = ranks(4, resume, config_of(loaded_by), LOOP, tmp_path / "saved", saved, False)
    check([a + b for a, b in zip(before, after, strict=True)], LOOP, "mics", atol=1e-12)


def in_flight(ctx: RankContext, config: Any, path: Path, loads: bool) -> tuple[list[dict[str, Tensor]], bool]:
    """Whole values of what is in flight after a save or a load, and whether a step can follow."""
    trained = _, sharded, optimizer, _ = start(config, LOOP)
    hops = delayed_of(sharded).hops
    if loads:
        load_checkpoint(path, sharded, [optimizer])
    else:
        for step in range(5):
            run_step(ctx, LOOP, trained, step)
        save_checkpoint(path, sharded, [optimizer])
    found = []
    for key in ("result", "kept", "tentative"):
        tensors = {}
        for delayed in hops.delayed:
            bucket, values = delayed.bucket, getattr(delayed, key)
            for own, parameter in zip(bucket.layout.param_slices, bucket.sharded_params, strict=True):
                tensors[own.name] = parameter.like_self(own.view_in(values, bucket.placement.index))
        found.append({name: tensor.full_tensor().clone() for name, tensor in tensors.items()})
    run_step(ctx, LOOP, trained, 5)
    return found, hops.commits


@pytest.mark.parametrize("world", [2, 8])
def test_what_is_in_flight_loads_on_other_numbers_of_ranks(ranks: RankPool, tmp_path: Path, world: int) -> None:
    (saved, commits), *_ = ranks(4, in_flight, config_of("mics"), tmp_path / "saved", False)
    config = config_of("mics" if world == 8 else "ddp")
    for found, commits_too in ranks(world, in_flight, config, tmp_path / "saved", True):
        assert commits == commits_too is True
        for one, other in zip(saved, found, strict=True):
            assert all(torch.equal(other[name], value) for name, value in one.items())


def synchronous(ctx: RankContext, path: Path, loads: bool) -> dict[str, Tensor]:
    """The parameters of a synchronous training that a checkpoint is saved by, or loaded into."""
    trained = model, sharded, optimizer, _ = start(config_of("mics", second_hop="boundary"), LOOP)
    if loads:
        load_checkpoint(path, sharded, [optimizer])
    else:
        run_step(ctx, LOOP, trained, 0)
        save_checkpoint(path, sharded, [optimizer])
    values = wholes(dict(model.named_parameters()))
    run_step(ctx, LOOP, trained, 1)
    return values


def test_a_synchronous_training_continues_from_the_committed_parameters(ranks: RankPool, tmp_path: Path) -> None:
    before = ranks(4, resume, config_of("mics"), LOOP, tmp_path / "saved", 5, True)
    for values in ranks(4, synchronous, tmp_path / "saved", True):
        assert all(torch.equal(values[name], value) for name, value in before[0][-1][0].items())


def continued(ctx: RankContext, path: Path) -> bool:
    """Whether what was in flight is forgotten."""
    trained = _, sharded, optimizer, _ = start(config_of("mics"), LOOP)
    for step in range(3):
        run_step(ctx, LOOP, trained, step)
    load_checkpoint(path, sharded, [optimizer])
    hops = delayed_of(sharded).hops
    is_new = not hops.has_pending and not hops.is_tentative
    run_step(ctx, LOOP, trained, 1)
    return is_new and hops.is_tentative


def test_a_delayed_training_continues_a_synchronous_one(ranks: RankPool, tmp_path: Path) -> None:
    ranks(4, synchronous, tmp_path / "saved", False)
    assert ranks(4, continued, tmp_path / "saved") == [True] * 4


def weights_loaded(ctx: RankContext) -> bool:
    trained = model, sharded, *_ = start(config_of("mics"), LOOP)
    for step in range(3):
        run_step(ctx, LOOP, trained, step)
    model.load_state_dict(wholes(dict(model.named_parameters())))
    return not delayed_of(sharded).hops.has_pending


def test_loaded_weights_begin_anew(ranks: RankPool) -> None:
    assert ranks(4, weights_loaded) == [True] * 4
    assert len(ranks(4, train, config_of("mics"), Loop(steps=1))) == 4
