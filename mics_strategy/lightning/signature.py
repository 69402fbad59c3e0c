"""Signatures of the strategies for command lines.

Every field of `ShardConfig` is an argument of a strategy. Tools that build commands from signatures (LightningCLI) see
each of them, with types that text can be parsed into.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable
from typing import Any, TypeVar

from mics_strategy import ShardConfig

if typing.TYPE_CHECKING:
    from mics_strategy.lightning.framework import Framework

T = TypeVar("T")
_OPTIONS = tuple(field.name for field in dataclasses.fields(ShardConfig))


def expand_signature(initialise: Callable[..., None], framework: Framework) -> inspect.Signature:
    """Replace ``**overrides`` by the options of `ShardConfig`, with parseable types.

    Args:
        initialise: Constructor with ``**overrides``.
        framework: Namespace of the plug-in classes.
    """
    plugins = {
        "accelerator": framework.accelerator,
        "cluster_environment": framework.cluster_environment,
        "checkpoint_io": framework.checkpoint_io,
        "precision_plugin": framework.precision,
        "precision": framework.precision,
    }
    parameters = []
    for parameter in inspect.signature(initialise, eval_str=True).parameters.values():
        if parameter.kind is not parameter.VAR_KEYWORD:
            annotation = plugins[parameter.name] | None if parameter.name in plugins else parameter.annotation
            parameters.append(parameter.replace(annotation=_str_last(annotation)))
    options = typing.get_type_hints(ShardConfig)
    parameters += [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_str_last(options[name] | None)
        )
        for name in _OPTIONS
    ]
    return inspect.Signature(parameters)


def make_strategy_class(base: type[T], framework: Framework, name: str) -> type[T]:
    """Make the strategy class of one namespace, with an expanded signature.

    Args:
        base: Mixin for the namespace's `ParallelStrategy`.
        framework: Namespace.
        name: Name of the class in its module, by which it is pickled.
    """
    members = {"framework": framework, "__module__": base.__module__, "__qualname__": name, "__doc__": base.__doc__}
    cls = type(name, (base, framework.parallel_strategy), members)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, *args, **kwargs)

    __init__.__signature__ = expand_signature(base.__init__, framework)  # type: ignore[attr-defined]
    cls.__init__ = __init__  # type: ignore[misc]
    return cls


def _str_last(annotation: Any) -> Any:
    """Move `str` to the end of a union, because any text parses as a string."""
    choices = typing.get_args(annotation)
    if str not in choices or typing.get_origin(annotation) not in (typing.Union, types.UnionType):
        return annotation
    return typing.Union[(*(choice for choice in choices if choice is not str), str)]
