"""Cluster for the planner: devices, and links with measured or stated speeds.

Pure data.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One GPU, or another processor that holds a rank.

    Attributes:
        name: Name of the product.
        memory_bytes: Bytes of its memory.
        memory_bytes_per_s: Bytes per second between its memory and its processor.
        peak_flop_per_s: Dense 16-bit FLOP per second by the datasheet.
        matmul_efficiency: Share of that peak that large matrix products reach, 0 to 1; measured or stated.
    """

    name: str
    memory_bytes: int
    memory_bytes_per_s: float
    peak_flop_per_s: float
    matmul_efficiency: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The links of one level of the network.

    Attributes:
        bytes_per_s: Bytes per second that one rank sends while all ranks of its node send, in one direction.
        latency_s: Seconds of one step of a ring, whatever its bytes (alpha).
        source: Origin of the figures: datasheet, paper, or file of a calibration.
    """

    bytes_per_s: float
    latency_s: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStage:
    """Measured times of one stage of a collective.

    Attributes:
        collective: Name of the collective, as in `comm.route`.
        link: Slowest link that it crosses: "intra_node", "inter_node" or "inter_switch".
        size: Ranks that take part.
        seconds_by_bytes: Bytes of the full tensor, and seconds, ascending.
    """

    collective: str
    link: str
    size: int
    seconds_by_bytes: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Nodes with equal numbers of equal devices.

    Attributes:
        name: Name of the product or of the file.
        device: Device of every rank.
        ranks_per_node: Ranks of a node.
        num_nodes: Nodes of the job.
        intra_node: Links inside a node.
        inter_node: Links between nodes, under one switch where there are several.
        nodes_per_switch: Nodes under one leaf switch; 0 where all nodes are equally near.
        inter_switch: Links between switches; None where `nodes_per_switch` is 0.
        slowest_factor: Time of the same work on the slowest node, in times of that on the others.
        overlap_slowdown: Time of compute while a collective runs, in times of that otherwise; measured or stated.
        measured_stages: Measured stages of collectives, which count instead of the links' figures.
    """

    name: str
    device: Device
    ranks_per_node: int
    num_nodes: int
    intra_node: Link
    inter_node: Link
    nodes_per_switch: int = 0
    inter_switch: Link | None = None
    slowest_factor: float = 1.0
    overlap_slowdown: float = 1.0
    measured_stages: tuple[MeasuredStage, ...] = ()

    def measured(self, collective: str, link: str, size: int) -> tuple[tuple[int, float], ...]:
        """Measured bytes and seconds of a stage; empty where nothing was measured."""
        for stage in self.measured_stages:
            if (stage.collective, stage.link, stage.size) == (collective, link, size):
                return stage.seconds_by_bytes
        return ()

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.num_nodes * self.ranks_per_node
