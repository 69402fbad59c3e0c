"""Averages of the weights, computed on the shards, equal those of plain training.

Averaging is elementwise: every rank averages its shards, and nothing is sent.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_avg_fn

from mics_strategy import LifecycleError, ShardConfig
from tests import models
from tests.engine.counting import CountC10d
from tests.engine.training import Run, assert_identical, assert_same, plain, start, train_without_reading, wholes
from tests.models import Case
from tests.ranks import RankContext, RankPool, raises_on_every_rank

WEIGHT = 0.1
STEPS = 4
EVALUATION = 50  # a step whose batches no training sees
Average = Callable[[list[Tensor], list[Any], int], None]


def by_parameter(averages: list[Tensor], parameters: list[Any], step: int) -> None:
    for average, parameter in zip(averages, parameters, strict=True):
        average.lerp_(parameter.detach(), WEIGHT)


def of_parameters_themselves(averages: list[Tensor], parameters: list[Any], step: int) -> None:
    for average, parameter in zip(averages, parameters, strict=True):
        average.mul_(1 - WEIGHT).add_(parameter, alpha=WEIGHT)


def of_data(averages: list[Tensor], parameters: list[Any], step: int) -> None:
    for average, parameter in zip(averages, parameters, strict=True):
        average.copy_(WEIGHT * parameter.data + (1 - WEIGHT) * average)


def at_once(averages: list[Tensor], parameters: list[Any], step: int) -> None:
    torch._foreach_lerp_(averages, [parameter.detach() for parameter in parameters], WEIGHT)


def by_torchs_function(averages: list[Tensor], parameters: list[Any], step: int) -> None:
    get_ema_multi_avg_fn(1 - WEIGHT)(averages, [parameter.detach() for parameter in parameters], step)


def equally(averages: list[Tensor], parameters: list[Any], step: int) -> None:
    """The plain mean, as stochastic weight averaging takes it.

    The first weights count.
    """
    function = get_swa_avg_fn()
    for average, parameter in zip(averages, parameters, strict=True):
        average.copy_(function(average, parameter.detach(), step + 1))


EXPONENTIAL: tuple[Average, ...] = (by_parameter, of_parameters_themselves, of_data, at_once, by_torchs_function)
PRESETS = ("ddp", "zero1", "zero3", "mics", "paro-iig")
cases = pytest.mark.parametrize(
    "case", [models.transformer, models.tied, models.frozen, models.scalar], ids=lambda case: case.__name__
)


def _run(case: Callable[[], Case], preset: str) -> Run:
    return Run(case=case, config=ShardConfig.preset(preset), steps=STEPS, accumulation=2)


def _plain_average(run: Run, world_size: int, average: Average) -> dict[str, Tensor]:
    averages = {name: p.detach().clone() for name, p in run.case().build().named_parameters()}
    for step in range(run.steps):
        after = plain(run.replace(steps=step + 1), world_size).parameters
        average([*averages.values()], [after[name] for name in averages], step)
    return averages


def _copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def averaged(ctx: RankContext, run: Run, average: Average) -> dict[str, Tensor]:
    """The whole average at the end of a training."""
    training = start(ctx, run)
    averages = _copies(training.model)
    for step in range(run.steps):
        training.step(step)
        with torch.no_grad():
            average([*averages.values()], [*training.model.parameters()], step)
    return wholes(averages)


def _check_average(ranks: RankPool, run: Run, average: Average) -> None:
    expected = _plain_average(run, 4, average)
    assert any(not torch.allclose(value, plain(run, 4).parameters[name]) for name, value in expected.items())
    for found in ranks(4, averaged, run, average, ranks_per_node=2):
        assert_same(found, expected)


@cases
@pytest.mark.parametrize("preset", PRESETS)
def test_average_of_shards_is_the_plain_one(ranks: RankPool, preset: str, case: Callable[[], Case]) -> None:
    _check_average(ranks, _run(case, preset), by_parameter)


@pytest.mark.parametrize("average", [*EXPONENTIAL, equally], ids=lambda average: average.__name__)
@pytest.mark.parametrize("preset", ["ddp", "zero1", "mics"])
def test_every_way_to_average_gives_the_plain_average(ranks: RankPool, preset: str, average: Average) -> None:
    _check_average(ranks, _run(models.scalar, preset), average)


def cost_of_averaging(ctx: RankContext, run: Run) -> tuple[int, int, int]:
    """Collectives of an averaging, bytes of the average, bytes of all parameters."""
    training = start(ctx, run)
    averages = _copies(training.model)
    training.step(0)
    with CountC10d() as counted, torch.no_grad():
        at_once([*averages.values()], [*training.model.parameters()], 0)
    local: list[Any] = [*averages.values()]
    own = sum(average.to_local().untyped_storage().nbytes() for average in local)
    return counted.names.total(), own, sum(4 * parameter.numel() for parameter in training.model.parameters())


def test_an_average_takes_a_share_of_the_memory_and_no_communication(ranks: RankPool) -> None:
    for num_collectives, own, all_bytes in ranks(4, cost_of_averaging, _run(models.transformer, "zero3")):
        assert num_collectives == 0
        assert own < 0.35 * all_bytes


def _copy(parameters: list[Any], values: list[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)


def _copy_data(parameters: list[Any], values: list[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.data.copy_(value)


def _set_data(parameters: list[Any], values: list[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.data = value


def _copy_locals(parameters: list[Any], values: list[Any]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.to_local().copy_(value.to_local())


SWAPS = {"copy": _copy, "data": _copy_data, "set data": _set_data, "local": _copy_locals}
Evaluated = tuple[list[float], dict[str, Tensor]]


def evaluated_with_average(ctx: RankContext, run: Run, swap: str) -> Evaluated:
    """Losses with the average after every step, and the final parameters."""
    training, losses = start(ctx, run), []
    parameters = [*training.model.parameters()]
    averages = [parameter.detach().clone() for parameter in parameters]
    for step in range(training.run.steps):
        training.step(step)
        with torch.no_grad():
            by_parameter(averages, parameters, step)
            kept = [parameter.detach().clone() for parameter in parameters]
            SWAPS[swap](parameters, averages)
            training.model.eval()
            losses.append(training.loss(EVALUATION).item())
            training.model.train()
            SWAPS[swap](parameters, kept)
    return losses, training.parameters()


def _plain_losses(run: Run, world_size: int) -> list[list[float]]:
    """[step][rank], of the plain model with the average."""
    case, losses = run.case(), []
    model = case.build().eval()
    for steps in range(1, run.steps + 1):
        averages = _plain_average(run.replace(steps=steps), world_size, by_parameter)
        model.load_state_dict(averages, strict=False)
        with torch.no_grad():
            by_rank = [case.loss(model, case.batch(EVALUATION, 0, r)).item() for r in range(world_size)]
        losses.append([loss / run.accumulation for loss in by_rank])
    return losses


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("swap", SWAPS)
def test_evaluation_with_the_average_is_plain_and_changes_nothing(ranks: RankPool, swap: str, preset: str) -> None:
    run = _run(models.tied, preset)
    expected = _plain_losses(run, 4)
    undisturbed = ranks(4, train_without_reading, run, ranks_per_node=2)
    for rank, (losses, parameters) in enumerate(ranks(4, evaluated_with_average, run, swap, ranks_per_node=2)):
        assert losses == pytest.approx([by_rank[rank] for by_rank in expected], rel=1e-5)
        assert_identical(parameters, undisturbed[rank])


def averaged_model(ctx: RankContext, run: Run) -> None:
    AveragedModel(start(ctx, run).model)


def test_torchs_averaged_model_is_refused(ranks: RankPool) -> None:
    run = _run(models.mlp, "mics")
    raises_on_every_rank(lambda: ranks(2, averaged_model, run), LifecycleError, "cannot be pickled or copied")
