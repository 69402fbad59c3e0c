"""Evaluation, interruptions and other orders of units between training steps."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mics_strategy import ShardConfig, shard
from mics_strategy.errors import LifecycleError
from tests import models
from tests.engine.training import (
    Run,
    Training,
    assert_identical,
    assert_same,
    plain,
    start,
    train_without_reading,
    whole,
)
from tests.ranks import RankContext, RankPool, raises_on_every_rank
from tests.torch_versions import kinds_of_dtensors

pytestmark = [pytest.mark.wide, pytest.mark.one_job]

CONFIGS = {
    "ddp": ShardConfig.preset("ddp"),
    "zero1": ShardConfig.preset("zero1"),
    "mics": ShardConfig(),
    "zero2": ShardConfig.preset("zero2"),
    "prefetch": ShardConfig(prefetch=2),
}
configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
Between = Callable[[Training, int], None]


def no_grad(training: Training, step: int) -> None:
    training.model.eval()
    with torch.no_grad():
        training.loss(step + 50)
    training.model.train()


def inference_mode(training: Training, step: int) -> None:
    training.model.eval()
    with torch.inference_mode():
        training.loss(step + 50)
    training.model.train()


def no_grad_in_training_mode(training: Training, step: int) -> None:
    with torch.no_grad():
        training.loss(step + 50)


def with_grad_and_no_backward(training: Training, step: int) -> None:
    training.loss(step + 50)


def forward_that_raises(training: Training, step: int) -> None:
    handle = training.model.blocks[1].up.register_forward_pre_hook(_raise)
    with pytest.raises(ZeroDivisionError):
        training.loss(step)
    handle.remove()


def backward_that_raises_late(training: Training, step: int) -> None:
    _fail_backward(training, training.model.blocks[0], step)


def backward_that_raises_and_is_cleared(training: Training, step: int) -> None:
    _fail_backward(training, training.model.blocks[1], step)
    training.optimizer.zero_grad()


def state_dict(training: Training, step: int) -> None:
    training.sharded.full_state_dict()


def _raise(*_: object) -> None:
    raise ZeroDivisionError


def _fail_backward(training: Training, module: nn.Module, step: int) -> None:
    def hook(*args: object) -> None:
        args[2].register_hook(_raise)

    handle = module.up.register_forward_hook(hook)
    loss = training.loss(step)
    handle.remove()
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    if module is not training.model.blocks[1]:
        training.model.zero_grad()


def nothing(training: Training, step: int) -> None:
    pass


BETWEEN = (
    no_grad,
    inference_mode,
    no_grad_in_training_mode,
    with_grad_and_no_backward,
    forward_that_raises,
    backward_that_raises_and_is_cleared,
    backward_that_raises_late,
    state_dict,
)


def train_with(ctx: RankContext, run: Run, between: Between, is_first: bool) -> dict[str, Tensor]:
    """Something else happens before the first step, or after every step."""
    training = start(ctx, run)
    if is_first:
        between(training, 0)
    for step in range(run.steps):
        training.step(step)
        if not is_first:
            between(training, step)
    return training.parameters()


@configs
@pytest.mark.parametrize("between", BETWEEN, ids=lambda between: between.__name__)
def test_training_goes_on_after(ranks: RankPool, between: Between, config: ShardConfig) -> None:
    run = Run(case=models.transformer, config=config)
    for parameters in ranks(2, train_with, run, between, False):
        assert_same(parameters, plain(run, 2).parameters)


@pytest.mark.parametrize("between", BETWEEN, ids=lambda between: between.__name__)
def test_training_starts_after(ranks: RankPool, between: Between) -> None:
    run = Run(case=models.transformer, config=ShardConfig())
    for parameters in ranks(2, train_with, run, between, True):
        assert_same(parameters, plain(run, 2).parameters)


@pytest.mark.parametrize("preset", ["mics", "zero3", "zeropp-hpz", "zeropp", "paro-iig", "zero1"])
def test_16_bit_parameters_train_after_inference_mode_as_without(ranks: RankPool, preset: str) -> None:
    """The evaluation is the first that asks for the buffers of casts and payloads; training writes to them later."""
    run = Run(case=models.transformer, config=ShardConfig.preset(preset, param_dtype="bfloat16"))
    after, without = (
        ranks(4, train_with, run, between, True, ranks_per_node=2) for between in (inference_mode, nothing)
    )
    for found, expected in zip(after, without, strict=True):
        assert_same(found, expected, tolerance=0)


def evaluate(ctx: RankContext, run: Run, mode: str) -> list[Tensor]:
    """Outputs for one batch before training and after every step."""
    training, outputs = start(ctx, run), []
    modes = {"no_grad": torch.no_grad, "inference": torch.inference_mode, "grad": nullcontext}
    for step in range(run.steps):
        training.model.eval()
        with modes[mode]():
            outputs.append(training.model(training.case.batch(9, 9, 9)["x"]).detach().clone())
        training.model.train()
        training.step(step)
    return outputs


@configs
@pytest.mark.parametrize("mode", ["no_grad", "inference", "grad"])
def test_evaluation_uses_the_newest_parameters(ranks: RankPool, config: ShardConfig, mode: str) -> None:
    run = Run(case=models.mlp, config=config)
    case = models.mlp()
    for outputs in ranks(2, evaluate, run, mode):
        for step, output in enumerate(outputs):
            model = case.build()
            if step:
                model.load_state_dict(plain(run.replace(steps=step), 2).parameters)
            torch.testing.assert_close(output, model(case.batch(9, 9, 9)["x"]).detach(), rtol=1e-5, atol=1e-5)


def drop_layers(ctx: RankContext, run: Run) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """LayerDrop, the same on all ranks, and layers in reverse order every third step.

    And the plain twin.
    """
    training, case = start(ctx, run), run.case()
    twin = case.build()
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    mine = torch.optim.SGD(training.model.parameters(), lr=0.1)
    for step in range(6):
        orders = [[0, 1, 2], [0, 2], [2, 1, 0], [1], [0, 1, 2, 1], [0, 1, 2]]
        for model in (training.model, twin):
            layers = model._modules["all"] = model._modules.get("all", model.blocks)
            model.blocks = nn.Sequential(*[layers[i] for i in orders[step]])
        training.loss(step).backward()
        mine.step()
        mine.zero_grad()
        for rank in range(ctx.world_size):
            (case.loss(twin, case.batch(step, 0, rank)) / ctx.world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
    names = dict(twin.named_parameters(remove_duplicate=True))
    found = {name: whole(p) for name, p in training.model.named_parameters() if name in names}
    return found, {name: p.detach() for name, p in names.items()}


@pytest.mark.parametrize("config", [ShardConfig(), ShardConfig(prefetch=3), CONFIGS["zero2"]], ids=["1", "3", "zero2"])
def test_order_of_layers_may_change_from_step_to_step(ranks: RankPool, config: ShardConfig) -> None:
    for found, expected in ranks(2, drop_layers, Run(case=models.transformer, config=config)):
        assert_same(found, expected)


WRITES: dict[str, Callable[[Any], Any]] = {
    "in place": lambda parameter: parameter.mul_(2),
    "into data": lambda parameter: parameter.data.mul_(2),
    "data": lambda parameter: setattr(parameter, "data", parameter.data * 2),
    "copy": lambda parameter: parameter.copy_(parameter * 2),
    "local": lambda parameter: parameter.to_local().mul_(2),
}


def write_parameter(ctx: RankContext, run: Run, name: str) -> tuple[Tensor, Tensor]:
    """The output before and after a write that doubles it."""
    training = start(ctx, run)
    x = training.case.batch(0, 0, 0)["x"]
    with torch.no_grad():
        training.model.get_parameter("4.bias").zero_()
        before = training.model(x).clone()
        WRITES[name](training.model.get_parameter("4.weight"))
        return before, training.model(x).clone()


@pytest.mark.parametrize("preset", ["ddp", "zero1", "mics"])
@pytest.mark.parametrize("write", WRITES)
def test_every_write_into_a_parameter_is_detected(ranks: RankPool, preset: str, write: str) -> None:
    run = Run(case=models.mlp, config=ShardConfig.preset(preset))
    before, after = ranks(2, write_parameter, run, write)[1]
    torch.testing.assert_close(after, 2 * before)


def write_lists(ctx: RankContext, run: Run) -> tuple[Tensor, Tensor]:
    training = start(ctx, run)
    x = training.batch(0)["x"]
    with torch.no_grad():
        before = training.model(x).clone()
        torch._foreach_mul_([training.model.get_parameter("4.weight")], 2)
        torch._foreach_mul_([training.model.get_parameter("4.bias")], 2)
        return before, training.model(x).clone()


def write_and_mark_modified(ctx: RankContext, run: Run) -> tuple[Tensor, Tensor]:
    training = start(ctx, run)
    x = training.batch(0)["x"]
    with torch.no_grad():
        before = training.model(x).clone()
        for name in ("4.weight", "4.bias"):
            training.model.get_parameter(name).to_local().data.mul_(2)
        training.sharded.mark_modified()
        return before, training.model(x).clone()


@pytest.mark.parametrize("preset", ["ddp", "zero1", "mics"])
@pytest.mark.parametrize("write", [pytest.param("lists", marks=kinds_of_dtensors), "announced"])
def test_write_that_torch_does_not_count_is_used(ranks: RankPool, preset: str, write: str) -> None:
    job = {"lists": write_lists, "announced": write_and_mark_modified}[write]
    before, after = ranks(2, job, Run(case=models.mlp, config=ShardConfig.preset(preset)))[1]
    torch.testing.assert_close(after, 2 * before)


def write_between(ctx: RankContext, run: Run) -> None:
    training = start(ctx, run)
    loss = training.loss(0)
    with torch.no_grad():
        training.model.get_parameter("2.up.weight").mul_(2)
    loss.backward()


def test_write_between_forward_and_backward_is_refused(ranks: RankPool) -> None:
    run = Run(case=models.mlp, config=ShardConfig())
    raises_on_every_rank(lambda: ranks(2, write_between, run), LifecycleError, "changed between its forward")


def buffers_after(ctx: RankContext, run: Run) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    """Buffers after training, after evaluation, and the evaluation's output."""
    training = start(ctx, run)
    for step in range(run.steps):
        training.step(step)
    after_training = {name: buffer.clone() for name, buffer in training.model.named_buffers()}
    training.model.eval()
    with torch.no_grad():
        output = training.model(training.case.batch(9, 9, 9)["x"])
    return after_training, {name: b.clone() for name, b in training.model.named_buffers()}, output


@pytest.mark.parametrize("config", [CONFIGS["ddp"], CONFIGS["mics"]], ids=["ddp", "mics"])
def test_evaluation_uses_the_first_ranks_buffers(ranks: RankPool, config: ShardConfig) -> None:
    run = Run(case=models.conv_bn, config=config.replace(broadcast_buffers=False))
    results = ranks(2, buffers_after, run)
    trace = plain(run, 2)
    for rank, (after_training, after_evaluation, output) in enumerate(results):
        assert_same(after_training, trace.buffers_by_rank[rank])
        assert_same(after_evaluation, trace.buffers_by_rank[0])
        torch.testing.assert_close(output, results[0][2])


@pytest.mark.parametrize("preset", ["mics", "zero1", "ddp", "paro-iig"])
def test_training_twice_gives_the_same_bits(ranks: RankPool, preset: str) -> None:
    run = Run(case=models.transformer, config=ShardConfig.preset(preset), accumulation=2)
    first, second = (ranks(4, train_without_reading, run, ranks_per_node=2) for _ in range(2))
    assert_identical(first[0], second[0])
    assert_identical(first[0], first[3])


def flattened(ctx: RankContext) -> None:
    """Job: operations that torch builds of others, on rows that do not divide, in inference mode."""
    torch.manual_seed(0)
    model = nn.Linear(5, 7)
    values = model.weight.detach().clone()
    shard(model, "zero3")
    with torch.inference_mode():
        for change in (torch.flatten, torch.ravel, torch.t, lambda weight: weight.matmul(weight.t()), nn.Flatten(0)):
            found = change(model.weight)
            torch.testing.assert_close(found.full_tensor(), change(values))


def test_composed_operations_run_in_inference_mode(ranks: RankPool) -> None:
    ranks(2, flattened)
