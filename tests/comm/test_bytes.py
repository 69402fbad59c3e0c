"""Are the bytes that leave a rank those of the traffic log, and those of the formulas?"""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch

from mics_strategy.comm import traffic
from mics_strategy.comm.codecs.format import Codec, Summands
from mics_strategy.comm.codecs.torch_codec import TorchCodec
from mics_strategy.comm.communicator import Communicator
from mics_strategy.comm.traffic import SENT_BYTES, StageTraffic, TrafficLog
from mics_strategy.comm.work import Work
from tests.comm.networks import Network
from tests.engine.counting import CountC10d, Kind
from tests.ranks import RankContext, RankPool

FP32, BF16 = torch.float32, torch.bfloat16
INT8, INT4 = Codec(bits=8, block_size=6), Codec(bits=4, block_size=64)


def kinds_of(messages: Iterable[StageTraffic]) -> Counter[Kind]:
    kinds: Counter[Kind] = Counter()
    for m in messages:
        kinds[m.dtype, m.size] += SENT_BYTES[m.collective](m.full_bytes, m.size)
    return kinds


def issued(traffic_log: TrafficLog) -> Counter[Kind]:
    kinds: Counter[Kind] = Counter()
    for sent, times in traffic_log.drain().items():
        kinds[sent.dtype, sent.size] += times * sent.sent_bytes
    return kinds


def started(one: Communicator, kind: str, numel: int) -> tuple[Work, list[StageTraffic]]:
    """A collective under way, and what is planned for it; `numel` of a shard, or of a whole all-reduce."""
    full = torch.zeros(one.size * numel, dtype=BF16)
    if kind == "gather":
        return one.all_gather(full, full[:numel].clone(), "block"), traffic.all_gather_traffic(
            one.route, full.numel(), BF16
        )
    if kind == "reduce":
        handle = one.reduce_scatter(torch.empty(numel), full, False, "block")
        return handle, traffic.reduce_scatter_traffic(one.route, full.numel(), BF16)
    wire = BF16 if kind == "narrow all-reduce" else FP32
    handle = one.all_reduce(torch.zeros(numel), wire, "block")
    return handle, traffic.all_reduce_traffic(one.route, numel, wire, FP32)


def different(ctx: RankContext, codec: Codec | None, links: str, num_stages: int) -> list[str]:
    """Where counted, written and planned bytes differ."""
    network = Network(ctx, codec, links, num_stages)
    one, found = network.one, []
    for numel in (1, 24, 1001, 70_001):
        one.reserve("all_gather", one.size * numel, BF16, BF16)
        one.reserve("reduce_scatter", one.size * numel, BF16, FP32)
        one.reserve("all_reduce", numel, BF16, FP32)
        one.reserve("all_reduce", numel, FP32, FP32)
        network.lend()
        for kind in ("gather", "reduce", "narrow all-reduce", "wide all-reduce"):
            with CountC10d() as counted:
                handle, messages = started(one, kind, numel)
                handle.wait()
            planned = kinds_of(messages)
            if not counted.kinds == issued(network.groups.traffic_log) == planned:
                found.append(f"{kind} of {numel}: {counted.kinds} sent, {planned} planned")
    return found


@pytest.mark.wide(every=3)
@pytest.mark.one_job
@pytest.mark.parametrize("codec", [None, INT8, INT4], ids=["plain", "int8", "int4"])
@pytest.mark.parametrize(
    ("nodes", "per_node", "stages", "links"),
    [
        *[(2, 2, 1, "slow"), (4, 1, 1, "all"), (4, 2, 2, "slow"), (2, 4, 2, "all")],
        *[(3, 2, 2, "slow"), (4, 2, 3, "slow"), (4, 2, 3, "all"), (4, 1, 3, "slow")],
    ],
)
def test_bytes_sent_are_those_written_and_those_planned(
    ranks: RankPool, nodes: int, per_node: int, stages: int, links: str, codec: Codec | None
) -> None:
    world = nodes * per_node
    assert ranks(world, different, codec, links, stages, ranks_per_node=per_node) == [[]] * world


@contextmanager
def counted_values() -> Iterator[Counter[str]]:
    """Values that pass through codecs on the CPU, of whole calls."""
    counts: Counter[str] = Counter()
    encode, decode, decode_sum = TorchCodec.encode, TorchCodec.decode, TorchCodec.decode_sum

    def counting_encode(self: TorchCodec, values: torch.Tensor, out: torch.Tensor) -> None:
        counts["encoded"] += values.numel()
        encode(self, values, out)

    def counting_decode(self: TorchCodec, encoded: torch.Tensor, out: torch.Tensor, accumulate: bool) -> None:
        counts["decoded"] += out.numel()
        decode(self, encoded, out, accumulate)

    def counting_sum(self: TorchCodec, summands: Summands, out: torch.Tensor, accumulate: bool) -> None:
        counts["decoded"] += (len(summands.rows) - 1) * out.numel()
        decode_sum(self, summands, out, accumulate)

    with (
        patch.object(TorchCodec, "encode", counting_encode),
        patch.object(TorchCodec, "decode", counting_decode),
        patch.object(TorchCodec, "decode_sum", counting_sum),
    ):
        yield counts


def different_work(ctx: RankContext, codec: Codec, links: str, num_stages: int) -> list[str]:
    """Where planned and real work of codecs differ."""
    network, found = Network(ctx, codec, links, num_stages), []
    one, numel = network.one, 24_000
    one.reserve("all_gather", one.size * numel, BF16, BF16)
    one.reserve("reduce_scatter", one.size * numel, BF16, FP32)
    one.reserve("all_reduce", numel, FP32, FP32)
    network.lend()
    for kind in ("gather", "reduce", "wide all-reduce"):
        with counted_values() as counts:
            handle, messages = started(one, kind, numel)
            handle.wait()
        works = [message.codec_work for message in messages if message.codec_work is not None]
        planned = {
            "encoded": sum(work.encoded_numel for work in works),
            "decoded": sum(work.decoded_numel for work in works),
        }
        if counts != planned:
            found.append(f"{kind}: {counts}, {planned} planned")
    return found


@pytest.mark.one_job
@pytest.mark.parametrize(
    ("nodes", "per_node", "stages", "links"),
    [(2, 2, 1, "slow"), (2, 2, 2, "slow"), (2, 2, 2, "all"), (2, 4, 2, "all"), (3, 2, 2, "slow"), (4, 2, 3, "all")],
)
def test_codecs_encode_and_decode_what_is_planned(
    ranks: RankPool, nodes: int, per_node: int, stages: int, links: str
) -> None:
    world = nodes * per_node
    assert ranks(world, different_work, INT4, links, stages, ranks_per_node=per_node) == [[]] * world


def leaving(ctx: RankContext, numel: int) -> int:
    """Bytes that this rank sends to other nodes in a gather in two stages."""
    network = Network(ctx)
    with CountC10d() as counted:
        network.one.all_gather(torch.empty(numel), torch.zeros(numel // ctx.world_size), "block").wait()
    return counted.kinds[FP32, ctx.num_nodes]


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 4), (4, 2)])
def test_a_gather_sends_what_other_nodes_lack_out_of_a_node_once(ranks: RankPool, nodes: int, per_node: int) -> None:
    """MiCS 3.3: of M bytes over p ranks, (p - k) M / p by the k ranks of a node; (p - 1) M / p in one stage."""
    world, numel = nodes * per_node, 8 * 100
    sent = ranks(world, leaving, numel, ranks_per_node=per_node)
    for node in range(nodes):
        assert sum(sent[node * per_node : (node + 1) * per_node]) == (world - per_node) * (4 * numel) // world
