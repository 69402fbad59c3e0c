"""Do the cases of a test share a job, and does each keep its own result and its own failure?"""

import pytest
import torch

from tests.rank_report import raises_on_every_rank
from tests.ranks import RankContext, RankPool
from tests.seeds import SEED

pytestmark = pytest.mark.one_job

_directories: dict[int, str] = {}


def number_and_place(ctx: RankContext, number: int) -> tuple[int, float, str]:
    """The number, the first random value, and the directory of the job."""
    return number, torch.rand(()).item(), str(ctx.tmp_path)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_case_gets_its_own_result_from_the_same_seeds(ranks: RankPool, number: int) -> None:
    first, _ = results = ranks(2, number_and_place, number)
    for found, value, _ in results:
        assert found == number
        assert value == torch.rand((), generator=torch.Generator().manual_seed(SEED)).item()
    _directories[number] = first[2]


def test_cases_of_a_test_share_a_job() -> None:
    assert len(set(_directories.values())) == min(1, len(_directories))


@pytest.mark.parametrize("world_size", [1, 2])
def test_cases_of_other_world_sizes_have_jobs_of_their_own(ranks: RankPool, world_size: int) -> None:
    assert len(ranks(world_size, number_and_place, 0)) == world_size


def not_one(ctx: RankContext, number: int) -> float:
    return 1 / (number - 1)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_case_that_fails_fails_no_other(ranks: RankPool, number: int) -> None:
    if number == 1:
        raises_on_every_rank(lambda: ranks(2, not_one, number), ZeroDivisionError, "division by zero")
    else:
        assert ranks(2, not_one, number) == [1 / (number - 1)] * 2


@pytest.mark.parametrize("number", [1, 2])
def test_a_second_call_of_a_test_is_a_job_of_its_own(ranks: RankPool, number: int) -> None:
    first, second = ranks(1, number_and_place, number), ranks(1, number_and_place, -number)
    assert (first[0][0], second[0][0]) == (number, -number)


@pytest.mark.parametrize("number", [1, 2])
def test_a_test_with_other_fixtures_has_jobs_of_its_own(
    ranks: RankPool, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    assert ranks(1, number_and_place, number)[0][0] == number
