"""Other ways to the parameters of a model than its modules' `_parameters`.

Modules also keep parameters in attributes, lists and dicts of their own. Such an `Alias` follows the parameter: it
refers to the unsharded one in forwards, and to the sharded one elsewhere.

Tensors that share memory with a trainable parameter would keep old values, and two such parameters would be updated
one by one. They are refused.

All other references (tuples, closures, lists of a script) keep the plain parameter, which is no part of the model any
more: it raises when it is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from mics_strategy.errors import ConfigError, LifecycleError

_MAX_DEPTH = 3  # of lists and dicts in attributes
_REGISTERED = ("_parameters", "_buffers", "_modules")
_VALUES = ("data", "grad", "T", "H", "mT", "mH", "real", "imag")  # attributes of a tensor besides its metadata
_METADATA = ("size", "dim", "numel", "nelement", "stride", "element_size", "is_floating_point", "is_complex", "__len__")


@dataclass(frozen=True, slots=True)
class Alias:
    """A parameter in a plain container.

    Attributes:
        container: List, dict, or attributes of a module.
        key: Index, key or attribute name.
    """

    container: Any
    key: Any

    def replace(self, old: nn.Parameter, new: nn.Parameter) -> None:
        """Refer to `new`, unless a script has put something else in the place of `old`."""
        container, key = self.container, self.key
        is_present = key < len(container) if isinstance(container, list) else key in container
        if is_present and container[key] is old:
            container[key] = new


def find_aliases(model: nn.Module) -> Iterator[tuple[Alias, nn.Parameter]]:
    """Aliases of parameters in attributes of modules, with the parameters."""
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, nn.Parameter):
                yield Alias(vars(module), name), value
            elif isinstance(value, list | dict) and name not in _REGISTERED:
                yield from _aliases_in(value, _MAX_DEPTH)


def _aliases_in(container: list[Any] | dict[Any, Any], depth: int) -> Iterator[tuple[Alias, nn.Parameter]]:
    for alias, tensor in _tensors_in(container, depth):
        if isinstance(tensor, nn.Parameter):
            yield alias, tensor


def _tensors_in(container: list[Any] | dict[Any, Any], depth: int) -> Iterator[tuple[Alias, torch.Tensor]]:
    for key, value in container.items() if isinstance(container, dict) else enumerate(container):
        if isinstance(value, torch.Tensor):
            yield Alias(container, key), value
        elif isinstance(value, list | dict) and depth > 1:
            yield from _tensors_in(value, depth - 1)


def _kept_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors in attributes of modules, except those that a hook computes."""
    for prefix, module in model.named_modules():
        computed = {getattr(hook, "name", None) for hook in module._forward_pre_hooks.values()}  # `spectral_norm`
        attributes = {name: vars(module)[name] for name in vars(module).keys() - computed - set(_REGISTERED)}
        for name, value in sorted(attributes.items()):
            for _, tensor in _tensors_in({name: value}, _MAX_DEPTH + 1):
                if not isinstance(tensor, nn.Parameter):
                    yield f"{prefix}.{name}".removeprefix("."), tensor


def check_memory(model: nn.Module) -> None:
    """Raise where a trainable parameter shares memory with another tensor.

    Other parameters, buffers, and tensors in attributes of modules are compared with it.

    Raises:
        ConfigError: Two tensors share memory. The error names the first pair.
    """
    named = [*model.named_parameters(), *model.named_buffers(), *_kept_tensors(model)]
    in_memory = sorted(
        (*_address_range(tensor), index) for index, (_, tensor) in enumerate(named) if _has_memory(tensor)
    )
    for position, (start, end, index) in enumerate(in_memory):
        for other_start, _, other_index in in_memory[position + 1 :]:
            if other_start >= end:
                break
            tensor, other = named[index][1], named[other_index][1]
            is_trained = any(isinstance(each, nn.Parameter) and each.requires_grad for each in (tensor, other))
            if is_trained and _shares_element(tensor, other, start):
                _raise_on_shared_memory(*(named[number] for number in sorted((index, other_index))))


def _raise_on_shared_memory(first_named: tuple[str, torch.Tensor], second_named: tuple[str, torch.Tensor]) -> NoReturn:
    (first, _), (second, tensor) = first_named, second_named
    if isinstance(tensor, nn.Parameter):
        raise ConfigError(
            f"`{first}` and `{second}` are two parameters over one memory, which become two copies when they are "
            f"sharded. Tie them as one parameter (assign the parameter `{first}` itself to `{second}`, not its "
            "`.data`), or give one of them memory of its own (`.clone()`)."
        )
    raise ConfigError(
        f"`{second}` is a view of the parameter `{first}` and would keep its old values. Compute it from "
        "the parameter in the forward, or give it memory of its own (`.clone()`)."
    )


def _has_memory(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided and tensor.data_ptr() != 0


def _address_range(tensor: torch.Tensor) -> tuple[int, int]:
    start = tensor.data_ptr()
    return start, start + _extent(tensor) * tensor.itemsize


def _extent(tensor: torch.Tensor) -> int:
    """Elements of memory from the first one of a tensor to its last one."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _shares_element(tensor: torch.Tensor, other: torch.Tensor, start: int) -> bool:
    """Whether two tensors whose address ranges overlap share an element.

    They may be interleaved, such as blocks of columns of one matrix.

    Args:
        tensor: The tensor that starts first.
        other: The other one.
        start: Address of `tensor`.
    """
    if tensor.is_contiguous() or other.dtype != tensor.dtype:
        return True
    offset = (other.data_ptr() - start) // tensor.itemsize
    is_taken = torch.zeros(max(_extent(tensor), offset + _extent(other)), dtype=torch.bool)
    is_taken.as_strided(tensor.shape, tensor.stride()).fill_(True)
    return bool(is_taken.as_strided(other.shape, other.stride(), offset).any())


class ReplacedParameter(nn.Parameter):
    """A plain parameter that `shard()` has replaced, with its metadata only.

    Optimizers and scripts that were made before still refer to it.

    Attributes:
        mics_name: Name of the parameter in the model.
    """

    mics_name: str

    @override
    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run functions that return metadata.

        Raises:
            LifecycleError: Another function was called, which would use old values.
        """
        name = func.__name__
        is_attribute = name == "__get__" and func.__self__.__name__ not in _VALUES
        if is_attribute or name in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs))
        raise _replaced(next(leaf.mics_name for leaf in leaves if isinstance(leaf, ReplacedParameter)))

    @override
    def __repr__(self) -> str:  # type: ignore[override]
        return f"ReplacedParameter({self.mics_name!r}, shape={tuple(self.shape)})"


def _replaced(name: str) -> LifecycleError:
    return LifecycleError(
        f"The plain parameter `{name}` was used after `shard()` had replaced it in the model. A list, tuple, closure "
        "or loss of before `shard()` refers to it. Read the parameter from its module when it is used "
        "(`module.weight`), keep it in a list or dict of its module, or build the object after `shard()`; for an "
        "optimizer call `sharded.adopt(optimizer)`."
    )


def retire(parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Make plain parameters raise when they are used, or when a gradient arrives.

    A graph of before `shard()` has gradients of them.

    Args:
        parameters: Names and parameters that the sharded ones have replaced.
    """
    for name, parameter in parameters:

        def refuse(_: torch.Tensor, name: str = name) -> NoReturn:
            raise _replaced(name)

        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(refuse)
        parameter.__class__ = ReplacedParameter
        parameter.mics_name = name  # type: ignore[attr-defined]
