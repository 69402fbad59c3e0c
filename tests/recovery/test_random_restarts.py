"""Nodes die at random moments: ``python -m tests.recovery.test_random_restarts 100 7`` prints how jobs went on.

Three or four nodes of two ranks, whose ranks kill themselves by SIGKILL after some time, wherever their main thread is
then; in every second job another node dies soon after, in every third one a spare waits. Each job is compared, bitwise,
with a chain of plain jobs that had as many ranks from the same steps on.
"""

import random
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.recovery.restart_job import Scenario, run_all
from tests.recovery.test_restart import assert_equal_to_plain, references

PRESETS = ("zero3", "zero1", "mics", "zeropp", "paro-iig")
LONGEST_S, SECOND_WITHIN_S = 4.0, 2.0


@dataclass(frozen=True)
class Report:
    """Outcome of some random kills.

    Attributes:
        seconds: From each last kill to the end of the next step, in ascending order.
        num_begun: Trainings of each job.
        num_anew: Jobs that died before their first snapshot, and began with the first step.
    """

    seconds: list[float]
    num_begun: list[int]
    num_anew: int


def scenario_of(number: int, rng: random.Random) -> Scenario:
    """One job, of which one or two nodes die."""
    has_second = number % 2 == 1
    num_nodes = 4 if has_second else 3
    first = rng.randrange(num_nodes)
    at_s = rng.uniform(0.0, LONGEST_S)
    dying = {2 * first + local: at_s for local in rng.choice(((0,), (1,), (0, 1)))}
    if has_second:  # not a neighbor of the first, which has what that one alone had
        second, later_s = (first + 2) % 4, at_s + rng.uniform(0.0, SECOND_WITHIN_S)
        dying |= {2 * second + local: later_s for local in rng.choice(((0,), (0, 1)))}
    return Scenario(
        name=f"random-{number}",
        preset=rng.choice(PRESETS),
        num_nodes=num_nodes,
        num_steps=30,
        every=2,
        step_s=0.03,
        joins=(0,) * (number % 3 == 2),
        kills={str(rank): (seconds, "clock") for rank, seconds in dying.items()},
    )


def run_random(count: int, seed: int, folder: Path) -> Report:
    """Run jobs, compare each, and measure."""
    rng = random.Random(seed)
    scenarios = [scenario_of(number, rng) for number in range(count)]
    results = run_all(scenarios, folder)
    begins = {}
    for scenario in scenarios:
        ended = [result for result in results[scenario.name].values() if "states" in result]
        assert ended, (folder / scenario.name / "output").read_text()
        begins[scenario.name] = max((result["begins"] for result in ended), key=len)
    plain = {r.name: r for scenario in scenarios for r in references(scenario, begins[scenario.name])}
    results |= run_all(plain.values(), folder)
    seconds = []
    for scenario in scenarios:
        assert_equal_to_plain(scenario, begins[scenario.name], (folder, results))
        killed = [float(path.read_text()) for path in (folder / scenario.name).glob("killed-*")]
        if killed and len(begins[scenario.name]) > 1:
            step, _ = begins[scenario.name][-1]
            ended = next(r for r in results[scenario.name].values() if "states" in r)
            seconds.append(ended["ends"][step] - max(killed))
    return Report(
        seconds=sorted(second for second in seconds if second > 0),  # others had all of their steps done
        num_begun=[len(found) for found in begins.values()],
        num_anew=sum(len(found) > 1 and found[-1][0] == 0 for found in begins.values()),
    )


@pytest.mark.weekly
def test_nodes_die_at_random(tmp_path: Path) -> None:
    report = run_random(6, 1, tmp_path)
    assert len(report.seconds) > 2


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        found = run_random(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0, Path(temporary))
    counts = {number: found.num_begun.count(number) for number in sorted({*found.num_begun})}
    print(f"{len(found.num_begun)} jobs, by their trainings: {counts}; all equal their references, bitwise")
    print(f"{found.num_anew} began anew")
    times = found.seconds
    print(f"seconds from the last kill to the next step: median {statistics.median(times):.2f}, worst {times[-1]:.2f}")
