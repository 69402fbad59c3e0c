"""Optimizers with quantized states (torchao) train as on the plain model.

Such states are tensor subclasses with one scale for each block of flattened elements. Where the blocks of a rank's rows
are blocks of the whole tensor, steps on shards equal the steps on whole tensors, bit by bit. Elsewhere the two differ
by rounding. torch.compile, which these optimizers call, is left out in all but one test.
"""

import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ExponentialLR
from torchao.optim import Adam4bit, Adam8bit, AdamFp8, AdamW4bit, AdamW8bit, AdamWFp8
from torchao.optim.quant_utils import create_dynamic_map
from torchao.utils import TorchAOBaseTensor

from mics_strategy import ConfigError, ShardConfig, shard
from tests import models
from tests.engine.loops import Loop, Seen, assert_same_loop
from tests.engine.training import Run, presets, start, whole
from tests.models import Case
from tests.ranks import RankContext, RankPool, raises_on_every_rank

pytestmark = pytest.mark.wide(every=2)

PRESETS = ("ddp", "zero1", "zero2", "mics", "paro-iig")
MakeOptimizer = Callable[..., Optimizer]


@contextmanager
def eagerly() -> Iterator[None]:
    """Without compiling torchao's steps, of which torch 2.12 warns."""
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.compile with fullgraph=True found no compiled frames")
        yield


class _Layer(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def layers(width: int, hidden: int) -> Case:
    def build() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            return nn.Sequential(_Layer(width, hidden), _Layer(width, hidden), nn.Linear(width, 3))

    def batch(step: int, micro: int, rank: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(1009 * step + 31 * micro + rank)
        return {"x": torch.randn(2, width, generator=generator), "y": torch.randn(2, 3, generator=generator)}

    return Case(build=build, batch=batch, loss=models.mlp().loss, units=(_Layer,))


def aligned() -> Case:
    """Matrices of 16384 elements, 4096 on each of four ranks.

    That is the smallest quantized size, and whole blocks.
    """
    return layers(64, 256)


def unaligned() -> Case:
    """Matrices whose blocks are cut by the shards of two and four ranks."""
    return layers(6, 4608)


class _Twins:
    """An optimizer on the sharded model, and plain ones with the same gradients.

    `whole` is stepped on as whole tensors, `rows` are those that this rank owns.
    """

    def __init__(self, ctx: RankContext, run: Run, make: MakeOptimizer) -> None:
        self.training = start(ctx, run)
        self.sharded = dict(self.training.model.named_parameters())
        self.whole = {name: nn.Parameter(whole(p)) for name, p in self.sharded.items()}
        self.rows = {name: nn.Parameter(p.to_local().detach().clone()) for name, p in self.sharded.items()}
        self.optimizers = [make(parameters.values()) for parameters in (self.sharded, self.whole, self.rows)]
        self.largest = dict.fromkeys(self.sharded, 0.0)  # gradient so far

    def step(self, step: int) -> None:
        self.training.backward(step)
        for name, parameter in self.sharded.items():
            self.whole[name].grad, self.rows[name].grad = whole(parameter.grad), parameter.grad.to_local().clone()
            self.largest[name] = max(self.largest[name], self.whole[name].grad.abs().max().item())
        with eagerly():
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()

    def differences(self) -> dict[str, float]:
        """The largest one of each parameter from the whole twin."""
        return {name: (whole(p) - self.whole[name]).abs().max().item() for name, p in self.sharded.items()}

    def differs_from_rows(self) -> bool:
        return any(not torch.equal(p.to_local(), self.rows[name]) for name, p in self.sharded.items())

    def num_quantized(self) -> int:
        """Number of quantized states of the sharded optimizer.

        Each is the local part of a DTensor like its parameter.
        """
        optimizer, count = self.optimizers[0], 0
        for parameter in self.sharded.values():
            for value in optimizer.state[parameter].values():
                if isinstance(value, DTensor) and isinstance(value.to_local(), TorchAOBaseTensor):
                    assert (value.shape, value.placements) == (parameter.shape, parameter.placements)
                    count += 1
        return count


def step_differences(ctx: RankContext, runs: list[Run], make: MakeOptimizer) -> list[tuple[float, int]]:
    """The largest difference from steps on whole tensors after each run.

    Also the number of quantized states.
    """
    found = []
    for run in runs:
        twins = _Twins(ctx, run, make)
        for step in range(run.steps):
            twins.step(step)
        found.append((max(twins.differences().values()), twins.num_quantized()))
    return found


@pytest.mark.parametrize("world_size", [2, 4])
def test_steps_on_whole_blocks_are_those_on_whole_tensors(ranks: RankPool, world_size: int) -> None:
    runs = [Run(case=aligned, config=config) for config in presets(PRESETS)]
    for found in ranks(world_size, step_differences, runs, partial(AdamW8bit, lr=0.01), ranks_per_node=2):
        assert found == [(0.0, 8)] * len(runs)  # two moments of four matrices


@pytest.mark.parametrize("make", [Adam8bit, AdamW4bit, Adam4bit, AdamWFp8, AdamFp8], ids=lambda make: make.__name__)
def test_every_quantized_format_steps_as_on_whole_tensors(ranks: RankPool, make: MakeOptimizer) -> None:
    run = Run(case=aligned, config=ShardConfig.preset("zero1"))
    assert ranks(4, step_differences, [run], partial(make, lr=0.01)) == [[(0.0, 8)]] * 4


def steps_on_rows(ctx: RankContext, run: Run, make: MakeOptimizer) -> tuple[bool, bool, int]:
    """Whether steps differ from those on this rank's rows, and on whole tensors.

    The number of quantized states.
    """
    twins = _Twins(ctx, run, make)
    for step in range(run.steps):
        twins.step(step)
    return twins.differs_from_rows(), any(twins.differences().values()), twins.num_quantized()


@pytest.mark.parametrize("make", [AdamW8bit, Adam4bit], ids=lambda make: make.__name__)
def test_every_rank_quantizes_the_states_of_its_rows(ranks: RankPool, make: MakeOptimizer) -> None:
    run = Run(case=unaligned, config=ShardConfig.preset("zero1"))
    assert ranks(4, steps_on_rows, run, partial(make, lr=0.01)) == [(False, True, 8)] * 4


def _rounding_bound(largest: float, steps: int, *, lr: float, beta: float, eps: float) -> float:
    """Largest difference of two Adams that round the same moments in other blocks.

    One of them may not round at all.

    A moment is rounded by at most half the widest gap of its code times the largest value in its block, which no
    gradient (or its square) is below; the step itself takes the moments of before the rounding. So after t steps they
    are `gap * largest * (beta + ... + beta**(t - 1))` from exact at most; and m / (sqrt(v) + eps) changes by at most
    dm / eps + m * sqrt(dv) / eps**2.
    """
    gaps = [torch.tensor(create_dynamic_map(signed)).diff().max().item() for signed in (True, False)]
    bound = 0.0
    for step in range(2, steps + 1):
        spread = sum(beta**s for s in range(1, step)) / (1 - beta**step)  # with the correction of the bias
        first, second = gaps[0] * largest * spread, gaps[1] * largest**2 * spread
        bound += lr * (first / eps + largest * second**0.5 / eps**2)
    return bound


def largest_differences(ctx: RankContext, run: Run, make: MakeOptimizer) -> tuple[dict[str, float], dict[str, float]]:
    """Largest difference from steps on whole tensors, and largest gradient.

    Both for each parameter.
    """
    twins = _Twins(ctx, run, make)
    for step in range(run.steps):
        twins.step(step)
    return twins.differences(), twins.largest


@pytest.mark.parametrize("world_size", [2, 4])
def test_steps_on_other_blocks_differ_by_rounding(ranks: RankPool, world_size: int) -> None:
    run, lr, beta, eps = Run(case=unaligned, config=ShardConfig.preset("zero1")), 0.01, 0.5, 1.0
    make = partial(Adam8bit, lr=lr, betas=(beta, beta), eps=eps)
    differences, largest = ranks(world_size, largest_differences, run, make)[0]
    assert max(differences.values()) > 0
    for name, difference in differences.items():
        bound = _rounding_bound(largest[name], run.steps, lr=lr, beta=beta, eps=eps)
        assert difference <= bound + 1e-7, name
        assert bound < 0.5 * lr * largest[name] / eps, name  # a moment that is lost is seen


def trained_with_quantized_states(loop: Loop) -> Seen:
    """Rates change, too: they are tensors here."""
    made = AdamW8bit(loop.parameters(), lr=0.01, eps=1e-3)
    schedule = ExponentialLR(made, 0.5)
    with eagerly():
        for step in range(3):
            loop.step(step, made)
            schedule.step()
    return [loop.values()]


def test_training_with_quantized_states_is_that_of_the_plain_model(ranks: RankPool) -> None:
    runs = [Run(case=aligned, config=config, accumulation=2) for config in presets(PRESETS)]
    one_code = 2e-4  # of an update by 0.01: a gradient that differs in its last bit may be rounded the other way
    assert_same_loop(ranks, 2, runs, trained_with_quantized_states, tolerance=one_code)


def _through_a_file(state: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)


def reload_quantized(ctx: RankContext, runs: list[Run], make: MakeOptimizer) -> list[tuple[float, int]]:
    """A new optimizer continues with the sharded states of the old one.

    Once through a file.
    """
    found = []
    for run in runs:
        twins = _Twins(ctx, run, make)
        for step in range(3):
            twins.step(step)
            state = twins.optimizers[0].state_dict()
            if step == 1:
                state["state"] = _through_a_file(state["state"])
            twins.optimizers[0] = make(twins.sharded.values())
            twins.optimizers[0].load_state_dict(state)
        found.append((max(twins.differences().values()), twins.num_quantized()))
    return found


@pytest.mark.parametrize("make", [AdamW8bit, AdamW4bit, AdamWFp8], ids=lambda make: make.__name__)
def test_states_may_be_given_to_a_new_optimizer(ranks: RankPool, make: MakeOptimizer) -> None:
    runs = [Run(case=aligned, config=config) for config in presets(("ddp", "zero1"))]
    for found in ranks(2, reload_quantized, runs, partial(make, lr=0.01)):
        assert found == [(0.0, 8)] * len(runs)


def load_whole_states(ctx: RankContext, runs: list[Run], make: MakeOptimizer) -> list[tuple[float, int]]:
    """A new optimizer on the sharded model continues with states of whole tensors."""
    found = []
    for run in runs:
        twins = _Twins(ctx, run, make)
        twins.step(0)
        twins.step(1)
        twins.optimizers[0] = make(twins.sharded.values())
        with eagerly():
            state = _through_a_file(twins.optimizers[1].state_dict())
            twins.training.sharded.load_full_optimizer_state_dict(twins.optimizers[0], state)
        twins.step(2)
        found.append((max(twins.differences().values()), twins.num_quantized()))
    return found


@pytest.mark.parametrize("make", [AdamW8bit, AdamW4bit, AdamWFp8], ids=lambda make: make.__name__)
def test_whole_blocks_of_a_plain_optimizers_states_are_loaded(ranks: RankPool, make: MakeOptimizer) -> None:
    runs = [Run(case=aligned, config=config) for config in presets(("ddp", "zero1"))]
    for found in ranks(4, load_whole_states, runs, partial(make, lr=0.01)):
        assert found == [(0.0, 8)] * len(runs)


def adopted_before_its_first_step(loop: Loop) -> Seen:
    """Built on the plain model where there is one."""
    made = AdamW8bit(loop.parameters(), lr=0.01, eps=1e-3)
    if loop.sharded is not None:
        model = loop.case.build()
        made = AdamW8bit(model.parameters(), lr=0.01, eps=1e-3)
        loop = replace(loop, model=model, sharded=shard(model, loop.run.config, units=loop.case.units))
    with eagerly():
        if loop.sharded is not None:
            loop.sharded.adopt(made)
        for step in range(2):
            loop.step(step, made)
    return [loop.values()]


def test_an_optimizer_for_quantized_states_may_be_adopted_before_its_first_step(ranks: RankPool) -> None:
    runs = [Run(case=aligned, config=config) for config in presets(("ddp", "mics"))]
    assert_same_loop(ranks, 2, runs, adopted_before_its_first_step, tolerance=2e-4)


def compiled_steps(ctx: RankContext, run: Run) -> tuple[float, list[int]]:
    """Traced by Dynamo, run without a compiler; frames traced so far, after each step."""
    torch._dynamo.reset()
    twins, frames = _Twins(ctx, run, partial(AdamW8bit, lr=0.01)), []
    sharded = twins.optimizers.pop(0)
    torch._dynamo.utils.counters.clear()
    for step in range(3):
        twins.step(step)
        with torch.compiler.set_stance(force_backend="eager"):
            sharded.step()
        twins.training.model.zero_grad()
        frames.append(torch._dynamo.utils.counters["frames"]["ok"])
    return max(twins.differences().values()), frames


@pytest.mark.slow
def test_compiled_steps_are_traced_once(ranks: RankPool) -> None:
    for difference, frames in ranks(2, compiled_steps, Run(case=aligned, config=ShardConfig.preset("zero1"))):
        assert difference == 0
        assert frames[0] >= 1
        assert frames[1:] == frames[:1] * 2


def adopt_quantized(ctx: RankContext) -> None:
    case = aligned()
    model = case.build()
    optimizer = AdamW8bit(model.parameters(), lr=0.01)
    case.loss(model, case.batch(0, 0, 0)).backward()
    with eagerly():
        optimizer.step()
    sharded = shard(model, "zero1", units=case.units)
    before = [*optimizer.state]
    try:
        sharded.adopt(optimizer)
    finally:
        assert [*optimizer.state] == before
        assert not any(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])


def test_quantized_states_that_cannot_be_adopted_are_left_as_they_are(ranks: RankPool) -> None:
    raises_on_every_rank(
        lambda: ranks(2, adopt_quantized),
        ConfigError,
        "cannot be sharded. Call `adopt` before the optimizer.s first step",
    )
