"""Ranks and nodes die at random moments: ``python -m tests.recovery.test_random_kills 100`` prints a table.

Three nodes of two ranks. A process kills itself by SIGKILL after some time, wherever its main thread is then; in some
jobs a second node dies within the recovery of the first. With ``100 7 grow`` nodes come back, one or two at once; in
some jobs a node dies while they join, one of theirs or another one. Each job is compared, bitwise, with jobs that had
as many ranks from those steps on.
"""

import random
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.recovery.cases import Case, check_case
from tests.recovery.job import Scenario, run_all

NUM_STEPS, STEP_S, LONGEST_S = 10, 0.03, 0.45
SECOND_WITHIN_S = 0.25


@dataclass(frozen=True)
class Report:
    """Outcome of some random kills.

    Attributes:
        seconds: From each last kill to the end of the next step, in ascending order; without jobs that grow.
        joining_s: From the end of each last step without newcomers to that of the first one with them, ascending.
        num_late: Jobs that had ended before the kill.
        num_repeated: Jobs in which a step was run again.
        sizes: Ranks at the end of each job.
    """

    seconds: list[float]
    joining_s: list[float]
    num_late: int
    num_repeated: int
    sizes: list[int]


def scenario_of(number: int, rng: random.Random) -> Scenario:
    """One job, of which a rank, a node, or ranks of two nodes die."""
    nodes = rng.sample(range(3), 2)
    at_s = rng.uniform(0.0, LONGEST_S)
    dying = {2 * nodes[0] + local: at_s for local in rng.choice(((0,), (1,), (0, 1)))}
    if number % 3 == 2:
        dying |= {
            2 * nodes[1] + local: at_s + rng.uniform(0.0, SECOND_WITHIN_S) for local in rng.choice(((0,), (0, 1)))
        }
    kills = {str(rank): (seconds, "clock") for rank, seconds in dying.items()}
    return Scenario(
        name=f"random-{number}", world_size=6, num_steps=NUM_STEPS, step_s=STEP_S, kills=kills, lost_after_s=10.0
    )


def growing_scenario_of(number: int, rng: random.Random) -> Scenario:
    """One job of which a node dies, and one or two others join; of every second one a node dies meanwhile."""
    nodes, asks_at = rng.sample(range(3), 2), rng.randrange(3, 7)
    kills = {str(2 * nodes[0] + local): (rng.uniform(0.0, LONGEST_S), "clock") for local in rng.choice(((1,), (0, 1)))}
    joins = (asks_at,) * rng.choice((1, 2))
    point = rng.choice(("agreement", "regroup", "send", "settle", "forward", "hop", "barrier", "update"))
    if number % 4 == 1:  # a node of the job, in front of the step of the joining or in it
        kills |= {str(2 * nodes[1] + local): (asks_at + 1, point) for local in rng.choice(((0,), (0, 1)))}
    elif number % 4 == 3:  # newcomers, while they wait or join or train
        kills |= {str(6 + local): (rng.uniform(0.0, 1.5), "clock") for local in rng.choice(((0,), (0, 1)))}
    return Scenario(
        name=f"growing-{number}",
        world_size=6,
        num_steps=NUM_STEPS,
        step_s=STEP_S,
        kills=kills,
        joins=joins,
        lost_after_s=10.0,
    )


def case_of(scenario: Scenario, results: dict[int, Any]) -> Case | None:
    """What must have come of a job, by the steps in which its ranks became fewer; None where none did."""
    finished = {number: result for number, result in results.items() if "error" not in result}
    sizes = finished[min(finished)]["sizes"]
    num_killed_late = sizes[NUM_STEPS - 1] - len(finished)
    if 0 < num_killed_late <= sum(int(number) not in results for number in scenario.kills):
        return None  # behind the last step
    phases: list[tuple[int, int]] = []
    for step in range(NUM_STEPS):
        if sizes[step] != (phases[-1][1] if phases else scenario.world_size):
            phases.append((step, sizes[step]))
    if not phases:
        return None
    return Case(
        scenario=scenario, survivors=tuple(sorted(finished)), continues_at=phases[-1][0], before=tuple(phases[:-1])
    )


def run_random(
    count: int, seed: int, folder: Path, make: Callable[[int, random.Random], Scenario] = scenario_of
) -> Report:
    """Run jobs, compare each, and measure."""
    rng = random.Random(seed)
    scenarios = [make(number, rng) for number in range(count)]
    results = run_all(scenarios, folder)
    cases = [case for scenario in scenarios if (case := case_of(scenario, results[scenario.name])) is not None]
    results |= run_all([reference for case in cases for reference in case.references], folder)
    seconds, joining_s = [], []
    for case in cases:
        check_case(case, results)
        ends, sizes = (results[case.scenario.name][case.survivors[0]][name] for name in ("ends", "sizes"))
        joining_s += [ends[step] - ends[step - 1] for step in range(1, NUM_STEPS) if sizes[step] > sizes[step - 1]]
        if case.scenario.joins:
            continue
        killed = [float(path.read_text()) for path in (folder / case.scenario.name).glob("killed-*")]
        seconds.append(ends[case.continues_at] - max(killed))
    finished = [next(r for r in results[s.name].values() if "error" not in r) for s in scenarios]
    return Report(
        seconds=sorted(seconds),
        joining_s=sorted(joining_s),
        num_late=count - len(cases),
        num_repeated=sum(bool(result["repeated"]) for result in finished),
        sizes=[result["sizes"][NUM_STEPS - 1] for result in finished],
    )


@pytest.mark.slow
def test_ranks_die_at_random(tmp_path: Path) -> None:
    report = run_random(6, 0, tmp_path)
    assert len(report.seconds) >= 3
    assert {2, 4} <= {*report.sizes}


@pytest.mark.weekly
def test_nodes_come_back_at_random(tmp_path: Path) -> None:
    report = run_random(6, 1, tmp_path, growing_scenario_of)
    assert len(report.joining_s) >= 3
    assert max(report.sizes) >= 6


if __name__ == "__main__":
    make = growing_scenario_of if sys.argv[3:] == ["grow"] else scenario_of
    with tempfile.TemporaryDirectory() as folder:
        report = run_random(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0, Path(folder), make)
    counts = {size: report.sizes.count(size) for size in sorted({*report.sizes})}
    num_jobs = len(report.sizes)
    print(f"{num_jobs - report.num_late} of {num_jobs} jobs lost or got ranks; ranks at the end: {counts}")
    print(f"{report.num_repeated} ran a step again; all equal their references, bitwise")
    times = {
        "from the last kill to the end of the next step": report.seconds,
        "from a step to the end of the next one, in front of which ranks joined": report.joining_s,
    }
    for name, seconds in times.items():
        if seconds:
            print(f"{name}: {len(seconds)} times, median {statistics.median(seconds):.3f} s, worst {seconds[-1]:.3f} s")
