"""What a step costs the host for each parameter: calls of functions, which are counted, not timed."""

import gc
import sys
from collections import Counter
from types import FrameType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.optim import adam

from mics_strategy import ShardConfig, Topology, shard
from mics_strategy.engine.parameter import LocalParameter
from mics_strategy.engine.tensor_memory import TensorMemory
from tests.ranks import RankContext, RankPool

NUM_UNITS, FEW, MANY = 3, 4, 20
NUM_COUNTED = 6
# Python functions and builtins; they may only fall. torch 2.11 passes attributes through `__torch_function__`.
CEILING, BUILTIN_CEILING = (23, 39) if torch.__version__ >= "2.12" else (29, 42)
# Comprehensions are no calls from Python 3.12 on; a parameter's hash stands for torch's own, which is a function too.
NOT_COUNTED = ("<listcomp>", "<dictcomp>", "<setcomp>", "__hash__")


class Unit(nn.Module):
    def __init__(self, num_parameters: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(num_parameters)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def calls_of_a_step(preset: str, num_parameters: int) -> dict[str, int]:
    """Calls of functions of the package, and of builtins by it, in the thread of the training loop.

    The fewest of several steps: waits for other ranks add some.
    """
    gc.collect()  # the model of before, which hooks of optimizers would ask for its parameters
    TensorMemory.has_checks = False  # earlier jobs of this process may have assigned tensors
    model = nn.Sequential(*(Unit(num_parameters) for _ in range(NUM_UNITS)))
    options = {"hierarchical": True, "overlap": set()}  # what is still in flight is asked for again and again
    shard(model, ShardConfig.preset(preset, topology=Topology(ranks_per_node=2), **options), units=[Unit])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def profile(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if "mics_strategy" in code.co_filename and (event == "c_call" or code.co_name not in NOT_COUNTED):
            calls[event] += 1

    by_step = []
    for _ in range(3 + NUM_COUNTED):
        calls = Counter[str]()
        sys.setprofile(profile)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        sys.setprofile(None)
        by_step.append(calls)
    return {event: min(calls[event] for calls in by_step[-NUM_COUNTED:]) for event in ("call", "c_call")}


def calls_per_parameter(ctx: RankContext, preset: str) -> tuple[float, float]:
    few, many = calls_of_a_step(preset, FEW), calls_of_a_step(preset, MANY)
    num_more = NUM_UNITS * (MANY - FEW)
    return (many["call"] - few["call"]) / num_more, (many["c_call"] - few["c_call"]) / num_more


@pytest.mark.parametrize("preset", ["zero3", "zero1", "ddp"])
def test_a_parameter_costs_few_calls_in_a_step(ranks: RankPool, preset: str) -> None:
    for python, builtin in ranks(4, calls_per_parameter, preset, ranks_per_node=2):
        assert python <= CEILING
        assert builtin <= BUILTIN_CEILING


class OwnAdamW(torch.optim.AdamW):
    """A script's class, whose methods may keep parameters in sets and dicts."""


def kinds_in_a_step(ctx: RankContext, optimizer_class: type[torch.optim.Optimizer]) -> set[type]:
    """Classes of the tensors that torch's update of AdamW is called with."""
    model = nn.Linear(4, 4)
    shard(model, ShardConfig.preset("zero3", update_locality="element"))
    optimizer = optimizer_class(model.parameters(), lr=0.1)
    with patch.object(adam, "adam", wraps=adam.adam) as update:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    return {type(parameter) for call in update.call_args_list for parameter in call.args[0]}


def test_torch_looks_for_no_overrides_in_its_own_optimizers(ranks: RankPool) -> None:
    assert ranks(2, kinds_in_a_step, torch.optim.AdamW) == [{nn.Parameter}] * 2
    assert ranks(2, kinds_in_a_step, OwnAdamW) == [{LocalParameter}] * 2
