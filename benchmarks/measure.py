"""How are engines measured so that noise does not choose the winner?

In rounds: every engine's processes run in turn for a few steps, in the same testbed, and the whole is repeated. What
the machine does beside it then falls on all of them.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks import deepspeed_setup
from benchmarks.entries import Entry
from benchmarks.launch import Launch, RankFailedError, launch
from benchmarks.rank import RankJob, RankRecord
from benchmarks.testbed import Testbed
from benchmarks.workload import Workload

_FIRST_PORT = 29500


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What the ranks of one engine measured together in one round.

    Attributes:
        step_s: Of each measured step, the slowest rank's.
        cpu_s: CPU time of all ranks in each measured step.
        micro_steps_s: Of these, in forwards and backwards; the slowest rank's. Empty where the engine does not say.
        sent_bytes: Of each measured step, the most that left one node.
        planned_bytes: The same as the engine planned it; empty where it does not plan.
        planned_last_bytes: Those of them that are sent after the backwards.
        facts: Facts that rank 0's engine stated about the last step.
        losses: Of every step from the first, means over all ranks.
        peak_bytes: Of the rank that needed most, with its libraries.
        training_bytes: The same without what was resident before the model was made.
    """

    step_s: list[float]
    cpu_s: list[float]
    micro_steps_s: list[float]
    sent_bytes: list[int]
    planned_bytes: list[float]
    planned_last_bytes: list[float]
    facts: dict[str, float]
    losses: list[float]
    peak_bytes: int
    training_bytes: int


@dataclass(slots=True, kw_only=True)
class Measured:
    """All rounds of one entry, or why there are none."""

    entry: Entry
    rounds: list[Round]
    refused: str = ""
    failed: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How each entry is run.

    Attributes:
        workload: What is trained.
        ranks_per_node: Of every node.
        rounds: How often every engine's processes are started.
        warm_up: Steps that are not measured, in each round.
        steps: Steps that are.
        timeout_s: For one engine in one round.
        peer_python: Interpreters of engines that have an environment of their own, by entry.
    """

    workload: Workload
    ranks_per_node: int
    rounds: int
    warm_up: int
    steps: int
    timeout_s: float
    peer_python: dict[str, str]


def measure(bed: Testbed, entries: list[Entry], setup: Setup, say: Callable[[str], None]) -> list[Measured]:
    """Run all entries in alternating rounds.

    An entry that is refused or fails is not started again; the others go on. What one of ours finds of the links, later
    rounds find in a cache of this measurement alone: other links may go by the same names.
    """
    with tempfile.TemporaryDirectory(prefix="cache-") as cache:
        return _measure(bed, entries, setup, say, cache)


def _measure(
    bed: Testbed, entries: list[Entry], setup: Setup, say: Callable[[str], None], cache: str
) -> list[Measured]:
    measured = [Measured(entry=entry, rounds=[]) for entry in entries]
    port = _FIRST_PORT
    for index in range(setup.rounds):
        for item in measured:
            if item.refused or item.failed:
                continue
            port += 1
            try:
                records = _run(bed, item.entry, setup, port, cache)
            except RankFailedError as error:
                item.failed = str(error)
                say(f"{item.entry.label} failed.\n{error}")
                continue
            item.refused = records[0].refused
            if item.refused:
                say(f"round {index + 1}/{setup.rounds}  {item.entry.label}: refused")
                continue
            item.rounds.append(combine(records))
            say(f"round {index + 1}/{setup.rounds}  {item.entry.label}: {item.rounds[-1].step_s[-1]:.2f} s a step")
    return measured


def combine(records: list[RankRecord]) -> Round:
    """One round from its ranks, in rank order."""
    nodes = sorted({record.node for record in records})
    by_node = [[record for record in records if record.node == node] for node in nodes]
    num_steps = range(len(records[0].step_s))

    def by_step(name: str, combined: Callable[[list[list[float]]], float]) -> list[float]:
        if not all(name in facts for record in records for facts in record.facts):
            return []
        return [combined([[record.facts[step][name] for record in ranks] for ranks in by_node]) for step in num_steps]

    return Round(
        step_s=[max(record.step_s[step] for record in records) for step in num_steps],
        cpu_s=[sum(record.cpu_s[step] for record in records) for step in num_steps],
        micro_steps_s=by_step("micro_steps_s", lambda nodes: max(map(max, nodes))),
        sent_bytes=[max(ranks[0].sent_bytes[step] for ranks in by_node) for step in num_steps],
        planned_bytes=by_step("planned_bytes", lambda nodes: max(map(sum, nodes))),
        planned_last_bytes=by_step("planned_last_bytes", lambda nodes: max(map(sum, nodes))),
        facts=records[0].facts[-1],
        losses=[sum(losses) / len(records) for losses in zip(*(record.losses for record in records), strict=True)],
        peak_bytes=max(record.peak_bytes for record in records),
        training_bytes=max(record.peak_bytes - record.before_bytes for record in records),
    )


def _run(bed: Testbed, entry: Entry, setup: Setup, port: int, cache: str) -> list[RankRecord]:
    python = setup.peer_python.get(entry.name, sys.executable)
    env = {"XDG_CACHE_HOME": cache} if entry.is_ours else {}
    if entry.name in setup.peer_python:
        env |= deepspeed_setup.environment(python, setup.ranks_per_node)
    job = RankJob(entry=entry, workload=setup.workload, warm_up=setup.warm_up, steps=setup.steps)
    with tempfile.TemporaryDirectory(prefix="round-") as folder:
        job_path = Path(folder, "job.json")
        job_path.write_text(job.to_json())
        launch(
            bed,
            Launch(
                command=[python, "-m", "benchmarks.rank", str(job_path), folder],
                ranks_per_node=setup.ranks_per_node,
                timeout_s=setup.timeout_s,
                env=env,
                port=port,
            ),
        )
        num_ranks = len(bed.nodes) * setup.ranks_per_node
        return [RankRecord(**json.loads(Path(folder, f"{rank}.json").read_text())) for rank in range(num_ranks)]
