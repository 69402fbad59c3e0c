"""Which arguments does the strategy take, and how does a command line know them?

Every field of `ShardConfig` is an argument. Tools that build commands from signatures (LightningCLI) see them one by
one, with types that text can be parsed into.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable
from typing import Any, TypeVar

from mics_strategy import ShardConfig
from mics_strategy.lightning.framework import Framework

T = TypeVar("T")
_OPTIONS = tuple(field.name for field in dataclasses.fields(ShardConfig))


def expand_signature(initialise: Callable[..., None], framework: Framework) -> inspect.Signature:
    """The arguments with the options of `ShardConfig` spelled out, and types that a command line can parse.

    Args:
        initialise: With ``**overrides`` for the options.
        framework: Whose plug-ins it takes.
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


def make_strategy_class(kind: type[T], framework: Framework, name: str) -> type[T]:
    """A strategy class of one namespace, whose arguments are spelled out.

    Args:
        kind: What is mixed into the namespace's `ParallelStrategy`.
        framework: The namespace.
        name: Of the class, by which its module gives it, so that it can be pickled.
    """
    members = {"framework": framework, "__module__": kind.__module__, "__qualname__": name, "__doc__": kind.__doc__}
    cls = type(name, (kind, framework.parallel_strategy), members)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        kind.__init__(self, *args, **kwargs)

    __init__.__signature__ = expand_signature(kind.__init__, framework)  # type: ignore[attr-defined]
    cls.__init__ = __init__  # type: ignore[misc]
    return cls


def _str_last(annotation: Any) -> Any:
    """A union in which `str` is tried last: any argument on a command line would pass for one."""
    choices = typing.get_args(annotation)
    if str not in choices or typing.get_origin(annotation) not in (typing.Union, types.UnionType):
        return annotation
    return typing.Union[(*(choice for choice in choices if choice is not str), str)]
