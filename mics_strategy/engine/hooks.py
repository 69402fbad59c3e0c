"""Entries into the engine: hooks of modules, of autograd, of sharded parameters.

Each unit has two module hooks, and each unsharded parameter one hook. Modules inside of a frozen unit have one more,
on their outputs. Autograd's hooks on the outputs of a unit are registered in every forward. `torch.compile` traces the
forward of a unit and never these hooks.

A sharded parameter calls the engine when its `grad` is read or cleared (`EngineLink`).

Hooks of parameters and the link refer to the engine weakly: hooks of a tensor belong to C++, where Python's garbage
collection does not see the cycle back to the tensor, and a model would never be freed. Hooks of outputs end with their
graph.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import operator
import sys
import weakref
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType
from typing import Any, TypeVar, cast
from weakref import WeakMethod

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from mics_strategy.engine.autograd import UnshardedParameter
from mics_strategy.engine.bucket import Bucket
from mics_strategy.engine.grad_bucket import GradBucket
from mics_strategy.engine.order import ForwardCall
from mics_strategy.engine.parameter import ShardedParameter
from mics_strategy.engine.step import Engine
from mics_strategy.engine.storage_guard import explain_refusal
from mics_strategy.engine.unit import Unit
from mics_strategy.errors import ConfigError, LifecycleError

T = TypeVar("T")
_CHECKPOINT_MODULE = "torch.distributed._composable.checkpoint_activation"
_MAX_DEPTH = 3  # of objects in attributes of objects
_NO_OUTPUT = (type(None), bool, int, float, complex, str, bytes, type, FunctionType, MethodType, nn.Module)


def install(engine: Engine, before_root_forward: WeakMethod[Callable[[], None]]) -> dict[nn.Module, ForwardHooks]:
    """Register the hooks on the units of `engine`.

    Args:
        engine: Engine that the hooks call.
        before_root_forward: Method that is called first when the root's forward begins.

    Returns:
        The hooks around forwards, by module of the unit.
    """
    modules = {unit.module for unit in engine.units}
    forward_hooks = {}
    for unit in engine.units:
        hooks = ForwardHooks(engine, unit, before_root_forward if unit.index == 0 else None)
        hooks.register()
        forward_hooks[unit.module] = hooks
        if unit.slot.is_shared and not unit.trainable_buckets:
            _hook_inner_modules(engine, unit.module, hooks.active_calls, modules)
        for grad_bucket in engine.reducer.grad_buckets.get(unit.index, []):
            for position, parameter in enumerate(grad_bucket.bucket.unsharded.params):
                hook = _gradient_hook(engine, unit, grad_bucket, position)
                nn.Parameter.register_post_accumulate_grad_hook(parameter, hook)
    return forward_hooks


def _gradient_hook(
    engine: Engine, unit: Unit, grad_bucket: GradBucket, position: int
) -> Callable[[UnshardedParameter], None]:
    """The hook of one unsharded parameter."""
    weak_engine, weak_unit, weak_bucket = weakref.ref(engine), weakref.ref(unit), weakref.ref(grad_bucket)

    def hook(parameter: UnshardedParameter) -> None:
        live_engine, live_unit, live_gradient = weak_engine(), weak_unit(), weak_bucket()
        if live_engine is not None and live_unit is not None and live_gradient is not None:
            live_engine.on_grad(live_unit, live_gradient, position, parameter)

    return hook


def _hook_inner_modules(
    engine: Engine, module: nn.Module, active_calls: list[ForwardCall], units: set[nn.Module]
) -> None:
    """Hook the outputs of modules inside a frozen unit, but not inside other units.

    A backward may enter there, at features that a user's hook has kept. No gradient arrives at a frozen parameter that
    would show that the parameters were not unsharded.

    Args:
        engine: Engine that the hooks call.
        module: Module of the unit, or one inside it.
        active_calls: Calls of the unit that have not ended.
        units: Modules of all units.
    """

    def after(_: nn.Module, __: tuple[Any, ...], outputs: Any) -> None:
        if active_calls and torch.is_grad_enabled():
            engine.watch(active_calls[-1], tensors_in(outputs))

    for child in module.children():
        if child not in units:
            child.register_forward_hook(cast("Any", torch.compiler.disable)(after))
            _hook_inner_modules(engine, child, active_calls, units)


class ForwardHooks:
    """The hooks around the forward of one unit.

    Args:
        engine: Engine that they call.
        unit: The unit.
        first: Method that is called first; None for nothing.

    Attributes:
        active_calls: Calls that have not ended.
    """

    def __init__(self, engine: Engine, unit: Unit, first: WeakMethod[Callable[[], None]] | None) -> None:
        self.active_calls: list[ForwardCall] = []
        self._engine = engine
        self._unit = unit
        self._first = first
        self._compute_dtype = next((b.spec.param_dtype for b in unit.buckets if b.needs_cast), None)
        disable: Any = torch.compiler.disable
        self._before, self._after = disable(self._enter), disable(self._leave)

    def register(self) -> None:
        """Register them on the module, around all other hooks, also later ones.

        So hooks of users see unsharded parameters. Only torch's composable `checkpoint` opens its region outside of
        them: the recomputation runs them as well.
        """
        module = self._unit.module
        before = module.register_forward_pre_hook(self._before, with_kwargs=True)
        after = module.register_forward_hook(self._after, always_call=True)

        def order() -> None:
            hooks: Any = module._forward_pre_hooks
            hooks.move_to_end(before.id, last=False)
            for hook_id in [i for i, hook in hooks.items() if getattr(hook, "__module__", "") == _CHECKPOINT_MODULE]:
                hooks.move_to_end(hook_id, last=False)
            cast("Any", module._forward_hooks).move_to_end(after.id)

        def then_order(register: Callable[..., T]) -> Callable[..., T]:
            @functools.wraps(register)
            def register_inside(*args: Any, **kwargs: Any) -> T:
                handle = register(*args, **kwargs)
                order()
                return handle

            return register_inside

        order()
        for name in ("register_forward_pre_hook", "register_forward_hook"):
            object.__setattr__(module, name, then_order(getattr(module, name)))

    def around(self, method: Callable[..., T]) -> Callable[..., T]:
        """A function that runs `method` as a forward of the unit, unless one is running."""

        @functools.wraps(method)
        def run_in_forward(*args: Any, **kwargs: Any) -> T:
            if self.active_calls:
                return method(*args, **kwargs)
            args, kwargs = self._before(self._unit.module, args, kwargs) or (args, kwargs)
            outputs: Any = None
            try:
                outputs = method(*args, **kwargs)
            finally:
                copies = self._after(self._unit.module, args, outputs)
            return cast("T", outputs if copies is None else copies)

        return run_in_forward

    def _enter(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Begin a forward; returns its arguments in the compute dtype, or None."""
        first = None if self._first is None else self._first()
        if first is not None:
            first()
        self.active_calls.append(self._engine.pre_forward(self._unit))
        dtype = self._compute_dtype
        if dtype is None or torch.is_autocast_enabled(self._unit.buckets[0].master_shard.device.type):
            return None
        return cast_floating(args, dtype), cast_floating(kwargs, dtype)

    def _leave(self, _: nn.Module, __: tuple[Any, ...], outputs: Any) -> Any:
        """End a forward, which may have raised; returns other outputs, or None."""
        if not self.active_calls:
            return None
        _add_explanation(sys.exc_info()[1])
        tensors = list(tensors_in(outputs))
        returns_slot_views = any(map(self._unit.lends, tensors))
        if returns_slot_views:
            outputs = _clone_slot_views(self._unit, outputs)
            tensors = list(tensors_in(outputs))
        self._engine.post_forward(self.active_calls.pop(), tensors)
        return outputs if returns_slot_views else None


def register_forward_method(
    model: nn.Module, forward_hooks: dict[nn.Module, ForwardHooks], module: nn.Module, name: str
) -> None:
    """See `Sharded.register_forward_method`.

    The method runs in a forward of the unit that holds the module's parameters, inside of one of the root.
    """
    path = next((path for path, inner in model.named_modules() if inner is module), None)
    method = getattr(module, name, None)
    if path is None or method is None:
        raise ConfigError(
            f"`register_forward_method` got `{name}` of a {type(module).__name__}, which "
            f"{'is no module of this sharded model' if path is None else 'has no such method'}. Pass the model or a "
            "module inside of it, and the name of one of its methods."
        )
    outward = [model.get_submodule(path.rsplit(".", depth)[0]) for depth in range(path.count(".") + 1)]
    owner = next((inner for inner in outward if inner in forward_hooks), model)
    for unit_module in dict.fromkeys((owner, model)):
        method = forward_hooks[unit_module].around(method)
    object.__setattr__(module, name, method)


def _add_explanation(error: BaseException | None) -> None:
    """Add to a forward's error what to do, where a parameter was read too late."""
    explanation = explain_refusal(error)
    if error is not None and explanation is not None and explanation not in getattr(error, "__notes__", ()):
        error.add_note(explanation)


def _clone_slot_views(unit: Unit, outputs: T) -> T:
    """The outputs of a unit, with copies of tensors that are in its slot.

    Tensors in the slot are parameters and their views.

    Other units overwrite the slot. Autograd, which saves the outputs for backwards of their users, does not notice.

    Raises:
        LifecycleError: Such a tensor is in a container that cannot be copied.
    """

    def clone_slot_view(leaf: object) -> object:
        return leaf.clone() if isinstance(leaf, torch.Tensor) and unit.lends(leaf) else leaf

    copies = cast("T", tree_map(clone_slot_view, outputs))
    if any(map(unit.lends, tensors_in(copies))):
        raise LifecycleError(
            f"Unit `{unit.name}` returns a parameter of its own, or a view of one, inside a {type(outputs).__name__}. "
            "Other units will overwrite it. Return a copy (`.clone()`), or return it in a tuple, list or dict."
        )
    return copies


def cast_floating(tree: T, dtype: torch.dtype) -> T:
    """A copy of `tree` with its floating-point tensors in `dtype`.

    A dataclass without such tensors is not copied: a cache counts on its identity.
    """

    def cast_leaf(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.to(dtype) if leaf.is_floating_point() else leaf
        if isinstance(leaf, type) or not dataclasses.is_dataclass(leaf):
            return leaf
        fields = {field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf)}
        leaves, structure = tree_flatten(fields)
        cast_leaves = [cast_leaf(inner) for inner in leaves]
        if all(map(operator.is_, leaves, cast_leaves)):
            return leaf
        copied = copy.copy(leaf)
        for name, value in tree_unflatten(cast_leaves, structure).items():
            object.__setattr__(copied, name, value)  # also of a frozen one
        return copied

    return cast("T", tree_map(cast_leaf, tree))


def tensors_in(tree: object) -> Iterator[torch.Tensor]:
    """The tensors in nested containers and in attributes of other objects.

    Containers are tuples, lists, dicts and those registered with torch.
    """
    if isinstance(tree, torch.Tensor):  # the usual case
        yield tree
        return
    pending, seen = [(tree, 0)], set[int]()
    while pending:
        subtree, depth = pending.pop()
        for leaf in tree_leaves(subtree):
            if isinstance(leaf, torch.Tensor):
                yield leaf
            elif depth < _MAX_DEPTH and id(leaf) not in seen and not isinstance(leaf, _NO_OUTPUT):
                seen.add(id(leaf))
                pending.append((_attributes(leaf), depth + 1))


def _attributes(instance: object) -> list[object]:
    slots = [name for kind in type(instance).__mro__ for name in getattr(kind, "__slots__", ())]
    values = [getattr(instance, name, None) for name in slots if name not in ("__dict__", "__weakref__")]
    return [*values, *getattr(instance, "__dict__", {}).values()]


class EngineLink:
    """The link from the sharded parameters of one bucket to the engine.

    Args:
        engine: Engine of the model.
        bucket: Bucket of the parameters.
        grad_bucket: Gradient of the bucket; None where it is frozen.
    """

    def __init__(self, engine: Engine, bucket: Bucket, grad_bucket: GradBucket | None) -> None:
        self._engine = weakref.ref(engine)
        self._bucket = weakref.ref(bucket)
        self._grad_bucket = None if grad_bucket is None else weakref.ref(grad_bucket)

    def finish_gradients(self) -> None:
        """See `parameter.GradientLink`."""
        engine = self._engine()
        if engine is not None:
            engine.finish_gradients()

    def clear_gradient(self, position: int) -> None:
        """See `parameter.GradientLink`."""
        engine, grad_bucket = self._engine(), None if self._grad_bucket is None else self._grad_bucket()
        if engine is not None and grad_bucket is not None:
            is_kept = grad_bucket.is_kept(position)
            if is_kept:
                engine.finish_gradients()  # a script keeps all that was added to it
            engine.reducer.zero_grad(grad_bucket, position, is_kept=is_kept)

    def settle_gradient(self, position: int) -> None:
        """See `parameter.GradientLink`."""
        grad_bucket = None if self._grad_bucket is None else self._grad_bucket()
        if grad_bucket is not None:
            grad_bucket.feedback.settle(position)

    def keep_writes(self) -> None:
        """Bring to the shards what a script has written into unsharded parameters, before a shard is read."""
        bucket = self._bucket()
        if bucket is not None:
            bucket.keep_late_writes()

    def unsharded(self, position: int) -> nn.Parameter | None:
        """See `parameter.GradientLink`."""
        bucket = self._bucket()
        return None if bucket is None else bucket.unsharded.params[position]

    def sharded(self, position: int) -> ShardedParameter | None:
        """See `parameter.GradientLink`."""
        bucket = self._bucket()
        return None if bucket is None else bucket.sharded_params[position]

    def belongs_to(self, engine: Engine) -> bool:
        """Whether the parameters belong to `engine`."""
        return self._engine() is engine
