"""What does one rank do in a measurement?

Run as ``python -m benchmarks.rank JOB FOLDER`` by `measure`, under the environment of a launcher. It trains some
steps, each between two barriers, and writes what it measured to FOLDER/RANK.json. It imports torch and the engine it is
told to use, nothing else, because peers live in environments of their own.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.engines import Engine, RefusedError, build
from benchmarks.entries import Entry
from benchmarks.testbed import own_link_bytes
from benchmarks.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class RankJob:
    """What every rank of a round does."""

    entry: Entry
    workload: Workload
    warm_up: int
    steps: int

    def to_json(self) -> str:
        """As text, for a file."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RankJob:
        """What `to_json` wrote."""
        values = json.loads(text)
        return cls(**{**values, "entry": Entry(**values["entry"]), "workload": Workload(**values["workload"])})


@dataclass(slots=True, kw_only=True)
class RankRecord:
    """What one rank measured.

    Attributes:
        node: Where it ran.
        refused: Why the engine does not offer the configuration; "" where it does.
        losses: Of every step from the first, warm-up included; means of this rank's micro-steps.
        step_s: Of each step after the warm-up.
        cpu_s: CPU time of all threads in each of these, without what the kernel does for the network.
        sent_bytes: That the node sent to others in each of these, by the counter of its link.
        facts: What the engine said of each of these.
        peak_bytes: The most memory that was resident (VmHWM).
        before_bytes: What was resident before the model was made: the interpreter and its libraries.
    """

    node: int
    refused: str = ""
    losses: list[float] = dataclasses.field(default_factory=list)
    step_s: list[float] = dataclasses.field(default_factory=list)
    cpu_s: list[float] = dataclasses.field(default_factory=list)
    sent_bytes: list[int] = dataclasses.field(default_factory=list)
    facts: list[dict[str, float]] = dataclasses.field(default_factory=list)
    peak_bytes: int = 0
    before_bytes: int = 0


def run(job: RankJob) -> RankRecord:
    """Build the engine and train, with the default process group."""
    ranks_per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    record = RankRecord(node=int(os.environ["GROUP_RANK"]), before_bytes=_memory_bytes("VmRSS"))
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM restarts at what is resident now
    try:
        engine = build(job.entry, job.workload, world_size=dist.get_world_size(), ranks_per_node=ranks_per_node)
    except RefusedError as error:
        record.refused = str(error)
        return record
    for step in range(job.warm_up + job.steps):
        _step(engine, job, step, record)
    record.peak_bytes = _memory_bytes("VmHWM")
    return record


def _step(engine: Engine, job: RankJob, step: int, record: RankRecord) -> None:
    batches = job.workload.batches(step, dist.get_rank())
    dist.barrier()
    sent_bytes, cpu_start, start = own_link_bytes().sent, time.process_time(), time.perf_counter()
    record.losses.append(engine.step(batches))
    elapsed_s = time.perf_counter() - start
    dist.barrier()  # what other ranks of the node still send belongs to the step
    if step >= job.warm_up:
        record.step_s.append(elapsed_s)
        record.cpu_s.append(time.process_time() - cpu_start)
        record.sent_bytes.append(own_link_bytes().sent - sent_bytes)
        record.facts.append(dict(engine.facts))


def _memory_bytes(name: str) -> int:
    matches: list[Any] = re.findall(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), flags=re.MULTILINE)
    return int(matches[0]) * 1024


def main(job_path: str, folder: str) -> None:
    """Run the job in a file and write the record."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    record = run(RankJob.from_json(Path(job_path).read_text()))
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(dataclasses.asdict(record)))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
