"""How long does training stand still for a checkpoint?

``torchrun --nproc-per-node 2 -m benchmarks.checkpoints`` trains a small GPT, saves it at once and while training goes
on, and does the same with FSDP2 and torch's distributed checkpoints, in one run. Rank 0 prints the table.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.workload import Workload
from mics_strategy import save_checkpoint, shard

Wait = Callable[[], Any]
Save = Callable[[Path], Wait]  # returns what waits until the checkpoint is whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """A training that can be saved.

    Attributes:
        step: Makes an optimizer step.
        saves: Ways to save it, by name.
    """

    step: Callable[[int], None]
    saves: dict[str, Save]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Medians over the rounds, of the slowest rank.

    Attributes:
        name: Of the way to save.
        stall_s: Until training may go on.
        whole_s: Until the checkpoint is whole.
        steps: Optimizer steps in between.
    """

    name: str
    stall_s: float
    whole_s: float
    steps: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure on the ranks of this job and print on rank 0."""
    options = parser().parse_args(arguments)
    dist.init_process_group("gloo")
    workload = Workload(width=options.width, layers=options.layers, accumulation=1)
    shared = [tempfile.mkdtemp(prefix="saves-", dir=options.folder) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(shared)
    folder = Path(str(shared[0]))
    try:
        rows, step_s = [], 0.0
        for make in (ours, fsdp2):
            contestant = make(workload)
            step_s = step_s or measure_step(contestant)
            rows += [measure(name, contestant, save, folder, options.rounds) for name, save in contestant.saves.items()]
        if dist.get_rank() == 0:
            print(table(rows, workload.numel, step_s))
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
        dist.destroy_process_group()
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.checkpoints", description=__doc__)
    options.add_argument("--width", type=int, default=512, help="of the model")
    options.add_argument("--layers", type=int, default=8)
    options.add_argument("--rounds", type=int, default=5, help="saves of each kind, of which the median counts")
    options.add_argument("--folder", type=Path, default=None, help="where to save; the system's temporary folder")
    return options


def ours(workload: Workload) -> Contestant:
    """`save_checkpoint`, at once and asynchronous."""
    model = workload.model()
    sharded = shard(model, "mics")
    optimizer = torch.optim.AdamW(model.parameters(), lr=workload.learning_rate)

    def save(path: Path, asynchronous: bool) -> Wait:
        return save_checkpoint(path, sharded, [optimizer], asynchronous=asynchronous).wait

    saves: dict[str, Save] = {
        "mics": lambda path: save(path, False),
        "mics, asynchronous": lambda path: save(path, True),
    }
    return Contestant(step=_stepper(model, optimizer, workload), saves=saves)


def fsdp2(workload: Workload) -> Contestant:
    """FSDP2 with `dcp.save` and `dcp.async_save`."""
    model = workload.model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=workload.learning_rate)

    own_group = dist.new_group()  # in the group that trains, its messages would be taken for gradients

    def state() -> dict[str, Any]:
        of_model, of_optimizer = get_state_dict(model, optimizer)
        return {"model": of_model, "optimizer": of_optimizer}

    def at_once(path: Path) -> Wait:
        dcp_save(state(), checkpoint_id=path)
        return lambda: None

    def asynchronous(path: Path) -> Wait:
        future: Any = async_save(state(), checkpoint_id=path, process_group=own_group)
        return lambda: future.result()

    saves: dict[str, Save] = {"fsdp2, dcp.save": at_once, "fsdp2, dcp.async_save": asynchronous}
    return Contestant(step=_stepper(model, optimizer, workload), saves=saves)


def _stepper(model: torch.nn.Module, optimizer: torch.optim.Optimizer, workload: Workload) -> Callable[[int], None]:
    def step(number: int) -> None:
        for batch in workload.batches(number, dist.get_rank()):
            model(batch.inputs, batch.targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure_step(contestant: Contestant) -> float:
    """Seconds of an optimizer step with nothing being saved."""
    times_s = []
    for number in range(6):
        start_s = time.perf_counter()
        contestant.step(number)
        times_s.append(time.perf_counter() - start_s)
    return statistics.median(times_s[1:])


def measure(name: str, contestant: Contestant, save: Save, folder: Path, rounds: int) -> Row:
    """Save again and again, and train until each save is whole. One round before them does not count."""
    measurements = []
    for number in range(rounds + 1):
        contestant.step(number)
        path = folder / f"{name.replace(', ', '-')}-{number}"
        dist.barrier()
        start_s = time.perf_counter()
        wait = save(path)
        stall_s = time.perf_counter() - start_s
        steps = 0
        if "async" in name:  # two steps, which all ranks make, however long the save takes
            for steps in (1, 2):
                contestant.step(steps)
        training_s = time.perf_counter() - start_s
        wait()
        measurements.append((stall_s, max(time.perf_counter() - start_s, training_s), float(steps)))
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(path)
    slowest = torch.tensor(measurements[1:]).median(dim=0).values
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    stall_s, whole_s, steps_made = slowest.tolist()
    return Row(name=name, stall_s=stall_s, whole_s=whole_s, steps=steps_made)


def table(rows: Sequence[Row], numel: int, step_s: float) -> str:
    """Seconds, and the stall beside that of the first row."""
    lines = [
        f"{numel / 1e6:.1f} M parameters with AdamW, {numel * 12 / 1e6:.0f} MB; a step takes {step_s:.2f} s",
        f"{'':24}{'stall s':>9}{'of mics':>9}{'whole s':>9}{'steps':>7}",
    ]
    for row in rows:
        ratio = row.stall_s / rows[0].stall_s
        lines.append(f"{row.name:24}{row.stall_s:9.3f}{ratio:9.2f}{row.whole_s:9.2f}{row.steps:7.0f}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
