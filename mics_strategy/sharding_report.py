"""What is sharded over which ranks, in which memory and with which traffic: what a run prints when it starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from mics_strategy.scopes import Scopes


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingReport:
    """How a model is sharded in this job; as text, a few lines.

    Attributes:
        scopes: Ranks and axes of every model state.
        num_units: Units, whose parameters share collectives.
        num_parameters: Elements of all parameters.
        num_trained: Elements of those that require gradients.
        dtypes: Dtypes in which parameters are gathered and gradients reduced, by the dtype in which they are stored.
        bytes_by_purpose: Bytes that the engine allocated on this rank, by purpose. Optimizers allocate states later.
        num_micro_steps: Micro-steps of the step that `sent_bytes` are of.
        sent_bytes: Bytes that this rank sends in one optimizer step, by mesh axis.
    """

    scopes: Scopes
    num_units: int
    num_parameters: int
    num_trained: int
    dtypes: Mapping[torch.dtype, tuple[torch.dtype, torch.dtype]]
    bytes_by_purpose: Mapping[str, int]
    num_micro_steps: int
    sent_bytes: Mapping[str, int]

    def __str__(self) -> str:
        scopes, total_bytes = self.scopes, sum(self.bytes_by_purpose.values())
        purposes = sorted(self.bytes_by_purpose.items(), key=lambda item: -item[1])
        nodes = "1 node" if (count := scopes.world_size // scopes.ranks_per_node) == 1 else f"{count} nodes"
        dtypes = [
            f"{_name(stored)} parameters are gathered in {_name(gathered)}, gradients reduced in {_name(reduced)}"
            for stored, (gathered, reduced) in self.dtypes.items()
        ]
        lines = [
            f"mics_strategy: parameters over {scopes.params}, gradients over {scopes.grads}, optimizer states over "
            f"{scopes.optimizer} of {scopes.world_size} ranks ({nodes} of {scopes.ranks_per_node}).",
            f"{self.num_parameters:,} parameters in {self.num_units} units, {self.num_trained:,} of them trained; "
            f"{'; '.join(dtypes)}.",
            f"Memory of a rank, without optimizer states and activations: {_size(total_bytes)} "
            f"({', '.join(f'{purpose} {_size(count)}' for purpose, count in purposes if count)}).",
        ]
        sent = [f"{_size(count)} over {axis}" for axis, count in self.sent_bytes.items()]
        count = self.num_micro_steps  # 1 before the first step, however many the loop will run
        step = "step without accumulation" if count == 1 else f"step of {count} micro-steps"
        return "\n".join([*lines, f"A rank sends in a {step}: {', '.join(sent) or 'nothing'}."])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _size(num_bytes: int) -> str:
    unit, factor = next((pair for pair in (("GB", 1e9), ("MB", 1e6)) if num_bytes >= pair[1]), ("kB", 1e3))
    return f"{num_bytes / factor:.3g} {unit}"
