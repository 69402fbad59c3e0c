"""Jobs that lose and get ranks, beside jobs of as many ranks from those steps on."""

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any

import torch

from tests.recovery.job import Scenario


@dataclass(frozen=True, kw_only=True)
class Case:
    """A job that loses ranks, and what must come of it.

    Attributes:
        scenario: The job.
        survivors: Numbers of the ranks that train to the end.
        continues_at: First step that the job runs with these ranks alone.
        before: First step and size of the job for each loss before the last.
    """

    scenario: Scenario
    survivors: tuple[int, ...]
    continues_at: int
    before: tuple[tuple[int, int], ...] = ()

    @property
    def references(self) -> list[Scenario]:
        """Jobs of as many ranks as were left, each of which starts from a checkpoint of the one before."""
        jobs, source = [], None
        job = dataclasses.replace(self.scenario, kills={}, joins=())
        varied = (job.preset, job.num_micro_steps, job.has_buffers, job.optimizer, job.dtype, job.freezes)
        key = "-".join(map(str, varied))
        phases = [(0, self.scenario.world_size), *self.before, (self.continues_at, len(self.survivors))]
        for (first, size), (last, _) in itertools.pairwise([*phases, (self.scenario.num_steps, 0)]):
            key = f"{key}-{size}x{first}"
            target = (f"{key}-to-{last}", last)
            per_node = size if job.block < job.ranks_per_node else min(job.ranks_per_node, size)
            size_of = {"world_size": size, "ranks_per_node": per_node}
            jobs.append(dataclasses.replace(job, name=f"{key}..{last}", loads=source, saves=target, **size_of))
            source = target
        return jobs


def check_case(case: Case, results: dict[str, dict[int, Any]]) -> None:
    """Compare with a job that had these ranks from that step on: losses, weights and optimizer states, bitwise."""
    job, reference = results[case.scenario.name], results[case.references[-1].name]
    finished = [number for number, result in job.items() if "error" not in result]
    assert finished == list(case.survivors), {number: result.get("error") for number, result in job.items()}
    ranks = [job[number]["rank"] for number in case.survivors]  # of newcomers: in the order in which they asked
    assert sorted(ranks) == list(range(len(case.survivors)))
    assert ranks == sorted(ranks) or case.scenario.joins
    last_joined = max(min(job[number]["losses"]) for number in case.survivors)  # until then ranks had other numbers
    for number in case.survivors:
        result, expected = job[number], reference[job[number]["rank"]]
        first = min(result["losses"])  # of a newcomer: that in front of which it has joined
        assert first == 0 or number >= case.scenario.world_size
        for step in range(max(last_joined, case.continues_at), case.scenario.num_steps):
            assert result["losses"][step] == expected["losses"][step], (number, step)
            assert result["sizes"][step] == len(case.survivors)
        assert result["steps_done"] == case.scenario.num_steps
        assert result["learning_rate"] == expected["learning_rate"]
        assert all(len(set(draws)) == 1 for draws in result["draws"].values()), "a repeated step draws other numbers"
    weights, expected_weights = job[case.survivors[0]]["weights"], reference[0]["weights"]
    assert weights.keys() == expected_weights.keys()
    assert [name for name in weights if not torch.equal(weights[name], expected_weights[name])] == []
    states, expected_states = job[case.survivors[0]]["states"]["state"], reference[0]["states"]["state"]
    assert states.keys() == expected_states.keys()
    for number, state in states.items():
        assert all(torch.equal(state[key], expected_states[number][key]) for key in state), number
