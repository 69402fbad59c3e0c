"""Placement of ranks on nodes and switches, and mesh axes.

Ranks are ordered by link speed: a rank has a location (local rank in its node, node under its leaf switch, switch),
fastest link first. A *scope* of degree d is d consecutive ranks: some ranks of a node, a node, several nodes of a
switch, or whole switches. The ranks are cut into *axes* at every degree in use, fastest first, and every scope is a
prefix of the axes. No axis mixes links: the name of each begins with one of `LINKS`.

Inside any span of axes the shard index is local-rank-major: the fastest axis is the most significant digit.
So the shard of a large scope is a contiguous piece of the shard of every smaller one. An all-gather runs from
the slowest axis to the fastest, a reduce-scatter in reverse, and no stage rearranges data.

Pure: no process group, no environment.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mics_strategy.errors import ConfigError

# Fastest first; names of axes begin with them. A further level is one more here, in `Topology`, `Switches`, `Cluster`,
# `make_axes` and `allowed_degrees` of `mesh_axis`; engine and comm follow the axes.
LINKS = ("intra_node", "inter_node", "inter_switch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Switches:
    """Leaf switches over nodes that are still to be found; see `Topology`.

    Attributes:
        nodes_per_switch: Consecutive nodes under one leaf switch; 0 where all nodes are equally near.

    Raises:
        ConfigError: `nodes_per_switch` is not a number of nodes.
    """

    nodes_per_switch: int

    def __post_init__(self) -> None:
        _check_nodes_per_switch(self.nodes_per_switch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The ranks that share a node, and the nodes that share a leaf switch.

    Both are consecutive. Where `nodes_per_switch` is 0, links between nodes are "inter_node". Otherwise they are
    "inter_node" under one switch and "inter_switch" beyond it: with 1, all are "inter_switch"; with all nodes of a job
    or more, none is.

    Attributes:
        ranks_per_node: Ranks of a node.
        nodes_per_switch: Nodes under one leaf switch; 0 where all nodes are equally near.

    Raises:
        ConfigError: `ranks_per_node` is not a positive number, or `nodes_per_switch` a negative one.

    Source:
        AMSP (arXiv:2311.00257) section V-D: placement on nodes under leaf and spine switches.
    """

    ranks_per_node: int
    nodes_per_switch: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.ranks_per_node, bool) or not isinstance(self.ranks_per_node, int) or self.ranks_per_node < 1:
            raise ConfigError(f"`ranks_per_node={self.ranks_per_node!r}` is not a number of ranks. Use 1 or more.")
        _check_nodes_per_switch(self.nodes_per_switch)

    def check_world(self, world_size: int) -> None:
        """Raise `ConfigError` for a world that does not fill nodes and switches evenly."""
        if world_size % self.ranks_per_node:
            raise ConfigError(
                f"`ranks_per_node={self.ranks_per_node}` does not divide the {world_size} ranks of this job. "
                "Start the same number of ranks on every node."
            )
        num_nodes, per_switch = world_size // self.ranks_per_node, self.nodes_per_switch
        if per_switch and num_nodes > per_switch and num_nodes % per_switch:
            divisors = [count for count in range(1, num_nodes + 1) if num_nodes % count == 0]
            raise ConfigError(
                f"`nodes_per_switch={per_switch}` does not divide the {num_nodes} nodes of this job. Place the same "
                f"number of nodes under every switch, and use {', '.join(map(str, divisors))}; or 0, which counts "
                "all links between nodes as equal."
            )

    def ranks_per_switch(self, world_size: int) -> int:
        """Ranks under one switch; all ranks of the job where there are no others."""
        return min(world_size, self.ranks_per_node * self.nodes_per_switch or world_size)


def topology_of(fields: Mapping[str, Any]) -> Topology | Switches:
    """The topology that a mapping describes, as a file holds it.

    Without `ranks_per_node` the nodes are still to be found.

    Raises:
        ConfigError: A key or a value is unknown.
    """
    names = ("ranks_per_node", "nodes_per_switch")
    if not fields or any(name not in names for name in fields):
        raise ConfigError(f"`topology={dict(fields)}` has unknown keys, or none. Use {' and '.join(names)}.")
    return Topology(**fields) if "ranks_per_node" in fields else Switches(**fields)


def _check_nodes_per_switch(count: object) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise ConfigError(
            f"`nodes_per_switch={count!r}` is not a number of nodes. Use 1 or more, or 0 where all nodes are equally "
            "near."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLocation:
    """The location of one rank. `node` is any value that is equal on, and only on, the ranks of a node."""

    node: str


def topology_from_locations(locations: list[RankLocation]) -> Topology:
    """The topology that the ranks' own locations describe, in rank order.

    Raises:
        ConfigError: Nodes with different numbers of ranks, or ranks of a node that are not consecutive.
    """
    nodes = [location.node for location in locations]
    counts = {node: nodes.count(node) for node in dict.fromkeys(nodes)}
    sizes = sorted(set(counts.values()))
    if len(sizes) > 1:
        raise ConfigError(
            f"The nodes hold different numbers of ranks ({', '.join(f'{n}: {c}' for n, c in counts.items())}). "
            "Start the same number of ranks on every node."
        )
    size = sizes[0]
    for rank, location in enumerate(locations):
        first = rank - rank % size
        if location.node != locations[first].node:
            raise ConfigError(
                f"Rank {rank} runs on {location.node}, rank {first} on {locations[first].node}: the ranks of a node "
                f"must be consecutive. Place {size} consecutive ranks per node (SLURM: --distribution=block)."
            )
    return Topology(ranks_per_node=size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One digit of a rank. The coordinate of rank r is ``(r // stride) % size``."""

    name: str
    size: int
    stride: int

    @property
    def link(self) -> str:
        """The link between its ranks, one of `LINKS`: the name without its number."""
        return self.name.partition(".")[0]

    @property
    def is_inside_node(self) -> bool:
        """Whether the ranks along the axis share a node."""
        return self.link == "intra_node"

    def coordinate(self, rank: int) -> int:
        """The coordinate of `rank` on this axis."""
        return rank // self.stride % self.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Consecutive axes: the ranks that one collective connects."""

    axes: tuple[Axis, ...]

    @property
    def size(self) -> int:
        """Ranks that take part."""
        return math.prod(axis.size for axis in self.axes)

    @property
    def name(self) -> str:
        """Names of the axes, fastest first."""
        return "+".join(axis.name for axis in self.axes)

    @property
    def is_inside_node(self) -> bool:
        """Whether the ranks share a node."""
        return all(axis.is_inside_node for axis in self.axes)

    @property
    def is_in_rank_order(self) -> bool:
        """Whether the order of the ranks' index is that of their numbers."""
        members = self.group_ranks(0)
        return members == sorted(members)

    def split_by_link(self) -> tuple[Span, ...]:
        """The parts over one kind of link each, fastest first; none for one rank."""
        return tuple(Span(axes=tuple(axes)) for _, axes in itertools.groupby(self.axes, lambda axis: axis.link))

    def index(self, rank: int) -> int:
        """Local-rank-major position of `rank`. The fastest axis is the most significant digit."""
        index = 0
        for axis in self.axes:
            index = index * axis.size + axis.coordinate(rank)
        return index

    def group_ranks(self, rank: int) -> list[int]:
        """Ranks that differ from `rank` only on these axes, in the order of their index."""
        base = rank - sum(axis.coordinate(rank) * axis.stride for axis in self.axes)
        members = [base]
        for axis in self.axes:
            members = [member + step * axis.stride for member in members for step in range(axis.size)]
        return members

    def groups(self, world_size: int) -> list[list[int]]:
        """Every group of ranks in the world, each once, in the order of its first rank."""
        return [members for rank in range(world_size) if (members := self.group_ranks(rank))[0] == rank]
