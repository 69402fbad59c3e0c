"""Compiled layers: hooks stay outside the graph, later steps compile nothing."""

import warnings
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import compiled_autograd

from mics_strategy import ShardConfig, Topology, shard
from tests import models
from tests.engine.training import Run, assert_same_training, plain, start, train
from tests.models import Case
from tests.ranks import RankContext, RankPool

NODES = Topology(ranks_per_node=2)


def compiled_forward(model: nn.Module) -> None:
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend="aot_eager")


def compiled_in_place(model: nn.Module) -> None:
    for block in model.blocks:
        block.compile(backend="aot_eager")


FORMS = {"forward": compiled_forward, "in_place": compiled_in_place}


def compiled(form: str) -> Case:
    case = models.transformer()

    def build() -> nn.Module:
        torch._dynamo.reset()
        model = case.build()
        FORMS[form](model)
        return model

    return Case(build=build, batch=case.batch, loss=case.loss, units=case.units)


def without_dynamos_warnings(job: Callable[..., Any]) -> Callable[..., Any]:
    """Ignore warnings of Dynamo about its own reads of `grad`.

    It also warns with plain models.
    """

    @wraps(job)
    def quiet(*args: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The .grad attribute", category=UserWarning)
            return job(*args)

    return quiet


@without_dynamos_warnings
def train_quietly(ctx: RankContext, run: Run) -> Any:
    return train(ctx, run)


@without_dynamos_warnings
def gradient_after_compiling_again(ctx: RankContext) -> torch.Tensor:
    """Accumulate over two forwards, the second of which compiles while there are gradients."""
    training = start(ctx, Run(case=partial(compiled, "in_place"), config=ShardConfig.preset("zero3", topology=NODES)))
    training.backward(0)
    first = training.grads()
    torch._dynamo.reset()
    training.backward(0)
    return max((2 * first[name] - grad).abs().max() for name, grad in training.grads().items())


def test_a_layer_may_be_compiled_again_while_there_are_gradients(ranks: RankPool) -> None:
    assert max(ranks(2, gradient_after_compiling_again)) < 1e-6


@pytest.mark.wide(every=2)
@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("preset", ["mics", "zero3", "ddp"])
def test_training_is_that_of_the_plain_model(ranks: RankPool, form: str, preset: str) -> None:
    config = ShardConfig.preset(preset, topology=NODES)
    found = ranks(2, train_quietly, Run(case=partial(compiled, form), config=config, accumulation=2))
    expected = plain(Run(case=models.transformer, config=config, accumulation=2), 2)
    for outcome in found:  # names gain nothing from compiling in place or of a forward
        assert list(outcome.parameters) == list(expected.parameters)
    assert_same_training(found, expected, tolerance=2e-6)


@without_dynamos_warnings
def frames_by_step(ctx: RankContext, form: str) -> list[int]:
    """Frames compiled so far, after each of four steps."""
    training = start(ctx, Run(case=partial(compiled, form), config=ShardConfig.preset("mics", topology=NODES)))
    torch._dynamo.utils.counters.clear()
    counts = []
    for step in range(4):
        training.step(step)
        counts.append(torch._dynamo.utils.counters["frames"]["ok"])
    return [*counts, len(torch._dynamo.utils.counters["graph_break"])]


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_nothing_is_compiled_again_after_the_first_step(ranks: RankPool, form: str) -> None:
    for *counts, graph_breaks in ranks(2, frames_by_step, form):
        assert counts[0] >= 1, "nothing was compiled at all"
        assert counts[1:] == counts[:1] * 3
        assert graph_breaks == 0


def with_compiled_autograd(ctx: RankContext) -> None:
    """It does not run what the engine does in a backward, so there must be an error."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    shard(model, "zero3", units=[nn.Linear])
    loss = model(torch.ones(2, 4)).sum()
    with warnings.catch_warnings(), compiled_autograd._enable(torch.compile(backend="eager")):
        warnings.simplefilter("ignore")  # of graph breaks
        with pytest.raises((AssertionError, RuntimeError)):
            loss.backward()
    torch._dynamo.reset()


def test_compiled_autograd_is_not_wrong_in_silence(ranks: RankPool) -> None:
    ranks(2, with_compiled_autograd)
