"""Do two stages move and add what one flat collective does, and how much crosses the slow links?"""

import pytest
import torch
from torch import Tensor

from mics_strategy.collectives.flat import FlatCollective, Ledger
from mics_strategy.collectives.hierarchical import Hierarchical
from mics_strategy.mesh import new_group
from tests.ranks import RankContext, RankPool

sizes = pytest.mark.parametrize("numel", [1, 5, 8, 24])
wires = pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16, torch.float16], ids=str)
shapes = pytest.mark.parametrize(("nodes", "per_node"), [(2, 2), (2, 4), (4, 2)])


def _values(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Small whole numbers, of which no sum rounds, in no dtype and no order."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-8, 9, (numel,), generator=generator).to(dtype)


def _pair(ctx: RankContext) -> tuple[Hierarchical, list[int], Ledger]:
    """Two stages over all ranks, the ranks in the order of their index, and the ledger."""
    per_node, world = ctx.ranks_per_node, ctx.world_size
    ledger = Ledger()
    groups = {}
    for axis, members in (
        *(("intra_node", list(range(start, start + per_node))) for start in range(0, world, per_node)),
        *(("inter_node", list(range(start, world, per_node))) for start in range(per_node)),
    ):
        group = new_group(members, "test")
        if ctx.rank in members:
            groups[axis] = FlatCollective(group, axis, ledger)
    order = [rank for local in range(per_node) for rank in range(local, world, per_node)]
    return Hierarchical(groups["intra_node"], groups["inter_node"]), order, ledger


def gather(ctx: RankContext, numel: int) -> tuple[Tensor, Tensor]:
    pair, order, _ = _pair(ctx)
    assert order[pair.index] == ctx.rank
    assert pair.size == ctx.world_size
    out = torch.full((ctx.world_size * numel,), torch.nan)
    pair.gather(out, _values(ctx.rank, numel), "test").wait()
    return out, torch.cat([_values(rank, numel) for rank in order])


@sizes
@shapes
def test_gather_concatenates_in_the_order_of_the_index(ranks: RankPool, nodes: int, per_node: int, numel: int) -> None:
    for found, expected in ranks(nodes * per_node, gather, numel, ranks_per_node=per_node):
        assert torch.equal(found, expected)


def reduce(ctx: RankContext, numel: int, wire: torch.dtype, accumulate: bool) -> tuple[Tensor, Tensor]:
    pair, _, _ = _pair(ctx)
    world = ctx.world_size
    full = _values(ctx.rank, world * numel, wire)
    out = torch.full((numel,), 100.0)
    pair.reduce(out, full, torch.full_like(full, torch.nan), accumulate, "test").wait()
    total = torch.stack([_values(rank, world * numel) for rank in range(world)]).sum(0)
    expected = total[pair.index * numel : (pair.index + 1) * numel] + (100.0 if accumulate else 0.0)
    return out, expected


@sizes
@wires
@shapes
def test_reduction_is_the_sum_of_this_rank_s_slice(
    ranks: RankPool, nodes: int, per_node: int, wire: torch.dtype, numel: int
) -> None:
    for accumulate in (False, True):
        for found, expected in ranks(nodes * per_node, reduce, numel, wire, accumulate, ranks_per_node=per_node):
            assert torch.equal(found, expected)


def all_reduce(ctx: RankContext, numel: int, wire: torch.dtype) -> tuple[Tensor, Tensor]:
    pair, _, _ = _pair(ctx)
    tensor = _values(ctx.rank, numel)
    scratch_numel = pair.all_reduce_scratch_numel(numel, is_narrow=wire != tensor.dtype)
    pair.all_reduce(tensor, torch.full((scratch_numel,), torch.nan, dtype=wire), "test").wait()
    return tensor, torch.stack([_values(rank, numel) for rank in range(ctx.world_size)]).sum(0)


@sizes
@wires
@shapes
def test_all_reduce_leaves_the_sum_everywhere(
    ranks: RankPool, nodes: int, per_node: int, wire: torch.dtype, numel: int
) -> None:
    for found, expected in ranks(nodes * per_node, all_reduce, numel, wire, ranks_per_node=per_node):
        assert torch.equal(found, expected)


def round_narrow(ctx: RankContext) -> tuple[Tensor, Tensor]:
    """This rank's slice of a sum of random numbers in bf16, and the exact one."""
    pair, _, _ = _pair(ctx)
    fulls = [torch.randn(4 * 64, generator=torch.Generator().manual_seed(rank)).bfloat16() for rank in range(4)]
    out, full = torch.zeros(64), fulls[ctx.rank].clone()
    pair.reduce(out, full, torch.empty_like(full), False, "test").wait()
    exact = torch.stack([each.double() for each in fulls]).sum(0)
    return out.double(), exact[pair.index * 64 : (pair.index + 1) * 64]


def test_a_narrow_wire_rounds_once_more_between_the_stages(ranks: RankPool) -> None:
    """Each of the two sums over a node is rounded to bf16, to 8 bits; no more than that."""
    for found, exact in ranks(4, round_narrow, ranks_per_node=2):
        assert (found - exact).abs().max() > 0
        assert ((found - exact).abs() <= 2 * 2.0**-9 * 8.0).all()


def sent(ctx: RankContext, numel: int) -> dict[tuple[str, str], int]:
    pair, _, ledger = _pair(ctx)
    full = torch.zeros(numel)
    pair.gather(full, torch.zeros(numel // ctx.world_size), "test").wait()
    pair.reduce(torch.zeros(numel // ctx.world_size), full, torch.empty(numel), False, "test").wait()
    scratch = torch.empty(pair.all_reduce_scratch_numel(numel, is_narrow=False))
    counts = {(f"once {e.collective}", e.axis): e.sent_bytes * n for e, n in ledger.take().items()}
    pair.all_reduce(torch.zeros(numel), scratch, "test").wait()
    return counts | {(e.collective, e.axis): e.sent_bytes * n for e, n in ledger.take().items()}


@shapes
def test_slow_links_carry_each_byte_once_in_a_gather_and_in_a_reduction(
    ranks: RankPool, nodes: int, per_node: int
) -> None:
    """MiCS 3.3: of M bytes, (p - k) M / p cross to each node, so (p - k) M / p / k from each of its k ranks."""
    world, numel = nodes * per_node, 32 * 64
    model = 4 * numel
    slow, fast = (world - per_node) * model // world // per_node, (per_node - 1) * model // per_node
    assert (
        ranks(world, sent, numel, ranks_per_node=per_node)
        == [
            {
                ("once all_gather", "inter_node"): slow,
                ("once all_gather", "intra_node"): fast,
                ("once reduce_scatter", "intra_node"): fast,
                ("once reduce_scatter", "inter_node"): slow,
                ("reduce_scatter", "intra_node"): fast,
                ("all_reduce", "inter_node"): 2 * (nodes - 1) * (model // per_node) // nodes,
                ("all_gather", "intra_node"): fast,
            }
        ]
        * world
    )
