"""What is sharded over which ranks, in which memory and with which traffic: what a run prints when it starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from mics_strategy.config import ShardConfig
from mics_strategy.islands import Round
from mics_strategy.scopes import Scopes


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingReport:
    """How a model is sharded in this job; as text, a few lines.

    Attributes:
        requested: Preset, and the fields that differ from it.
        chosen: Choice of ``"auto"``, and its reason; empty where nothing was ``"auto"``.
        scopes: Ranks and axes of every model state.
        num_units: Units, whose parameters share collectives.
        num_parameters: Elements of all parameters.
        num_trained: Elements of those that require gradients.
        dtypes: Dtypes in which parameters are gathered and gradients reduced, by the dtype in which they are stored.
        bytes_by_purpose: Bytes that the engine allocated on this rank, by purpose. Optimizers allocate states later.
        num_micro_steps: Micro-steps of the step that `sent_bytes` are of.
        sent_bytes: Bytes that this rank sends in one optimizer step, by mesh axis.
        added_bytes: Bytes that each further micro-step adds to them.
        outer_round: When islands take outer steps.
        outer_bytes: Bytes that this rank sends in the outer step of each fragment.
        is_delayed: Whether second hops are delayed.
    """

    requested: str
    chosen: str
    scopes: Scopes
    num_units: int
    num_parameters: int
    num_trained: int
    dtypes: Mapping[torch.dtype, tuple[torch.dtype, torch.dtype]]
    bytes_by_purpose: Mapping[str, int]
    num_micro_steps: int
    sent_bytes: Mapping[str, int]
    added_bytes: Mapping[str, int]
    outer_round: Round
    outer_bytes: Sequence[int]
    is_delayed: bool = False

    def __str__(self) -> str:
        scopes, total_bytes = self.scopes, sum(self.bytes_by_purpose.values())
        purposes = sorted(self.bytes_by_purpose.items(), key=lambda item: -item[1])
        nodes = "1 node" if (count := scopes.job_size // scopes.ranks_per_node) == 1 else f"{count} nodes"
        dtypes = [
            f"{_name(stored)} parameters are gathered in {_name(gathered)}, gradients reduced in {_name(reduced)}"
            for stored, (gathered, reduced) in self.dtypes.items()
        ]
        lines = [
            f"mics_strategy, {self.requested}: {scopes.phrase} of {scopes.job_size} ranks ({nodes} of "
            f"{scopes.ranks_per_node}).",
            *([f"'auto' chose {self.chosen}"] if self.chosen else []),
            f"{self.num_parameters:,} parameters in {self.num_units} units, "
            f"{'; '.join([f'{self.num_trained:,} of them trained', *dtypes])}.",
            f"Memory of a rank, without optimizer states and activations: {_size(total_bytes)} "
            f"({', '.join(f'{purpose} {_size(count)}' for purpose, count in purposes if count)}).",
        ]
        count = self.num_micro_steps  # 1 before the first step, however many the loop will run
        sent = f"A rank sends in a step of {count} micro-step{'s' * (count != 1)}: {_by_axis(self.sent_bytes)}"
        lines.append(f"{sent}; a further micro-step adds {_by_axis(self.added_bytes)}.")
        if self.outer_round.every:
            lines.append(self._outer_line())
        if self.is_delayed:
            lines.append(
                "Second hops are delayed: of two calls of `step` the second updates, with the gradients of both. This "
                "is not the algorithm of synchronous training."
            )
        return "\n".join(lines)

    def _outer_line(self) -> str:
        steps, scopes = self.outer_round, self.scopes
        text = f"every {steps.every} steps an outer step sends {_size(sum(self.outer_bytes))}"
        if steps.fragments > 1:
            text += f", at most {_size(max(self.outer_bytes))} at a time, in {steps.fragments} fragments"
        if steps.delay:
            text += f", and ends {steps.delay} step{'s' * (steps.delay > 1)} later"
        return (
            f"{scopes.num_islands} islands of {scopes.world_size} ranks step alone; {text}. This is not the algorithm "
            "of synchronous training."
        )


def requested(config: ShardConfig) -> str:
    """The preset that is nearest to a configuration, and the fields that differ from it."""
    described = [(name, ShardConfig.preset(name).describe()) for name in (*ShardConfig.PRESETS, "auto")]
    name, preset = max(described, key=lambda item: len(item[1].items() & config.describe().items()))
    differing = [f"{field}={value}" for field, value in config.describe().items() if value != preset[field]]
    return f"preset {name} with {', '.join(differing)}" if differing else f"preset {name}"


def _by_axis(num_bytes: Mapping[str, int]) -> str:
    return ", ".join(f"{_size(count)} over {axis}" for axis, count in num_bytes.items() if count) or "nothing"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _size(num_bytes: int) -> str:
    unit, factor = next((pair for pair in (("GB", 1e9), ("MB", 1e6)) if num_bytes >= pair[1]), ("kB", 1e3))
    return f"{num_bytes / factor:.3g} {unit}"
