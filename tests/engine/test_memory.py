"""All memory is allocated once, with the sizes of the layouts."""

import gc
import math
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor

from mics_strategy import ShardConfig, Sharded, shard
from mics_strategy.comm.workspace import aligned_bytes
from mics_strategy.engine.layout import make_layout
from mics_strategy.engine.memory import MemoryTracker
from mics_strategy.engine.units import find_units
from tests import models
from tests.engine.training import Run, start
from tests.ranks import RankContext, RankPool

CONFIGS = {
    "ddp": ShardConfig.preset("ddp"),
    "zero1": ShardConfig.preset("zero1"),
    "zero2": ShardConfig.preset("zero2"),
    "zero3": ShardConfig.preset("zero3"),
    "mics": ShardConfig.preset("mics"),
    "iig": ShardConfig.preset("paro-iig"),
    "bf16": ShardConfig.preset("mics", param_dtype="bfloat16", reduce_dtype="bfloat16", prefetch=2),
}
configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def _live_bytes() -> int:
    """Bytes of memory that some Python object can reach.

    A shard's storage is a part of its arena's.
    """
    gc.collect()
    ranges = set()
    alive = (each for each in gc.get_objects() if isinstance(each, torch.Tensor))
    for tensor in (each for each in alive if not isinstance(each, FakeTensor)):  # of a compiler that ran before
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        with suppress(RuntimeError):  # a guard is closed; the slot is counted itself
            ranges.add((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
    total = reached = 0
    for start_, end in sorted(ranges):
        total += max(0, end - max(start_, reached))
        reached = max(reached, end)
    return total


def _addresses(sharded: Sharded) -> Iterator[int]:
    for unit in sharded.internals.units:
        yield unit.slot.buffer.data_ptr()
        for bucket in unit.buckets:
            yield bucket.master_shard.data_ptr()
            yield from (view.data_ptr() for view in bucket.unsharded.views)
            yield from (parameter.to_local().data_ptr() for parameter in bucket.sharded_params)


def _gradient_addresses(model: nn.Module) -> list[int]:
    return [p.grad.to_local().data_ptr() for p in model.parameters() if p.grad is not None]


def measure_by_step(ctx: RankContext, run: Run) -> tuple[list[int], list[list[int]], list[list[int]], list[int]]:
    """After every step: engine bytes, addresses, gradient addresses, process bytes."""
    training = start(ctx, run)
    accounts, addresses, gradients, bytes_ = [], [], [], []
    for step in range(run.steps):
        training.backward(step)
        gradients.append(_gradient_addresses(training.model))
        training.optimizer.step()
        training.optimizer.zero_grad()
        accounts.append(training.sharded.memory.total_bytes)
        addresses.append(list(_addresses(training.sharded)))
        bytes_.append(_live_bytes())
    return accounts, addresses, gradients, bytes_


@configs
def test_nothing_is_allocated_or_moved_after_the_second_step(ranks: RankPool, config: ShardConfig) -> None:
    run = Run(case=models.transformer, config=config, steps=5, accumulation=2)
    for measured in ranks(4, measure_by_step, run, ranks_per_node=2):
        for by_step in measured:
            assert by_step[1:] == by_step[1:2] * 4


def memory_by_purpose(ctx: RankContext, run: Run) -> tuple[dict[str, int], int]:
    """The engine's account, and the bytes that sharding really added to the process."""
    case = run.case()
    model = case.build()
    before = _live_bytes()
    plain_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    sharded = shard(model, run.config, units=case.units)
    added = _live_bytes() - (before - plain_bytes)
    return dict(sharded.memory.bytes_by_purpose), added


@configs
def test_tracked_memory_equals_allocated_memory(ranks: RankPool, config: ShardConfig) -> None:
    run = Run(case=models.transformer, config=config)
    for purposes, added in ranks(4, memory_by_purpose, run, ranks_per_node=2):
        assert abs(added - sum(purposes.values())) < 2048  # scalars and shapes of torch's own


def _flat_numel(case: models.Case, ranks: int) -> int:
    """Elements of all buckets at the optimizer scope, padding included."""
    return sum(_numel_by_unit(case, ranks))


def _numel_by_unit(case: models.Case, ranks: int) -> list[int]:
    layouts = (
        make_layout([(entry.name, entry.parameter.shape) for entry in unit.parameters], ranks)
        for unit in find_units(case.build(), case.units)
    )
    return [layout.full_numel for layout in layouts]


@pytest.mark.wide(every=5)
@pytest.mark.parametrize("preset", [p for p in ShardConfig.PRESETS if p.startswith("paro-")])
def test_states_take_their_share_of_the_model(ranks: RankPool, preset: str) -> None:
    config = ShardConfig.preset(preset)
    [(purposes, _), *_] = ranks(4, memory_by_purpose, Run(case=models.transformer, config=config), ranks_per_node=2)
    words = {"replicate": 1, "partition": 2, "world": 4}
    params, grads, optimizer = (words[scope] for scope in (config.params, config.grads, config.optimizer))
    flat_bytes = 4 * _flat_numel(models.transformer(), optimizer)
    assert purposes["master shards"] == flat_bytes // optimizer
    assert purposes["gradients"] == flat_bytes // grads
    assert purposes.get("reduced gradients", 0) == (flat_bytes // optimizer if grads != optimizer else 0)
    assert purposes.get("parameter shards", 0) == (flat_bytes // params if 1 < params < optimizer else 0)
    assert ("unsharded parameters" in purposes) is (params == 1 < optimizer)


@pytest.mark.wide(every=5)
@pytest.mark.parametrize("preset", [p for p in ShardConfig.PRESETS if p.startswith("paro-")])
def test_parameters_in_another_dtype_are_kept_only_where_fewer_ranks_share_them(ranks: RankPool, preset: str) -> None:
    config = ShardConfig.preset(preset, param_dtype="bfloat16")
    [(purposes, _), *_] = ranks(4, memory_by_purpose, Run(case=models.transformer, config=config), ranks_per_node=2)
    words = {"replicate": 1, "partition": 2, "world": 4}
    params, optimizer = words[config.params], words[config.optimizer]
    flat_bytes = 2 * _flat_numel(models.transformer(), optimizer)
    assert purposes.get("parameter shards", 0) == (flat_bytes // params if 1 < params < optimizer else 0)
    assert ("unsharded parameters" in purposes) is (params == 1)
    num_cast = 1 if params < optimizer else 2 if params > 1 else 0  # a unit is synced, or gathered while one computes
    largest = max(_numel_by_unit(models.transformer(), optimizer)) // optimizer
    assert purposes.get("cast staging buffers", 0) == num_cast * aligned_bytes((largest, torch.bfloat16))


def _unit_bytes(case: models.Case, ranks: int) -> list[int]:
    """Bytes of every unit's parameters side by side, root first."""
    return [
        4 * make_layout([(e.name, e.parameter.shape) for e in unit.parameters], ranks).unpadded_numel
        for unit in find_units(case.build(), case.units)
    ]


@pytest.mark.parametrize("prefetch", [1, 2, 5])
def test_slots_hold_the_root_and_one_unit_more_than_is_fetched_ahead(ranks: RankPool, prefetch: int) -> None:
    run = Run(case=models.transformer, config=ShardConfig(prefetch=prefetch))
    purposes, _ = ranks(2, memory_by_purpose, run)[0]
    root, layer, *_ = _unit_bytes(models.transformer(), 2)
    assert purposes["slots"] == sum(64 * math.ceil(n / 64) for n in (root, *[layer] * min(3, prefetch + 1)))


def memory_of_frozen(ctx: RankContext) -> tuple[dict[str, int], int, int]:
    training = start(ctx, Run(case=models.frozen, config=ShardConfig.preset("zero1")))
    numels = [(p.numel(), p.requires_grad) for p in training.model.parameters()]
    trained = sum(numel for numel, requires_grad in numels if requires_grad)
    return dict(training.sharded.memory.bytes_by_purpose), trained, sum(numel for numel, _ in numels)


def test_frozen_parameters_have_no_gradient_memory(ranks: RankPool) -> None:
    purposes, trained, _ = ranks(1, memory_of_frozen)[0]
    assert 4 * trained <= purposes["gradients"] <= 4 * (trained + 8 * 40)


def allocate_by_step(ctx: RankContext, run: Run) -> int:
    """Leftover objects per step: handles, chains, calls that nobody forgets."""
    training = start(ctx, run)
    counts = []
    for step in range(12):  # the last transfers are remembered, up to a bound that is reached by then
        training.step(step)
        gc.collect()
        counts.append(len(gc.get_objects()))
    return counts[-1] - counts[-4]


@pytest.mark.parametrize("preset", ["mics", "zero2"])
def test_steps_leave_no_objects_behind(ranks: RankPool, preset: str) -> None:
    run = Run(case=models.transformer, config=ShardConfig.preset(preset), accumulation=2)
    assert max(ranks(2, allocate_by_step, run)) <= 30


def _flags_of_mapping(address: int) -> list[str]:
    """The kernel's flags of the mapping that holds an address of this process."""
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first:
            start, end = (int(bound, 16) for bound in first.split("-"))
            is_inside = start <= address < end
        elif is_inside and first == "VmFlags:":
            return line.split()[1:]
    raise AssertionError(f"{address:#x} is not mapped")


@pytest.mark.skipif(
    sys.platform != "linux" or not Path("/sys/kernel/mm/transparent_hugepage").exists(),
    reason="this kernel has no huge pages",
)
def test_large_buffers_are_zeros_in_huge_pages() -> None:
    memory = MemoryTracker()
    large = memory.zeros("arena", 4 << 20, torch.float32, torch.device("cpu"))
    assert "hg" in _flags_of_mapping(large.data_ptr() + large.nbytes // 2)
    assert not large.any()
    assert not memory.zeros("arena", 3, torch.float32, torch.device("cpu")).any()
    assert memory.bytes_by_purpose == {"arena": (16 << 20) + 12}
