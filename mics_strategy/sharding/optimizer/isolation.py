"""How may a class of optimizers be tried without its author noticing?

A copy of the class takes the steps. Its methods see copies of what they write to: attributes of the class, names of
their module, variables of functions around them. What a step prints, writes to files or sends is still seen.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import CellType, CodeType, FunctionType
from typing import Any

_SKIPPED = ("__dict__", "__weakref__", "__module__")
_PLAIN = (bool, int, float, complex, str, bytes, list, dict, set, bytearray)  # and what derives from them


def isolated(cls: type[Any]) -> type[Any]:
    """A copy of a class and of its bases, as far as torch is not their author.

    Args:
        cls: Of an optimizer.
    """
    return _Copies().of_class(cls)


class _Copies:
    """The copies of classes, functions and namespaces that belong together."""

    def __init__(self) -> None:
        self._classes: dict[type[Any], type[Any]] = {}
        self._functions: dict[FunctionType, FunctionType] = {}
        self._cells: dict[int, CellType] = {}
        self._namespaces: dict[int, dict[str, Any]] = {}

    def of_class(self, cls: type[Any]) -> type[Any]:
        if cls.__module__ == "builtins" or _is_torch(cls.__module__):
            return cls
        if cls not in self._classes:
            bases = tuple(self.of_class(base) for base in cls.__bases__)
            kind: Any = type(cls)
            made = self._classes[cls] = kind(cls.__name__, bases, {"__module__": cls.__module__})
            for name, value in vars(cls).items():
                if name not in _SKIPPED:
                    setattr(made, name, self._of_value(value))
        return self._classes[cls]

    def _of_value(self, value: Any) -> Any:
        if isinstance(value, FunctionType):
            return self._of_function(value)
        if isinstance(value, staticmethod | classmethod):
            return type(value)(self._of_value(value.__func__))
        if isinstance(value, property):
            return property(*map(self._of_value, (value.fget, value.fset, value.fdel)))
        if isinstance(value, type):
            return self._classes.get(value, value)
        return copy.deepcopy(value) if isinstance(value, _PLAIN) else value

    def _of_function(self, function: FunctionType) -> FunctionType:
        if function in self._functions:
            return self._functions[function]
        names = self._namespace(function)
        closure = tuple(self._of_cell(cell) for cell in function.__closure__ or ())
        made = FunctionType(function.__code__, names, function.__name__, function.__defaults__, closure or None)
        self._functions[function] = made
        made.__kwdefaults__ = function.__kwdefaults__
        made.__dict__.update(function.__dict__)
        if names is not function.__globals__:
            for name in _names_in(function.__code__):
                if name in function.__globals__ and name not in names["mics_copied"]:
                    names["mics_copied"].add(name)
                    names[name] = self._of_value(function.__globals__[name])
        return made

    def _namespace(self, function: FunctionType) -> dict[str, Any]:
        """A copy of a module's names, one for all functions of the module; torch's own stays as it is."""
        original = function.__globals__
        if _is_torch(original.get("__name__", "")):
            return original
        return self._namespaces.setdefault(id(original), {**original, "mics_copied": set()})

    def _of_cell(self, cell: CellType) -> CellType:
        if id(cell) not in self._cells:
            made = self._cells[id(cell)] = CellType()
            try:
                value = cell.cell_contents
            except ValueError:  # empty
                return made
            made.cell_contents = self._of_value(value)
        return self._cells[id(cell)]


def _names_in(code: CodeType) -> Iterator[str]:
    """Names of the module that a function uses, and those of functions inside of it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _is_torch(module: str) -> bool:
    return module.partition(".")[0] == "torch"
