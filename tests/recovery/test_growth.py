"""Blocks of ranks join a running job, which continues as a job that had that many ranks from that step on.

One program runs all jobs of this file, whose ranks are real processes (see `job`).
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.recovery.cases import Case, check_case
from tests.recovery.job import Scenario, run_all

pytestmark = pytest.mark.interpreter
BEFORE_STEPS = -1  # of a newcomer that has not begun to train


def kills(ranks: Iterable[int], step: int, point: str) -> dict[str, tuple[int, str]]:
    return {str(rank): (step, point) for rank in ranks}


def grows(name: str, *, world_size: int = 2, **fields: Any) -> Case:
    """A job with one node more from step 3 on."""
    size = world_size + 2
    scenario = Scenario(name=name, world_size=world_size, joins=(2,), **fields)
    return Case(scenario=scenario, survivors=tuple(range(size)), continues_at=3)


def newcomer_dies(point: str, ranks: Iterable[int]) -> Case:
    """A job whose newcomers die before they have trained, so that it goes on as it was."""
    scenario = Scenario(name=f"newcomer-dies-{point}", joins=(2,), kills=kills(ranks, BEFORE_STEPS, point))
    return Case(scenario=scenario, survivors=(0, 1, 2, 3), continues_at=0)


def member_dies(point: str, ranks: Iterable[int], left: tuple[int, ...]) -> Case:
    """A job that loses a node in the middle of a joining."""
    scenario = Scenario(name=f"member-dies-{point}", joins=(2,), kills=kills(ranks, 3, point))
    return Case(scenario=scenario, survivors=left, continues_at=3)


SHRINKS_AND_GROWS = Case(
    scenario=Scenario(name="back", world_size=6, kills=kills([2, 3], 1, "backward"), joins=(3,)),
    survivors=(0, 1, 4, 5, 6, 7),
    continues_at=4,
    before=((1, 4),),
)
FAST = [grows("one-node-more", world_size=4, has_buffers=True), SHRINKS_AND_GROWS]
REFUSED = Scenario(
    name="refused",
    world_size=2,
    joins=(1, 2, 3),
    newcomers=({"fields": {"prefetch": 2}}, {"optimizer": "SGD"}, {"has_buffers": True}),
)
ENDS = Scenario(name="ends", world_size=2, joins=(5,))
OWN_SEEDS = grows("own-seeds", seeds_ranks=True)
DEATHS = [
    *(newcomer_dies(point, ranks) for point, ranks in {"wait": (4, 5), "receive": (5,), "settle": (4,)}.items()),
    newcomer_dies("regroup", (4, 5)),
    *(
        member_dies(point, ranks, left)
        for point, ranks, left in (
            ("regroup", (2, 3), (0, 1, 4, 5)),
            ("send", (0,), (2, 3, 4, 5)),
            ("settle", (0, 1), (2, 3, 4, 5)),
        )
    ),
    Case(
        scenario=Scenario(name="newcomer-cannot-load", joins=(2,), newcomers=({"fails_to_load": True},)),
        survivors=(0, 1, 2, 3),
        continues_at=0,
    ),
    Case(
        scenario=Scenario(name="member-dies-before", joins=(2,), kills=kills([2, 3], 3, "agreement")),
        survivors=(0, 1, 4, 5),
        continues_at=4,
        before=((3, 2),),
    ),
    Case(
        scenario=Scenario(name="newcomer-dies-later", joins=(2,), kills=kills([4, 5], 4, "backward")),
        survivors=(0, 1, 2, 3),
        continues_at=4,
        before=((3, 6),),
    ),
    Case(
        scenario=Scenario(name="only-newcomers-live", joins=(1,), kills=kills([0, 1, 2, 3], 4, "backward")),
        survivors=(4, 5),
        continues_at=4,
        before=((2, 6),),
    ),
    Case(
        scenario=Scenario(name="member-dies-in-two-joins", joins=(1, 1), kills=kills([2, 3], 2, "settle")),
        survivors=(0, 1, 4, 5, 6, 7),
        continues_at=2,
    ),
]
SLOW = [
    OWN_SEEDS,
    Case(
        scenario=Scenario(name="one-two-three", world_size=2, joins=(1, 3)),
        survivors=(0, 1, 2, 3, 4, 5),
        continues_at=4,
        before=((2, 4),),
    ),
    Case(scenario=Scenario(name="two-at-once", world_size=2, joins=(2, 2)), survivors=tuple(range(6)), continues_at=3),
    Case(
        scenario=Scenario(name="ranks-of-ddp", preset="ddp", ranks_per_node=3, world_size=3, joins=(1, 3), block=1),
        survivors=(0, 1, 2, 3, 4),
        continues_at=4,
        before=((2, 4),),
    ),
    grows("sgd", optimizer="SGD"),
    grows("frozen", freezes=True),
    grows("bf16", dtype="bfloat16"),
    grows("micro-steps", num_micro_steps=3),
    grows("profiled", profiles=True),
    *(grows(f"preset-{preset}", preset=preset) for preset in ("hsdp", "paro-nii", "paro-nni", "paro-ini")),
    grows("preset-ddp", world_size=4, preset="ddp", fields={"hierarchical": True}),
]


def run_cases(cases: Iterable[Case], folder: Path, *others: Scenario) -> dict[str, dict[int, Any]]:
    return run_all([s for case in cases for s in (*case.references, case.scenario)] + [*others], folder)


@pytest.fixture(scope="module")
def fast_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fast")


@pytest.fixture(scope="module")
def fast_results(fast_folder: Path) -> dict[str, dict[int, Any]]:
    return run_cases(FAST, fast_folder, REFUSED, ENDS)


@pytest.fixture(scope="module")
def death_results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, Any]]:
    return run_cases(DEATHS, tmp_path_factory.mktemp("deaths"))


@pytest.fixture(scope="module")
def slow_results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, Any]]:
    return run_cases(SLOW, tmp_path_factory.mktemp("slow"))


@pytest.mark.parametrize("case", FAST, ids=[case.scenario.name for case in FAST])
def test_a_job_grows_bitwise(case: Case, fast_results: dict[str, dict[int, Any]]) -> None:
    check_case(case, fast_results)


def test_members_draw_on_and_newcomers_as_they_do(fast_results: dict[str, dict[int, Any]]) -> None:
    alone = fast_results[FAST[0].references[0].name][0]["draws"]
    for number, result in fast_results["one-node-more"].items():
        steps = range(6) if number < 4 else range(3, 6)
        assert result["draws"] == {step: alone[step] for step in steps}


def test_bytes_are_those_of_the_states(fast_folder: Path, fast_results: dict[str, dict[int, Any]]) -> None:
    """Two ranks with half of the model: masters, two states of AdamW and its counters, and the buffers of BatchNorm."""
    result = fast_results["one-node-more"][0]
    numels = [
        weight.numel() for name, weight in result["weights"].items() if "running" not in name and "num" not in name
    ]
    masters, buffers = 2 * result["bytes"]["master shards"], 2 * (12 * 4 + 12 * 4 + 8)
    expected = masters + buffers + 2 * 4 * sum(numels) + 2 * 4 * len(numels)
    assert (
        f"4, 5 have joined, and got {expected} bytes of states (planned: {expected})"
        in (fast_folder / "output").read_text()
    )


def test_a_newcomer_with_something_else_is_refused_and_the_job_goes_on(fast_results: dict[str, dict[int, Any]]) -> None:
    results = fast_results["refused"]
    problems = (
        "`prefetch`: 1 in the running job, 2 here",
        "optimizer 0: torch.optim.adamw.AdamW in the running job, torch.optim.sgd.SGD here",
        "buffer `1.running_mean`: none in the running job, shape (12,), torch.float32 here",
    )
    for block, problem in enumerate(problems):
        for number in (2 + 2 * block, 3 + 2 * block):
            assert results[number]["error"].startswith("ConfigError: The running job does not let this node in")
            assert problem in results[number]["error"]
    assert [results[number]["sizes"] for number in (0, 1)] == [dict.fromkeys(range(6), 2)] * 2
    assert results[0]["repeated"] == results[1]["repeated"] == []


def test_a_newcomer_of_a_job_that_ends_says_so_and_ends(
    fast_folder: Path, fast_results: dict[str, dict[int, Any]]
) -> None:
    results = fast_results["ends"]
    assert [results[number]["error"] for number in (2, 3)] == ["SystemExit 0"] * 2
    assert "has ended before it let this node in" in (fast_folder / "output").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("case", DEATHS, ids=[case.scenario.name for case in DEATHS])
def test_a_death_in_a_joining_costs_a_recovery(case: Case, death_results: dict[str, dict[int, Any]]) -> None:
    check_case(case, death_results)


@pytest.mark.slow
def test_a_newcomer_that_cannot_load_says_why(death_results: dict[str, dict[int, Any]]) -> None:
    for number in (4, 5):
        error = death_results["newcomer-cannot-load"][number]["error"]
        assert "The states of the running job could not be loaded here: RuntimeError: of a script" in error


@pytest.mark.weekly  # 14 jobs and as many references: FAST and DEATHS stand for them at each commit
@pytest.mark.parametrize("case", SLOW, ids=[case.scenario.name for case in SLOW])
def test_a_job_grows_bitwise_everywhere(case: Case, slow_results: dict[str, dict[int, Any]]) -> None:
    check_case(case, slow_results)


@pytest.mark.weekly
def test_newcomers_draw_other_numbers_where_all_ranks_do(slow_results: dict[str, dict[int, Any]]) -> None:
    draws = [result["draws"][step][0] for result in slow_results["own-seeds"].values() for step in (3, 4, 5)]
    assert len({*draws}) == 4 * 3
