"""Islands: ranks that step without the others, and take an outer step with them now and then.

An island is a node, or a leaf switch where the topology states them: the outermost axis of the ranks lies between
islands. Inside an island everything is as in a job of its own; only the outer step leaves it.

An outer step may be taken in *fragments* of the units, at different steps of a round, and may be *delayed*: what it
sends is in flight while the next steps compute.

Pure.

Source:
    DiLoCo (arXiv:2311.08105); Streaming DiLoCo (arXiv:2501.18512).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from mics_strategy.errors import ConfigError
from mics_strategy.topology import Topology

T = TypeVar("T")

_NUMBERS = {  # the least value of a field, the value that it stays below, its default, and what is allowed
    "outer_lr": (math.ulp(0.0), math.inf, 0.7, "a positive number"),
    "outer_momentum": (0.0, 1.0, 0.5, "a number from 0 to below 1"),
    "outer_alpha": (0.0, 1.0, 0.0, "a number from 0 to below 1"),
}
OUTER_NUMBERS = tuple(_NUMBERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Optimizer steps of the islands in which every parameter takes one outer step. Steps count from 1.

    Attributes:
        every: Steps of a round; 0 without outer steps.
        fragments: Fragments that take their outer steps behind different steps, evenly spread.
        delay: Steps between the start of an outer step and its end.
    """

    every: int
    fragments: int
    delay: int

    @property
    def is_streaming(self) -> bool:
        """Whether islands differ at all steps: no step ends with all parameters behind their outer steps."""
        return self.fragments > 1 or self.delay > 0

    def deal(self, units: Sequence[T]) -> dict[int, list[T]]:
        """Units by the step behind which their outer steps start. Neighbours are in different fragments."""
        return {
            (index + 1) * self.every // self.fragments: [*units[index :: self.fragments]]
            for index in range(self.fragments)
        }

    def check(self, num_units: int) -> None:
        """Check that no fragment is empty.

        Args:
            num_units: Units with trained parameters.

        Raises:
            ConfigError: There are more fragments than such units.
        """
        if self.fragments > max(num_units, 1):
            raise ConfigError(
                f"`outer_fragments={self.fragments}` deals out the units of the model, of which {num_units} have "
                f"trained parameters. Use {max(num_units, 1)} fragments or fewer, or smaller units: `shard(units=...)`."
            )


def check_outer(steps: Round, numbers: Mapping[str, object]) -> None:
    """Check the fields of the outer step.

    Args:
        steps: Values of `outer_every`, `outer_fragments` and `outer_delay`.
        numbers: Values of `outer_lr`, `outer_momentum` and `outer_alpha`.

    Raises:
        ConfigError: A value is not available, or is set where it does not count.
    """
    every: object = steps.every
    if isinstance(every, bool) or not isinstance(every, int) or every < 0:
        raise ConfigError(f"`outer_every={every!r}` is not a number of optimizer steps. Use 1 or more, or 0 for never.")
    _check_steps(steps)
    for name, value in numbers.items():
        least, below, default, allowed = _NUMBERS[name]
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not (is_number and least <= float(str(value)) < below):
            raise ConfigError(f"`{name}={value!r}` is not {allowed}. Use {default}, or another one.")
        if not every and value != default:
            raise ConfigError(
                f"`{name}={value!r}` counts for outer steps, and `outer_every=0` takes none. Set `outer_every` to the "
                f"optimizer steps between two of them, or remove `{name}`."
            )
        if name == "outer_alpha" and value != default and not steps.delay:
            raise ConfigError(
                f"`outer_alpha={value!r}` counts for outer steps that are delayed, and `outer_delay=0` waits for them. "
                "Set `outer_delay`, or remove `outer_alpha`."
            )


def _check_steps(steps: Round) -> None:
    """Check how a round is divided."""
    for name, value, default in (("outer_fragments", steps.fragments, 1), ("outer_delay", steps.delay, 0)):
        found: object = value
        if isinstance(found, bool) or not isinstance(found, int) or found < default:
            raise ConfigError(f"`{name}={found!r}` is not a number. Use {default} or more.")
        if found != default and not steps.every:
            raise ConfigError(
                f"`{name}={found!r}` counts for outer steps, and `outer_every=0` takes none. Set `outer_every` to the "
                f"optimizer steps between two of them, or remove `{name}`."
            )
    if steps.fragments > max(steps.every, 1):
        raise ConfigError(
            f"`outer_fragments={steps.fragments}` are more than the {steps.every} steps of a round (`outer_every`). "
            f"Each starts behind a step of its own. Use {steps.every} or fewer."
        )
    if steps.delay >= max(steps.every, 1):
        raise ConfigError(
            f"`outer_delay={steps.delay}` ends an outer step when the next one has started, {steps.every} steps later "
            f"(`outer_every`). Use {steps.every - 1} or less."
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
