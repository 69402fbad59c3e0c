"""Kinds of optimizers: which of them step another one, and which fit saved states."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer

from mics_strategy.errors import CheckpointError


def stepped_by(optimizer: Optimizer) -> list[Optimizer]:
    """Other optimizers that this one holds, itself or in a list or dict, over some of the same parameters."""
    held: list[Any] = []
    for value in vars(optimizer).values():
        is_dict = isinstance(value, dict) and value is not optimizer.state
        held += value.values() if is_dict else value if isinstance(value, (list, tuple)) else (value,)
    others = [each for each in held if isinstance(each, Optimizer) and each is not optimizer]
    if not others:
        return []
    ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return [o for o in others if any(id(parameter) in ids for group in o.param_groups for parameter in group["params"])]


def is_torch_own(optimizer: Optimizer) -> bool:
    """Whether the class of an optimizer and the body of its steps are torch's own."""
    cls = type(optimizer)
    return all(module.startswith("torch.optim.") for module in (cls.__module__, cls.step.__module__))


def has_states_elsewhere(optimizer: Optimizer) -> bool:
    """Whether another optimizer, which this one steps, holds states of its own."""
    return any(other.state is not optimizer.state for other in stepped_by(optimizer))


def check_same_kind(optimizer: Optimizer, saved_options: Iterable[str]) -> None:
    """Raise if saved states belong to another kind of optimizer.

    Kinds differ in their numbers: SGD has a momentum, AdamW has betas. Flags are not compared, as versions add some.

    Args:
        optimizer: Optimizer that loads the states.
        saved_options: Names of the options of a saved parameter group.

    Raises:
        CheckpointError: An option that the optimizer was built with was not saved.
    """
    saved = set(saved_options)
    numbers = {
        k for k, v in optimizer.defaults.items() if isinstance(v, (int, float, tuple)) and not isinstance(v, bool)
    }
    if numbers - saved:
        raise CheckpointError(
            f"The saved states are not those of {type(optimizer).__name__}, which has "
            f"{', '.join(f'`{name}`' for name in sorted(numbers - saved))}: the saved optimizer has only "
            f"{', '.join(f'`{name}`' for name in sorted(saved - {'params', 'param_names'}))}. Build the optimizer that "
            "was saved, or load the model alone."
        )
