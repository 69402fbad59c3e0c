"""Does a training begin again in the same processes, with the bits of one that was started with these ranks?

Every job is real processes that kill themselves by SIGKILL. What they do from their last beginning on is compared with
a plain job of as many ranks that continued from a checkpoint of the same step.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.recovery.restart_job import ROOT, Scenario, run_all
from tests.recovery.test_without_launcher import free_port

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
    (Scenario(name="back", kills=dies(1, 5), joins=(7,)), [(0, 4), (3, 2), (6, 4)]),
    (Scenario(name="one-node", preset="mics", num_nodes=1, is_repeated=True), [(0, 2)]),
]
WEEKLY: list[tuple[Scenario, Begins]] = [
    (Scenario(name="loading", num_nodes=4, kills=dies(3) | dies(1, 8, "loading")), [(0, 8), (6, 4)]),
    (Scenario(name="late", **LATE), [(0, 4), (6, 4)]),
    (Scenario(name="first-node", kills=dies(0)), [(0, 4), (6, 2)]),
    (Scenario(name="rank", kills={"3": (8, "step")}), [(0, 4), (6, 2)]),
    (Scenario(name="writing", kills=dies(1, 6, "writing")), [(0, 4), (3, 2)]),
    (Scenario(name="error", kills={"2": (8, "error")}), [(0, 4), (6, 2)]),
    (Scenario(name="regroup", num_nodes=4, kills=dies(0) | dies(2, 8, "regroup")), [(0, 8), (6, 4)]),
    (Scenario(name="two-nodes", preset="mics", num_nodes=3, kills=dies(1) | dies(2)), [(0, 6), (6, 2)]),
    (Scenario(name="feedback", fields=FEEDBACK, kills=dies(1)), [(0, 4), (6, 2)]),
    (Scenario(name="islands", **OUTER, kills=dies(1, 9)), [(0, 6), (8, 4)]),
    (Scenario(name="delayed", preset="zero1", fields={"second_hop": "delayed"}, kills=dies(1)), [(0, 4), (6, 2)]),
    (Scenario(name="spare", kills=dies(1), joins=(2,)), [(0, 4), (6, 4)]),
]


def references(scenario: Scenario, begins: Begins) -> list[Scenario]:
    """Plain jobs for each of the trainings of a job, of which each continues from a checkpoint of the one before."""
    found, loads = [], ""
    kind = f"{scenario.preset}-{scenario.num_steps}-{'-'.join(scenario.fields)}"
    for (step, size), (next_step, _) in zip(begins, [*begins[1:], (-1, 0)], strict=True):
        if step == next_step:
            continue  # it left nothing from which the next one could continue
        name = f"plain-{kind}-{step}-{size}-{loads.replace('/', '-')}-{next_step}"
        plain = Scenario(
            name=name,
            preset=scenario.preset,
            fields=scenario.fields,
            num_nodes=size // 2,
            num_steps=scenario.num_steps,
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
        assert result["degrees"] == reference["degrees"]
        assert result["states"] == reference["states"]
        assert len(result["states"]) > 15
        for step in range(first_step, scenario.num_steps):
            assert result["losses"][step] == reference["losses"][step]
        memory = folder / scenario.name / f"memory-{number // 2}"
        assert not list(memory.glob("*/*"))  # snapshots end with the training


@pytest.mark.weekly
def test_a_first_rank_that_is_stopped_keeps_no_snapshots_from_the_others(tmp_path: Path) -> None:
    """It has the lock of the node's folder, and lives."""
    scenario = Scenario(name="stopped", num_nodes=1, kills={"0": (8, "stop")})
    results = run_all([scenario], tmp_path)["stopped"]
    assert results[1]["begins"] == [(0, 2), (6, 1)]
    assert "states" in results[1]


def test_the_example_of_the_page_begins_again_and_lets_in_the_node_that_comes_back() -> None:
    command = [sys.executable, "-m", "tests.recovery.page", "restart_on_loss"]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=150).stdout
    assert "`restart_on_loss`: processes 2, 3 are gone" in output
    assert "continue from step 20" in output  # of 40 the snapshot came behind the death
    assert "processes 4, 5 have joined (" in output
    assert len(re.findall(r"^loss 0\.\d+$", output, flags=re.MULTILINE)) == 4
    assert "exit codes [0, 0, -9, -9, 0, 0]" in output


def run_ranks(name: str, folder: Path, dies: str, world_size: int) -> str:
    """Run a training by a framework, with what `accelerate launch` sets. Returns what all ranks have printed."""
    options = {"preset": "zero3", "recovery": {"every": 2, "job": "job", "folder": str(folder)}}
    usual = {
        **os.environ,
        **{"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "mics", "FSDP_SHARDING_STRATEGY": str(options)},
        **{"MASTER_ADDR": "localhost", "MASTER_PORT": free_port(), "GLOO_SOCKET_IFNAME": "lo"},
        **{"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
        **{"WORLD_SIZE": str(world_size), "GROUP_WORLD_SIZE": str(world_size), "TORCHELASTIC_RUN_ID": "none"},
    }
    command = [sys.executable, "-m", "tests.recovery.framework_job", name, str(folder), dies]
    with tempfile.TemporaryFile("w+") as output:
        ranks = [
            subprocess.Popen(
                command, cwd=ROOT, env=usual | {"RANK": rank, "GROUP_RANK": rank}, stdout=output, stderr=output
            )
            for rank in map(str, range(world_size))
        ]
        for rank in ranks:
            rank.wait(timeout=120)
        output.seek(0)
        return output.read()


@pytest.mark.weekly  # five processes that import a framework
@pytest.mark.parametrize("name", ["lightning", "transformers"])
def test_a_training_by_a_framework_begins_again(name: str, tmp_path: Path) -> None:
    """As one rank that is started by hand, when both had died behind the same snapshot."""
    folders = [tmp_path / "again", tmp_path / "by-hand"]
    for folder in folders:
        folder.mkdir()
    again = run_ranks(name, folders[0], "1", 2)
    run_ranks(name, folders[1], "01", 2)
    by_hand = run_ranks(name, folders[1], "", 1)
    before, _, behind = again.partition("1 ranks begin the training again.")
    assert "places 0 2" in before, again
    assert "places 1 2" in before
    assert "places 0 1" in behind, again
    assert "of step 8" in behind
    assert "of step 8" in by_hand, by_hand
    losses = [re.findall(r"^loss (.*)$", text, flags=re.MULTILINE) for text in (behind, by_hand)]
    assert len(losses[0]) == 8
    assert losses[0] == losses[1]
