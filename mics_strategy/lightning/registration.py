"""How do the names `mics`, `mics_zero1`, ... get into Lightning's registry?

Lightning has no plug-in hook for strategies, so the names are put into its registry as soon as that exists: at once
when Lightning is loaded already, else right after the module that makes the registry was imported. The class behind a
name is imported when the name is used.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# The module that makes the registry -> the namespace of its classes.
REGISTRIES = {
    "lightning.pytorch.strategies": "lightning.pytorch",
    "pytorch_lightning.strategies": "pytorch_lightning",
    "lightning.fabric.strategies": "lightning.fabric",
    "lightning_fabric.strategies": "lightning_fabric",
}
_OF_FABRIC = ("lightning.fabric", "lightning_fabric")
START_METHODS = {"mics_spawn": "spawn", "mics_fork": "fork", "mics_notebook": "fork"}


class LazyStrategy:
    """Stands in Lightning's registry and makes the strategy when the name is used.

    Args:
        namespace: Whose strategy.
    """

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """A new strategy."""
        from mics_strategy.lightning import fabric_strategy_for, strategy_for

        strategy_class: Any = fabric_strategy_for if self.namespace in _OF_FABRIC else strategy_for
        return strategy_class(self.namespace)(*args, **kwargs)


def register() -> None:
    """Register the names in every namespace that is loaded, and in those that will be. Idempotent."""
    for module, namespace in REGISTRIES.items():
        loaded = sys.modules.get(module)
        if loaded is not None:
            register_in(loaded, namespace)
    if not any(isinstance(finder, PostImportHook) for finder in sys.meta_path):
        sys.meta_path.insert(0, PostImportHook())


def register_in(strategies: ModuleType, namespace: str) -> None:
    """Add the names to one registry, as far as they are not there.

    Args:
        strategies: The module with the registry; one that is still being imported has none and is left alone.
        namespace: Of its classes.
    """
    registry = getattr(strategies, "STRATEGY_REGISTRY" if namespace in _OF_FABRIC else "StrategyRegistry", None)
    if registry is None:
        return
    for name, init_params in names():
        if name not in registry:
            description = f"mics_strategy with {', '.join(map(str, init_params.values()))}"
            registry.register(name, LazyStrategy(namespace), description=description, **init_params)


def names() -> Iterator[tuple[str, dict[str, str]]]:
    """Every registered name with the arguments that it stands for."""
    from mics_strategy import ShardConfig

    for preset in (*ShardConfig.PRESETS, "auto"):
        name = "mics" if preset == "mics" else f"mics_{preset.replace('-', '_')}"
        yield name, {"config": preset}
    for name, start_method in START_METHODS.items():
        yield name, {"config": "mics", "start_method": start_method}


class PostImportHook:
    """A finder that finds nothing itself and acts when one of `REGISTRIES` was imported."""

    def __init__(self) -> None:
        self._searched: set[str] = set()  # two such finders ask each other

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The spec that the other finders give, with a loader that also registers."""
        if name not in REGISTRIES or name in self._searched:
            return None
        self._searched.add(name)
        try:
            others = [
                finder.find_spec for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")
            ]
            spec = next((found for find in others if (found := find(name, path, target)) is not None), None)
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
