"""Do the formulas say what is sent, as the papers do?"""

import itertools

import pytest
import torch

from mics_strategy.comm.codecs.format import Codec
from mics_strategy.comm.route import (
    Route,
    SizedRoutes,
    Stage,
    all_reduce_slice,
    is_plain_all_reduce,
)
from mics_strategy.comm.traffic import (
    SENT_BYTES,
    StageTraffic,
    all_gather_bytes,
    all_gather_traffic,
    all_reduce_bytes,
    all_reduce_traffic,
    reduce_scatter_bytes,
    reduce_scatter_traffic,
)

FP32, FP64, BF16, U8 = torch.float32, torch.float64, torch.bfloat16, torch.uint8
GATHER, REDUCE, ALL_REDUCE = "all_gather", "reduce_scatter", "all_reduce"
INT8 = Codec(bits=8, block_size=16)  # 8 numbers: 8 bytes, a scale of 4, in all 16
NUMELS = (1, 2, 5, 24, 1000, 16_384, 32_767, 32_768, 65_537, 131_072, 150_001, 1_000_003)


def route(nodes: int, per_node: int = 1, codec: Codec | None = None, links: str = "slow") -> Route:
    slow = Stage(axis="inter_node", size=nodes, codec=codec)
    fast = Stage(axis="intra_node", size=per_node, codec=codec if links == "all" else None)
    return Route(stages=(slow, fast) if per_node > 1 else (slow,))


def inter_hop(collective: str, ranks: int, dtype: torch.dtype, full_bytes: int) -> StageTraffic:
    return StageTraffic(collective, "inter_node", ranks, dtype, full_bytes)


def intra_hop(collective: str, ranks: int, dtype: torch.dtype, full_bytes: int) -> StageTraffic:
    return StageTraffic(collective, "intra_node", ranks, dtype, full_bytes)


@pytest.mark.parametrize(
    ("given", "messages"),
    [
        (route(4), [inter_hop(GATHER, 4, FP32, 256)]),
        (route(4, codec=INT8), [inter_hop(GATHER, 4, U8, 4 * 32)]),
        (route(4, 2), [inter_hop(GATHER, 4, FP32, 128), intra_hop(GATHER, 2, FP32, 256)]),
        (route(4, 2, INT8), [inter_hop(GATHER, 4, U8, 4 * 16), intra_hop(GATHER, 2, FP32, 256)]),
        (route(4, 2, INT8, "all"), [inter_hop(GATHER, 4, U8, 4 * 16), intra_hop(GATHER, 2, U8, 8 * 16)]),
    ],
)
def test_a_gather_of_64_numbers(given: Route, messages: list[StageTraffic]) -> None:
    assert all_gather_traffic(given, 64, FP32) == messages


@pytest.mark.parametrize(
    ("given", "messages"),
    [
        (route(4), [inter_hop(REDUCE, 4, BF16, 128)]),
        (route(4, codec=INT8), [inter_hop(REDUCE, 4, U8, 4 * 32)]),
        (route(4, 2), [intra_hop(REDUCE, 2, BF16, 128), inter_hop(REDUCE, 4, BF16, 64)]),
        (route(4, 2, INT8), [intra_hop(REDUCE, 2, BF16, 128), inter_hop(REDUCE, 4, U8, 4 * 16)]),
        (route(4, 2, INT8, "all"), [intra_hop(REDUCE, 2, U8, 2 * (32 + 16)), inter_hop(REDUCE, 4, U8, 4 * 16)]),
    ],
)
def test_a_reduction_of_64_numbers(given: Route, messages: list[StageTraffic]) -> None:
    assert reduce_scatter_traffic(given, 64, BF16) == messages


@pytest.mark.parametrize(
    ("given", "wire", "messages"),
    [
        (route(4), FP32, [inter_hop(ALL_REDUCE, 4, FP32, 4 * 61)]),
        (route(4), BF16, [inter_hop(ALL_REDUCE, 4, BF16, 2 * 64)]),
        (route(4, codec=INT8), FP32, [inter_hop(ALL_REDUCE, 4, U8, 4 * 32)]),
        (
            route(4, 2),
            BF16,
            [intra_hop(REDUCE, 2, BF16, 128), inter_hop(ALL_REDUCE, 4, BF16, 64), intra_hop(GATHER, 2, BF16, 128)],
        ),
        (
            route(4, 2, INT8),
            FP32,
            [intra_hop(REDUCE, 2, FP32, 512), inter_hop(ALL_REDUCE, 4, U8, 4 * 32), intra_hop(GATHER, 2, FP32, 512)],
        ),
        (
            route(4, 2, INT8, "all"),
            FP32,
            [intra_hop(REDUCE, 2, U8, 2 * 80), inter_hop(ALL_REDUCE, 4, U8, 4 * 32), intra_hop(GATHER, 2, FP32, 512)],
        ),
    ],
)
def test_an_all_reduce_of_61_numbers_that_become_64_or_whole_blocks(
    given: Route, wire: torch.dtype, messages: list[StageTraffic]
) -> None:
    assert all_reduce_traffic(given, 61, wire, FP32) == messages


def three(codec: Codec | None = None, links: str = "slow") -> Route:
    """Two switches of four nodes of two ranks."""
    sizes = {"inter_switch": 2, "inter_node": 4, "intra_node": 2}
    encoded = [name for name in sizes if links == "all" or name != "intra_node"]
    return Route(stages=tuple(Stage(axis=n, size=s, codec=codec if n in encoded else None) for n, s in sizes.items()))


def sent_over(messages: list[StageTraffic]) -> list[tuple[str, str, torch.dtype, int]]:
    return [(m.collective, m.axis.partition("_")[2], m.dtype, m.full_bytes) for m in messages]


@pytest.mark.parametrize(
    ("codec", "links", "dtypes", "full_bytes"),
    [
        (None, "slow", (FP32, FP32, FP32), (64, 256, 512)),
        (INT8, "slow", (U8, U8, FP32), (2 * 16, 8 * 16, 512)),
        (INT8, "all", (U8, U8, U8), (2 * 16, 8 * 16, 16 * 16)),
    ],
)
def test_a_gather_of_128_numbers_over_three_levels(
    codec: Codec | None, links: str, dtypes: tuple[torch.dtype, ...], full_bytes: tuple[int, ...]
) -> None:
    found = sent_over(all_gather_traffic(three(codec, links), 128, FP32))
    assert found == [
        (GATHER, link, *each) for link, *each in zip(("switch", "node", "node"), dtypes, full_bytes, strict=True)
    ]


@pytest.mark.parametrize(
    ("codec", "links", "dtypes", "full_bytes"),
    [
        (None, "slow", (BF16, BF16, BF16), (256, 128, 32)),
        (INT8, "slow", (BF16, U8, U8), (256, 4 * (16 + 4 + 12), 2 * 16)),
        (INT8, "all", (U8, U8, U8), (2 * (64 + 16), 4 * (16 + 4 + 12), 2 * 16)),
    ],
)
def test_a_reduction_of_128_numbers_over_three_levels(
    codec: Codec | None, links: str, dtypes: tuple[torch.dtype, ...], full_bytes: tuple[int, ...]
) -> None:
    """A rank gets 8 numbers: 16 after the stage between nodes, 64 after the one inside."""
    found = sent_over(reduce_scatter_traffic(three(codec, links), 128, BF16))
    assert found == [
        (REDUCE, link, *each) for link, *each in zip(("node", "node", "switch"), dtypes, full_bytes, strict=True)
    ]


@pytest.mark.parametrize("links", ["slow", "all"])
def test_encoded_sums_of_an_all_reduce_go_back_encoded_between_nodes_only(links: str) -> None:
    messages = all_reduce_traffic(three(INT8, links), 2000, FP32, FP32)
    assert [(m.collective, m.axis, m.dtype is U8) for m in messages] == [
        (REDUCE, "intra_node", links == "all"),
        (REDUCE, "inter_node", True),
        (ALL_REDUCE, "inter_switch", True),
        (GATHER, "inter_node", True),
        (GATHER, "intra_node", False),
    ]
    share = INT8.encoded_bytes(128)  # 2000 numbers in 8 slices of 2 shares of whole blocks
    assert messages[2].full_bytes == 2 * share
    assert messages[3].full_bytes == 4 * 2 * share
    assert messages[4].full_bytes == 2 * 4 * 2 * 128 * 4


def test_digits_of_an_index_have_the_strides_of_the_stages_before() -> None:
    assert three().strides == (1, 2, 8, 16)
    assert (three().num_slices, three().size) == (8, 16)


@pytest.mark.parametrize("numel", NUMELS)
def test_slices_of_an_all_reduce_are_as_small_as_equal_shares_allow(numel: int) -> None:
    for nodes, per_node in itertools.product((2, 3, 4), (1, 2, 4)):
        slice_numel = all_reduce_slice(route(nodes, per_node), numel)
        assert slice_numel % nodes == 0
        assert numel <= per_node * slice_numel < numel + nodes * per_node + per_node


def test_only_one_plain_stage_is_left_to_the_transport() -> None:
    assert is_plain_all_reduce(route(4), FP32, FP32)
    assert is_plain_all_reduce(route(4), FP64, FP64)
    assert not is_plain_all_reduce(route(4), BF16, FP32)
    assert not is_plain_all_reduce(route(4, codec=INT8), FP32, FP32)
    assert not is_plain_all_reduce(route(4, 2), FP32, FP32)


def test_a_route_is_chosen_by_the_bytes_of_the_whole_tensor() -> None:
    routes = SizedRoutes(hierarchical=route(4, 2), flat=route(8), hierarchical_from_bytes=256)
    assert [routes.for_bytes(full_bytes) is routes.flat for full_bytes in (0, 255, 256, 1 << 40)] == [
        True,
        True,
        False,
        False,
    ]
    assert SizedRoutes(hierarchical=route(4, 2)).for_bytes(0) == route(4, 2)


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 2), (2, 8), (8, 2), (64, 8)])
def test_a_node_sends_p_minus_k_of_p_shares_of_what_it_gathers_or_reduces(nodes: int, per_node: int) -> None:
    """MiCS (arXiv:2205.00119) section 3.3."""
    world, numel = nodes * per_node, 512 * 1024
    for messages in (all_gather_traffic, reduce_scatter_traffic):
        over_slow = next(m for m in messages(route(nodes, per_node), numel, FP32) if m.axis == "inter_node")
        sent = per_node * SENT_BYTES[over_slow.collective](over_slow.full_bytes, nodes)
        assert sent == (world - per_node) * 4 * numel // world


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
