"""Do collectives move and add what they should, bit by bit, in one stage and in two, encoded and as they are?"""

from collections.abc import Iterator

import pytest
import torch

from mics_strategy.comm import route as routes
from mics_strategy.comm.codecs.format import Codec
from mics_strategy.comm.route import Route
from mics_strategy.comm.transport import BackendTransport
from mics_strategy.errors import LifecycleError, ShapeError
from tests.comm.networks import Network
from tests.comm.plain import Plain
from tests.ranks import RankContext, RankPool, simulate

FP32, FP64, BF16, FP16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
WIRES = (FP32, BF16, FP16)
SMALL, EIGHT_PIECES = (1, 5, 8, 24), (150_000, 150_001)
INT8, INT4 = Codec(bits=8, block_size=6), Codec(bits=4, block_size=64)

networks = pytest.mark.parametrize(
    ("nodes", "per_node", "stages"),
    [
        *[(1, 4, 1), (4, 1, 1), (2, 2, 1), (2, 2, 2), (2, 4, 1), (2, 4, 2), (4, 2, 2)],
        *[(3, 2, 2), (4, 1, 3), (4, 2, 3)],
    ],
    ids=lambda number: str(number),
)
stages = pytest.mark.parametrize("stages", [2, 1], ids=["two-stages", "one-stage"])
codecs = pytest.mark.parametrize("codec", [None, INT8, INT4], ids=["plain", "int8", "int4"])
links = pytest.mark.parametrize("links", ["slow", "all"])
kinds = pytest.mark.parametrize("kind", ["gather", "reduce", "all_reduce"])


def sizes_of(ctx: RankContext, codec: Codec | None) -> tuple[int, ...]:
    """Elements of a shard: few, and, on two nodes of two ranks, so many that a slice goes in eight pieces.

    In three pieces on two switches of two nodes of two ranks.
    """
    largest = {(2, 4): EIGHT_PIECES[codec is not None], (4, 8): 50_000}.get((ctx.num_nodes, ctx.world_size), 301)
    return (*(SMALL if codec is None else SMALL[1::2]), largest)


def check_gather(network: Network, numel: int) -> Iterator[str]:
    one = network.one
    for dtype in (*WIRES, FP64):
        one.reserve("all_gather", one.size * numel, dtype, dtype)
        network.lend()
        shard, out = network.values(one.index, numel, dtype), torch.full((one.size * numel,), torch.nan, dtype=dtype)
        before = shard.clone()
        one.all_gather(out, shard, "block").wait()
        expected = Plain.of(one).gather([network.values(i, numel, dtype) for i in range(one.size)])
        if not (torch.equal(out, expected) and torch.equal(shard, before)):
            yield f"gather of {numel} {dtype}"


def pairs_of(route: Route, numel: int) -> list[tuple[torch.dtype, torch.dtype]]:
    """Wires and sums; fewer where it takes long."""
    if route.is_quantized:
        return [(FP32, FP32), (BF16, FP32), (FP32, FP64)]
    return [*((wire, FP32) for wire in (WIRES if numel < 1000 else WIRES[:2])), (FP64, FP64), (FP32, FP64)]


def check_reduce(network: Network, numel: int) -> Iterator[str]:
    one = network.one
    for wire, dtype in pairs_of(one.route, numel):
        for accumulate in (False, True):
            one.reserve("reduce_scatter", one.size * numel, wire, dtype)
            network.lend()
            full = network.values(one.index, one.size * numel, wire)
            before, start = full.clone(), network.values(99, numel, dtype)
            out = start.clone() if accumulate else torch.full_like(start, torch.nan)
            one.reduce_scatter(out, full, accumulate, "block").wait()
            given = [network.values(i, one.size * numel, wire) for i in range(one.size)]
            expected = Plain.of(one).reduce(given, dtype, start if accumulate else None)
            if not (torch.equal(out, expected) and torch.equal(full, before)):
                yield f"reduction of {numel} {wire} to {dtype}, accumulate={accumulate}"


def check_all_reduce(network: Network, numel: int) -> Iterator[str]:
    one = network.one
    for wire, dtype in pairs_of(one.route, numel):
        one.reserve("all_reduce", numel * one.size, wire, dtype)
        network.lend()
        given = [network.values(i, one.size * numel, dtype) for i in range(one.size)]
        if routes.is_plain_all_reduce(one.route, wire, dtype):
            given = [each.mul(8).round() for each in given]  # no sum rounds: its order is the transport's
        tensor = given[one.index].clone()
        one.all_reduce(tensor, wire, "block").wait()
        if not torch.equal(tensor, Plain.of(one).all_reduce(given, wire)):
            yield f"all-reduce of {numel} {wire} to {dtype}"


CHECKS = {"gather": check_gather, "reduce": check_reduce, "all_reduce": check_all_reduce}


def wrong(ctx: RankContext, kind: str, codec: Codec | None, links: str, num_stages: int) -> list[str]:
    """The cases in which this rank gets other bits than the plain version; each in no more memory than announced."""
    network = Network(ctx, codec, links, num_stages)
    num_links = (ctx.ranks_per_node > 1) + (ctx.num_nodes > 1) + (num_stages == 3)
    assert len(network.one.transports) == (num_links if num_stages in (2, 3) else 1)
    return [case for numel in sizes_of(ctx, codec) for case in CHECKS[kind](network, numel)]


@pytest.mark.wide
@pytest.mark.one_job
@kinds
@networks
def test_results_are_those_of_the_plain_version(
    ranks: RankPool, nodes: int, per_node: int, stages: int, kind: str
) -> None:
    world = nodes * per_node
    assert ranks(world, wrong, kind, None, "slow", stages, ranks_per_node=per_node) == [[]] * world


@pytest.mark.wide
@pytest.mark.one_job
@kinds
@pytest.mark.parametrize("codec", [INT8, INT4], ids=["int8", "int4"])
@pytest.mark.parametrize(
    ("nodes", "per_node", "stages", "links"),
    [
        *[
            (2, 2, 2, "slow"),
            (2, 2, 2, "all"),
            (2, 2, 1, "slow"),
            (1, 4, 1, "all"),
            (2, 4, 2, "slow"),
            (4, 2, 2, "all"),
        ],
        *[(3, 2, 2, "slow"), (4, 1, 3, "slow"), (4, 2, 3, "slow"), (4, 2, 3, "all")],
    ],
)
def test_encoded_results_are_those_of_the_plain_version(
    ranks: RankPool, nodes: int, per_node: int, codec: Codec, links: str, stages: int, kind: str
) -> None:
    world = nodes * per_node
    assert ranks(world, wrong, kind, codec, links, stages, ranks_per_node=per_node) == [[]] * world


@pytest.mark.wide
@kinds
@pytest.mark.parametrize(
    ("nodes", "per_node", "stages", "codec"),
    [
        *[(2, 4, 1, INT8), (2, 4, 2, INT8), (2, 4, 1, None)],
        *[(4, 4, 2, INT4), (4, 4, 1, None), (4, 4, 2, None)],
        *[(6, 2, 3, None), (6, 2, 3, INT8), (6, 1, 3, INT8), (3, 2, 2, INT8)],
    ],
    ids=str,
)
def test_torch_s_own_collectives_give_the_same_bits(
    nodes: int, per_node: int, stages: int, codec: Codec | None, kind: str
) -> None:
    """On simulated ranks, where tasks run at once and nothing is sent point to point."""

    def job(ctx: RankContext) -> list[str]:
        network = Network(ctx, codec, "slow", stages, per_switch=3)
        assert not any(transport.blocks_host for transport in network.one.transports)
        return [case for numel in (5, 301) for case in CHECKS[kind](network, numel)]

    assert simulate(nodes * per_node, job, ranks_per_node=per_node) == [[]] * (nodes * per_node)


class WholeNumbers(Network):
    """A network of small whole numbers, whose sums are exact in every dtype and every order."""

    def values(self, index: int, numel: int, dtype: torch.dtype = FP32, salt: int = 0) -> torch.Tensor:
        return super().values(index, numel, FP32, salt).mul(2).round().to(dtype)


@pytest.mark.wide
@kinds
@pytest.mark.parametrize(
    ("nodes", "per_node", "stages", "codec", "links"),
    [
        *[(2, 4, 1, None, "slow"), (2, 4, 2, None, "slow")],
        *[(2, 2, 2, INT8, "slow"), (2, 4, 2, INT4, "all"), (3, 2, 2, INT8, "all"), (2, 2, 1, INT8, "slow")],
        *[(6, 2, 3, None, "slow"), (6, 2, 3, INT8, "slow"), (6, 2, 3, INT4, "all"), (6, 1, 3, INT8, "slow")],
    ],
    ids=str,
)
def test_sums_of_the_backend_are_those_of_the_plain_version(
    monkeypatch: pytest.MonkeyPatch,
    nodes: int,
    per_node: int,
    stages: int,
    codec: Codec | None,
    links: str,
    kind: str,
) -> None:
    """As on a GPU, with numbers whose order in a sum does not matter."""
    monkeypatch.setattr(BackendTransport, "sums_natively", property(lambda self: True, lambda self, value: None))

    def job(ctx: RankContext) -> list[str]:
        network = WholeNumbers(ctx, codec, links, stages, per_switch=3)
        return [case for numel in (5, 8, 301) for case in CHECKS[kind](network, numel)]

    assert simulate(nodes * per_node, job, ranks_per_node=per_node) == [[]] * (nodes * per_node)


def same_bits(
    ctx: RankContext, codec: Codec | None, links: str, num_stages: int, per_switch: int = 1
) -> list[list[float]]:
    """What this rank holds after a gather, and after all-reduces of random numbers."""
    network = Network(ctx, codec, links, num_stages, per_switch)
    one, held = network.one, []
    one.reserve("all_gather", one.size * 50, FP32, FP32)
    one.reserve("all_reduce", 203, FP32, FP32)
    network.lend()
    out = torch.empty(one.size * 50)
    one.all_gather(out, network.values(one.index, 50), "block").wait()
    held.append(out.tolist())
    for wire in WIRES:
        one.reserve("all_reduce", 203, wire, FP32)
        network.lend()
        tensor = network.values(one.index, 203)
        one.all_reduce(tensor, wire, "block").wait()
        held.append(tensor.tolist())
    return held


@pytest.mark.one_job
@stages
@links
@pytest.mark.parametrize("codec", [None, INT8, Codec(bits=4, block_size=6, rounding="stochastic")], ids=str)
def test_all_ranks_end_with_the_same_bits(ranks: RankPool, codec: Codec | None, links: str, stages: int) -> None:
    first, *others = ranks(4, same_bits, codec, links, stages, ranks_per_node=2)
    assert others == [first] * 3


@pytest.mark.wide(every=2)
@links
@pytest.mark.parametrize("codec", [None, INT8, Codec(bits=4, block_size=6, rounding="stochastic")], ids=str)
def test_all_ranks_under_several_switches_end_with_the_same_bits(codec: Codec | None, links: str) -> None:
    first, *others = simulate(12, same_bits, codec, links, 3, 3, ranks_per_node=2)
    assert others == [first] * 11


def asked_at_once(ctx: RankContext, order: list[int]) -> bool:
    """Six collectives in each of two queues, waited for in another order and twice."""
    network = Network(ctx)
    one, other = network.one, network.other
    for comm in (one, other):
        comm.reserve("all_gather", comm.size * 8, FP32, FP32)
        comm.reserve("reduce_scatter", 4 * 8, FP32, FP32)
        comm.reserve("all_reduce", 8, BF16, FP32)
    network.lend()
    handles, outs, expected = [], [], []
    for salt in range(2):
        for place, comm in enumerate((one, other)):
            plain, number = Plain.of(comm), 10 * salt + place
            given = [network.values(i, 32, salt=number) for i in range(4)]
            gathered, total, for_all = torch.empty(128), torch.empty(8), given[comm.index].clone()
            handles.append(comm.all_gather(gathered[:32], given[comm.index][:8], "gathered"))
            handles.append(comm.reduce_scatter(total, given[comm.index], False, "reduced"))
            handles.append(comm.all_reduce(for_all[:8], BF16, "summed"))
            outs += [gathered[:32], total, for_all[:8]]
            expected += [plain.gather([each[:8] for each in given]), plain.reduce(given, FP32, None)]
            expected.append(plain.all_reduce([each[:8] for each in given], BF16))
    for number in (*order, *order):
        handles[number].wait()
        assert handles[number].has_completed
    return all(torch.equal(out, each) for out, each in zip(outs, expected, strict=True))


@pytest.mark.parametrize("order", [list(range(12)), list(range(12))[::-1], [5, 0, 11, 3, 4, 1, 2, 10, 9, 8, 7, 6]])
def test_handles_of_two_lanes_may_be_waited_for_in_any_order_and_twice(ranks: RankPool, order: list[int]) -> None:
    assert ranks(4, asked_at_once, order, ranks_per_node=2) == [True] * 4


def nothing_at_all(ctx: RankContext, codec: Codec | None, num_stages: int) -> None:
    one = Network(ctx, codec, "all", num_stages).one
    empty = torch.empty(0)
    one.reserve("all_gather", 0, FP32, FP32)
    one.reserve("reduce_scatter", 0, BF16, FP32)
    one.reserve("all_reduce", 0, BF16, FP32)
    one.all_gather(empty, empty, "block").wait()
    one.reduce_scatter(empty, empty.bfloat16(), True, "block").wait()
    one.all_reduce(empty, BF16, "block").wait()
    one.all_reduce(empty, FP32, "block").wait()


@pytest.mark.one_job
@stages
@codecs
def test_nothing_may_be_gathered_and_summed(ranks: RankPool, codec: Codec | None, stages: int) -> None:
    assert ranks(4, nothing_at_all, codec, stages, ranks_per_node=2) == [None] * 4


def refused(ctx: RankContext) -> int:
    network = Network(ctx)
    one, count = network.one, 0
    for out, shard in [(7, 2), (4, 4), (8, 3)]:
        with pytest.raises(ShapeError, match="of the layout"):
            one.all_gather(torch.empty(out), torch.empty(shard), "block")
        with pytest.raises(ShapeError, match="of the layout"):
            one.reduce_scatter(torch.empty(shard), torch.empty(out), False, "block")
        count += 2
    with pytest.raises(ShapeError):
        one.all_gather(torch.empty(8), torch.empty(2, dtype=BF16), "block")
    assert not network.groups.traffic_log.entries
    assert [transport.fingerprint.count for transport in one.transports] == [0, 0]
    return count


def test_buffers_that_do_not_fit_are_refused_before_anything_is_sent(ranks: RankPool) -> None:
    assert ranks(4, refused, ranks_per_node=2) == [6] * 4


def take_too_much(ctx: RankContext, kind: str, codec: Codec | None) -> bool:
    """Whether a collective that is larger than any announced is refused, on all ranks before they send."""
    network = Network(ctx, codec, "slow")
    one = network.one
    one.reserve("all_gather", one.size * 8, FP32, FP32)
    one.reserve("reduce_scatter", 32, BF16, FP32)
    one.reserve("all_reduce", 32, BF16, FP32)
    network.lend()
    start = {
        "gather": lambda: one.all_gather(torch.empty(4000), torch.empty(1000), "block"),
        "reduce": lambda: one.reduce_scatter(torch.empty(1000), torch.empty(4000, dtype=BF16), False, "block"),
        "all_reduce": lambda: one.all_reduce(torch.empty(1000), BF16, "block"),
    }[kind]
    with pytest.raises(LifecycleError, match="are reserved"):
        start().wait()
    return True


CASES = [("reduce", None), ("all_reduce", None), ("gather", INT8), ("reduce", INT8), ("all_reduce", INT8)]


@pytest.mark.parametrize(("kind", "codec"), CASES, ids=str)
def test_more_memory_than_announced_is_refused(ranks: RankPool, kind: str, codec: Codec | None) -> None:
    assert ranks(4, take_too_much, kind, codec, ranks_per_node=2) == [True] * 4
    assert simulate(4, take_too_much, kind, codec, ranks_per_node=2) == [True] * 4
