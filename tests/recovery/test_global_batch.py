"""The global batch stays when ranks are lost and join: as one process that trains on all micro-batches, in fp64."""

from pathlib import Path
from typing import Any

import pytest
import torch

from mics_strategy import ConfigError
from mics_strategy.recovery.attempt import Attempt
from tests.ranks import RankContext, RankPool
from tests.recovery.job import Scenario, dealt_batch, make_model, run_all

NUM_DEALT, NUM_STEPS = 6, 8
SCENARIO = Scenario(
    name="dealt",
    world_size=6,
    num_steps=NUM_STEPS,
    num_dealt=NUM_DEALT,
    kills={"2": (2, "hop"), "3": (2, "hop"), "5": (4, "update")},
    joins=(5,),
)


def one_process() -> dict[str, torch.Tensor]:
    """Weights after the same steps in one process, without sharding."""
    model = make_model(has_buffers=False).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    for step in range(NUM_STEPS):
        for number in range(NUM_DEALT):
            (model(dealt_batch(step, number)).square().mean() / NUM_DEALT).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.interpreter
def test_no_micro_batch_is_lost_or_counts_twice(tmp_path: Path) -> None:
    """Six ranks, then four, which have one and a half micro-batches each, then two, then four again."""
    result = run_all([SCENARIO], tmp_path)["dealt"][0]
    assert [result["sizes"][step] for step in range(NUM_STEPS)] == [6, 6, 4, 4, 4, 2, 4, 4]
    expected = one_process()
    for name, weight in result["weights"].items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-12, atol=1e-14)


def dealt(ctx: RankContext, count: int) -> list[tuple[int, float]]:
    return Attempt().micro_batches(count)


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (6, [[(0, 0.5), (3, 0.5)], [(1, 0.5), (4, 0.5)], [(2, 0.5), (5, 0.5)]]),
        (4, [[(0, 0.75), (3, 0.75)], [(1, 0.75), (1, 0.0)], [(2, 0.75), (2, 0.0)]]),
        (1, [[(0, 3.0)], [(0, 0.0)], [(0, 0.0)]]),
    ],
)
def test_each_micro_batch_is_dealt_once(ranks: RankPool, count: int, expected: Any) -> None:
    assert ranks(3, dealt, count) == expected


def test_no_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"`micro_batches\(0\)` is no batch"):
        Attempt().micro_batches(0)
