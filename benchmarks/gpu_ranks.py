"""Are several ranks on one device right, and what does a step of theirs cost?

NCCL refuses two ranks on one GPU, so gloo moves the tensors, through host memory. Everything else of a step is that of
several GPUs: streams, events, shards, hops. Times say what the engines ask of gloo, and nothing of NCCL.

All engines compute in fp32 and update by SGD, whose step is proportional to the gradients: a sum that is not divided,
or lacks a rank, changes the losses. Adam would hide a wrong factor.
"""

from __future__ import annotations

import datetime
import json
import re
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.gpu_codecs import Meter, Row
from benchmarks.gpu_model import Block, Shape
from benchmarks.gpu_training import EngineResult, Rounds, Trained, loss_difference, train
from benchmarks.workload import Batch
from mics_strategy import ShardConfig, Topology, shard

WORLD_SIZES = (2, 4)
PARTITION = 2  # ranks of a node, and of a partition of `mics`
LOSS_TOLERANCE = 1e-5  # relative; fp32 sums in another order differ by some 1e-7
_TIMEOUT = datetime.timedelta(minutes=2)  # of a collective: one rank may have failed
_sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)

Builder = Callable[[Shape, torch.device], Trained]


def _ddp(shape: Shape, device: torch.device) -> Trained:
    return Trained(DistributedDataParallel(shape.model(device)), make_optimizer=_sgd)


def _fsdp2(shape: Shape, device: torch.device, *, is_hybrid: bool) -> Trained:
    """`fully_shard` of each block and the root, over all ranks or, as `mics`, over partitions with replicas."""
    ranks, model = dist.get_world_size(), shape.model(device)
    sizes, names = ((ranks // PARTITION, PARTITION), ("replicate", "shard")) if is_hybrid else ((ranks,), ("shard",))
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=names)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return Trained(model, make_optimizer=_sgd)


def _ours(shape: Shape, device: torch.device, *, preset: str) -> Trained:
    """A preset in one stage, without groups of tensors: gloo has no coalesced all-gather that is sound on CUDA."""
    topology = Topology(ranks_per_node=PARTITION)
    config = ShardConfig.preset(preset, topology=topology, partition_size="node", hierarchical=False, coalesce=False)
    model = shape.model(device)
    with ExitStack() as stack:
        if device.type == "cuda":  # `shard` refuses gloo there, which is right for training
            stack.enter_context(mock.patch("mics_strategy.api.target_device", return_value=device))
        shard(model, config, units=[Block], device=device)
    return Trained(model, make_optimizer=_sgd)


RANK_BUILDERS: dict[str, Builder] = {
    "ddp": _ddp,
    "fsdp2": partial(_fsdp2, is_hybrid=False),
    "fsdp2-hybrid": partial(_fsdp2, is_hybrid=True),
    "zero3": partial(_ours, preset="zero3"),
    "mics": partial(_ours, preset="mics"),
}
_OURS = ("zero3", "mics")


def engines_of(world_size: int) -> list[str]:
    """Names of the engines that are measured; `mics` and hybrid FSDP2 need two partitions."""
    is_replicated = world_size > PARTITION
    return [name for name in RANK_BUILDERS if is_replicated or name not in ("fsdp2-hybrid", "mics")]


def measure_ranks(shape: Shape, device: torch.device, rounds: Rounds) -> Iterator[Row]:
    """Train on 2 and 4 ranks with every engine, and by a plain process on the batches of all ranks."""
    for world_size in WORLD_SIZES:
        expected = plain_losses(shape, device, world_size, rounds)
        Meter(device).release()
        yield from rank_rows(_results(shape, device, world_size, rounds), expected, world_size)


def plain_losses(shape: Shape, device: torch.device, world_size: int, rounds: Rounds) -> list[float]:
    """Losses of a plain process that reads what all ranks read."""
    batches = []
    for step in range(rounds.warm_up + rounds.steps):
        of_ranks = [rank_batch(shape, step, rank, world_size, device) for rank in range(world_size)]
        inputs, targets = (torch.cat([getattr(batch, name) for batch in of_ranks]) for name in ("inputs", "targets"))
        batches.append(Batch(inputs=inputs, targets=targets))
    trained = Trained(shape.model(device), make_optimizer=_sgd)
    return [float(trained.step(batch)) for batch in batches]


def rank_batch(shape: Shape, step: int, rank: int, world_size: int, device: torch.device) -> Batch:
    """Batch of a rank in a step."""
    return shape.batch(step * world_size + rank, device)


def train_on_ranks(name: str, shape: Shape, device: torch.device, rounds: Rounds) -> EngineResult:
    """Train with one engine over the default process group. Every rank returns the result of all.

    A step takes as long as on its slowest rank; losses are means over the ranks.
    """
    rank, ranks, own = dist.get_rank(), dist.get_world_size(), EngineResult()
    steps = range(rounds.warm_up + rounds.steps)
    batches = [rank_batch(shape, step, rank, ranks, device) for step in steps]
    train(partial(RANK_BUILDERS[name], shape, device), batches, rounds.warm_up, Meter(device), own)
    results: list[Any] = [None] * ranks
    dist.all_gather_object(results, own)
    return EngineResult(
        step_s=[max(of_step) for of_step in zip(*(each.step_s for each in results), strict=True)],
        peak_bytes=[max(each.peak_bytes[0] for each in results)],
        losses=[[statistics.fmean(of_step) for of_step in zip(*(each.losses[0] for each in results), strict=True)]],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """Arguments of the ranks of one start.

    Attributes:
        shape: Shape of the model.
        device: Name of the device that all share.
        rounds: Numbers of steps.
        engines: Names of engines, in the order in which they train.
        world_size: Number of ranks.
        folder: Folder of the store and of the results, one file for each engine that has trained.
    """

    shape: Shape
    device: str
    rounds: Rounds
    engines: tuple[str, ...]
    world_size: int
    folder: str


def _results(shape: Shape, device: torch.device, world_size: int, rounds: Rounds) -> dict[str, EngineResult]:
    """Results by engine. Ranks that fail end together; others are started for the engines that are left."""
    results: dict[str, EngineResult] = {}
    while left := [name for name in engines_of(world_size) if name not in results]:
        with tempfile.TemporaryDirectory() as folder:
            job = _Job(
                shape=shape,
                device=str(device),
                rounds=rounds,
                engines=tuple(left),
                world_size=world_size,
                folder=folder,
            )
            failure = _start(job)
            for name in left:
                if (path := Path(folder, name)).exists():
                    results[name] = EngineResult(**json.loads(path.read_text()))
        missing = [name for name in left if name not in results]
        if missing:
            results[missing[0]] = EngineResult(failure=failure or "the ranks ended without a result")
    return results


def _start(job: _Job) -> str:
    """Run a job in processes of its own; the error of the first rank that fails."""
    try:
        spawn(_run_rank, (job,), nprocs=job.world_size)
    except Exception as error:  # the traceback of a rank, as text
        return failure_of(str(error))
    return ""


def failure_of(text: str) -> str:
    """The line of a traceback that names the error, or the last line of another text."""
    lines = text.strip().splitlines() or [""]
    return next((line for line in reversed(lines) if re.match(r"[A-Za-z_][\w.]*: ", line)), lines[-1])


def _run_rank(rank: int, job: _Job) -> None:
    device = torch.device(job.device)
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:gloo" if is_cuda else "gloo",
        init_method=f"file://{job.folder}/store",
        rank=rank,
        world_size=job.world_size,
        timeout=_TIMEOUT,
    )
    for name in job.engines:
        result = train_on_ranks(name, job.shape, device, job.rounds)
        if rank == 0:
            Path(job.folder, name).write_text(json.dumps(asdict(result)))
    dist.barrier()
    dist.destroy_process_group()


def rank_rows(results: dict[str, EngineResult], expected: list[float], world_size: int) -> Iterator[Row]:
    """A row for each engine, with the speed of ours by that of the peers over the same ranks.

    Args:
        results: Results by engine.
        expected: Losses of a plain process.
        world_size: Number of ranks.
    """
    steps = {name: statistics.median(each.step_s) for name, each in results.items() if each.is_measured}
    fsdp2 = min((step_s for name, step_s in steps.items() if name.startswith("fsdp2")), default=None)
    for name, each in results.items():
        row: Row = {"engine": name, "ranks": world_size}
        if not each.is_measured:
            yield {**row, "problem": each.failure, "not measured": each.reason}
            continue
        row |= {"step s": steps[name], "min s": min(each.step_s), "max s": max(each.step_s)}
        if name in _OURS:
            row["of fsdp2"] = None if fsdp2 is None else fsdp2 / steps[name]
            row["of ddp"] = steps["ddp"] / steps[name] if "ddp" in steps else None
        row |= {"peak MB": max(each.peak_bytes) / 1e6 or None, "loss": each.losses[0][-1], "losses": each.losses}
        yield {**row, "problem": loss_difference(each.losses, expected, LOSS_TOLERANCE)}
