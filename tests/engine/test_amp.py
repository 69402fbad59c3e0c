"""Lower precision and loss scaling, and overflows on one rank."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.func import functional_call

from mics_strategy import ShardConfig, Topology, shard
from tests import models
from tests.engine.training import (
    OPTIMIZERS,
    Run,
    assert_identical,
    assert_same,
    assert_same_training,
    plain,
    start,
    train,
    train_without_reading,
    whole,
)
from tests.models import Batch
from tests.ranks import RankContext, RankPool
from tests.reference import train_reference

pytestmark = [pytest.mark.wide, pytest.mark.one_job]

SCALE = 2.0**10
scalers = pytest.mark.parametrize("preset", ["ddp", "zero1", "zero2", "mics", "paro-iig"])


class InBfloat16(nn.Module):
    """Computes with rounded parameters and inputs; parameters and gradients stay fp32."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        rounded = {name: p.bfloat16() for name, p in self.inner.named_parameters()}
        return functional_call(self.inner, rounded, (x.bfloat16(),))


@pytest.mark.parametrize("preset", ["ddp", "zero1", "zero3", "mics", "paro-iig"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_bfloat16_computes_rounded_and_sums_in_fp32(ranks: RankPool, preset: str, accumulation: int) -> None:
    config = ShardConfig.preset(preset, param_dtype="bfloat16")
    run = Run(case=models.mlp, config=config, accumulation=accumulation)
    case = models.mlp()
    model = InBfloat16(case.build())
    batches = case.batches(run.steps, accumulation, 4)
    trace = train_reference(model, batches, OPTIMIZERS[run.optimizer], loss_fn=case.loss)
    trace.parameters = {name.removeprefix("inner."): p for name, p in trace.parameters.items()}
    trace.grads = [{name.removeprefix("inner."): g for name, g in grads.items()} for grads in trace.grads]
    assert_same_training(ranks(4, train, run, ranks_per_node=2), trace)


@pytest.mark.parametrize("preset", ["ddp", "zero2", "mics", "paro-iig"])
def test_bfloat16_wire_rounds_a_few_times(ranks: RankPool, preset: str) -> None:
    config = ShardConfig.preset(preset, reduce_dtype="bfloat16")
    run = Run(case=models.mlp, config=config, steps=1, accumulation=2, optimizer="sgd")
    [outcome, *_] = ranks(4, train, run, ranks_per_node=2)
    trace = plain(run, 4)
    for name, expected in trace.grads[0].items():
        error = (outcome.grads[0][name] - expected).abs().max().item()
        assert 0 < error < 3 * 2**-8 * 4 * expected.abs().max().item(), name


def in_bfloat16_throughout(ctx: RankContext, run: Run) -> dict[str, Tensor]:
    training = start(ctx, run)
    dtypes = {p.dtype for p in training.model.parameters()}
    for step in range(run.steps):
        training.step(step)
    assert dtypes == {torch.bfloat16}
    return training.parameters()


def bfloat16_mlp() -> models.Case:
    case = models.mlp()

    def batch(step: int, micro: int, rank: int) -> Batch:
        return {key: value.bfloat16() for key, value in case.batch(step, micro, rank).items()}

    return models.Case(build=lambda: case.build().bfloat16(), batch=batch, loss=case.loss, units=case.units)


@pytest.mark.parametrize("preset", ["mics", "zero1"])
def test_bfloat16_model_trains_as_the_plain_one_up_to_rounding(ranks: RankPool, preset: str) -> None:
    run = Run(case=bfloat16_mlp, config=ShardConfig.preset(preset), optimizer="sgd", steps=2)
    assert_same(ranks(2, in_bfloat16_throughout, run)[0], plain(run, 2).parameters, 0.02)


def scaled(ctx: RankContext, run: Run, poison: int | None) -> tuple[dict[str, Tensor], list[float]]:
    """Steps with a scaler; in step 1 the loss of rank `poison` is infinite.

    The scale after every step.
    """
    training, scales = start(ctx, run), []
    scaler = GradScaler("cpu", init_scale=SCALE, growth_interval=100)
    for step in range(run.steps):
        for micro in range(run.accumulation):
            loss = training.loss(step, micro)
            is_poisoned = step == 1 and micro == 0 and ctx.rank == poison
            scaler.scale(loss * math.inf if is_poisoned else loss).backward()
        if run.clip is not None:
            scaler.unscale_(training.optimizer)
            training.sharded.clip_grad_norm_(run.clip)
        scaler.step(training.optimizer)
        scaler.update()
        training.optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return training.parameters(), scales


@scalers
@pytest.mark.parametrize("clip", [None, 0.1], ids=["whole", "clipped"])
def test_scaled_training_equals_plain(ranks: RankPool, preset: str, clip: float | None) -> None:
    run = Run(case=models.mlp, config=ShardConfig.preset(preset), accumulation=2, clip=clip)
    for parameters, scales in ranks(4, scaled, run, None, ranks_per_node=2):
        assert_same(parameters, plain(run, 4).parameters)
        assert scales == [SCALE] * run.steps


@scalers
@pytest.mark.parametrize("optimizer", ["momentum", "adamw_fused"])
def test_overflow_on_one_rank_skips_the_step_on_all(ranks: RankPool, preset: str, optimizer: str) -> None:
    config = ShardConfig.preset(preset)
    run = Run(case=models.mlp, config=config, accumulation=2, steps=2, optimizer=optimizer)
    after_one = plain(run.replace(steps=1), 4).parameters
    for parameters, scales in ranks(4, scaled, run, 3, ranks_per_node=2):
        assert scales == [SCALE, SCALE / 2]
        assert_same(parameters, after_one)


class ScalarFirst(nn.Module):
    """Its first parameter has no dimension, as the `logit_scale` of CLIP."""

    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(2.0))
        self.head = nn.Linear(1, 4, bias=False)

    def forward(self, factors: Tensor) -> Tensor:
        return self.logit_scale.clone() + (self.head(torch.ones(1, 1)) * factors).sum()


def overflow_in_one_row(ctx: RankContext, preset: str) -> tuple[float, float, float]:
    """The scale, the scalar and the first row after an overflow in the last row."""
    torch.manual_seed(0)
    model = ScalarFirst()
    shard(model, ShardConfig.preset(preset, topology=Topology(ranks_per_node=2)), units="auto")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    nn.init.zeros_(model.head.weight)
    scaler = GradScaler("cpu", init_scale=SCALE, growth_interval=100)
    for last in (1.0, math.inf):
        scaler.scale(model(torch.tensor([1.0, 1.0, 1.0, last]))).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return scaler.get_scale(), model.logit_scale.full_tensor().item(), model.head.weight.full_tensor()[0].item()


@scalers
def test_all_ranks_find_an_overflow_of_one_rank_if_the_first_parameter_is_a_scalar(
    ranks: RankPool, preset: str
) -> None:
    assert ranks(4, overflow_in_one_row, preset, ranks_per_node=2) == [(SCALE / 2, 1.0, -1.0)] * 4


def torch_norms(ctx: RankContext, run: Run, max_norm: float, norm_type: float) -> list[tuple[float, float, dict]]:
    """Norm and gradients after clipping: torch's function, ours, and plain."""
    found = []
    for is_ours in (False, True):
        training = start(ctx, run)
        training.backward(0)
        parameters = list(training.model.parameters())
        if is_ours or math.isinf(norm_type):  # torch has no infinity norm of an empty shard
            norm = training.sharded.clip_grad_norm_(max_norm, norm_type)
        else:
            norm = whole(nn.utils.clip_grad_norm_(parameters, max_norm, norm_type))
        found.append((norm.item(), training.grads()))
    case = run.case()
    model = case.build()
    for rank in range(ctx.world_size):
        (case.loss(model, case.batch(0, 0, rank)) / ctx.world_size).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
    found.append((norm.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
    return found


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf], ids=str)
@pytest.mark.parametrize("case", [models.scalar, models.frozen], ids=lambda case: case.__name__)
@pytest.mark.parametrize("preset", ["mics", "paro-iig"])
def test_clipping_equals_torch_on_the_plain_model(ranks: RankPool, preset: str, case: object, norm_type: float) -> None:
    run = Run(case=case, config=ShardConfig.preset(preset))
    for theirs, ours, expected in ranks(4, torch_norms, run, 0.01, norm_type, ranks_per_node=2):
        assert ours[0] == pytest.approx(expected[0], rel=1e-5)
        assert theirs[0] == pytest.approx(expected[0], rel=1e-5)
        assert_same(ours[1], expected[1])
        assert_same(theirs[1], expected[1])


def test_clipping_without_a_limit_changes_nothing(ranks: RankPool) -> None:
    run = Run(case=models.mlp, config=ShardConfig())
    unclipped, clipped = run, run.replace(clip=math.inf)
    first = ranks(2, train_without_reading, unclipped)[0]
    assert_identical(ranks(2, train, clipped)[0].parameters, first)
