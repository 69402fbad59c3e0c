"""Where does each rank sit, and which ranks does a scope hold?

Ranks are ordered by link speed: a rank has a place (local rank in its node, node), fastest link first. A
*scope* of degree d is d consecutive ranks: some ranks of a node, a node, or whole nodes. The ranks are cut
into *axes* at every degree in use, fastest first, and every scope is a prefix of the axes.

Inside any run of axes the shard index is local-rank-major: the fastest axis is the most significant digit.
So the shard of a large scope is a contiguous piece of the shard of every smaller one, a gather runs from
the slowest axis to the fastest and a reduction back, and no stage re-arranges anything.

Pure: no process group, no environment.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mics_strategy.errors import ConfigError

if TYPE_CHECKING:
    from mics_strategy.config import ShardConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """How many consecutive ranks share a node."""

    ranks_per_node: int

    def __post_init__(self) -> None:
        if isinstance(self.ranks_per_node, bool) or not isinstance(self.ranks_per_node, int) or self.ranks_per_node < 1:
            raise ConfigError(f"`ranks_per_node={self.ranks_per_node!r}` is not a number of ranks. Use 1 or more.")

    def check_world(self, world_size: int) -> None:
        """Refuse a world that does not fill its nodes evenly."""
        if world_size % self.ranks_per_node:
            raise ConfigError(
                f"`ranks_per_node={self.ranks_per_node}` does not divide the {world_size} ranks of this job. "
                "Start the same number of ranks on every node."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What one rank knows of where it runs. `node` is any value equal on, and only on, the ranks of a node."""

    node: str
    local_rank: int


def topology_from_places(places: list[Place]) -> Topology:
    """The topology that the ranks' own places describe, in rank order.

    Raises:
        ConfigError: Nodes with different numbers of ranks, or ranks of a node that are not consecutive.
    """
    nodes = [place.node for place in places]
    counts = {node: nodes.count(node) for node in dict.fromkeys(nodes)}
    sizes = sorted(set(counts.values()))
    if len(sizes) > 1:
        raise ConfigError(
            f"The nodes hold different numbers of ranks ({', '.join(f'{n}: {c}' for n, c in counts.items())}). "
            "Start the same number of ranks on every node."
        )
    size = sizes[0]
    for rank, place in enumerate(places):
        if place.node != places[rank - rank % size].node:
            raise ConfigError(
                f"Rank {rank} runs on {place.node}, rank {rank - rank % size} on {places[rank - rank % size].node}: "
                "the ranks of a "
                f"node must be consecutive. Place {size} consecutive ranks per node (SLURM: --distribution=block)."
            )
    return Topology(ranks_per_node=size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One digit of a rank. Coordinate of rank r: ``(r // stride) % size``."""

    name: str
    size: int
    stride: int

    def coordinate(self, rank: int) -> int:
        """Where `rank` is on this axis."""
        return rank // self.stride % self.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Scopes:
    """Ranks over which each model state is sharded, and the axes that these degrees cut.

    Every degree is the product of a prefix of `axes`.
    """

    world_size: int
    ranks_per_node: int
    params: int
    grads: int
    optimizer: int
    axes: tuple[Axis, ...]

    def depth(self, degree: int) -> int:
        """Number of leading axes whose sizes multiply to `degree`."""
        product = 1
        for position, axis in enumerate(self.axes):
            if product == degree:
                return position
            product *= axis.size
        if product != degree:
            raise ConfigError(f"No scope of {degree} ranks among axes {[axis.size for axis in self.axes]}.")
        return len(self.axes)

    def span(self, inner: int, outer: int) -> Span:
        """The axes that a scope of `outer` ranks has and one of `inner` ranks lacks."""
        return Span(axes=self.axes[self.depth(inner) : self.depth(outer)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A run of consecutive axes: the ranks that one collective connects."""

    axes: tuple[Axis, ...]

    @property
    def size(self) -> int:
        """Ranks that take part."""
        return math.prod(axis.size for axis in self.axes)

    @property
    def name(self) -> str:
        """Names of the axes, fastest first."""
        return "+".join(axis.name for axis in self.axes)

    def index(self, rank: int) -> int:
        """Local-rank-major position of `rank`: the fastest axis is the most significant digit."""
        index = 0
        for axis in self.axes:
            index = index * axis.size + axis.coordinate(rank)
        return index

    def members(self, rank: int) -> list[int]:
        """Ranks that differ from `rank` only on these axes, in the order of their index."""
        base = rank - sum(axis.coordinate(rank) * axis.stride for axis in self.axes)
        members = [base]
        for axis in self.axes:
            members = [member + step * axis.stride for member in members for step in range(axis.size)]
        return members

    def groups(self, world_size: int) -> list[list[int]]:
        """Every set of members in the world, each once, in the order of its first rank."""
        return [members for rank in range(world_size) if (members := self.members(rank))[0] == rank]


def resolve_scopes(config: ShardConfig, topology: Topology, world_size: int) -> Scopes:
    """Turn the words of a configuration into numbers of ranks, and cut the axes.

    Raises:
        ConfigError: A scope that does not divide the world, straddles nodes unevenly, does not nest with the
            others, or optimizer states coarser than parameters or gradients.
    """
    topology.check_world(world_size)
    per_node = topology.ranks_per_node
    words = {"none": 1, "node": per_node, "auto": per_node, "world": world_size}
    partition = _ranks_of(config.partition_size, words)
    words["partition"] = partition
    degrees = {name: _ranks_of(getattr(config, name), words) for name in ("params", "grads", "optimizer")}
    for name, degree in {"partition_size": partition, **degrees}.items():
        _check_degree(name, degree, per_node, world_size)
    for name in ("params", "grads"):
        if degrees["optimizer"] < degrees[name]:
            raise ConfigError(
                f"`optimizer` is sharded over {degrees['optimizer']} ranks, coarser than `{name}` over "
                f"{degrees[name]}. Shard `optimizer` over {degrees[name]} ranks or more, or `{name}` over fewer."
            )
    return Scopes(
        world_size=world_size,
        ranks_per_node=per_node,
        axes=_cut_axes(sorted(set(degrees.values())), per_node, world_size),
        **degrees,
    )


def _ranks_of(scope: str | int, words: dict[str, int]) -> int:
    return scope if isinstance(scope, int) else words[scope]


def _check_degree(name: str, degree: int, per_node: int, world_size: int) -> None:
    allowed = [d for d in range(1, world_size + 1) if world_size % d == 0 and (per_node % d == 0 or d % per_node == 0)]
    if degree in allowed:
        return
    if degree > world_size or world_size % degree:
        problem = f"does not divide the {world_size} ranks of this job"
    else:
        problem = f"straddles nodes of {per_node} ranks"
    raise ConfigError(f"`{name}={degree}` {problem}. Use {', '.join(map(str, allowed))}.")


def _cut_axes(degrees: list[int], per_node: int, world_size: int) -> tuple[Axis, ...]:
    cuts = sorted({*degrees, per_node, world_size} - {1})
    sizes: list[tuple[int, int]] = []
    inner = 1
    for cut in cuts:
        if cut % inner:
            raise ConfigError(
                f"Scopes of {inner} and {cut} ranks do not nest. Choose sizes of which each divides the next larger "
                "one."
            )
        sizes.append((cut // inner, inner))
        inner = cut
    links = ["intra_node" if size * stride <= per_node else "inter_node" for size, stride in sizes]
    names = [link if links.count(link) == 1 else f"{link}.{links[:i].count(link)}" for i, link in enumerate(links)]
    return tuple(Axis(name=name, size=size, stride=stride) for name, (size, stride) in zip(names, sizes, strict=True))
