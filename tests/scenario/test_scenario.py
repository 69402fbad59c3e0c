"""Does every adapter train, evaluate, survive a kill and resume on other ranks, with the numbers of a plain run?"""

from pathlib import Path

import pytest
import torch

from tests.accelerate.runs import in_accelerate
from tests.lightning.runs import in_lightning
from tests.rank_report import RankError
from tests.ranks import RankContext, RankPool
from tests.scenario.adapters import ADAPTERS
from tests.scenario.task import DIES_AT, MICRO_STEPS, STEPS, RankResult, Task, reference

VICTIM = 1


def run(ctx: RankContext, adapter: str, folder: Path, is_resumed: bool) -> RankResult:
    """One rank, which kills itself where it is the victim of the first run."""
    dies_at = DIES_AT if ctx.rank == VICTIM and not is_resumed else None
    job = ADAPTERS[adapter]
    return in_lightning(ctx, lambda ctx: in_accelerate(ctx, job, Task(dies_at), folder, is_resumed))


def mean_losses(results: list[RankResult]) -> list[float]:
    """[micro-step], over ranks."""
    return [sum(losses) / len(results) for losses in zip(*(result.losses for result in results), strict=True)]


@pytest.mark.wide(every=5)
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_killed_run_goes_on_elsewhere_as_if_nothing_had_been(ranks: RankPool, tmp_path: Path, adapter: str) -> None:
    expected = reference()
    env = {"ACCELERATE_USE_CPU": "true"}
    with pytest.raises(RankError) as killed:
        ranks(4, run, adapter, tmp_path, False, ranks_per_node=2, env=env)
    assert "ChildProcessError" in str(killed.value)
    assert f"rank {VICTIM}" in str(killed.value)
    assert "no answer" not in str(killed.value)  # the others ended by themselves
    first = [RankResult.read(tmp_path, rank) for rank in range(4)]
    rest = ranks(2, run, adapter, tmp_path, True, env=env)
    per_epoch = STEPS * MICRO_STEPS
    assert mean_losses(first) == pytest.approx(expected.losses[:per_epoch], rel=1e-5)
    assert mean_losses(rest) == pytest.approx(expected.losses[per_epoch:], rel=1e-5)
    for result in first + rest:
        epoch = 0 if result in first else 1
        assert result.evaluations == pytest.approx([expected.evaluations[epoch]], rel=1e-5)
        if result.norms:
            assert result.norms == pytest.approx(expected.norms[STEPS * epoch : STEPS * (epoch + 1)], rel=1e-4)
    for result in rest:
        assert list(result.values) == list(expected.values)
        for name, value in result.values.items():
            torch.testing.assert_close(value, expected.values[name], rtol=1e-5, atol=1e-6)
