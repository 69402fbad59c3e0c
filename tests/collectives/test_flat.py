"""Do collectives move and add what they should, in every dtype and size?"""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mics_strategy.collectives.flat import FlatCollective, Ledger
from mics_strategy.errors import ShapeError
from mics_strategy.mesh import new_group
from tests.ranks import RankContext, RankPool

sizes = pytest.mark.parametrize("numel", [1, 5, 8, 24])


def _values(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


def _collective(order: list[int] | None = None) -> FlatCollective:
    ranks = order or list(range(dist.get_world_size()))
    return FlatCollective(new_group(ranks, "test"), "axis", Ledger())


def gather(ctx: RankContext, numel: int, order: list[int]) -> Tensor:
    out = torch.empty(ctx.world_size * numel)
    _collective(order).gather(out, _values(ctx.rank, numel), "test").wait()
    return out


@sizes
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [0, 2, 1, 3]], ids=["ascending", "local-rank-major"])
def test_gather_concatenates_in_the_order_of_the_group(ranks: RankPool, numel: int, order: list[int]) -> None:
    expected = torch.cat([_values(rank, numel) for rank in order])
    assert all(torch.equal(out, expected) for out in ranks(4, gather, numel, order))


def reduce(ctx: RankContext, numel: int, wire: torch.dtype, accumulate: bool) -> tuple[Tensor, Tensor]:
    full = _values(ctx.rank, 4 * numel, wire)
    before = full.clone()
    out = torch.full((numel,), 100.0)
    _collective().reduce(out, full, torch.full_like(full, torch.nan), accumulate, "test").wait()
    assert torch.equal(full, before)
    return out


@sizes
@pytest.mark.parametrize("accumulate", [False, True], ids=["overwrite", "accumulate"])
@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16], ids=str)
def test_reduction_adds_in_rank_order_in_the_wide_dtype(
    ranks: RankPool, numel: int, wire: torch.dtype, accumulate: bool
) -> None:
    outs = ranks(4, reduce, numel, wire, accumulate)
    for index, out in enumerate(outs):
        expected = torch.full((numel,), 100.0 if accumulate else 0.0)
        for rank in range(4):
            expected += _values(rank, 4 * numel, wire)[index * numel : (index + 1) * numel]
        assert torch.equal(out, expected)


def all_reduce(ctx: RankContext, numel: int, wire: torch.dtype) -> Tensor:
    tensor = _values(ctx.rank, numel)
    scratch = torch.full((3 * 4 * -(-numel // 4),), torch.nan, dtype=wire)
    _collective().all_reduce(tensor, scratch, "test").wait()
    return tensor


@sizes
def test_all_reduce_leaves_the_same_bits_everywhere(ranks: RankPool, numel: int) -> None:
    first, *rest = ranks(4, all_reduce, numel, torch.float32)
    assert all(torch.equal(first, other) for other in rest)
    torch.testing.assert_close(first, sum(_values(rank, numel) for rank in range(4)))


@sizes
def test_narrow_all_reduce_rounds_once_going_and_once_coming(ranks: RankPool, numel: int) -> None:
    expected = torch.zeros(numel)
    for rank in range(4):
        expected += _values(rank, numel, torch.bfloat16)
    expected = expected.bfloat16().float()
    assert all(torch.equal(out, expected) for out in ranks(4, all_reduce, numel, torch.bfloat16))


def two_reductions_at_once(ctx: RankContext) -> list[Tensor]:
    collective, fulls = _collective(), [_values(ctx.rank + 10 * i, 8) for i in range(2)]
    outs = [torch.zeros(2) for _ in fulls]
    handles = [
        collective.reduce(out, full, torch.empty(8), False, "test") for out, full in zip(outs, fulls, strict=True)
    ]
    for handle in reversed(handles):
        handle.wait()
        handle.wait()
    return outs


def test_handles_may_be_waited_for_in_any_order_and_twice(ranks: RankPool) -> None:
    for index, outs in enumerate(ranks(4, two_reductions_at_once)):
        for i, out in enumerate(outs):
            total = sum(_values(rank + 10 * i, 8) for rank in range(4))
            torch.testing.assert_close(out, total[2 * index : 2 * index + 2])


def ledger(ctx: RankContext) -> list[tuple[str, int, int, int]]:
    collective = _collective()
    collective.gather(torch.empty(8), torch.zeros(4), "test").wait()
    collective.reduce(torch.empty(4), torch.zeros(8), torch.empty(8), False, "test").wait()
    collective.all_reduce(torch.zeros(5), torch.empty(18, dtype=torch.bfloat16), "test").wait()
    collective.all_reduce(torch.zeros(5), torch.empty(5), "test").wait()
    entries = collective._ledger.take()
    assert collective._ledger.take().total() == 0
    return [(entry.collective, entry.full_bytes, entry.sent_bytes, times) for entry, times in entries.items()]


def test_ledger_counts_what_was_sent(ranks: RankPool) -> None:
    assert ranks(2, ledger)[0] == [
        ("all_gather", 32, 16, 1),
        ("reduce_scatter", 32, 16, 1),
        ("all_reduce", 12, 12, 1),
        ("all_reduce", 20, 20, 1),
    ]


def wrong_sizes(ctx: RankContext) -> int:
    collective, refused = _collective(), 0
    for out, shard in [(7, 4), (4, 4), (8, 3)]:
        with pytest.raises(ShapeError, match="of the layout"):
            collective.gather(torch.empty(out), torch.empty(shard), "test")
        with pytest.raises(ShapeError, match="of the layout"):
            collective.reduce(torch.empty(shard), torch.empty(out), torch.empty(out), False, "test")
        refused += 2
    with pytest.raises(ShapeError):
        collective.gather(torch.empty(8), torch.empty(4, dtype=torch.bfloat16), "test")
    return refused


def test_buffers_that_do_not_fit_are_refused_before_anything_is_sent(ranks: RankPool) -> None:
    assert ranks(2, wrong_sizes) == [6, 6]
