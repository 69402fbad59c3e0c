"""Is a model that Accelerate has prepared recorded with a plain call, and logged by trackers?"""

import itertools
from typing import Any

import pytest
import torch
from accelerate.tracking import GeneralTracker
from torch import nn

from tests.accelerate.runs import accelerator, run
from tests.ranks import RankContext, RankPool


class Memory(GeneralTracker):
    """Keeps what it receives."""

    name = "memory"
    requires_logging_directory = False
    tracker = None
    main_process_only = False

    def __init__(self) -> None:
        super().__init__()
        self.logged: dict[str, float] = {}

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        pass

    def log(self, values: dict[str, float], step: int | None = None, **_: Any) -> None:
        self.logged.update(values)


def profiled(ctx: RankContext) -> tuple[int, dict[str, float], float]:
    memory = Memory()
    acc = accelerator(accelerator_log_with=memory, accelerator_gradient_accumulation_steps=2)
    acc.init_trackers("profile")
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model, optimizer = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    profile = acc.sharded_of(model).profile(steps=2)
    for _ in range(4):
        with acc.accumulate(model):
            acc.backward(model(torch.ones(2, 4)).sum())
            optimizer.step()
            optimizer.zero_grad()
    acc.log(profile.result.metrics(), step=2)
    row = profile.result.own_rows[0].intervals
    num_losses = sum(before.key.name != "loss" and this.key.name == "loss" for before, this in itertools.pairwise(row))
    return num_losses, memory.logged, profile.result.step_s


def test_a_plain_call_records_and_trackers_log(ranks: RankPool) -> None:
    (num_losses, logged, step_s), (num_on_other, *_) = run(ranks, 2, profiled)
    assert num_losses == num_on_other == 4
    assert logged["mics/step_s"] == step_s
    assert sum(value for key, value in logged.items() if key != "mics/step_s") == pytest.approx(step_s)
