"""Ranks and nodes die at random moments: ``python -m tests.recovery.test_random_kills 100`` prints a table.

Three nodes of two ranks. A process kills itself by SIGKILL after some time, wherever its main thread is then; in some
jobs a second node dies within the recovery of the first. Each job is compared, bitwise, with jobs that had as many
ranks from those steps on.
"""

import random
import statistics
import sys
import tempfile
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
        seconds: From each last kill to the end of the next step, in ascending order.
        num_late: Jobs that had ended before the kill.
        num_repeated: Jobs in which a step was run again.
        sizes: Ranks at the end of each job.
    """

    seconds: list[float]
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


def case_of(scenario: Scenario, results: dict[int, Any]) -> Case | None:
    """What must have come of a job, by the steps in which its ranks became fewer; None where none did."""
    finished = {number: result for number, result in results.items() if "error" not in result}
    sizes = next(iter(finished.values()))["sizes"]
    phases: list[tuple[int, int]] = []
    for step in range(NUM_STEPS):
        if sizes[step] != (phases[-1][1] if phases else scenario.world_size):
            phases.append((step, sizes[step]))
    if not phases:
        return None
    return Case(
        scenario=scenario, survivors=tuple(sorted(finished)), continues_at=phases[-1][0], before=tuple(phases[:-1])
    )


def run_random(count: int, seed: int, folder: Path) -> Report:
    """Run jobs, compare each, and measure."""
    rng = random.Random(seed)
    scenarios = [scenario_of(number, rng) for number in range(count)]
    results = run_all(scenarios, folder)
    cases = [case for scenario in scenarios if (case := case_of(scenario, results[scenario.name])) is not None]
    results |= run_all([reference for case in cases for reference in case.references], folder)
    seconds = []
    for case in cases:
        check_case(case, results)
        killed = [float(path.read_text()) for path in (folder / case.scenario.name).glob("killed-*")]
        ends = results[case.scenario.name][case.survivors[0]]["ends"]
        seconds.append(ends[case.continues_at] - max(killed))
    finished = [next(r for r in results[s.name].values() if "error" not in r) for s in scenarios]
    return Report(
        seconds=sorted(seconds),
        num_late=count - len(cases),
        num_repeated=sum(bool(result["repeated"]) for result in finished),
        sizes=[result["sizes"][NUM_STEPS - 1] for result in finished],
    )


@pytest.mark.slow
def test_ranks_die_at_random(tmp_path: Path) -> None:
    report = run_random(24, 0, tmp_path)
    assert len(report.seconds) >= 12
    assert {2, 4} <= {*report.sizes}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        report = run_random(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0, Path(folder))
    counts = {size: report.sizes.count(size) for size in sorted({*report.sizes})}
    print(f"{len(report.seconds)} jobs lost ranks, {report.num_late} had ended before; ranks left: {counts}")
    print(f"{report.num_repeated} ran a step again; all equal their references, bitwise")
    median_s, worst_s = statistics.median(report.seconds), report.seconds[-1]
    print(f"from the last kill to the end of the next step: median {median_s:.3f} s, worst {worst_s:.3f} s")
