"""Do the formulas say what the papers say?"""

import pytest

from mics_strategy.comm.traffic import all_gather_bytes, all_reduce_bytes, reduce_scatter_bytes

MODEL = 2 * 3 * 5 * 7 * 64 * 1024  # bytes M, divided by every group size below
GROUPS = (1, 2, 3, 5, 8, 16, 64)
groups = pytest.mark.parametrize("ranks", GROUPS)


@groups
def test_all_gather_sends_mics_formula_m6(ranks: int) -> None:
    assert all_gather_bytes(MODEL, ranks) == (ranks - 1) * MODEL / ranks


@groups
def test_reduce_scatter_sends_as_much_as_all_gather(ranks: int) -> None:
    assert reduce_scatter_bytes(MODEL, ranks) == all_gather_bytes(MODEL, ranks)


@groups
def test_all_reduce_sends_a_reduce_scatter_and_a_gather(ranks: int) -> None:
    assert all_reduce_bytes(MODEL, ranks) == reduce_scatter_bytes(MODEL, ranks) + all_gather_bytes(MODEL, ranks)


def test_one_rank_sends_nothing() -> None:
    assert [f(MODEL, 1) for f in (all_gather_bytes, reduce_scatter_bytes, all_reduce_bytes)] == [0, 0, 0]


def test_all_reduce_of_an_odd_size_is_rounded_down() -> None:
    assert all_reduce_bytes(10, 4) == 15
    assert all_reduce_bytes(4, 3) == 5


@pytest.mark.parametrize(("nodes", "per_node"), [(8, 8), (2, 4), (4, 4)])
def test_two_hops_over_a_prefix_send_what_one_hop_sends(nodes: int, per_node: int) -> None:
    """A reduction to the node and on to the world: PaRO's IIG against a flat one."""
    world = nodes * per_node
    first, second = reduce_scatter_bytes(MODEL, per_node), reduce_scatter_bytes(MODEL // per_node, nodes)
    assert first + second == reduce_scatter_bytes(MODEL, world)


def test_paro_equation_1() -> None:
    """The gain of gathering inside groups: s (N-1)/N - s (M-1)/M - (g-1)/N = (s-1)(g-1)/N, in units of the model."""
    steps, world, group = 8, 64, 8
    nodes = world // group
    flat = steps * all_gather_bytes(MODEL, world)
    grouped = steps * all_gather_bytes(MODEL, group) + all_gather_bytes(MODEL // group, nodes)
    assert flat - grouped == MODEL * (steps - 1) * (nodes - 1) / world
