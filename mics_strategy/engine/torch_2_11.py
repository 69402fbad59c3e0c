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
Run = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def run_function(cls: type[DTensor], run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function of torch on a DTensor of our own class.

    The backward of an operation with a plain tensor cannot be followed there, so it gets differentiable whole tensors,
    unless it writes to one of the class. `where` makes a plain tensor of a number.

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
        has_plain = func.__name__ == "where" or any(not isinstance(tensor, DTensor) for tensor in tensors)
        tracks = torch.is_grad_enabled()
        if has_plain and tracks and func not in _BACKWARDS and any(tensor.requires_grad for tensor in tensors):
            if not (_IN_PLACE.fullmatch(func.__name__) and isinstance(args[0], cls)):
                args, kwargs = tree_map_only(cls, cls.full_tensor, (args, kwargs))
                return func(*args, **kwargs)
            tracks = args[0].requires_grad  # torch refuses to write to a parameter; a gradient gets the values alone
        with torch.set_grad_enabled(tracks), _Operations(cls, run):
            return func(*args, **kwargs)


class _Operations(TorchDispatchMode):
    """Passes operations with a DTensor of a class to a function."""

    def __init__(self, cls: type[DTensor], run: Run) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cls = cls
        self._run = run

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        is_ours = any(isinstance(leaf, self._cls) for leaf in tree_leaves((args, kwargs)))
        if not is_ours:
            return func(*args, **(kwargs or {}))
        with self:  # which torch leaves for the call; what an operation is made of comes here, too
            return self._run(func, args, kwargs or {})
