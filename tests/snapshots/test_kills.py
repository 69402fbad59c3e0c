"""Does a job that dies continue from its newest whole snapshot, with the bits of a job that does not die?

Every job is real processes that kill themselves by SIGKILL. Jobs that continue on as many ranks are compared with one
that was never interrupted; others with a job of the same sizes that lost all of its memory, and continued from a
checkpoint on the disk.
"""

import dataclasses
import pickle
import random
import re
from pathlib import Path
from typing import Any

import pytest

from tests.snapshots.job import EVERYBODY, Kill, Scenario, begins_of, losses_of, output_of, run_all

pytestmark = pytest.mark.slow

ALL = [EVERYBODY]
FEEDBACK: dict[str, Any] = {"grad_codec": {"bits": 8, "feedback": True}}
DIFFERENCES: dict[str, Any] = {"weight_codec": {"bits": 8, "differences": True}}
OTHER_PRESETS = ("zero1", "zero2", "paro-iig", "ddp")
LATER = Kill(attempt=2, ranks=[0], at=11)


def at_step(ranks: list[int], step: float = 8, **fields: Any) -> list[Kill]:
    """Ranks die in the first attempt, behind a step."""
    return [Kill(attempt=0, ranks=ranks, at=step, **fields)]


def lost(node: int) -> list[Kill]:
    """A node dies, with its memory."""
    return at_step([2 * node, 2 * node + 1], loses=[node])


# On as many ranks: each job, and the step from which its last attempt continues.
SAME = [
    (Scenario(name="zero3-all", kills=at_step(ALL)), 6),
    (Scenario(name="zero3-node", kills=lost(1)), 6),
    (Scenario(name="mics-first-node", preset="mics", kills=lost(0)), 6),
    (Scenario(name="writing", kills=at_step([1], 6, point="writing")), 3),
    (Scenario(name="exchange", kills=at_step([3], 6, point="exchange", loses=[1])), 3),
    (Scenario(name="twice", kills=[*at_step(ALL), Kill(attempt=1, ranks=[2], at=0, point="loading"), LATER]), 9),
]
SLOW = [
    *((Scenario(name=f"{preset}-node", preset=preset, kills=lost(1)), 6) for preset in OTHER_PRESETS),
    (Scenario(name="mics-all", preset="mics", kills=at_step(ALL)), 6),
    (Scenario(name="zeropp-first-node", preset="zeropp", kills=lost(0)), 6),
    (Scenario(name="sgd-node", optimizer="sgd", kills=lost(0)), 6),
    (Scenario(name="muon-node", optimizer="muon", fields={"optimizer_layout": "tensors"}, kills=lost(1)), 6),
    (Scenario(name="feedback-node", fields=FEEDBACK, kills=lost(1)), 6),
    (Scenario(name="islands-node", preset="mics", fields={"outer_every": 4}, kills=lost(0)), 6),
    (Scenario(name="delayed-node", preset="zero1", fields={"second_hop": "delayed"}, kills=lost(1)), 6),
    (Scenario(name="differences-node", preset="paro-iig", fields=DIFFERENCES, kills=lost(1)), 6),
    (Scenario(name="both-nodes", kills=at_step([0, 3], loses=[0, 1])), 0),
    (Scenario(name="first-steps", kills=at_step(ALL, 2)), 0),
]
# On other ranks: preset, and the nodes of both attempts.
RESIZED = [("zero3", [[0, 1], [1]]), ("mics", [[0, 1], [0]])]
RESIZED_SLOW = [("zero3", [[0, 1], [0, 1, 2]]), ("zero1", [[0, 1, 2], [0, 2]]), ("ddp", [[0, 1], [1]])]


def resized(preset: str, nodes: list[list[int]], *, on_disk: bool) -> Scenario:
    """A job that loses its first node, and continues on others: from memory, or from a checkpoint of the same step."""
    gone = [node for node in nodes[0] if node not in nodes[1]]
    name = f"{preset}-{len(nodes[0])}-to-{len(nodes[1])}{'-disk' if on_disk else ''}"
    kills = at_step(ALL, loses=nodes[0] if on_disk else gone)
    return Scenario(name=name, preset=preset, nodes=nodes, kills=kills, saves_at=6 if on_disk else 0)


def reference_of(scenario: Scenario) -> Scenario:
    """The same job without a death."""
    name = f"{scenario.preset}-{scenario.optimizer}-{'-'.join(map(str, scenario.fields))}"
    return dataclasses.replace(scenario, name=name, kills=[])


def run_with_references(
    cases: list[tuple[Scenario, int]], sizes: list[tuple[str, list[list[int]]]], folder: Path
) -> Path:
    """Run jobs, and those with which they are compared."""
    references = {reference_of(scenario).name: reference_of(scenario) for scenario, _ in cases}
    others = [resized(preset, nodes, on_disk=on_disk) for preset, nodes in sizes for on_disk in (False, True)]
    run_all([*references.values(), *(scenario for scenario, _ in cases), *others], folder)
    return folder


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_with_references(SAME, RESIZED, tmp_path_factory.mktemp("jobs"))


@pytest.fixture(scope="module")
def slow_jobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_with_references(SLOW, RESIZED_SLOW, tmp_path_factory.mktemp("slow-jobs"))


def assert_equal_to_reference(scenario: Scenario, step: int, folder: Path) -> None:
    """The last attempt began with this step; losses, weights and optimizer states are those of the reference."""
    job, reference = folder / scenario.name, folder / reference_of(scenario).name
    begins = begins_of(job)
    assert begins[max(begins)] == step
    assert_same_end(job, reference, scenario.world_size(0))


def assert_same_end(job: Path, reference: Path, world_size: int, first_step: int = 0) -> None:
    """Losses from a step on, and all states at the end, are equal bit by bit."""
    for own, other in zip(losses_of(job, world_size), losses_of(reference, world_size), strict=True):
        assert {step: loss for step, loss in own.items() if step >= first_step} == {
            step: loss for step, loss in other.items() if step >= first_step
        }
        assert own.keys() | set(range(first_step)) == set(range(12))  # ranks that are new have no others
    for rank in range(world_size):
        own_end, other_end = (pickle.loads((folder / f"end-{rank}").read_bytes()) for folder in (job, reference))
        assert len(own_end["states"]) > 15
        assert own_end["states"] == other_end["states"]


@pytest.mark.parametrize(("scenario", "step"), SAME, ids=[scenario.name for scenario, _ in SAME])
def test_a_job_continues_as_if_nothing_had_died(scenario: Scenario, step: int, jobs: Path) -> None:
    assert_equal_to_reference(scenario, step, jobs)


@pytest.mark.weekly  # 24 jobs: those of SAME and RESIZED stand for them at each commit
@pytest.mark.parametrize(("scenario", "step"), SLOW, ids=[scenario.name for scenario, _ in SLOW])
def test_other_jobs_continue_as_well(scenario: Scenario, step: int, slow_jobs: Path) -> None:
    assert_equal_to_reference(scenario, step, slow_jobs)


def assert_equal_to_disk(preset: str, nodes: list[list[int]], folder: Path) -> None:
    """From the snapshot's step on, the job is the one that continued from a checkpoint on as many ranks."""
    job, reference = (folder / resized(preset, nodes, on_disk=on_disk).name for on_disk in (False, True))
    assert begins_of(job) == begins_of(reference) == {0: 0, 1: 6}
    assert "continue from step 6" in output_of(job)
    assert "continue from the checkpoint of step 6" in output_of(reference)
    assert_same_end(job, reference, 2 * len(nodes[1]), first_step=6)


@pytest.mark.parametrize(("preset", "nodes"), RESIZED, ids=[preset for preset, _ in RESIZED])
def test_fewer_nodes_continue(preset: str, nodes: list[list[int]], jobs: Path) -> None:
    assert_equal_to_disk(preset, nodes, jobs)


@pytest.mark.weekly
@pytest.mark.parametrize(("preset", "nodes"), RESIZED_SLOW, ids=[preset for preset, _ in RESIZED_SLOW])
def test_other_numbers_of_nodes_continue(preset: str, nodes: list[list[int]], slow_jobs: Path) -> None:
    assert_equal_to_disk(preset, nodes, slow_jobs)


@pytest.mark.weekly
@pytest.mark.parametrize("seed", range(3))
def test_a_job_that_dies_at_random_moments_continues(seed: int, tmp_path: Path) -> None:
    """Ranks, a node or all ranks die, up to three times, by a timer."""
    chance = random.Random(seed)
    cases = [(random_scenario(number, chance), 0) for number in range(5)]
    run_with_references(cases, [], tmp_path)
    for scenario, _ in cases:
        assert_same_end(tmp_path / scenario.name, tmp_path / reference_of(scenario).name, 4)


def random_scenario(number: int, chance: random.Random) -> Scenario:
    """A job with up to three deaths; no two nodes lose their memory at once."""
    kills = []
    for attempt in range(chance.choice((1, 2, 3))):
        ranks, loses = chance.choice((([0], []), ([3], []), (ALL, []), ([0, 1], [0]), ([2, 3], [1])))
        kills.append(Kill(attempt=attempt, ranks=ranks, at=chance.uniform(0.0, 2.5), point="clock", loses=loses))
    preset = chance.choice(("zero3", "mics", "zero1"))
    return Scenario(name=f"random-{number}", preset=preset, every=2, kills=kills, step_s=0.05)


def test_a_snapshot_that_lacks_a_part_is_named(jobs: Path) -> None:
    """The other ranks may have been killed before they had written their parts, or all but one."""
    missing = r"skipped that of step 6: (no node has the part of rank \d|it has no report that can be read)"
    assert re.search(missing, output_of(jobs / "writing"))
