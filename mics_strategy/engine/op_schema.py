"""What the schema of an operation of torch says of its arguments and results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

T = TypeVar("T")


def tensors_in(tree: Any) -> list[Any]:
    """The tensors in nested containers, or the one that `tree` is."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def are_flat(args: Any, kwargs: Any) -> bool:
    """Whether no argument is a container.

    Most operations get none, and a walk through containers costs more than they do.
    """
    return not kwargs and not any(isinstance(argument, (list, tuple, dict)) for argument in args)


def map_arguments(cls: type[T], change: Callable[[T], Any], args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Arguments of an operation with those of a class changed, also in lists."""
    if not are_flat(args, kwargs):
        changed: tuple[Any, Any] = tree_map_only(cls, change, (args, kwargs))
        return changed
    return tuple(change(argument) if isinstance(argument, cls) else argument for argument in args), kwargs


def is_view(func: Any) -> bool:
    """Whether the results share memory with the first tensor."""
    return any(value.alias_info is not None and not value.alias_info.is_write for value in func._schema.returns)


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """The DTensors that an operation writes to."""
    return (tensor for tensor in _written(func, args, kwargs) if isinstance(tensor, DTensor))


def writes_plain(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operation writes to a plain tensor: ``total += weight.norm()``."""
    return any(not isinstance(tensor, DTensor) for tensor in _written(func, args, kwargs))


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    if func._schema.is_mutable:
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                yield from tensors_in(args[position] if position < len(args) else kwargs.get(argument.name))


def returned_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    """What an operation returns: the arguments that it writes to, in place or to `out=`, or else its `result`."""
    if not func._schema.is_mutable or not func._schema.returns:
        return result
    written = [
        args[position] if position < len(args) else kwargs.get(argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    if len(written) < len(func._schema.returns):
        return result
    return written[0] if len(func._schema.returns) == 1 else tuple(written)


def fills_with_random_numbers(func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an operation draws a number for each element, without a generator."""
    is_seeded = torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None
    return is_seeded and func._schema.name.endswith(("_", "_like"))
