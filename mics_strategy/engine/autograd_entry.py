"""What a script passes to `torch.autograd.backward` and `grad`, and what they raise, when parameters are sharded.

Autograd's graph holds unsharded parameters, and a script knows sharded ones. Torch offers no hook between the two, so
that ``loss.backward(inputs=list(model.parameters()))`` would compute nothing, without an error. Both functions are
therefore wrapped, once, when the first model is sharded; calls that have nothing to do with one pass through.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from mics_strategy.engine.parameter import ShardedParameter
from mics_strategy.engine.saved_versions import resharded_unit
from mics_strategy.errors import LifecycleError

Function = Callable[..., Any]


def wrap_autograd() -> None:
    """Wrap `torch.autograd.backward` and `torch.autograd.grad`, unless they are wrapped already."""
    if not hasattr(torch.autograd.backward, "mics_wraps"):
        torch.autograd.backward = _wrapped(torch.autograd.backward, _backward)
        torch.autograd.grad = _wrapped(torch.autograd.grad, _grad)


def _wrapped(original: Function, call: Callable[..., Any]) -> Function:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(original, *args, **kwargs)
        except RuntimeError as error:
            unit = resharded_unit(error)
            if unit is None:
                raise
            raise LifecycleError(
                f"A backward needed the parameters of unit `{unit}` when they were not unsharded: it entered the unit "
                "other than through the tensors that its forward had returned (through one that a hook or an attribute "
                "kept, say), or several units are recomputed together. Return that tensor from the unit's forward, "
                "keep the model's output in the loss (`+ 0 * output.sum()`), checkpoint one unit at a time, or keep "
                "parameters whole with `params='none'`."
            ) from error

    wrapper.mics_wraps = original  # type: ignore[attr-defined]
    return wrapper


def _backward(original: Function, *args: Any, inputs: Any = None, **kwargs: Any) -> None:
    if inputs is not None:
        given = [inputs] if isinstance(inputs, torch.Tensor | GradientEdge) else list(inputs)
        kwargs["inputs"] = [*given, *_in_graph(given)]
    original(*args, **kwargs)


def _in_graph(inputs: Iterable[Any]) -> list[torch.Tensor]:
    """The unsharded forms of those inputs that are sharded parameters: what a forward has used."""
    sharded = [each for each in inputs if isinstance(each, ShardedParameter)]
    unsharded = [each.mics_owner.unsharded(each.mics_position) for each in sharded]
    return [each for each in unsharded if each is not None]


def _grad(original: Function, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    given = [inputs] if isinstance(inputs, torch.Tensor | GradientEdge) else list(inputs)
    sharded = [each for each in given if isinstance(each, ShardedParameter)]
    if not sharded:
        return original(outputs, inputs, *args, **kwargs)
    if kwargs.get("materialize_grads"):
        raise _no_local_gradient(sharded[0])
    try:
        found = original(outputs, inputs, *args, **kwargs)
    except RuntimeError as error:
        if "appears to not have been used in the graph" not in str(error):
            raise
        raise _no_local_gradient(sharded[0]) from error
    missing = [each for each, gradient in zip(given, found, strict=True) if gradient is None]
    for each in missing:
        if isinstance(each, ShardedParameter):
            raise _no_local_gradient(each)
    return found


def _no_local_gradient(parameter: ShardedParameter) -> LifecycleError:
    return LifecycleError(
        f"`torch.autograd.grad` was asked for the gradient of the sharded parameter `{parameter.mics_name}`, which no "
        "rank has whole. Call `backward()`, on every rank, and read `parameter.grad`."
    )
