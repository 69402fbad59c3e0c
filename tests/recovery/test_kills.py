"""Ranks die by SIGKILL, and the others continue as a job that had only them from that step on.

One program runs all jobs of this file, whose ranks are real processes (see `job`).
"""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.recovery.cases import Case, check_case
from tests.recovery.job import CHILD_S, Scenario, run_all

pytestmark = pytest.mark.interpreter
LATE_S = 60.0


def kills(ranks: Iterable[int], step: int, point: str) -> dict[str, tuple[int, str]]:
    return {str(rank): (step, point) for rank in ranks}


def node_dies(point: str, *, node: int = 1, continues_at: int = 3, **fields: Any) -> Case:
    """Two nodes of two ranks, of which one dies in step 3."""
    dying, living = ((2, 3), (0, 1)) if node else ((0, 1), (2, 3))
    scenario = Scenario(name=fields.pop("name", f"node-{point}"), kills=kills(dying, 3, point), **fields)
    return Case(scenario=scenario, survivors=living, continues_at=continues_at)


FAST = [
    node_dies("backward"),
    node_dies("barrier"),
    node_dies("update", continues_at=4),
    Case(
        scenario=Scenario(name="rank", kills=kills([3], 3, "hop"), lost_after_s=LATE_S),
        survivors=(0, 1),
        continues_at=3,
    ),
    Case(
        scenario=Scenario(
            name="twice", world_size=6, kills=kills([4, 5], 2, "forward") | kills([2], 4, "clip"), lost_after_s=LATE_S
        ),
        survivors=(0, 1),
        continues_at=4,
        before=((2, 4),),
    ),
]
WITH_CHILDREN = Scenario(name="children", kills=kills([2, 3], 3, "backward"), forks=True, lost_after_s=LATE_S)
STORE_DIES = Scenario(name="store", kills=kills([0], 3, "backward"), rank_0_has_store=True)
FAILS_BY_ITSELF = Scenario(name="error", kills=kills([3], 3, "error"), lost_after_s=LATE_S)
NO_COPY_LEFT = Scenario(name="no-copy", kills=kills([0, 3], 3, "forward"))
SAVES = [
    scenario
    for point in ("save", "barrier")  # before a save, and behind it
    for scenario in (
        Scenario(name=f"saves-{point}", kills=kills([2, 3], 3, point), saves=(f"of-{point}", 3)),
        Scenario(name=f"continues-{point}", world_size=2, loads=(f"of-{point}", 3)),
    )
]
PRESETS = ("mics", "hsdp", "ddp", "paro-nii", "paro-nni", "paro-ini")
SLOW = [
    *(node_dies(point) for point in ("forward", "hop", "clip", "step")),
    node_dies("end", continues_at=4),
    node_dies("backward", node=0, name="first-node"),
    node_dies("backward", num_micro_steps=3, name="micro-steps"),
    node_dies("backward", has_buffers=True, name="buffers"),
    node_dies("backward", profiles=True, name="profiled"),
    *(node_dies("backward", preset=preset, name=f"preset-{preset}") for preset in PRESETS[1:]),
    Case(scenario=Scenario(name="stopped", kills=kills([3], 3, "stop")), survivors=(0, 1), continues_at=3),
    Case(
        scenario=Scenario(name="ddp-rank", preset="ddp", world_size=3, ranks_per_node=3, kills=kills([1], 3, "hop")),
        survivors=(0, 2),
        continues_at=3,
    ),
    Case(
        scenario=Scenario(
            name="one-after-the-other",
            preset="ddp",
            world_size=6,
            ranks_per_node=6,
            num_steps=7,
            kills={str(rank): (rank, "hop") for rank in range(1, 6)},
        ),
        survivors=(0,),
        continues_at=5,
        before=((1, 5), (2, 4), (3, 3), (4, 2)),
    ),
    *(
        Case(
            scenario=Scenario(
                name=f"in-{point}", world_size=6, kills=kills([4, 5], 2, "forward") | kills([2, 3], 2, point)
            ),
            survivors=(0, 1),
            continues_at=2,
        )
        for point in ("agreement", "regroup")
    ),
]


def run_cases(cases: Iterable[Case], folder: Path, *others: Scenario) -> dict[str, dict[int, Any]]:
    return run_all([s for case in cases for s in (*case.references, case.scenario)] + [*others], folder)


@pytest.fixture(scope="module")
def fast_results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, Any]]:
    return run_cases(FAST, tmp_path_factory.mktemp("fast"), NO_COPY_LEFT, STORE_DIES, WITH_CHILDREN, FAILS_BY_ITSELF)


@pytest.fixture(scope="module")
def slow_results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, Any]]:
    return run_cases(SLOW, tmp_path_factory.mktemp("slow"))


@pytest.fixture(scope="module")
def save_results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, Any]]:
    return run_all(SAVES, tmp_path_factory.mktemp("saves"))


@pytest.mark.parametrize("case", FAST, ids=[case.scenario.name for case in FAST])
def test_the_others_continue_bitwise(case: Case, fast_results: dict[str, dict[int, Any]]) -> None:
    check_case(case, fast_results)


@pytest.mark.weekly
@pytest.mark.parametrize("case", SLOW, ids=[case.scenario.name for case in SLOW])
def test_the_others_continue_bitwise_everywhere(case: Case, slow_results: dict[str, dict[int, Any]]) -> None:
    check_case(case, slow_results)


@pytest.mark.slow
@pytest.mark.parametrize("point", ["save", "barrier"])
def test_a_save_that_a_death_has_interrupted_counts_on_all_ranks_or_is_repeated(
    point: str, save_results: dict[str, dict[int, Any]]
) -> None:
    job, resumed = save_results[f"saves-{point}"], save_results[f"continues-{point}"]
    for rank in (0, 1):
        assert job[rank]["sizes"][3] == 2
        assert [job[rank]["losses"][step] for step in (3, 4, 5)] == [
            resumed[rank]["losses"][step] for step in (3, 4, 5)
        ]


def test_a_death_shows_by_its_connection_long_before_silence_would(fast_results: dict[str, dict[int, Any]]) -> None:
    """Two jobs have `lost_after_s=60`, on two busy cores."""
    assert all(max(fast_results["rank"][rank]["seconds"]) < LATE_S / 3 for rank in (0, 1))


def test_a_neighbor_of_a_dead_rank_leaves_and_says_why(fast_results: dict[str, dict[int, Any]]) -> None:
    error = fast_results["rank"][2]["error"]
    assert "Processes 3 were lost, and process 2 shares a node or a partition group with one of them" in error


def test_without_a_complete_copy_all_end_and_say_why(fast_results: dict[str, dict[int, Any]]) -> None:
    results = fast_results["no-copy"]
    assert sorted(results) == [1, 2]
    for result in results.values():
        assert "Processes 0, 3 were lost, and no complete copy of the states is left" in result["error"]


def test_a_death_shows_although_children_of_the_process_live(fast_results: dict[str, dict[int, Any]]) -> None:
    results = fast_results["children"]
    assert sorted(results) == [0, 1]
    assert all(max(result["seconds"]) < CHILD_S / 2 for result in results.values())


def test_a_rank_that_raises_ends_with_its_own_error_and_the_others_continue(
    fast_results: dict[str, dict[int, Any]],
) -> None:
    results = fast_results["error"]
    assert results[3]["error"] == "RuntimeError: of a script"
    assert "Processes 3 were lost, and process 2 shares a node" in results[2]["error"]
    assert [results[rank]["sizes"][5] for rank in (0, 1)] == [2, 2]
    assert all(max(results[rank]["seconds"]) < LATE_S / 3 for rank in (0, 1))


def test_without_the_store_all_end_and_say_why(fast_results: dict[str, dict[int, Any]]) -> None:
    results = fast_results["store"]
    assert sorted(results) == [1, 2, 3]
    for result in results.values():
        assert "A rank was lost, and so was the store of the job" in result["error"]


def test_the_example_of_the_page_survives_its_second_node_which_comes_back() -> None:
    command = [sys.executable, "-m", "tests.recovery.page", "recovery.attempt"]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=150).stdout
    assert output.count("finished with 4 ranks") == 4
    assert "`Recovery`: processes 2, 3 are gone (" in output
    assert "2 ranks continue; the step " in output
    assert "`Recovery`: processes 4, 5 have joined" in output
    assert "exit codes [0, 0, -9, -9, 0, 0]" in output
