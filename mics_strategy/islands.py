"""Islands: ranks that step without the others, and take an outer step with them now and then.

An island is a node, or a leaf switch where the topology states them: the outermost axis of the ranks lies between
islands. Inside an island everything is as in a job of its own; only the outer step leaves it.

Pure.

Source:
    DiLoCo (arXiv:2311.08105).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from mics_strategy.errors import ConfigError
from mics_strategy.topology import Topology

_NUMBERS = {  # the least value of a field, its default, and what is allowed
    "outer_lr": (math.ulp(0.0), 0.7, "a positive number"),
    "outer_momentum": (0.0, 0.5, "a number from 0 to below 1"),
}


def check_outer(every: object, numbers: Mapping[str, object]) -> None:
    """Check the fields of the outer step.

    Args:
        every: Value of `outer_every`.
        numbers: Values of `outer_lr` and `outer_momentum`.

    Raises:
        ConfigError: A value is not available, or is set without `outer_every`.
    """
    if isinstance(every, bool) or not isinstance(every, int) or every < 0:
        raise ConfigError(f"`outer_every={every!r}` is not a number of optimizer steps. Use 1 or more, or 0 for never.")
    for name, value in numbers.items():
        least, default, allowed = _NUMBERS[name]
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not (is_number and least <= float(str(value)) < (1.0 if name == "outer_momentum" else math.inf)):
            raise ConfigError(f"`{name}={value!r}` is not {allowed}. Use {default}, or another one.")
        if not every and value != default:
            raise ConfigError(
                f"`{name}={value!r}` counts for outer steps, and `outer_every=0` takes none. Set `outer_every` to the "
                f"optimizer steps between two of them, or remove `{name}`."
            )


def ranks_of_island(every: int, topology: Topology, world_size: int, degrees: Mapping[str, int]) -> int:
    """The number of ranks that synchronize gradients in every step: all of the job without outer steps.

    Args:
        every: Value of `outer_every`.
        topology: Ranks of a node, and nodes of a switch.
        world_size: Ranks of the job.
        degrees: Ranks of each scope, by the name of its field.

    Raises:
        ConfigError: The job has one island only, or a scope is larger than an island.
    """
    if not every:
        return world_size
    per_switch = topology.ranks_per_switch(world_size)
    name, island = ("leaf switch", per_switch) if per_switch < world_size else ("node", topology.ranks_per_node)
    asked = f"`outer_every={every}` lets each {name} step without the others"
    if island == world_size:
        raise ConfigError(
            f"{asked}, but all {world_size} ranks of this job are on one node. Use outer_every=0, start more nodes, or "
            "state smaller ones: topology={'ranks_per_node': ...}."
        )
    for field, degree in degrees.items():
        if degree > island:
            raise ConfigError(
                f"{asked}, but `{field}` is sharded over {degree} ranks, more than the {island} of a {name}. Shard it "
                f"over {island} ranks or fewer, as the preset 'mics' with partition_size='node' does, or use "
                "outer_every=0."
            )
    return island
