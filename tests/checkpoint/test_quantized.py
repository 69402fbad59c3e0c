"""Are states that are no plain tensors saved, and is training with them as if it had not stopped?"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer
from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8
from torchao.utils import TorchAOBaseTensor

from mics_strategy import CheckpointError, ShardConfig
from mics_strategy.checkpoint.load import load_checkpoint
from mics_strategy.checkpoint.save import finish_saves, save_checkpoint
from tests.engine.optimizer.test_quantized_states import aligned, eagerly, layers, unaligned
from tests.engine.training import Run, Training, assert_identical, start, whole
from tests.models import Case
from tests.ranks import RankContext, RankPool, raises_on_every_rank

MakeOptimizer = Callable[..., Optimizer]
MAKES: dict[str, MakeOptimizer] = {
    "8bit": partial(AdamW8bit, lr=0.01),
    "4bit": partial(AdamW4bit, lr=0.01),
    "fp8": partial(AdamWFp8, lr=0.01),
}
ROUNDED = {"8bit": 0.02, "4bit": 0.25, "fp8": 0.07}  # of the largest value in a block, when values are rounded again


def mixed() -> Case:
    """The last of four ranks has half a block too little, so that its rows of one matrix are not quantized."""
    return layers(64, 270)


TRAININGS = [(aligned, "8bit"), (aligned, "4bit"), (aligned, "fp8"), (unaligned, "8bit"), (mixed, "8bit")]


def run_of(case: Any, preset: str = "zero1") -> Run:
    return Run(case=case, config=ShardConfig.preset(preset, update_locality="element"))


def begin(ctx: RankContext, run: Run, make: MakeOptimizer) -> Training:
    training = start(ctx, run)
    training.optimizer = make(training.model.parameters())
    return training


def local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def values_of(training: Training) -> dict[str, Tensor]:
    """The whole moments, dequantized, by names."""
    found = {}
    for name, parameter in training.model.named_parameters():
        for key, value in sorted(training.optimizer.state[parameter].items()):
            if isinstance(value, DTensor):
                plain = local(value)
                plain = plain.dequantize() if isinstance(plain, TorchAOBaseTensor) else plain
                found[f"{name}:{key}"] = whole(parameter.like_self(plain))
    return dict(sorted(found.items()))


def num_quantized(optimizer: Optimizer) -> int:
    return sum(isinstance(local(v), TorchAOBaseTensor) for state in optimizer.state.values() for v in state.values())


Told = tuple[dict[str, Tensor], dict[str, Tensor], int]


def save_each(ctx: RankContext, trainings: list[tuple[Any, str]], folder: Path) -> list[Told]:
    """Three steps, saved after two; moments when they were saved, parameters at the end, quantized states."""
    found = []
    for case, code in trainings:
        training = begin(ctx, run_of(case), MAKES[code])
        with eagerly():
            training.step(0)
            training.step(1)
            path = folder / f"{case.__name__}-{code}"
            save_checkpoint(path, training.sharded, [training.optimizer], asynchronous=True)
            saved = values_of(training)
            training.step(2)
        finish_saves(training.sharded)
        found.append((saved, training.parameters(), num_quantized(training.optimizer)))
    return found


def load_each(ctx: RankContext, trainings: list[tuple[Any, str]], folder: Path) -> list[Told]:
    found = []
    for case, code in trainings:
        training = begin(ctx, run_of(case), MAKES[code])
        load_checkpoint(folder / f"{case.__name__}-{code}", training.sharded, [training.optimizer])
        loaded, count = values_of(training), num_quantized(training.optimizer)
        with eagerly():
            training.step(2)
        found.append((loaded, training.parameters(), count))
    return found


def assert_rounded(found: dict[str, Tensor], saved: dict[str, Tensor], share: float) -> None:
    assert list(found) == list(saved)
    for name, value in saved.items():
        assert (found[name] - value).abs().max() <= share * value.abs().max(), name


@pytest.mark.weekly
def test_training_with_quantized_states_goes_on_as_if_it_had_not_stopped(ranks: RankPool, tmp_path: Path) -> None:
    """On the same ranks bit by bit; on others each moment is rounded once more, and is quantized again."""
    saved = ranks(4, save_each, TRAININGS, tmp_path)
    for of_rank, was in zip(ranks(4, load_each, TRAININGS, tmp_path), saved, strict=True):
        for (loaded, end, count), (before, after, expected) in zip(of_rank, was, strict=True):
            assert_identical(loaded, before)
            assert_identical(end, after)
            assert count == expected
    counts = [[count for *_, count in of_rank] for of_rank in saved]
    assert counts == [[8, 8, 8, 8, 4]] * 3 + [[8, 8, 8, 8, 0]]  # two moments of each matrix
    loaded = ranks(2, load_each, TRAININGS, tmp_path)[0]
    for (found, _, _), (before, _, _), (_, code) in zip(loaded, saved[0], TRAININGS, strict=True):
        assert_rounded(found, before, ROUNDED[code])
    assert [count for *_, count in loaded] == [8, 8, 8, 8, 0]


def load_plain(ctx: RankContext, run: Run, path: Path) -> tuple[dict[str, Tensor], int]:
    training = begin(ctx, run, partial(AdamW, lr=0.01))
    load_checkpoint(path, training.sharded, [training.optimizer])
    found = values_of(training), num_quantized(training.optimizer)
    training.step(2)
    return found


def test_values_of_quantized_states_are_there_for_everybody(ranks: RankPool, tmp_path: Path) -> None:
    """For an optimizer that does not quantize, and for torch's own tools."""
    saved = ranks(2, save_each, [(unaligned, "8bit")], tmp_path)[0][0][0]
    found, count = ranks(2, load_plain, run_of(unaligned, "mics"), tmp_path / "unaligned-8bit")[0]
    assert_identical(found, saved)
    assert count == 0
    dcp_to_torch_save(tmp_path / "unaligned-8bit", tmp_path / "one.pt")
    states = torch.load(tmp_path / "one.pt", weights_only=True)["optimizer_0"]["state"]
    assert_identical({name: states[name.partition(":")[0]][name.partition(":")[2]] for name in saved}, saved)


def through_full(ctx: RankContext, run: Run, make: MakeOptimizer) -> tuple[bool, float, list[str]]:
    """Whether a new optimizer goes on alike from the full form, how far off its moments are, and kinds in that form."""
    training = begin(ctx, run, make)
    with eagerly():
        training.step(0)
        training.step(1)
        before, parameters = values_of(training), training.sharded.full_state_dict()
        full = training.sharded.full_optimizer_state_dict(training.optimizer)
        held = [full, parameters]
        torch.distributed.broadcast_object_list(held)
        training.step(2)
        expected = training.parameters()
        training.sharded.load_full_state_dict(held[1])
        training.optimizer = make(training.model.parameters())
        training.sharded.load_full_optimizer_state_dict(training.optimizer, held[0])
        after = values_of(training)
        assert num_quantized(training.optimizer) == 8
        training.step(2)
    off = max(((after[n] - v).abs().max() / v.abs().max()).item() for n, v in before.items())
    found = training.parameters()
    kinds = [type(value).__name__ for value in held[0]["state"][0].values()]
    return all(torch.equal(found[name], value) for name, value in expected.items()), off, kinds


@pytest.mark.parametrize(("code", "kind"), [("8bit", "OptimState8bit"), ("4bit", "OptimState4bit")])
def test_the_full_form_is_that_of_the_plain_optimizer(ranks: RankPool, code: str, kind: str) -> None:
    """Exact where blocks of rows are blocks of the whole; else rounded once when put together, once when cut."""
    for is_same, off, kinds in ranks(4, through_full, run_of(aligned), MAKES[code]):
        assert (is_same, off) == (True, 0.0)
        assert kinds == ["Tensor", kind, kind]
    for _, off, kinds in ranks(4, through_full, run_of(unaligned), MAKES[code]):
        assert 0 < off <= 2 * ROUNDED[code]
        assert kinds == ["Tensor", kind, kind]


class Nesting(Optimizer):
    """Momentum in a dict, a list and a tuple; and a number for each row that a rank has."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["momenta"] = {"all": [torch.zeros_like(p), (torch.zeros_like(p),)], "count": 0}
                    state["rows"] = torch.zeros(len(p))
                one, (two,) = state["momenta"]["all"]
                one.mul_(0.9).add_(p.grad)
                two.mul_(0.5).add_(one)
                state["momenta"]["count"] += 1
                state["rows"] += p.grad.flatten(1).square().mean(1) if p.dim() > 1 else p.grad.abs()
                rows = state["rows"].view(-1, *[1] * (p.dim() - 1))
                p.sub_(group["lr"] * (one + two) / (1 + rows + state["momenta"]["count"]))


def save_nested(ctx: RankContext, run: Run, path: Path) -> dict[str, Tensor]:
    training = begin(ctx, run, Nesting)
    training.step(0)
    save_checkpoint(path, training.sharded, [training.optimizer])
    training.step(1)
    return training.parameters()


def load_nested(ctx: RankContext, run: Run, path: Path) -> dict[str, Tensor]:
    training = begin(ctx, run, Nesting)
    load_checkpoint(path, training.sharded, [training.optimizer])
    training.step(1)
    return training.parameters()


def full_nested(ctx: RankContext, run: Run) -> None:
    training = begin(ctx, run, Nesting)
    training.step(0)
    training.sharded.full_optimizer_state_dict(training.optimizer)


def test_nested_states_load_on_the_ranks_that_had_them(ranks: RankPool, tmp_path: Path) -> None:
    run, path = run_of(aligned, "zero2"), tmp_path / "one"
    saved = ranks(2, save_nested, run, path)[0]
    for found in ranks(2, load_nested, run, path):
        assert_identical(found, saved)
    message = "cannot be resharded.*this rank has.*Load on the same number of ranks with the same scopes"
    raises_on_every_rank(lambda: ranks(4, load_nested, run, path), CheckpointError, message)
    raises_on_every_rank(lambda: ranks(2, full_nested, run), CheckpointError, "inside a dict.*sharded checkpoint")


class _Unknown(torch.Tensor):
    """Of which nothing is known."""


def save_unknown(ctx: RankContext, path: Path) -> None:
    training = begin(ctx, run_of(aligned), Nesting)
    training.step(0)
    for state in training.optimizer.state.values():
        state["momenta"]["all"][0] = state["momenta"]["all"][0].as_subclass(_Unknown)
    save_checkpoint(path, training.sharded, [training.optimizer])


def test_states_of_unknown_kinds_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    raises_on_every_rank(lambda: ranks(2, save_unknown, tmp_path / "one"), CheckpointError, "holds a _Unknown.*Save")
    assert list(tmp_path.iterdir()) == []
