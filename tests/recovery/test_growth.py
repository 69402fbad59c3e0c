"""Blocks of ranks join a running job, which continues as a job that had that many ranks from that step on.

One program runs all jobs of this file, whose ranks are real processes (see `job`).
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.recovery.job import Case, Scenario, check_case, run_all

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
    joins=(1, 2, 3, 4),
    newcomer={"optimizer": "SGD", "fields": {"prefetch": 2}},
)
ENDS = Scenario(name="ends", joins=(5,))
SLOW = [
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
    *(
        grows(f"preset-{preset}", world_size=4, preset=preset, fields={"hierarchical": True})
        for preset in ("ddp", "paro-nii")
    ),
]


def run_cases(cases: Iterable[Case], folder: Path, *others: Scenario) -> dict[str, dict[int, Any]]:
    return run_all([s for case in cases for s in (*case.references, case.scenario)] + [*others], folder)


@pytest.fixture(scope="module")
def fast_results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, Any]]:
    return run_cases(FAST, tmp_path_factory.mktemp("fast"))


@pytest.fixture(scope="module")
def slow_results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, Any]]:
    return run_cases(SLOW, tmp_path_factory.mktemp("slow"))


@pytest.mark.parametrize("case", FAST, ids=[case.scenario.name for case in FAST])
def test_a_job_grows_bitwise(case: Case, fast_results: dict[str, dict[int, Any]]) -> None:
    check_case(case, fast_results)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW, ids=[case.scenario.name for case in SLOW])
def test_a_job_grows_bitwise_everywhere(case: Case, slow_results: dict[str, dict[int, Any]]) -> None:
    check_case(case, slow_results)
