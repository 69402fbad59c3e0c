"""Plain data and tensors as JSON and bytes, bitwise: reading them runs no code.

Tensors are taken out, and JSON has their dtypes and shapes, in the order in which they follow. What JSON does not know
is an object with one key: ``{"tuple": [...]}``. So is every mapping, as a list of pairs: keys may be numbers.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mics_strategy.errors import ConfigError

_COLLECTIONS: dict[str, Any] = {"list": list, "tuple": tuple}
_MAPPINGS: dict[str, Any] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


@dataclass(frozen=True, slots=True)
class Encoded:
    """A value without its tensors, and its tensors.

    Attributes:
        text: JSON of the value, with dtypes and shapes of the tensors.
        tensors: The tensors, in their order in `text`; they share memory with the value.
    """

    text: str
    tensors: list[torch.Tensor]

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.numel() * tensor.itemsize for tensor in self.tensors)


def encode(value: Any, name: str) -> Encoded:
    """Encode dicts, lists, tuples, numbers, texts and dense tensors.

    Args:
        value: Value to encode.
        name: Name of the value, for errors.

    Raises:
        ConfigError: Something in it is no plain data. The error says where.
    """
    tensors: list[torch.Tensor] = []
    tree = _encode(value, name, tensors)
    return Encoded(json.dumps(tree), tensors)


def _encode(value: Any, name: str, tensors: list[torch.Tensor]) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided:
        tensors.append(value.detach())
        return {"tensor": [str(value.dtype), list(value.shape)]}
    kind = type(value).__name__
    if isinstance(value, (list, tuple)) and _COLLECTIONS.get(kind) is type(value):
        return {kind: [_encode(item, f"{name}[{index}]", tensors) for index, item in enumerate(value)]}
    if isinstance(value, dict) and _MAPPINGS.get(kind) is type(value):
        return {kind: [[_key(key, name), _encode(item, f"{name}[{key!r}]", tensors)] for key, item in value.items()]}
    raise ConfigError(
        f"`{name}` is a {type(value).__module__}.{type(value).__qualname__}, which a newcomer cannot get from the "
        "running ranks: it gets dicts, lists, tuples, numbers, texts and dense tensors. Leave it out of the state."
    )


def _key(key: Any, name: str) -> Any:
    if type(key) in (bool, int, float, str):
        return key
    raise ConfigError(f"`{name}` has the key {key!r}. Use texts or numbers, which a newcomer can get.")


def decode(text: str, read: Callable[[torch.Tensor], object]) -> Any:
    """The value that was encoded, with new tensors on the CPU.

    Args:
        text: Text of `Encoded`.
        read: Function that fills one tensor, viewed as bytes, [num_bytes] uint8. It is called for each, in their order.

    Raises:
        ValueError: The text is not what `encode` makes.
    """
    return _decode(json.loads(text), read)


def _decode(tree: Any, read: Callable[[torch.Tensor], object]) -> Any:
    if not isinstance(tree, dict):
        return tree
    [(kind, content)] = tree.items()
    if kind == "tensor":
        dtype, shape = content
        tensor = torch.empty(shape, dtype=_DTYPES[dtype])
        if tensor.numel():
            read(as_bytes(tensor))
        return tensor
    if kind in _COLLECTIONS:
        return _COLLECTIONS[kind](_decode(item, read) for item in content)
    if kind in _MAPPINGS:
        return _MAPPINGS[kind]({key: _decode(item, read) for key, item in content})  # a Counter would count pairs
    raise ValueError(f"`{kind}` is no kind of plain data.")


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor as bytes, [num_bytes] uint8; a copy if it is not contiguous."""
    return tensor.contiguous().view(-1).view(torch.uint8)
