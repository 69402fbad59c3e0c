"""Operations of DTensors of our own class on torch 2.11.

torch 2.11 runs the operations of any DTensor by itself; torch 2.12 passes them to ``__torch_dispatch__`` of the class.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from typing_extensions import override

_VIEWS = ("T", "mT", "H", "mH", "real", "imag")  # attributes
_BACKWARDS = (torch.autograd.backward, torch.autograd.grad, torch.Tensor.backward)  # nothing is computed of inputs
_IN_PLACE = re.compile(r"\w*[a-z\d]_|__i\w+__|__setitem__")  # names of functions that write to their first argument
_ON_WHOLE = ("where", "pad", "constant_pad_nd")  # make a plain tensor, of a number or in their backward
Run = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def run_function(cls: type[DTensor], run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function of torch on a DTensor of our own class.

    The backward of an operation with a plain tensor cannot be followed there, so it gets differentiable whole tensors,
    unless it writes to one of the class.

    Args:
        cls: The class.
        run: Function that runs an operation of which at least one argument is of the class.
        func: The function.
        args: Its positional arguments.
        kwargs: Its other arguments.
    """
    with torch._C.DisableTorchFunctionSubclass():
        if func.__name__ in ("__get__", "__set__") and func.__self__.__name__ not in _VIEWS:  # of another attribute
            return func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        has_plain = func.__name__ in _ON_WHOLE or any(not isinstance(tensor, DTensor) for tensor in tensors)
        tracks = torch.is_grad_enabled()
        has_gradient = tracks and func not in _BACKWARDS and any(tensor.requires_grad for tensor in tensors)
        is_written = bool(_IN_PLACE.fullmatch(func.__name__)) and isinstance(args[0], cls)
        if has_gradient and is_written and has_plain:
            tracks = args[0].requires_grad  # torch refuses to write to a parameter; a gradient gets the values alone
        elif has_gradient and has_plain:
            return _on_whole(cls, func, args, kwargs)
        try:
            refuses_plain = has_gradient and not is_written
            with torch.set_grad_enabled(tracks), _Operations(cls, run, refuses_plain=refuses_plain):
                return func(*args, **kwargs)
        except _FoundPlainTensor:  # an index, a count
            return _on_whole(cls, func, args, kwargs)


def _on_whole(cls: type[DTensor], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    args, kwargs = tree_map_only(cls, cls.full_tensor, (args, kwargs))
    return func(*args, **kwargs)


class _FoundPlainTensor(Exception):
    """A function, whose gradients are to be computed, has made a plain tensor and combined it with one of the class."""


class _Operations(TorchDispatchMode):
    """Passes operations with a DTensor of a class to a function.

    Args:
        cls: The class.
        run: The function.
        refuses_plain: Whether to raise `_FoundPlainTensor`.
    """

    def __init__(self, cls: type[DTensor], run: Run, *, refuses_plain: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cls = cls
        self._run = run
        self._refuses_plain = refuses_plain

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not any(isinstance(tensor, self._cls) for tensor in tensors):
            return func(*args, **(kwargs or {}))
        if self._refuses_plain and any(not isinstance(tensor, DTensor) for tensor in tensors):
            raise _FoundPlainTensor
        with self:  # which torch leaves for the call; what an operation is made of comes here, too
            return self._run(func, args, kwargs or {})
