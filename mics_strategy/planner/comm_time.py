"""Time of collectives on the links of a cluster, stage by stage.

A stage of a collective over p ranks takes ``steps * latency + sent_bytes / bytes_per_s`` on the slowest link that it
crosses. A ring has p - 1 steps, and an all-reduce 2 (p - 1), or fewer where a tree is faster. A ring over k ranks of
each of n nodes crosses the network in n - 1 of its steps; the others have the latency of the links inside a node.

The bandwidth of an inter-node link is that of one rank while all ranks of its node send. A single stage over k ranks of
each of several nodes enters and leaves a node once, in one ring that k ranks' links share.

Where a calibration has measured a stage, the measured time counts, interpolated between sizes. Encoding and decoding
take the time that was measured for the codec, or else that of their bytes in memory.

Pure.

Source:
    Ring: MiCS (arXiv:2205.00119) section 2.3; AMSP (arXiv:2311.00257), formulas of the ring. Tree: MiCS, footnote 1.
    Latencies of rings and trees over several nodes: NCCL, src/graph/tuning.cc.
    Interpolated profiles: AMSP section V-B.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from mics_strategy.comm.route import ALL_REDUCE
from mics_strategy.comm.traffic import CodecWork, StageTraffic
from mics_strategy.planner.cluster import Cluster, Link
from mics_strategy.topology import LINKS, Axis

INTRA_NODE, INTER_NODE, INTER_SWITCH = LINKS
_UNENCODED_BYTES = 4  # values are read and written in fp32
_ROTATION = 4  # time of a codec with rotation, in times of that without; measured on a CPU


@dataclass(frozen=True, slots=True)
class StageTime:
    """Time of one stage alone.

    Attributes:
        link: Slowest link that it crosses: `INTRA_NODE`, `INTER_NODE` or `INTER_SWITCH`.
        seconds: Seconds on that link, if nothing else uses it.
        encode_seconds: Seconds in which the device encodes, before the stage.
        decode_seconds: Seconds in which it decodes, behind the stage.
    """

    link: str
    seconds: float
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0


@dataclass(slots=True)
class CommTime:
    """Times of the stages of collectives in one job.

    Args:
        cluster: Links and devices.
        axes: Mesh axes of the job.
    """

    cluster: Cluster
    axes: tuple[Axis, ...]
    _cache: dict[tuple[str, str, int, int, CodecWork | None], StageTime] = field(default_factory=dict)

    @property
    def call_s(self) -> float:
        """Seconds of one stage in which the host computes nothing else, and with it a device that is its CPU.

        The smallest stage inside a node moves nothing to speak of: its time is that of calls, threads and wake-ups. A
        GPU computes on meanwhile, and nothing is known where a node has one rank.
        """
        if self.cluster.backend != "gloo":
            return 0.0
        tables = (stage.seconds_by_bytes for stage in self.cluster.measured_stages if stage.link == INTRA_NODE)
        return min((table[0][1] for table in tables), default=0.0)

    def of(self, stage: StageTraffic) -> StageTime:
        """The time of one stage."""
        key = (stage.collective, stage.axis, stage.size, stage.full_bytes, stage.codec_work)
        time = self._cache.get(key)
        if time is None:
            time = self._cache[key] = self._of(stage)
        return time

    def _of(self, stage: StageTraffic) -> StageTime:
        names = stage.axis.split("+")
        links = [link for link in LINKS if any(name.startswith(link) for name in names)]
        name = links[-1]
        encode_s, decode_s = (0.0, 0.0) if stage.codec_work is None else self._codec_seconds(stage.codec_work)
        ranks_of_node = math.prod(axis.size for axis in self.axes if axis.name in names and axis.is_inside_node)
        table = self.cluster.measured(stage.collective, name, stage.size, ranks_of_node)
        if table:
            return StageTime(name, interpolate(table, stage.full_bytes), encode_s, decode_s)
        link = self._link(name)
        bytes_per_s = link.bytes_per_s * (ranks_of_node if name != INTRA_NODE else 1)
        if len(links) > 1:
            bytes_per_s = min(bytes_per_s, self.cluster.intra_node.bytes_per_s)
        latency_s = self._latency_s(stage, ranks_of_node, link)
        return StageTime(name, latency_s + stage.sent_bytes / bytes_per_s, encode_s, decode_s)

    def _codec_seconds(self, work: CodecWork) -> tuple[float, float]:
        """Seconds in which one rank encodes, and decodes."""
        measured = self.cluster.measured_codec(work.codec)
        if measured is not None:
            return work.encoded_numel / measured.encoded_per_s, work.decoded_numel / measured.decoded_per_s
        bytes_of_value = (_UNENCODED_BYTES + work.codec.bits / 8) * (_ROTATION if work.codec.rotation else 1)
        seconds_of_value = bytes_of_value / self.cluster.device.sustained_bytes_per_s
        return work.encoded_numel * seconds_of_value, work.decoded_numel * seconds_of_value

    def _latency_s(self, stage: StageTraffic, ranks_of_node: int, link: Link) -> float:
        """Seconds of the messages of a stage that wait for one another.

        A ring enters each node once, so that all but one step for each node stay inside. A tree is a chain in each
        node and binary between them; its messages go up and down.
        """
        inside_s = self.cluster.intra_node.latency_s
        num_nodes = stage.size // ranks_of_node
        ring_s = (num_nodes - 1) * link.latency_s + (stage.size - num_nodes) * inside_s
        if stage.collective != ALL_REDUCE:
            return ring_s
        tree_s = math.ceil(math.log2(num_nodes)) * link.latency_s + (ranks_of_node - 1) * inside_s
        return 2 * min(ring_s, tree_s)

    def _link(self, name: str) -> Link:
        if name == INTRA_NODE:
            return self.cluster.intra_node
        if name == INTER_SWITCH and self.cluster.inter_switch is not None:
            return self.cluster.inter_switch
        return self.cluster.inter_node


def interpolate(table: Sequence[tuple[int, float]], full_bytes: int) -> float:
    """Seconds of a collective, interpolated between measured sizes.

    Beyond the largest, the line through the last two goes on.

    Args:
        table: Bytes of the full tensor and seconds, ascending; at least one.
        full_bytes: Bytes of the full tensor.
    """
    if full_bytes <= table[0][0] or len(table) == 1:
        return table[0][1]
    position = next((n for n, (num_bytes, _) in enumerate(table) if full_bytes <= num_bytes), len(table) - 1)
    (low_bytes, low_s), (high_bytes, high_s) = table[position - 1], table[position]
    return high_s + (full_bytes - high_bytes) * (high_s - low_s) / (high_bytes - low_bytes)
