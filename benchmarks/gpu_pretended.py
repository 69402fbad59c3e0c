"""Rank 0 of many ranks that are not there.

The process group that torch's own tests use stands in for the others. What it gathers is this rank's shard again and
again, copied on the stream on which a gather would run; a reduction keeps this rank's part of what this rank has.

``python -m benchmarks.gpu_pretended`` needs no GPU: it prints the CPU time that a step costs the host.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.gpu_codecs import Meter, Row
from benchmarks.gpu_model import SIZES, Block, Shape
from benchmarks.gpu_training import EngineResult, Rounds, Trained, build_fsdp2, memory_columns, train
from mics_strategy import ShardConfig, Topology, shard
from mics_strategy.comm.process_groups import ProcessGroups

WARM_UP = 3  # the order of units is known after the first step, all memory taken after the second
_PER_NODE = 8
_BESIDE_RANKS = 8


@contextmanager
def pretended_ranks(world_size: int) -> Iterator[None]:
    """A default process group of `world_size` ranks of which only rank 0 runs; the others say what it says."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def same_on_all_ranks(value: object, _caller: str = "") -> list[object]:
        return [value] * world_size

    with ExitStack() as stack:
        for module in ("comm.process_groups", "comm.consensus", "engine.setup.materialize"):
            stack.enter_context(mock.patch(f"mics_strategy.{module}.gather_objects", same_on_all_ranks))
        # No rank sends the other digests, which make the sums 0.
        stack.enter_context(mock.patch.object(ProcessGroups, "desync_digest", 0))
        stack.enter_context(mock.patch("mics_strategy.engine.rank_agreement.zero_sum", return_value=0))
        stack.enter_context(mock.patch("mics_strategy.engine.rank_agreement.digest_weight", return_value=0))
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
        try:
            if not _keeps_own_part():
                for name in ("_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "alltoall_base"):
                    stack.enter_context(mock.patch.object(dist.ProcessGroup, name, _keeping_own_part(name)))
            yield
        finally:
            dist.destroy_process_group()


def _keeps_own_part() -> bool:
    """Whether what is sent arrives: in torch 2.11 the stand-in leaves the results of reductions as they were."""
    out = torch.zeros(dist.get_world_size())
    dist.all_to_all_single(out, torch.ones_like(out))
    return bool(out.all())


def _keeping_own_part(name: str) -> Callable[..., object]:
    """A method of process groups which sees to it that a result is the first part of what is sent."""
    original = getattr(dist.ProcessGroup, name)

    def method(group: dist.ProcessGroup, outs: Any, sent: Any, *options: object) -> object:
        is_one = isinstance(outs, torch.Tensor)
        with torch.no_grad():
            for out, full in zip([outs] if is_one else outs, [sent] if is_one else sent, strict=True):
                out.view(-1).copy_(full.view(-1)[: out.numel()])
        return original(group, outs, sent, *options)

    return method


def topology_of(world_size: int) -> Topology:
    """Nodes of 8 ranks."""
    return Topology(ranks_per_node=min(_PER_NODE, world_size))


def config_of(preset: str, world_size: int, *, overlap: str = "all") -> ShardConfig:
    """A preset with bf16 parameters and, where partitions have a size, one of a node."""
    topology = topology_of(world_size)
    return ShardConfig.preset(preset, partition_size="node", param_dtype="bfloat16", overlap=overlap, topology=topology)


def sharded(shape: Shape, device: torch.device, config: ShardConfig) -> tuple[Trained, int]:
    """A sharded model that was never whole, and the bytes that its engine says it allocated."""
    model = shape.model("meta")
    handle = shard(model, config, units=[Block], device=device)
    return Trained(model), handle.memory.total_bytes


def compare_pretended(
    shape: Shape, device: torch.device, rounds: Rounds, say: Callable[[str], None] = print
) -> Iterator[Row]:
    """Steps of rank 0 of 8, ours beside FSDP2's: gathers and reductions are copies on the device.

    All that a step launches is there, and no network. Losses are not compared: engines shard in different ways, so the
    parameters that copies make of one shard are others. A model with as many layers, but so small that the device waits
    for the host, shows what a step costs the host.
    """
    builders = _builders("zero3", "mics", "zero2")
    small, meter = replace(SIZES["tiny"], layers=shape.layers), Meter(device)
    results, of_small = ({name: EngineResult() for name in builders} for _ in range(2))
    for index, (name, build) in itertools.product(range(rounds.rounds), builders.items()):
        for size, into in ((shape, results[name]), (small, of_small[name])):
            with pretended_ranks(_BESIDE_RANKS):
                batches = [size.batch(step, device) for step in range(rounds.warm_up + rounds.steps)]
                train(partial(build, size, device), batches, rounds.warm_up, meter, into)
        say(f"round {index}: {name} {results[name].step_s[-1]:.4f} s a step")
    step_s, host_s = (
        {name: statistics.median(each.step_s) for name, each in of_size.items()} for of_size in (results, of_small)
    )
    for name, each in results.items():
        row = {"engine": name, "step s": step_s[name], "min s": min(each.step_s), "max s": max(each.step_s)}
        row |= {"of fsdp2": step_s["fsdp2"] / step_s[name], "host s": host_s[name]}
        yield row | {"host of fsdp2": host_s[name] / host_s["fsdp2"]} | memory_columns(each)


def _builders(*presets: str) -> dict[str, Callable[[Shape, torch.device], Trained]]:
    """FSDP2 and presets, over 8 ranks."""
    builders: dict[str, Callable[[Shape, torch.device], Trained]] = {
        "fsdp2": partial(build_fsdp2, num_ranks=_BESIDE_RANKS, is_light=False)
    }
    for name in presets:
        builders[name] = partial(_build, config=config_of(name, _BESIDE_RANKS))
    return builders


def _build(shape: Shape, device: torch.device, *, config: ShardConfig) -> Trained:
    return sharded(shape, device, config)[0]


def measure_host(rounds: int, layers: int = 24) -> Iterator[Row]:
    """CPU time of a step whose kernels are next to nothing, on one thread; the least of all rounds.

    Engines take turns, so that what else the machine does hits all of them.
    """
    device, shape = torch.device("cpu"), replace(SIZES["tiny"], layers=layers, sequence=8, micro_batch=1)
    torch.set_num_threads(1)
    plain: dict[str, Callable[[Shape, torch.device], Trained]] = {
        "plain": lambda *_: Trained(shape.model(device).bfloat16())
    }
    host_s: dict[str, float] = {}
    for _, (name, build) in itertools.product(range(rounds), (plain | _builders("zero3", "mics")).items()):
        with pretended_ranks(_BESIDE_RANKS):
            trained, batch = build(shape, device), shape.batch(0, device)
            for _ in range(WARM_UP):
                trained.step(batch)
            gc.collect()
            gc.disable()
            for _ in range(4):
                begin_s = time.process_time()
                trained.step(batch)
                host_s[name] = min(host_s.get(name, float("inf")), time.process_time() - begin_s)
            gc.enable()
    engine_s = {name: step_s - host_s["plain"] for name, step_s in host_s.items()}
    for name, step_s in host_s.items():
        share = {"over plain ms": 1e3 * engine_s[name], "of fsdp2": engine_s[name] / engine_s["fsdp2"]}
        yield {"engine": name, "cpu ms": 1e3 * step_s, **share}


if __name__ == "__main__":
    for row in measure_host(rounds=12):
        print(
            "  ".join(f"{key} {value:.3f}" if isinstance(value, float) else f"{value:>6}" for key, value in row.items())
        )
