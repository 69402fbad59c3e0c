"""Strategies on command lines: names in Lightning's registry, and signatures.

Lightning has no plug-in hook for strategies. The names (`mics`, `mics_zero1`, ...) are added to its registry as soon as
the registry exists: at once if Lightning is already loaded, otherwise right after the import of the module that makes
it. The class behind a name is imported when the name is used.

Every field of `ShardConfig` is an argument of a strategy. Tools that build commands from signatures (LightningCLI) see
each of them, with types that text can be parsed into.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar

if typing.TYPE_CHECKING:
    from mics_strategy.lightning.framework import Framework

T = TypeVar("T")
# Module that makes the registry -> namespace of its classes.
REGISTRIES = {
    "lightning.pytorch.strategies": "lightning.pytorch",
    "pytorch_lightning.strategies": "pytorch_lightning",
    "lightning.fabric.strategies": "lightning.fabric",
    "lightning_fabric.strategies": "lightning_fabric",
}
_FABRIC_NAMESPACES = ("lightning.fabric", "lightning_fabric")
START_METHODS = {"mics_spawn": "spawn", "mics_fork": "fork", "mics_notebook": "fork"}


class LazyStrategy:
    """Entry of Lightning's registry that makes the strategy when its name is used.

    Args:
        namespace: Namespace of the strategy.
    """

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Make a new strategy."""
        from mics_strategy.lightning import fabric_strategy_for, strategy_for

        strategy_class: Any = fabric_strategy_for if self.namespace in _FABRIC_NAMESPACES else strategy_for
        return strategy_class(self.namespace)(*args, **kwargs)


def register() -> None:
    """Register the names in loaded namespaces now, in others on import. Idempotent."""
    for module, namespace in REGISTRIES.items():
        loaded = sys.modules.get(module)
        if loaded is not None:
            register_in(loaded, namespace)
    if not any(isinstance(finder, PostImportHook) for finder in sys.meta_path):
        sys.meta_path.insert(0, PostImportHook())


def register_in(strategies: ModuleType, namespace: str) -> None:
    """Add the missing names to one registry.

    Args:
        strategies: Module with the registry. A module that is still being imported has none and is skipped.
        namespace: Namespace of its classes.
    """
    registry = getattr(strategies, "STRATEGY_REGISTRY" if namespace in _FABRIC_NAMESPACES else "StrategyRegistry", None)
    if registry is None:
        return
    for name, init_params in names():
        if name not in registry:
            description = f"mics_strategy with {', '.join(map(str, init_params.values()))}"
            registry.register(name, LazyStrategy(namespace), description=description, **init_params)


def names() -> Iterator[tuple[str, dict[str, str]]]:
    """Yield every registered name with its arguments."""
    from mics_strategy import ShardConfig  # and torch, once Lightning is imported

    for preset in (*ShardConfig.PRESETS, "auto"):
        name = "mics" if preset == "mics" else f"mics_{preset.replace('-', '_')}"
        yield name, {"config": preset}
    for name, start_method in START_METHODS.items():
        yield name, {"config": "mics", "start_method": start_method}


class PostImportHook:
    """Import hook that registers the names after the import of one of `REGISTRIES`."""

    def __init__(self) -> None:
        self._searched: set[str] = set()  # two such finders would call each other

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec of the other finders, with a loader that also registers."""
        if name not in REGISTRIES or name in self._searched:
            return None
        self._searched.add(name)
        try:
            finders = [
                finder.find_spec for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")
            ]
            spec = next((candidate for find in finders if (candidate := find(name, path, target)) is not None), None)
        finally:
            self._searched.discard(name)
        if spec is not None and spec.loader is not None:
            _wrap_loader(spec.loader, REGISTRIES[name])
        return spec


def _wrap_loader(loader: Any, namespace: str) -> None:
    execute = loader.exec_module

    def execute_and_register(module: ModuleType) -> None:
        execute(module)
        register_in(module, namespace)

    loader.exec_module = execute_and_register


def expand_signature(initialise: Callable[..., None], framework: Framework) -> inspect.Signature:
    """Replace ``**overrides`` by the options of `ShardConfig`, with parseable types.

    Args:
        initialise: Constructor with ``**overrides``.
        framework: Namespace of the plug-in classes.
    """
    from mics_strategy import ShardConfig

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
        for name in (field.name for field in dataclasses.fields(ShardConfig))
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
