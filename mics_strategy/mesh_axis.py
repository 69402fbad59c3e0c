"""Degrees of scopes: numbers of ranks that fill nodes and switches evenly, and the mesh axes that they define.

Pure.
"""

from __future__ import annotations

import functools

from mics_strategy.errors import ConfigError
from mics_strategy.topology import LINKS, Axis, Topology


def allowed_degrees(topology: Topology, world_size: int) -> list[int]:
    """Numbers of ranks that a scope may have. They divide the job, and fill its nodes and switches evenly."""
    per_node, per_switch = topology.ranks_per_node, topology.ranks_per_switch(world_size)
    return [d for d in _divisors(world_size) if _nests(d, per_node) and _nests(d, per_switch)]


@functools.lru_cache(maxsize=64)
def _divisors(number: int) -> tuple[int, ...]:
    """Divisors of a number, in ascending order."""
    return tuple(divisor for divisor in range(1, number + 1) if number % divisor == 0)


def check_degree(name: str, degree: int, topology: Topology, world_size: int) -> None:
    """Raise `ConfigError` for a number of ranks that the scope `name` may not have."""
    per_node, per_switch = topology.ranks_per_node, topology.ranks_per_switch(world_size)
    allowed = allowed_degrees(topology, world_size)
    if degree in allowed:
        return
    if degree > world_size or world_size % degree:
        problem = f"does not divide the {world_size} ranks of this job"
    elif not _nests(degree, per_node):
        problem = f"straddles nodes of {per_node} ranks"
    else:
        problem = f"straddles switches of {topology.nodes_per_switch} nodes, {per_switch} ranks"
    raise ConfigError(f"`{name}={degree}` {problem}. Use {', '.join(map(str, allowed))}.")


def _nests(degree: int, other: int) -> bool:
    """Whether one of two degrees divides the other."""
    return degree % other == 0 or other % degree == 0


def make_axes(degrees: set[int], topology: Topology, world_size: int) -> tuple[Axis, ...]:
    """The axes that are cut at every degree, at the node and at the switch."""
    per_node, per_switch = topology.ranks_per_node, topology.ranks_per_switch(world_size)
    sizes: list[tuple[int, int]] = []
    inner = 1
    for degree in sorted({*degrees, per_node, per_switch, world_size} - {1}):
        if degree % inner:
            raise ConfigError(
                f"Scopes of {inner} and {degree} ranks do not nest. Choose numbers of ranks each of which divides the "
                "next larger one."
            )
        sizes.append((degree // inner, inner))
        inner = degree
    links = [LINKS[(degree > per_node) + (degree > per_switch)] for degree in (size * stride for size, stride in sizes)]
    names = [link if links.count(link) == 1 else f"{link}.{links[:i].count(link)}" for i, link in enumerate(links)]
    return tuple(Axis(name=name, size=size, stride=stride) for name, (size, stride) in zip(names, sizes, strict=True))
