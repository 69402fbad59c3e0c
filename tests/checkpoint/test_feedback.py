"""Does error feedback survive a checkpoint: bit by bit on the same ranks, in its sum on others?"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from mics_strategy import ShardConfig, Topology, load_checkpoint, save_checkpoint
from mics_strategy.checkpoint.feedback import common_ranges
from mics_strategy.engine.layout import make_layout
from tests.engine.test_feedback import CONFIGS, SHAPES, Loop, inputs, mean_of, residual_total, start_loop
from tests.ranks import RankContext, RankPool

SAVED_AT, STEPS = 2, 4
Found = tuple[dict[str, Tensor], dict[str, Tensor]]


def train(ctx: RankContext, config: ShardConfig, path: Path, first: int, last: int) -> list[Found]:
    """Gradients and residuals of steps; starts from the checkpoint unless `first` is 0."""
    loop, found, pending = start_loop(ctx, config, accumulation=1), [], None
    if first:
        loop.backward(9, 0)
        loop.step()  # residuals that loading must replace
        load_checkpoint(path, loop.sharded, [loop.optimizer])
    for step in range(first, last):
        if step == SAVED_AT and not first:
            pending = save_checkpoint(path, loop.sharded, [loop.optimizer], asynchronous=True)
        loop.backward(step, 0)
        grads = loop.grads()
        loop.step()
        found.append((grads, residual_total(loop.sharded)))
    if pending is not None:
        pending.wait()
    if last == SAVED_AT:
        save_checkpoint(path, loop.sharded, [loop.optimizer])
    return found


@pytest.mark.wide(every=2)
@pytest.mark.parametrize("case", ["zero3", "zero3, slow", "mics", "ddp"])
def test_a_resumed_training_has_the_bits_of_the_uninterrupted_one(ranks: RankPool, tmp_path: Path, case: str) -> None:
    whole = ranks(4, train, CONFIGS[case], tmp_path / "saved", 0, STEPS)
    resumed = ranks(4, train, CONFIGS[case], tmp_path / "saved", SAVED_AT, STEPS)
    for expected, found in zip(whole, resumed, strict=True):
        for (grads, left), (found_grads, found_left) in zip(expected[SAVED_AT:], found, strict=True):
            for name in SHAPES:
                assert torch.equal(found_grads[name], grads[name])
                assert torch.equal(found_left[name], left[name])


@pytest.mark.wide(every=2)
@pytest.mark.parametrize(
    ("case", "world", "per_node", "preset"),
    [
        *[("zero3", 2, 1, "zero3"), ("zero3", 2, 2, "mics"), ("mics", 2, 1, "zero3"), ("ddp", 2, 1, "ddp")],
        *[("zero3, slow", 1, 1, "ddp"), ("mics", 4, 2, "zero3"), ("paro-nii", 3, 1, "zero3")],
    ],
)
def test_other_ranks_send_the_sum(
    ranks: RankPool, tmp_path: Path, case: str, world: int, per_node: int, preset: str
) -> None:
    *_, (_, pending) = ranks(4, train, CONFIGS[case], tmp_path / "saved", 0, SAVED_AT)[0]
    fields = {"grad_codec": CONFIGS[case].grad_codec, "codec_links": "all" if world > per_node else "slow"}
    other = ShardConfig.preset(preset, topology=Topology(ranks_per_node=per_node), **fields)
    grads, left = ranks(world, train, other, tmp_path / "saved", SAVED_AT, SAVED_AT + 1)[0][0]
    assert max(float(value.abs().max()) for value in pending.values()) > 0.01
    for name, mean in mean_of(SAVED_AT, 1, world).items():
        torch.testing.assert_close(grads[name] + left[name], mean + pending[name], rtol=1e-5, atol=1e-5)


def saved_twice(ctx: RankContext, path: Path, other: Path) -> None:
    """Loads what other ranks have saved, and saves at once."""
    loop = start_loop(ctx, CONFIGS["mics"])
    load_checkpoint(path, loop.sharded, [loop.optimizer])
    assert all(feedback.carry is not None for feedback in loop.sharded.internals.feedback)
    save_checkpoint(other, loop.sharded, [loop.optimizer])


@pytest.mark.parametrize("world", [2, 4])
def test_a_sum_that_was_not_sent_is_saved_again(ranks: RankPool, tmp_path: Path, world: int) -> None:
    *_, (_, pending) = ranks(4, train, CONFIGS["zero3"], tmp_path / "first", 0, SAVED_AT)[0]
    ranks(4, saved_twice, tmp_path / "first", tmp_path / "second")
    config = CONFIGS["mics"].replace(topology=Topology(ranks_per_node=world // 2))
    grads, left = ranks(world, train, config, tmp_path / "second", SAVED_AT, SAVED_AT + 1)[0][0]
    for name, mean in mean_of(SAVED_AT, 1, world).items():
        torch.testing.assert_close(grads[name] + left[name], mean + pending[name], rtol=1e-5, atol=1e-5)


def next_step(loop: Loop) -> Found:
    loop.backward(7, 0)
    return loop.grads(), residual_total(loop.sharded)


def saved_in_mid_window(ctx: RankContext, config: ShardConfig, path: Path) -> list[Found]:
    """The next step of a job that drops gradients which no optimizer has used, and of one that saves and resumes."""
    loop = start_loop(ctx, config, accumulation=1)
    loop.backward(0, 0)
    loop.step()
    loop.backward(1, 0)
    loop.grads()  # sends them in every preset
    save_checkpoint(path, loop.sharded, [loop.optimizer])
    loop.optimizer.zero_grad()
    dropped = next_step(loop)
    resumed = start_loop(ctx, config, accumulation=1)
    load_checkpoint(path, resumed.sharded, [resumed.optimizer])
    return [dropped, next_step(resumed)]


@pytest.mark.parametrize("case", ["zero3", "zero3, slow", "mics", "ddp"])
def test_residuals_of_gradients_that_are_not_saved_are_not_saved(ranks: RankPool, tmp_path: Path, case: str) -> None:
    for dropped, resumed in ranks(4, saved_in_mid_window, CONFIGS[case], tmp_path):
        for expected, found in zip(dropped, resumed, strict=True):
            for name in SHAPES:
                assert torch.equal(found[name], expected[name])


def saved_without_use(ctx: RankContext, config: ShardConfig, path: Path) -> list[Found]:
    """The next step of a job that drops a window in which no rank used a parameter, and of one that resumes there."""
    loop = start_loop(ctx, config, accumulation=1)
    loop.backward(0, 0)
    loop.step()
    loop.model({name: value for name, value in inputs(1, 0, ctx.rank).items() if name != "odd"}).backward()
    loop.grads()
    loop.optimizer.zero_grad()
    save_checkpoint(path, loop.sharded, [loop.optimizer])
    dropped = next_step(loop)
    resumed = start_loop(ctx, config, accumulation=1)
    load_checkpoint(path, resumed.sharded, [resumed.optimizer])
    return [dropped, next_step(resumed)]


@pytest.mark.parametrize("case", ["zero3", "zero3, slow", "mics", "ddp"])
def test_residuals_of_an_unused_parameter_are_saved(ranks: RankPool, tmp_path: Path, case: str) -> None:
    for dropped, resumed in ranks(4, saved_without_use, CONFIGS[case], tmp_path):
        for expected, found in zip(dropped, resumed, strict=True):
            for name in SHAPES:
                assert torch.equal(found[name], expected[name])


def forgets(ctx: RankContext, path: Path) -> bool:
    """Whether a checkpoint without residuals clears those of a running model."""
    loop = start_loop(ctx, CONFIGS["mics"].replace(grad_codec="none"))
    save_checkpoint(path, loop.sharded, [loop.optimizer])
    other = start_loop(ctx, CONFIGS["mics"])
    other.backward(0, 0)
    other.step()
    load_checkpoint(path, other.sharded, [other.optimizer])
    return all(bool((value == 0).all()) for value in residual_total(other.sharded).values())


def test_a_checkpoint_without_residuals_clears_them(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks(4, forgets, tmp_path / "saved") == [True] * 4


@pytest.mark.parametrize("shape", [(37, 3), (3, 40), (64, 8), (1,)], ids=str)
def test_pieces_of_two_layouts_share_every_element_once(shape: tuple[int, ...]) -> None:
    slices = {n: make_layout([("p", torch.Size(shape))], n).param_slices[0] for n in (1, 2, 3, 4, 8)}
    for (ranks, own), (others, saved) in [(a, b) for a in slices.items() for b in slices.items()]:
        count = torch.zeros(shape)
        for index in range(ranks):
            for row in range(others):
                common = common_ranges(own, index, saved, row)
                piece, other = own.narrow(count, index), saved.narrow(count, row)
                for dim, (start, other_start, length) in (common or {}).items():
                    piece, other = piece.narrow(dim, start, length), other.narrow(dim, other_start, length)
                if common is not None:
                    assert piece.data_ptr() == other.data_ptr()
                    piece += 1
        assert (count == 1).all()
