"""Do stages of collectives take alpha + beta times of the links that they cross?"""

import dataclasses

import pytest
import torch

from mics_strategy.comm.codecs.format import Codec
from mics_strategy.comm.route import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from mics_strategy.comm.traffic import CodecWork, StageTraffic
from mics_strategy.planner.cluster import MEMORY_SHARE, Cluster, Link, MeasuredCodec, MeasuredStage
from mics_strategy.planner.comm_time import CommTime, interpolate
from mics_strategy.topology import Axis
from tests.planner.jobs import tiny_cluster

INTRA, INTER = Axis(name="intra_node", size=4, stride=1), Axis(name="inter_node", size=8, stride=4)
MB = 10**6


def seconds(collective: str, axis: str, size: int, full_bytes: int, cluster: Cluster | None = None) -> float:
    cluster = cluster or tiny_cluster(nodes=8, ranks_per_node=4)
    return CommTime(cluster, (INTRA, INTER)).of(StageTraffic(collective, axis, size, torch.float32, full_bytes)).seconds


@pytest.mark.parametrize("collective", [ALL_GATHER, REDUCE_SCATTER])
def test_a_ring_has_a_step_less_than_ranks(collective: str) -> None:
    assert seconds(collective, "intra_node", 4, 8 * MB) == pytest.approx(3 * 1e-6 + 6 * MB / 1e9)
    assert seconds(collective, "inter_node", 8, 8 * MB) == pytest.approx(7 * 1e-5 + 7 * MB / 1e8)


def test_an_all_reduce_sends_twice_and_takes_the_shorter_of_ring_and_tree() -> None:
    """Over 8 ranks the tree has 6 steps, the ring 14; over 2 ranks both have 2."""
    assert seconds(ALL_REDUCE, "inter_node", 8, 8 * MB) == pytest.approx(6 * 1e-5 + 2 * 7 * MB / 1e8)
    assert seconds(ALL_REDUCE, "inter_node", 2, 8 * MB) == pytest.approx(2 * 1e-5 + 2 * 4 * MB / 1e8)


def test_one_ring_over_nodes_uses_the_links_of_all_its_ranks_of_a_node() -> None:
    """All 32 ranks of 8 nodes: 7 of 31 steps leave a node; a node sends through the links of its 4 ranks."""
    flat = seconds(ALL_GATHER, "intra_node+inter_node", 32, 32 * MB)
    assert flat == pytest.approx(7 * 1e-5 + 24 * 1e-6 + 31 * MB / (4 * 1e8))


def test_the_links_inside_a_node_bound_a_ring_over_nodes() -> None:
    cluster = tiny_cluster(nodes=8, ranks_per_node=4, inter_node=Link(bytes_per_s=9e8, latency_s=1e-5, source="x"))
    flat = seconds(ALL_GATHER, "intra_node+inter_node", 32, 32 * MB, cluster)
    assert flat == pytest.approx(7 * 1e-5 + 24 * 1e-6 + 31 * MB / 1e9)


def encoded(codec: Codec) -> StageTraffic:
    work = CodecWork(codec=codec, encoded_numel=MB, decoded_numel=8 * MB)
    return StageTraffic(ALL_GATHER, "inter_node", 8, torch.uint8, 8 * MB, codec_work=work)


KERNELS_BYTES_PER_S = 1e10 * MEMORY_SHARE  # of `tiny_cluster`


@pytest.mark.parametrize(
    ("codec", "bytes_of_value"),
    [
        (Codec(bits=8), 5.0),
        (Codec(bits=4), 4.5),
        (Codec(bits=2), 4.25),
        (Codec(bits=8, rotation=True), 20.0),
    ],
)
def test_codecs_take_time_of_the_devices_memory(codec: Codec, bytes_of_value: float) -> None:
    time = CommTime(tiny_cluster(), (INTRA, INTER)).of(encoded(codec))
    assert time.encode_seconds == pytest.approx(MB * bytes_of_value / KERNELS_BYTES_PER_S)
    assert time.decode_seconds == pytest.approx(8 * MB * bytes_of_value / KERNELS_BYTES_PER_S)


def test_measured_codecs_count_instead_of_the_memory() -> None:
    measured = MeasuredCodec(bits=4, rotation=False, encoded_per_s=1e8, decoded_per_s=4e8)
    times = CommTime(dataclasses.replace(tiny_cluster(), measured_codecs=(measured,)), (INTRA, INTER))
    time = times.of(encoded(Codec(bits=4, block_size=32)))
    assert (time.encode_seconds, time.decode_seconds) == pytest.approx((0.01, 0.02))
    assert times.of(encoded(Codec(bits=4, rotation=True))).encode_seconds == pytest.approx(
        18 * MB / KERNELS_BYTES_PER_S
    )
    assert times.of(encoded(Codec(bits=8))).encode_seconds == pytest.approx(5 * MB / KERNELS_BYTES_PER_S)


def test_measured_stages_count_instead_of_the_links() -> None:
    table = ((MB, 1e-3), (4 * MB, 2e-3))
    stage = MeasuredStage(collective=ALL_GATHER, link="inter_node", size=8, ranks_of_node=1, seconds_by_bytes=table)
    cluster = dataclasses.replace(tiny_cluster(nodes=8, ranks_per_node=4), measured_stages=(stage,))
    assert seconds(ALL_GATHER, "inter_node", 8, 4 * MB, cluster) == pytest.approx(2e-3)
    assert seconds(ALL_GATHER, "inter_node", 4, 4 * MB, cluster) == pytest.approx(3 * 1e-5 + 3 * MB / 1e8)
    assert seconds(REDUCE_SCATTER, "inter_node", 8, 8 * MB, cluster) == pytest.approx(7 * 1e-5 + 7 * MB / 1e8)


@pytest.mark.parametrize(
    ("num_bytes", "expected"), [(5, 1.0), (10, 1.0), (15, 1.5), (20, 2.0), (30, 5.0), (40, 8.0), (50, 11.0)]
)
def test_times_between_sizes_are_in_proportion_and_beyond_them_on_the_last_line(
    num_bytes: int, expected: float
) -> None:
    assert interpolate([(10, 1.0), (20, 2.0), (40, 8.0)], num_bytes) == pytest.approx(expected)
    assert interpolate([(10, 1.0)], num_bytes) == 1.0
