"""Update locality: the elements on which the update of one element depends.

An update depends on its own element only (Adam), on its whole tensor (Muon, Adafactor, LAMB), or on all tensors (a
global norm). The first kind can step on rows of tensors, the second on whole tensors assigned to ranks, the third on
neither. The class name does not determine the kind, so an optimizer other than torch's own takes a dry run: a copy of
it and of its class takes a few steps on small tensors, on halves of each tensor, and on half of the tensors. An
optimizer is local if its steps on parts equal its steps on the whole.
"""

from __future__ import annotations

import copy
import enum
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import CellType, CodeType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

_ELEMENTWISE = (ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop)
# Some of these depend on the whole tensor only after more steps than a dry run takes.
_NAMED_FOR_WHOLE_TENSORS = ("muon", "shampoo", "soap", "kfac", "galore")
_NUM_STEPS = 3
_LR = 0.01  # the optimizer's own may be 0 in a warm-up, and then no step would show anything
_TOLERANCE = 1e-3  # relative to the largest change; halves differ by rounding only
_HOOKS = ("step", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")

Selector = Callable[[torch.Tensor, int], torch.Tensor | None]
_log = logging.getLogger(__name__)


class UpdateLocality(enum.IntEnum):
    """Elements on which the update of one element depends.

    Attributes:
        ELEMENTWISE: The element itself.
        PER_TENSOR: All elements of its tensor.
        GLOBAL: All elements of all tensors.
    """

    ELEMENTWISE = 0
    PER_TENSOR = 1
    GLOBAL = 2


def locality_by_group(
    optimizer: Optimizer, device: torch.device, fallback: UpdateLocality = UpdateLocality.ELEMENTWISE
) -> list[UpdateLocality]:
    """Update locality of each parameter group of an optimizer.

    Args:
        optimizer: Optimizer to examine. It is not changed and takes no step.
        device: Device of the dry run.
        fallback: Locality to assume when a dry run fails.

    Returns:
        One locality per parameter group.
    """
    groups = optimizer.param_groups
    if type(optimizer) in _ELEMENTWISE:
        return [UpdateLocality.ELEMENTWISE] * len(groups)
    names = [cls.__name__.lower() for cls in type(optimizer).__mro__]
    minimum = (
        UpdateLocality.PER_TENSOR
        if any(word in name for name in names for word in _NAMED_FOR_WHOLE_TENSORS)
        else UpdateLocality.ELEMENTWISE
    )
    try:
        localities = _dry_run(optimizer, device)
    except Exception as error:  # a foreign optimizer may raise anything; the warning states the assumption
        _log.warning(
            "The dry run of %s on small tensors failed (%s: %s). The locality of its updates is assumed to be %s. If "
            "it needs whole tensors, use `optimizer_layout='tensors'`. If it needs all tensors together, replicate "
            "the optimizer states with `optimizer='none'`.",
            *(type(optimizer).__name__, type(error).__name__, error, fallback.name.lower()),
        )
        localities = [fallback] * len(groups)
    return [max(minimum, locality) for locality in localities]


def _dry_run(optimizer: Optimizer, device: torch.device) -> list[UpdateLocality]:
    """Locality of each group, by a dry run of a copy of the class or of the class.

    Steps of a copy do not change state that the author keeps on the class or in its module.
    """
    cls = type(optimizer)
    try:
        localities = _DryRun(optimizer, device, isolated(cls)).locality_by_group()
    except Exception as error:  # the class cannot be copied, or its dry run fails and fails again below
        _log.info("The dry run of a copy of %s failed (%s), so the class itself is used.", cls.__name__, error)
        localities = _DryRun(optimizer, device, cls).locality_by_group()
    _log.info("%s is not known. A dry run on small tensors determined its update locality.", cls.__name__)
    return localities


class _Deterministic(TorchDispatchMode):
    """Dispatch mode in which every random number is 0.5 or 0.

    An optimizer that adds noise then takes equal steps on parts and on the whole.
    """

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation, and overwrite the numbers that it drew."""
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            for tensor in (leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)):
                tensor.fill_(0.5 if tensor.is_floating_point() else 0)
        return result


@dataclass(slots=True, kw_only=True)
class _Outcome:
    """Result of the steps of one dry run.

    Attributes:
        changes: Change of each proxy's part; None for a proxy without a part in this run.
        numbers: Float options of each parameter group after the steps.
    """

    changes: list[torch.Tensor | None]
    numbers: list[dict[str, float]]


class _DryRun:
    """Dry run of one optimizer on small proxies of its parameters.

    Each group has at most two proxies for each number of dimensions.

    Args:
        optimizer: Optimizer to examine.
        device: Device of the proxies.
        cls: Class of the copy that steps.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device, cls: type[Optimizer]) -> None:
        self._optimizer = optimizer
        self._class = cls
        self._device = device
        self._generator = torch.Generator().manual_seed(0)
        self._proxies: list[tuple[int, torch.Tensor]] = []  # group, parameter
        for index, group in enumerate(optimizer.param_groups):
            num_by_dim: dict[int, int] = defaultdict(int)
            for parameter in group["params"]:
                num_by_dim[parameter.dim()] += 1
                if num_by_dim[parameter.dim()] <= 2:
                    self._proxies.append((index, parameter))
        shapes = [(4, 6, 2, 2, 2, 2)[: parameter.dim()] for _, parameter in self._proxies]
        self._values = [self._random(shape) for shape in shapes]
        self._grads = [[self._random(shape) for shape in shapes] for _ in range(_NUM_STEPS)]

    def _random(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator).to(self._device)

    def locality_by_group(self) -> list[UpdateLocality]:
        """Compare steps on whole tensors with steps on parts; one locality per group."""
        whole = self._step(lambda tensor, _: tensor)
        by_rows = [self._match_by_group(whole, partial(_half_of_tensor, dim=dim)) for dim in (0, -1)]
        by_tensors = self._match_by_group(whole, _half_of_tensors)
        localities = []
        for group in range(len(self._optimizer.param_groups)):
            if not by_tensors[group]:
                localities.append(UpdateLocality.GLOBAL)
            else:
                localities.append(
                    UpdateLocality.ELEMENTWISE
                    if all(matches[group] for matches in by_rows)
                    else UpdateLocality.PER_TENSOR
                )
        return localities

    def _match_by_group(self, whole: _Outcome, select_half: Callable[[int], Selector]) -> list[bool]:
        """Whether, for each group, steps on either half equal steps on everything."""
        matches = [True] * len(self._optimizer.param_groups)
        for half in (0, 1):
            outcome = self._step(select_half(half))
            for position, (group, _) in enumerate(self._proxies):
                change, expected = outcome.changes[position], whole.changes[position]
                if change is not None and expected is not None:
                    part = select_half(half)(expected, position)
                    matches[group] &= part is not None and _changes_match(change, part, expected)
            for group, numbers in enumerate(outcome.numbers):
                matches[group] &= all(
                    _numbers_match(value, whole.numbers[group].get(key)) for key, value in numbers.items()
                )
        return matches

    def _step(self, select: Selector) -> _Outcome:
        """Take the steps on the parts of the proxies that `select` selects."""
        starts = [select(value, position) for position, value in enumerate(self._values)]
        parts = [None if start is None else nn.Parameter(start.clone()) for start in starts]
        stepper = self._copy_optimizer(parts)
        with torch.random.fork_rng([self._device] if self._device.type == "cuda" else []), torch.enable_grad():
            for grads in self._grads:
                for position, (part, grad) in enumerate(zip(parts, grads, strict=True)):
                    piece = select(grad, position)
                    if part is not None and piece is not None:
                        part.grad = piece.clone()
                # Compiling would take longer than the whole dry run.
                with torch.compiler.set_stance("force_eager"), _Deterministic():  # type: ignore[no-untyped-call]
                    type(stepper).step(stepper)
        return _Outcome(
            changes=[
                None if part is None or start is None else part.detach() - start
                for part, start in zip(parts, starts, strict=True)
            ],
            numbers=[
                {key: value for key, value in group.items() if isinstance(value, float)}
                for group in stepper.param_groups
            ],
        )

    def _copy_optimizer(self, parts: list[nn.Parameter | None]) -> Optimizer:
        """A copy of the optimizer with other parameters and no states.

        Optimizers that it wraps are copied in the same way.
        """
        stepper: Optimizer = object.__new__(self._class)
        memo: dict[int, Any] = {id(self._optimizer): stepper, id(self._optimizer.state): defaultdict(dict)}
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                memo[id(parameter)] = nn.Parameter(torch.empty(0, device=self._device))  # without a gradient
        for (_, parameter), part in zip(self._proxies, parts, strict=True):
            if part is not None:
                memo[id(parameter)] = part
        attributes = {name: value for name, value in vars(self._optimizer).items() if name not in _HOOKS}
        stepper.__dict__.update(copy.deepcopy(attributes, memo), **{hook: {} for hook in _HOOKS[1:]})
        for group in stepper.param_groups:
            lr = group.get("lr")
            if isinstance(lr, torch.Tensor):
                lr.fill_(_LR)
            elif isinstance(lr, (int, float)):
                group["lr"] = _LR
        return stepper


def _half_of_tensor(half: int, dim: int) -> Selector:
    """Select one half of every tensor along `dim`, and whole scalars."""
    return lambda tensor, _: tensor.chunk(2, dim)[half] if tensor.dim() else tensor


def _half_of_tensors(half: int) -> Selector:
    """Select every other tensor."""
    return lambda tensor, position: tensor if position % 2 == half else None


def _changes_match(change: torch.Tensor, expected: torch.Tensor, whole: torch.Tensor) -> bool:
    return bool((change - expected).abs().max() <= _TOLERANCE * whole.abs().max())


def _numbers_match(value: float, other: float | None) -> bool:
    return other is not None and abs(value - other) <= _TOLERANCE * max(abs(value), abs(other))


_SKIPPED = ("__dict__", "__weakref__", "__module__")
_PLAIN = (bool, int, float, complex, str, bytes, list, dict, set, bytearray)  # and classes derived from them


def isolated(cls: type[Any]) -> type[Any]:
    """A copy of a class and of those of its bases that torch does not define.

    Args:
        cls: Class of an optimizer.
    """
    return _Copies().copy_class(cls)


class _Copies:
    """Copies of a class and of the classes, functions and names that it uses."""

    def __init__(self) -> None:
        self._classes: dict[type[Any], type[Any]] = {}
        self._functions: dict[FunctionType, FunctionType] = {}
        self._cells: dict[int, CellType] = {}
        self._namespaces: dict[int, dict[str, Any]] = {}

    def copy_class(self, cls: type[Any]) -> type[Any]:
        if cls.__module__ == "builtins" or _is_torch(cls.__module__):
            return cls
        if cls not in self._classes:
            bases = tuple(self.copy_class(base) for base in cls.__bases__)
            metaclass: Any = type(cls)
            copied = self._classes[cls] = metaclass(cls.__name__, bases, {"__module__": cls.__module__})
            for name, value in vars(cls).items():
                if name not in _SKIPPED:
                    setattr(copied, name, self._copy_value(value))
        return self._classes[cls]

    def _copy_value(self, value: Any) -> Any:
        if isinstance(value, FunctionType):
            return self._copy_function(value)
        if isinstance(value, staticmethod | classmethod):
            return type(value)(self._copy_value(value.__func__))
        if isinstance(value, property):
            return property(*map(self._copy_value, (value.fget, value.fset, value.fdel)))
        if isinstance(value, type):
            return self._classes.get(value, value)
        return copy.deepcopy(value) if isinstance(value, _PLAIN) else value

    def _copy_function(self, function: FunctionType) -> FunctionType:
        if function in self._functions:
            return self._functions[function]
        namespace = self._namespace(function)
        closure = tuple(self._copy_cell(cell) for cell in function.__closure__ or ())
        copied = FunctionType(function.__code__, namespace, function.__name__, function.__defaults__, closure or None)
        self._functions[function] = copied
        copied.__kwdefaults__ = function.__kwdefaults__
        copied.__dict__.update(function.__dict__)
        if namespace is not function.__globals__:
            for name in _global_names(function.__code__):
                if name in function.__globals__ and name not in namespace["mics_copied"]:
                    namespace["mics_copied"].add(name)
                    namespace[name] = self._copy_value(function.__globals__[name])
        return copied

    def _namespace(self, function: FunctionType) -> dict[str, Any]:
        """A copy of a module's names, shared by its functions; torch's are not copied."""
        original = function.__globals__
        if _is_torch(original.get("__name__", "")):
            return original
        return self._namespaces.setdefault(id(original), {**original, "mics_copied": set()})

    def _copy_cell(self, cell: CellType) -> CellType:
        if id(cell) not in self._cells:
            copied = self._cells[id(cell)] = CellType()
            try:
                value = cell.cell_contents
            except ValueError:  # empty
                return copied
            copied.cell_contents = self._copy_value(value)
        return self._cells[id(cell)]


def _global_names(code: CodeType) -> Iterator[str]:
    """Module-level names that a function and its nested functions use."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _global_names(constant)


def _is_torch(module: str) -> bool:
    return module.partition(".")[0] == "torch"
