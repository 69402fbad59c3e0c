"""Does a training begin again in the same processes, with the bits of one that was started with these ranks?

Every job is real processes that kill themselves by SIGKILL. What they do from their last beginning on is compared with
a plain job of as many ranks that continued from a checkpoint of the same step.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.recovery.restart_job import Scenario, run_all

pytestmark = pytest.mark.slow

Begins = list[tuple[int, int]]  # step and ranks of each training
FEEDBACK = {"grad_codec": {"bits": 8, "feedback": True}}


def dies(node: int, step: int = 8, point: str = "step") -> dict[str, tuple[int, str]]:
    return {str(number): (step, point) for number in (2 * node, 2 * node + 1)}


LATE = {"kills": dies(1, 8, "call"), "joins": (8,), "wait_for_node_s": 20.0}
OUTER = {"preset": "mics", "num_nodes": 3, "every": 4, "fields": {"outer_every": 4}}
# Jobs, and the trainings of a process that is there from the beginning to the end.
JOBS: list[tuple[Scenario, Begins]] = [
    (Scenario(name="node", kills=dies(1)), [(0, 4), (6, 2)]),
    (Scenario(name="exchange", kills=dies(0, 6, "exchange")), [(0, 4), (3, 2)]),
    (Scenario(name="end", kills=dies(1, 12, "end")), [(0, 4), (12, 2)]),
    (Scenario(name="loading", num_nodes=4, kills=dies(3) | dies(1, 8, "loading")), [(0, 8), (6, 4)]),
    (Scenario(name="back", kills=dies(1, 5), joins=(7,)), [(0, 4), (3, 2), (6, 4)]),
    (Scenario(name="late", **LATE), [(0, 4), (6, 4)]),
]
WEEKLY: list[tuple[Scenario, Begins]] = [
    (Scenario(name="first-node", kills=dies(0)), [(0, 4), (6, 2)]),
    (Scenario(name="rank", kills={"3": (8, "step")}), [(0, 4), (6, 2)]),
    (Scenario(name="writing", kills=dies(1, 6, "writing")), [(0, 4), (3, 2)]),
    (Scenario(name="error", kills={"2": (8, "error")}), [(0, 4), (6, 2)]),
    (Scenario(name="regroup", num_nodes=4, kills=dies(0) | dies(2, 8, "regroup")), [(0, 8), (6, 4)]),
    (Scenario(name="feedback", fields=FEEDBACK, kills=dies(1)), [(0, 4), (6, 2)]),
    (Scenario(name="islands", **OUTER, kills=dies(1, 9)), [(0, 6), (8, 4)]),
    (Scenario(name="delayed", preset="zero1", fields={"second_hop": "delayed"}, kills=dies(1)), [(0, 4), (6, 2)]),
    (Scenario(name="spare", kills=dies(1), joins=(2,)), [(0, 4), (6, 4)]),
]


def references(scenario: Scenario, begins: Begins) -> list[Scenario]:
    """Plain jobs for each of the trainings of a job, of which each continues from a checkpoint of the one before."""
    found, loads = [], ""
    kind = f"{scenario.preset}-{'-'.join(scenario.fields)}"
    for (step, size), (next_step, _) in zip(begins, [*begins[1:], (-1, 0)], strict=True):
        name = f"plain-{kind}-{step}-{size}-{loads.replace('/', '-')}-{next_step}"
        plain = Scenario(
            name=name,
            preset=scenario.preset,
            fields=scenario.fields,
            num_nodes=size // 2,
            loads=loads,
            is_plain=True,
            saves_at=next_step,
        )
        found.append(plain)
        loads = f"{name}/disk"
    return found


Results = dict[str, dict[int, Any]]


def run_with_references(jobs: list[tuple[Scenario, Begins]], folder: Path) -> tuple[Path, Results]:
    plain = {reference.name: reference for job in jobs for reference in references(*job)}
    return folder, run_all([*plain.values(), *(scenario for scenario, _ in jobs)], folder)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Results]:
    return run_with_references(JOBS, tmp_path_factory.mktemp("jobs"))


@pytest.fixture(scope="module")
def weekly_jobs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Results]:
    return run_with_references(WEEKLY, tmp_path_factory.mktemp("weekly-jobs"))


@pytest.mark.parametrize(("scenario", "begins"), JOBS, ids=[scenario.name for scenario, _ in JOBS])
def test_it_goes_on_as_if_it_had_been_started_so(
    scenario: Scenario, begins: Begins, jobs: tuple[Path, Results]
) -> None:
    assert_equal_to_plain(scenario, begins, jobs)


@pytest.mark.weekly  # those of JOBS stand for them at each commit
@pytest.mark.parametrize(("scenario", "begins"), WEEKLY, ids=[scenario.name for scenario, _ in WEEKLY])
def test_others_do_as_well(scenario: Scenario, begins: Begins, weekly_jobs: tuple[Path, Results]) -> None:
    assert_equal_to_plain(scenario, begins, weekly_jobs)


def assert_equal_to_plain(scenario: Scenario, begins: Begins, jobs: tuple[Path, Results]) -> None:
    folder, results = jobs
    ended = {number: result for number, result in results[scenario.name].items() if "states" in result}
    plain = results[references(scenario, begins)[-1].name]
    (first_step, size) = begins[-1]
    output = (folder / scenario.name / "output").read_text()
    assert sorted(result["rank"] for result in ended.values()) == list(range(size)), output
    for number, result in ended.items():
        is_new = number >= 2 * scenario.num_nodes
        assert result["begins"] == (begins[-1:] if is_new else begins)
        assert result["places"] == {"RANK": str(result["rank"]), "WORLD_SIZE": str(size)}
        reference = plain[result["rank"]]
        assert result["states"] == reference["states"]
        assert len(result["states"]) > 15
        for step in range(first_step, scenario.num_steps):
            assert result["losses"][step] == reference["losses"][step]
        memory = folder / scenario.name / f"memory-{number // 2}"
        assert not list(memory.glob("*/*"))  # snapshots end with the training
