"""Is the memory of one rank what the engine's account and the estimate say?

The account is what the engine of the measured model says it has allocated. The estimate is that of `mics estimate`,
made before the model is: of another engine, on the meta device. NCCL's communicators are outside torch's allocator, so
they are in none of the figures.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu_codecs import Meter, Row
from benchmarks.gpu_model import SIZES, Block, Shape
from benchmarks.gpu_pretended import WARM_UP, config_of, pretended_ranks, sharded, topology_of
from benchmarks.gpu_training import Trained
from mics_strategy import ShardConfig
from mics_strategy.estimate import estimate_memory

CASES = (("mics", 512), ("zero3", 512), ("zero3", 8))
TOLERANCE = 0.05  # of memory at rest, by the account and by the estimate
_ROUNDED_BYTES = 1e6  # more are no error either: the allocator rounds every tensor up to 512 bytes
_ADAM_BYTES = 8  # two moments in fp32


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Bytes of live tensors on the device, without those from before.

    Attributes:
        rest: Between two steps.
        activations: Those that a forward leaves for its backward.
        peak: At most in a step.
    """

    rest: int
    activations: int
    peak: int


def measure_memory(shape: Shape, device: torch.device) -> Iterator[Row]:
    """What is allocated, between steps and at most, beside account, optimizer states and estimate."""
    Trained(SIZES["tiny"].model(device).bfloat16()).step(SIZES["tiny"].batch(0, device))  # what libraries keep for good
    for preset, world_size in CASES:
        config = config_of(preset, world_size)
        estimate_bytes = estimated_bytes(shape, config, world_size)
        with pretended_ranks(world_size):
            account_bytes, measured = _measure(config, shape, Meter(device))
        row = {"preset": preset, "ranks": world_size}
        yield {**row, **memory_columns(account_bytes, estimate_bytes, measured)}


def estimated_bytes(shape: Shape, config: ShardConfig, world_size: int) -> int:
    """Bytes of the engine and of Adam's states by `mics estimate`, without what a step takes for a while."""
    per_node = topology_of(world_size).ranks_per_node
    estimate = estimate_memory(
        shape.model("meta"), config, num_nodes=world_size // per_node, ranks_per_node=per_node, units=[Block]
    )
    return sum(estimate.bytes_by_purpose.values()) + _ADAM_BYTES * estimate.num_trained


def _measure(config: ShardConfig, shape: Shape, meter: Meter) -> tuple[int, Measured | None]:
    """Bytes by the account, optimizer states included; and what is measured, where there is a GPU."""
    meter.release()
    before = meter.allocated_bytes
    trained, account_bytes = sharded(shape, meter.device, config)
    for step in range(WARM_UP):
        trained.step(shape.batch(step, meter.device))
    account_bytes += sum(_state_bytes(state) for state in trained.optimizer.state.values())
    meter.release()
    meter.forget_peak()
    rest = meter.allocated_bytes - before
    batch = shape.batch(WARM_UP, meter.device)
    loss = trained.model(batch.inputs, batch.targets)
    activations = meter.allocated_bytes - before - rest
    loss.backward()
    trained.update()
    if not meter.is_cuda:
        return account_bytes, None
    return account_bytes, Measured(rest=rest, activations=activations, peak=meter.peak_bytes - before)


def memory_columns(account_bytes: int, estimate_bytes: int, measured: Measured | None) -> Row:
    """The figures of a row. Where nothing is measured there is no target, and nothing is wrong."""
    row: Row = {"account MB": account_bytes / 1e6, "estimate MB": estimate_bytes / 1e6}
    if measured is None:
        names = ("at rest MB", "of account", "of estimate", "target", "activations MB", "peak MB", "of all")
        return {**row, **dict.fromkeys(names), "problem": ""}
    of_account, of_estimate = measured.rest / account_bytes, measured.rest / estimate_bytes
    row |= {"at rest MB": measured.rest / 1e6, "of account": of_account, "of estimate": of_estimate}
    row |= {"target": "met" if _is_close(measured.rest, estimate_bytes) else "missed"}
    row |= {"activations MB": measured.activations / 1e6, "peak MB": measured.peak / 1e6}
    row |= {"of all": measured.peak / (account_bytes + measured.activations)}
    return {
        **row,
        "problem": "" if _is_close(measured.rest, account_bytes) else "memory at rest is not what the account says",
    }


def _is_close(rest: int, expected: int) -> bool:
    return -TOLERANCE * expected <= rest - expected <= max(TOLERANCE * expected, _ROUNDED_BYTES)


def _state_bytes(state: dict[str, Any]) -> int:
    tensors = [getattr(value, "_local_tensor", value) for value in state.values() if isinstance(value, torch.Tensor)]
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)
