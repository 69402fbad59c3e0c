"""First hops of large parameters, chunk by chunk through one small staging buffer.

On simulated ranks, whose collectives have the order of a stream.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from mics_strategy import ShardConfig, Topology
from mics_strategy.engine import layout as layout_module
from mics_strategy.engine.schedule import first_hop_chunks
from tests.engine.training import Run, start
from tests.models import Batch, Case
from tests.ranks import RankContext, simulate

VOCABULARY, WIDTH = 64, 24
FULL_BYTES = VOCABULARY * WIDTH * 4
CHUNK_BYTES = 700


class Rare(nn.Module):
    """A large table that may be unused or used twice, beside a small layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor, uses: int) -> Tensor:
        x = torch.ones(len(tokens), WIDTH) if uses == 0 else self.table(tokens)
        x = self.inner(x)
        return x + self.table(tokens.flip(0)) if uses > 1 else x


@dataclass(frozen=True)
class Loop:
    """Uses of the table by rank, micro-step and step."""

    uses: tuple[tuple[int, ...], ...]

    def __call__(self) -> Case:
        def loss(model: nn.Module, batch: Batch) -> Tensor:
            return model(*batch).square().mean()

        def batch(step: int, micro_step: int, rank: int) -> Any:
            generator = torch.Generator().manual_seed(100 * step + 10 * micro_step + rank)
            row = self.uses[rank % len(self.uses)]
            return torch.randint(VOCABULARY, (5,), generator=generator), row[(step + micro_step) % len(row)]

        return Case(build=Rare, batch=batch, loss=loss, units=(nn.Embedding, nn.Linear))


LOOPS = {
    "always": Loop(((1,),)),
    "twice": Loop(((2,),)),
    "one rank never": Loop(((1,), (0,))),
    "now and then": Loop(((0, 2, 1),)),
    "each rank otherwise": Loop(((0, 2, 1), (2, 1, 0))),
}


@contextmanager
def chunked(size_bytes: int) -> Iterator[None]:
    with mock.patch.object(layout_module, "MAX_BUCKET_BYTES", size_bytes):
        yield


def outcome(ctx: RankContext, config: ShardConfig, loop: Loop) -> tuple[list[Any], int, list[tuple[Any, Any]]]:
    training = start(ctx, Run(case=loop, config=config, accumulation=2))
    losses, traffic = [], []
    for step in range(3):
        losses.append(training.step(step))
        rows = training.sharded.traffic()
        traffic.append(([(r.count, r.sent_bytes) for r in rows], [(r.planned_count, r.planned_bytes) for r in rows]))
    values = [each.tolist() for each in training.parameters().values()]
    staging = training.sharded.memory.bytes_by_purpose["gradient staging buffers"]
    return [losses, values], staging, [*traffic, (len(training.sharded.plan.collectives), None)]


CONFIGS = {
    "mics": ShardConfig.preset("mics"),
    "zero3-flat": ShardConfig.preset("zero3", hierarchical=False),
    "paro-iig": ShardConfig.preset("paro-iig"),
    "zero2-bf16": ShardConfig.preset("zero2", param_dtype="bfloat16"),
    "mics-fp16-wire": ShardConfig.preset("mics", reduce_dtype="float16"),
}
SHARED_LOOPS = ("always", "twice", "now and then")  # where parameters are sharded, all ranks run the same units


@pytest.mark.wide(every=3)
@pytest.mark.parametrize(
    ("preset", "name"),
    [(p, n) for p, config in CONFIGS.items() for n in (LOOPS if config.params == "replicate" else SHARED_LOOPS)],
)
def test_chunks_change_no_bit_and_need_less_memory(preset: str, name: str) -> None:
    config = CONFIGS[preset].replace(topology=Topology(ranks_per_node=2))
    both = []
    for size_bytes in (10**9, CHUNK_BYTES):
        with chunked(size_bytes):
            both.append(simulate(4, outcome, config, LOOPS[name], ranks_per_node=2))
    for (whole_values, whole_bytes, whole_traffic), (values, num_bytes, traffic) in zip(*both, strict=True):
        assert values == whole_values
        assert num_bytes < whole_bytes / 2
        assert traffic[-1][0] > whole_traffic[-1][0] + 2 * 2  # more than two chunks in each of two micro-steps
        if name in ("always", "twice"):
            assert all(issued == planned for issued, planned in traffic[1:-1])


@pytest.mark.parametrize("count", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("numel", [0, 1, 8, 9, 64, 1000, 4096])
def test_chunks_cover_the_slice_once(numel: int, count: int) -> None:
    chunks = first_hop_chunks(numel, count)
    assert [n for start, end in chunks for n in range(start, end)] == list(range(numel))
    assert len(chunks) <= count
    assert all(start % 8 == 0 for start, _ in chunks)
