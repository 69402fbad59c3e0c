"""Does a long training keep its memory, its descriptors and its threads?

``torchrun --nproc-per-node 2 -m benchmarks.soak`` trains a tiny GPT for many steps with everything on: codecs with
error feedback, accumulation, clipping, evaluation, checkpoints of every kind, profiles, and exceptions that the loop
catches. Now and then every rank counts what it holds. Rank 0 prints a table, and what the second half of the run added
to it.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import gc
import itertools
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.workload import GPT, Batch, Workload
from mics_strategy import Codec, ShardConfig, Topology, finish_saves, load_checkpoint, save_checkpoint, shard

WORKLOAD = Workload(width=16, layers=2, vocabulary=64, sequence=8, micro_batch=1, accumulation=2)
CONFIG = ShardConfig.preset(
    "mics",
    partition_size=2,
    weight_codec="int8",
    grad_codec=Codec(bits=4, block_size=32, feedback=True),
    codec_links="all",
    topology=Topology(ranks_per_node=1),
)
RECORDED = 2000  # collectives that torch keeps in its flight recorder, about a kilobyte each


class CaughtError(RuntimeError):
    """Raised by the soak, and caught by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What one rank holds after a step.

    Attributes:
        step: Optimizer steps so far.
        resident_bytes: Memory of the process, without what it shares with files.
        allocated_bytes: Handed out by the C library's allocator, which torch's CPU tensors come from.
        objects: Python objects that the collector tracks.
        descriptors: Open ones.
        store_keys: Entries of the job's store.
        threads: Number of threads of the process, those of libraries included.
    """

    step: int
    resident_bytes: int
    allocated_bytes: int
    objects: int
    descriptors: int
    threads: int
    store_keys: int


class _MallInfo2(ctypes.Structure):
    names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = [(name, ctypes.c_size_t) for name in names]


def take_sample(step: int) -> Sample:
    """Count after a collection, so that only what is reachable counts."""
    gc.collect()
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = _MallInfo2
    library.malloc_trim(0)
    info = library.mallinfo2()
    pages = [int(word) for word in Path("/proc/self/statm").read_text().split()]
    return Sample(
        step=step,
        resident_bytes=(pages[1] - pages[2]) * os.sysconf("SC_PAGE_SIZE"),
        allocated_bytes=info.uordblks + info.hblkhd,
        objects=len(gc.get_objects()),
        descriptors=len(os.listdir("/proc/self/fd")) - 1,  # without that of the listing
        threads=len(os.listdir("/proc/self/task")),
        store_keys=dist.distributed_c10d._get_default_store().num_keys(),
    )


class Soak:
    """A training with everything on.

    Args:
        folder: Shared folder for checkpoints.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._model: GPT = WORKLOAD.model()
        self._sharded = shard(self._model, CONFIG)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=WORKLOAD.learning_rate)
        self._rank = dist.get_rank()

    def step(self, number: int) -> None:
        """Make one optimizer step."""
        for index, batch in enumerate(WORKLOAD.batches(number, self._rank)):
            with self._sharded.micro_step(index, of=WORKLOAD.accumulation):
                self._loss(batch).backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def evaluate(self, number: int) -> None:
        """Run forwards without gradients, in evaluation mode."""
        self._model.eval()
        with torch.no_grad():
            for batch in WORKLOAD.batches(number, self._rank):
                self._loss(batch)
        self._model.train()

    def raise_in_forward(self, number: int) -> None:
        """Raise in the forward of the second block, and go on."""
        handle = self._model.blocks[1].register_forward_pre_hook(_raise)
        self._catch(number)
        handle.remove()

    def raise_in_backward(self, number: int) -> None:
        """Raise in the backward between two blocks, and go on."""

        def hook(_module: Any, _inputs: Any, output: Tensor) -> None:
            output.register_hook(_raise)

        handle = self._model.blocks[0].register_forward_hook(hook)
        self._catch(number)
        handle.remove()

    def _catch(self, number: int) -> None:
        try:
            self._loss(WORKLOAD.batches(number, self._rank)[0]).backward()
        except CaughtError:
            self._optimizer.zero_grad()
        else:
            raise RuntimeError("The soak raised nothing on purpose.")

    def save(self, number: int) -> None:
        """Write a sharded checkpoint, and remove it."""
        self._save(number, asynchronous=False)

    def save_asynchronously(self, number: int) -> None:
        """Write a sharded checkpoint during a step, and remove it."""
        self._save(number, asynchronous=True)

    def _save(self, number: int, *, asynchronous: bool) -> None:
        path = self._folder / f"{number}-{asynchronous}"
        save_checkpoint(path, self._sharded, [self._optimizer], {"step": number}, asynchronous=asynchronous)
        if asynchronous:
            self.step(number)
        finish_saves(self._sharded)
        self._remove(path)

    def load(self, number: int) -> None:
        """Write a sharded checkpoint, read it back, and remove it."""
        path = self._folder / str(number)
        save_checkpoint(path, self._sharded, [self._optimizer])
        load_checkpoint(path, self._sharded, [self._optimizer])
        self._remove(path)

    def _remove(self, path: Path) -> None:
        dist.barrier()
        if self._rank == 0:
            shutil.rmtree(path)

    def gather(self, _number: int) -> None:
        """Collect the plain state dicts of the model and the optimizer."""
        self._sharded.full_state_dict()
        self._sharded.full_optimizer_state_dict(self._optimizer)

    def profile(self, number: int) -> None:
        """Profile two steps, and read the plan and the traffic."""
        profile = self._sharded.profile(2)
        for _ in range(3):
            self.step(number)
        profile.stop()
        self._sharded.traffic()

    def _loss(self, batch: Batch) -> Tensor:
        loss: Tensor = self._model(batch.inputs, batch.targets)
        return loss


def _raise(*_: Any) -> None:
    raise CaughtError("Raised on purpose.")


EVERY = {  # steps between two, of each event
    "evaluate": 5,
    "raise_in_forward": 7,
    "raise_in_backward": 11,
    "gather": 23,
    "save": 29,
    "save_asynchronously": 31,
    "load": 97,
    "profile": 101,
}


def soak(
    steps: int, samples: int, folder: Path, report: Callable[[Sample], None] = lambda _sample: None
) -> list[Sample]:
    """Train on a rank of a job, and count what it holds at equal distances.

    Args:
        steps: Optimizer steps.
        samples: How often to count.
        folder: Shared folder for checkpoints.
        report: Called with each sample, so that a run which is ended early leaves something.
    """
    for _ in range(RECORDED):  # otherwise memory grows until as many have run
        dist.barrier()
    training = Soak(folder)
    counted = []
    for number in range(1, steps + 1):
        training.step(number)
        for event, every in EVERY.items():
            if number % every == 0:
                getattr(training, event)(number)
        if number % max(1, steps // samples) == 0:
            counted.append(take_sample(number))
            report(counted[-1])
    return counted


def growth(samples: Sequence[Sample], field: str) -> float:
    """What a step added to a field in the second half of a run: the median of the slopes between samples."""
    half = samples[len(samples) // 2 :]
    slopes: list[float] = [
        (getattr(later, field) - getattr(earlier, field)) / (later.step - earlier.step)
        for earlier, later in itertools.combinations(half, 2)
    ]
    return statistics.median(slopes)


def header() -> str:
    """The names of the columns."""
    return "".join(f"{field.name:>17}" for field in dataclasses.fields(Sample))


def line(sample: Sample) -> str:
    """One line of the table."""
    return "".join(f"{value:17,}" for value in dataclasses.astuple(sample))


def last_line(samples: Sequence[Sample]) -> str:
    """What a step added to every column."""
    names = [field.name for field in dataclasses.fields(Sample)][1:]
    return f"{'added by a step':>17}" + "".join(f"{growth(samples, name):17,.3f}" for name in names)


def draw(samples: Sequence[Sample], path: Path) -> None:
    """Draw memory, descriptors and threads over the steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    memory, counts = figure.subplots(2, 1, sharex=True)
    steps = [sample.step for sample in samples]
    memory.plot(steps, [sample.resident_bytes / 1e6 for sample in samples], label="resident")
    memory.plot(steps, [sample.allocated_bytes / 1e6 for sample in samples], label="allocated")
    memory.set(ylabel="MB", ylim=(0, None))
    counts.plot(steps, [sample.descriptors for sample in samples], label="descriptors")
    counts.plot(steps, [sample.threads for sample in samples], label="threads")
    counts.set(xlabel="optimizer steps", ylim=(0, None))
    memory.legend()
    counts.legend()
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str] | None = None) -> int:
    """Soak on the ranks of this job; rank 0 prints its table."""
    options = parser().parse_args(arguments)
    dist.init_process_group("gloo")
    shared = [tempfile.mkdtemp(prefix="soak-") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(shared)
    folder = Path(str(shared[0]))
    is_first = dist.get_rank() == 0

    def report(text: str) -> None:
        if is_first:
            print(text, flush=True)

    report(header())
    samples = soak(options.steps, options.samples, folder, lambda sample: report(line(sample)))
    report(last_line(samples))
    dist.barrier()
    if is_first:
        if options.picture is not None:
            draw(samples, options.picture)
        shutil.rmtree(folder)
    dist.destroy_process_group()
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    options.add_argument("--steps", type=int, default=20_000)
    options.add_argument("--samples", type=int, default=40)
    options.add_argument("--picture", type=Path, default=None, help="file to draw to, .png")
    return options


if __name__ == "__main__":
    sys.exit(main())
