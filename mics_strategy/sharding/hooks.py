"""When do the model and autograd call us?

Two module hooks per unit and one hook per unsharded parameter; autograd's hooks on a unit's outputs are made
anew in every forward. A hook may not be traced: `torch.compile` sees a unit's forward and never these.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from mics_strategy.errors import LifecycleError
from mics_strategy.sharding.engine import Engine
from mics_strategy.sharding.gradients.gradient import BucketGradient
from mics_strategy.sharding.unit import Unit

T = TypeVar("T")


def install(engine: Engine, before_root_forward: Callable[[], None]) -> None:
    """Put the hooks on the units of `engine`.

    Args:
        engine: Is told of every event.
        before_root_forward: Called first when the root's forward begins.
    """
    for unit in engine.units:
        _watch_forward(engine, unit, before_root_forward if unit.index == 0 else None)
        for gradient in engine.reducer.gradients.get(unit.index, []):
            for position, parameter in enumerate(gradient.bucket.unsharded):
                parameter.register_post_accumulate_grad_hook(_gradient_hook(engine, unit, gradient, position))


def _gradient_hook(
    engine: Engine, unit: Unit, gradient: BucketGradient, position: int
) -> Callable[[torch.Tensor], None]:
    """The hook of one unsharded parameter.

    It refers to the engine weakly: a tensor's hooks belong to C++, where Python's garbage collection does not see the
    cycle that leads back to the tensor, and a model would never be freed.
    """
    weak_engine, weak_unit, weak_gradient = weakref.ref(engine), weakref.ref(unit), weakref.ref(gradient)

    def hook(parameter: torch.Tensor) -> None:
        alive, of_unit, of_bucket = weak_engine(), weak_unit(), weak_gradient()
        if alive is not None and of_unit is not None and of_bucket is not None:
            alive.on_gradient(of_unit, of_bucket, position, cast("nn.Parameter", parameter))

    return hook


def _watch_forward(engine: Engine, unit: Unit, first: Callable[[], None] | None) -> None:
    entered: list[int] = []
    compute_dtype = next((b.spec.param_dtype for b in unit.buckets if b.needs_cast), None)

    def before(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if first is not None:
            first()
        entered.append(engine.before_forward(unit))
        if compute_dtype is None or torch.is_autocast_enabled(unit.buckets[0].whole.device.type):
            return None
        return cast_floating(args, compute_dtype), cast_floating(kwargs, compute_dtype)

    def after(_: nn.Module, __: tuple[Any, ...], outputs: Any) -> Any:
        if not entered:
            return None
        tensors = list(tensors_in(outputs))
        is_lasting = not unit.slot.is_shared or not any(map(unit.slot.holds, tensors))
        if not is_lasting:
            outputs = _outlasting(unit, outputs)
            tensors = list(tensors_in(outputs))
        engine.after_forward(unit, entered.pop(), tensors)
        return None if is_lasting else outputs

    disable: Any = torch.compiler.disable
    unit.module.register_forward_pre_hook(disable(before), prepend=True, with_kwargs=True)
    unit.module.register_forward_hook(disable(after), always_call=True)


def _outlasting(unit: Unit, outputs: T) -> T:
    """The outputs of a unit with copies of what lies in its slot: parameters, and views of them.

    Other units overwrite the slot, and autograd, which keeps the outputs for their users' backwards, does not see it.

    Raises:
        LifecycleError: They are in a container that cannot be made anew.
    """
    slot = unit.slot

    def copied(leaf: object) -> object:
        return leaf.clone() if isinstance(leaf, torch.Tensor) and slot.holds(leaf) else leaf

    lasting = cast("T", tree_map(copied, outputs))
    if any(map(slot.holds, tensors_in(lasting))):
        raise LifecycleError(
            f"Unit `{unit.name}` returns a parameter of its own, or a view of one, inside a {type(outputs).__name__}. "
            "Other units will overwrite it. Return a copy (`.clone()`), or return it in a tuple, list or dict."
        )
    return lasting


def cast_floating(tree: T, dtype: torch.dtype) -> T:
    """Every floating tensor of `tree` in `dtype`."""

    def cast_leaf(leaf: object) -> object:
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return cast("T", tree_map(cast_leaf, tree))


def tensors_in(tree: object) -> Iterator[torch.Tensor]:
    """The tensors in nested tuples, lists, dicts, registered containers and dataclasses."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            for field in dataclasses.fields(leaf):
                yield from tensors_in(getattr(leaf, field.name))
