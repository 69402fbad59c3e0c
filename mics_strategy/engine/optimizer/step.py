"""Steps of any torch optimizer on shards, and the norm of their gradients.

Only the body of ``step`` sees plain local tensors (see `local_swap`). Everywhere else an optimizer holds sharded
parameters: clipping, gradient scalers, state dicts, schedulers and step hooks work on DTensors. Four hooks enclose the
body, so every call of ``step`` is covered, for optimizers built after `shard()` and for adopted ones. torch runs global
hooks, the optimizer's own hooks, the body, its own hooks and global hooks, in this order:

    _before_body   first global pre-hook   checks; shows sharded parameters to the other hooks; adds the next two
    _swap_in       last own pre-hook       swaps in, or after the closure if there is one
    _swap_out      first own post-hook     swaps out; records the step
    _after_body    last global post-hook   swaps in again for the rest of an enclosing body

The body of a subclass may call the step of its parent, which runs all hooks again. That is no step of its own. Tensors
stay local there, unless other hooks see them.

An optimizer that steps another one on the same parameters (Lookahead, SAM) has no local tensors: its body computes with
DTensors, and the other one's step swaps.

The norm takes one pass over this rank's shards and one all-reduce over the ranks with different shards. Replicas are
left out, because they would count every shard again.
"""

from __future__ import annotations

import functools
import math
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextlib import ExitStack
from itertools import chain
from typing import Any, cast

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from mics_strategy.comm.process_groups import ProcessGroups
from mics_strategy.engine.optimizer.kinds import has_states_elsewhere, stepped_by
from mics_strategy.engine.optimizer.local_swap import LocalParamSwap, check_param_groups_only, deref
from mics_strategy.engine.optimizer.target import OptimizerTarget
from mics_strategy.engine.origins import shortened
from mics_strategy.engine.parameter import ShardedParameter
from mics_strategy.engine.tensor_memory import count_writes
from mics_strategy.errors import ConfigError


class StepHooks:
    """Hooks around the optimizer steps of one sharded model, while this object lives.

    Args:
        target: Engine's side of the steps, referenced weakly.
    """

    def __init__(self, target: OptimizerTarget) -> None:
        self._target = weakref.ref(target)
        self._swaps: weakref.WeakKeyDictionary[Optimizer, LocalParamSwap] = weakref.WeakKeyDictionary()
        _all_models[self] = None

    @property
    def optimizers(self) -> list[Optimizer]:
        """Optimizers that have stepped on this model, were adopted or loaded."""
        return list(self._swaps)

    def swap_of(self, optimizer: Optimizer) -> LocalParamSwap:
        """The swap of `optimizer` on this model, with owners assigned to whole tensors."""
        swap = self._swaps.get(optimizer)
        if swap is None:
            swap = self._swaps[optimizer] = LocalParamSwap(optimizer, deref(self._target))
        swap.prepare()
        return swap

    def show_sharded(self, optimizer: Optimizer, is_nested: bool) -> None:
        """Swap out of an optimizer, so that hooks see sharded parameters. Collective.

        Its step has raised, or its body calls the step of its parent class.

        As in torch, updates made before an error count.

        Raises:
            ConfigError: Gradients that the body has changed are on the owners of whole tensors.
        """
        swap = self._swaps.get(optimizer)
        if swap is None:
            return
        if is_nested and swap.exchanges:
            raise ConfigError(
                f"`{type(optimizer).__name__}.step` calls the step of its parent class, which runs the hooks of steps "
                "again. They need gradients that are on the owners of whole tensors. Remove the step hooks and act "
                "before or after `step()`, or replicate all states with the preset 'ddp'."
            )
        swap.sync_owned()

    def show_local(self, optimizer: Optimizer) -> None:
        """Swap into an optimizer whose step goes on. Collective."""
        swap = self._swaps.get(optimizer)
        if swap is not None:
            swap.swap_in()

    def check(self, optimizer: Optimizer) -> None:
        """Raise for an optimizer that still holds plain parameters from before `shard()`."""
        target = self._target()
        if target is not None:
            _check_not_stale(optimizer, target.sharded_param_for)

    def check_steps_others(self, optimizer: Optimizer) -> None:
        """Raise for an optimizer that steps another one, if this model does not support it."""
        target = self._target()
        if target is not None:
            target.check_steps_others(optimizer)

    def reset_after_error(self) -> None:
        """Swap out of optimizers whose step raised. Collective. Called before new gradients are accumulated."""
        for swap in list(self._swaps.values()):
            swap.sync_owned()

    def before(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], LocalParamSwap | None]:
        """Prepare a step of `optimizer`.

        Args:
            optimizer: Optimizer that is about to step.
            args: Positional arguments of its `step`, the optimizer first.
            kwargs: Keyword arguments of its `step`.

        Returns:
            The arguments for `step`, and the swap to make now. The swap is None if the optimizer has no parameter of
            this model, or if a closure in the arguments, wrapped here, makes it.
        """
        target = self._target()
        if target is None or not any(target.owns(p) for group in optimizer.param_groups for p in group["params"]):
            return args, kwargs, None
        swap = self.swap_of(optimizer)
        target.engine.reducer.groups.record_options(shortened(_options(optimizer)))
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer itself
        recorder = target.engine.ranges.recorder
        if recorder is not None:
            recorder.compute.begin_step(has_closure=closure is not None)
        if closure is None:
            return args, kwargs, swap
        wrapped = _wrap_closure(swap, target, closure)
        if len(args) > 1:
            return (args[0], wrapped, *args[2:]), kwargs, None
        return args, {**kwargs, "closure": wrapped}, None

    def after(self, optimizer: Optimizer) -> None:
        """Swap out of the optimizer, and record the step in the engine. Collective."""
        target, swap = self._target(), self._swaps.get(optimizer)
        if target is None or swap is None:
            return
        swap.sync_owned()
        parameters = [p for group in optimizer.param_groups for p in group["params"] if target.owns(p)]
        is_first = target.engine.reducer.window.num_backwards > 0  # of the optimizers that share a step
        target.post_step(parameters, swap.exchanges)
        recorder = target.engine.ranges.recorder
        if recorder is not None:
            recorder.end_optimizer(is_first=is_first)


def _options(optimizer: Optimizer) -> str:
    """The numbers of an optimizer's groups, which all ranks have in common. Of floats the last digits may differ."""
    groups = [{k: v for k, v in group.items() if isinstance(v, (int, float))} for group in optimizer.param_groups]
    texts = [", ".join(f"{key} {value:.9g}" for key, value in numbers.items()) for numbers in groups]
    return f"step of {type(optimizer).__name__} with {'; '.join(texts)}"


def _wrap_closure(swap: LocalParamSwap, target: OptimizerTarget, closure: Callable[[], Any]) -> Callable[[], Any]:
    def closure_on_sharded() -> Any:
        swap.sync_owned()
        result = closure()
        target.engine.finish_gradients()
        target.engine.settle_params()
        swap.swap_in()
        return result

    return closure_on_sharded


_all_models: weakref.WeakKeyDictionary[StepHooks, None] = weakref.WeakKeyDictionary()  # in the order of shard()


_OWN_KEY = -1  # of the hooks that every stepped optimizer is given; torch counts its keys from 0


def _before_body(optimizer: Optimizer, *_: Any) -> None:
    is_nested = _is_nested(optimizer)
    models = list(_all_models)
    if not is_nested or _has_other_hooks(optimizer):
        for model in reversed(models):  # random generators are restored in reverse order
            model.show_sharded(optimizer, is_nested)
    if is_nested:
        return
    kinds = set(chain.from_iterable(map(type, group["params"]) for group in optimizer.param_groups))
    if kinds != {ShardedParameter}:
        for model in models:
            model.check(optimizer)
        if ShardedParameter not in kinds:
            return
        _check_no_foreign_params(optimizer)
    check_param_groups_only(optimizer)
    if stepped_by(optimizer):
        for model in models:
            model.check_steps_others(optimizer)
    else:
        pre_hooks = cast("OrderedDict[int, Any]", optimizer._optimizer_step_pre_hooks)
        post_hooks = cast("OrderedDict[int, Any]", optimizer._optimizer_step_post_hooks)
        pre_hooks[_OWN_KEY], post_hooks[_OWN_KEY] = _swap_in, _swap_out
        pre_hooks.move_to_end(_OWN_KEY)
        post_hooks.move_to_end(_OWN_KEY, last=False)


def _swap_in(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    for model in list(_all_models):
        args, kwargs, swap = model.before(optimizer, args, kwargs)
        if swap is not None:
            if not swap.target.engine.finish_gradients():
                swap.target.engine.settle_params()
            swap.swap_in()
    return args, kwargs


def _swap_out(optimizer: Optimizer, *_: Any) -> None:
    is_nested = _is_nested(optimizer)
    if is_nested and not _has_other_hooks(optimizer):
        return
    if is_nested:  # hooks registered in the meantime must see sharded parameters
        _global_hooks(_AFTER_BODY).move_to_end(_AFTER_BODY.id)
    for model in reversed(list(_all_models)):
        model.show_sharded(optimizer, is_nested) if is_nested else model.after(optimizer)


def _after_body(optimizer: Optimizer, *_: Any) -> None:
    if _has_other_hooks(optimizer) and _is_nested(optimizer):
        for model in list(_all_models):
            model.show_local(optimizer)


def _global_hooks(handle: RemovableHandle) -> OrderedDict[int, Any]:
    """The dict of global hooks in which `handle` is registered."""
    return cast("OrderedDict[int, Any]", handle.hooks_dict_ref())


def _has_other_hooks(optimizer: Optimizer) -> bool:
    """Whether a step of `optimizer`, which has our own hooks, runs any others."""
    return any(
        len(hooks) > 1
        for hooks in (
            optimizer._optimizer_step_pre_hooks,
            optimizer._optimizer_step_post_hooks,
            _global_hooks(_BEFORE_BODY),
            _global_hooks(_AFTER_BODY),
        )
    )


def _check_no_foreign_params(optimizer: Optimizer) -> None:
    """Raise for an optimizer with sharded parameters that also holds plain ones.

    Gradients of plain parameters are not synchronized, so the plain parameters would diverge between ranks.

    Args:
        optimizer: Optimizer that is about to step.

    Raises:
        ConfigError: A trainable parameter belongs to no sharded model. The error names the first one.
    """
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if parameter.requires_grad and not isinstance(parameter, ShardedParameter):
                raise ConfigError(
                    f"Parameter {position} of group {index} of {type(optimizer).__name__}, shape "
                    f"{tuple(parameter.shape)}, belongs to no sharded model. Its gradient would not be synchronized. "
                    "Make it a parameter of the model before `shard()`, or give it its own optimizer."
                )


def _check_not_stale(
    optimizer: Optimizer, sharded_param_for: Callable[[torch.Tensor], ShardedParameter | None]
) -> None:
    """Raise for an optimizer that holds plain parameters from before `shard()`.

    The model no longer uses them, so steps on them would train nothing and raise no error.

    Args:
        optimizer: Optimizer that is about to step.
        sharded_param_for: Function from a plain parameter to the sharded one that replaced it, or None.

    Raises:
        ConfigError: A parameter was replaced. The error names the first one.
    """
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        sharded = None if isinstance(parameter, ShardedParameter) else sharded_param_for(parameter)
        if sharded is not None:
            raise ConfigError(
                f"{type(optimizer).__name__} was built before `shard()` and still holds the plain "
                f"`{sharded.mics_name}`. The model no longer uses that parameter. Call `optimizer = "
                "sharded.adopt(optimizer)`, or build the optimizer after `shard()`."
            )


def _is_nested(optimizer: Optimizer) -> bool:
    """Whether the same optimizer's step called this one.

    A subclass may call the step of its parent, which also has hooks.
    """
    step_frame = sys._getframe(2)  # torch's wrapper of `step`, which calls the hooks
    caller_frame = step_frame.f_back
    while caller_frame is not None:
        if caller_frame.f_code is step_frame.f_code and caller_frame.f_locals.get("self") is optimizer:
            return True
        caller_frame = caller_frame.f_back
    return False


# Registered once for all models: torch iterates over its hooks while one runs, so none may be added or removed later.
_BEFORE_BODY = register_optimizer_step_pre_hook(_before_body)
_AFTER_BODY = register_optimizer_step_post_hook(_after_body)
_global_hooks(_BEFORE_BODY).move_to_end(_BEFORE_BODY.id, last=False)


def adopt(optimizer: Optimizer, target: OptimizerTarget, hooks: StepHooks) -> None:
    """Replace plain parameters of an optimizer by sharded ones, and shard its states.

    Args:
        optimizer: Optimizer built before `shard()`. Changed in place, or not at all if this raises.
        target: Engine's side of the optimizer's steps.
        hooks: Step hooks of the model.

    Raises:
        ConfigError: The optimizer holds a parameter of another model, needs more than the tensors on a rank, or steps
            another optimizer.
    """
    check_param_groups_only(optimizer)
    if has_states_elsewhere(optimizer):
        raise ConfigError(
            f"{type(optimizer).__name__} steps another optimizer, which holds states of its own. Build both after "
            "`shard()`."
        )
    sharded_by_plain: dict[torch.Tensor, ShardedParameter] = {}
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            sharded = target.sharded_param_for(parameter)
            if sharded is not None:
                sharded_by_plain[parameter] = sharded
            elif not target.owns(parameter):
                raise ConfigError(
                    f"Parameter {position} of group {index} of {type(optimizer).__name__}, shape "
                    f"{tuple(parameter.shape)}, is not a parameter of the sharded model. Build one optimizer per "
                    "sharded model, with parameters of that model only."
                )
    states: dict[torch.Tensor, Any] = {}
    with ExitStack() as undo:  # restores the groups if anything below raises
        for group in optimizer.param_groups:
            undo.callback(group.__setitem__, "params", group["params"])
            group["params"] = [sharded_by_plain.get(parameter, parameter) for parameter in group["params"]]
        swap = hooks.swap_of(optimizer)
        for plain, sharded in sharded_by_plain.items():
            state, owner = optimizer.state.get(plain), swap.owner_of(sharded)
            if state is not None and owner is None:
                states[sharded] = {key: _shard_like(value, sharded) for key, value in state.items()}
            elif state is not None and owner == sharded.mics_index:
                states[sharded] = {key: _to_device_of(value, sharded) for key, value in state.items()}
        undo.pop_all()
    for plain in sharded_by_plain:
        optimizer.state.pop(plain, None)
    optimizer.state.update(states)


def _shard_like(value: Any, sharded: ShardedParameter) -> Any:
    if not isinstance(value, torch.Tensor) or value.shape != sharded.shape or not value.dim():
        return value
    if type(value) is not torch.Tensor:
        raise ConfigError(
            f"A state of `{sharded.mics_name}` is a {type(value).__name__}, which cannot be sharded. Call `adopt` "
            "before the optimizer's first step."
        )
    piece = sharded.mics_slice.narrow(value.detach(), sharded.mics_index).to(sharded.device, copy=True)
    return sharded.like_self(piece)


def _to_device_of(value: Any, sharded: ShardedParameter) -> Any:
    return value.to(sharded.device) if isinstance(value, torch.Tensor) and value.dim() else value


def total_norm(parameters: list[ShardedParameter], groups: ProcessGroups, norm_type: float) -> torch.Tensor:
    """Norm of all gradients together, a scalar equal on all ranks. Collective.

    It is computed in fp32, or in fp64 if a parameter has that dtype.

    Args:
        parameters: Parameters whose gradients are final. One without a gradient counts as 0.
        groups: Process groups of the model.
        norm_type: Order of the p-norm, a positive number or infinity.

    Raises:
        ConfigError: `norm_type` is not positive.

    Cost:
        One all-reduce of one number over the ranks with different shards.
    """
    if not norm_type > 0:
        raise ConfigError(f"`norm_type={norm_type}` is not a norm. Use a positive number or `math.inf`.")
    grads = []
    for parameter in parameters:
        grad = parameter.raw_grad
        is_repeated = parameter.mics_slice.dim is None and parameter.mics_index > 0
        if grad is not None and not is_repeated:
            grads.append(getattr(grad, "_local_tensor", grad))
    grads = [grad for grad in grads if grad.numel()]
    dtype = functools.reduce(torch.promote_types, (parameter.dtype for parameter in parameters), torch.float32)
    norms = torch._foreach_norm(grads, norm_type, dtype) if grads else []  # else a norm has the gradient's dtype
    stacked = torch.stack([*norms]) if norms else torch.zeros(1, dtype=dtype, device=groups.device)
    if math.isinf(norm_type):
        total = stacked.max()
        return groups.reduce_over_shards(total, is_max=True)
    return groups.reduce_over_shards(stacked.pow(norm_type).sum(), is_max=False).pow(1.0 / norm_type)


def clip_to_norm(parameters: list[ShardedParameter], norm: torch.Tensor, max_norm: float) -> None:
    """Scale all gradients so that their norm is at most `max_norm`.

    The factor is that of torch's `clip_grad_norm_`.

    Args:
        parameters: Parameters whose gradients are scaled in place.
        norm: Present norm of the gradients, a scalar tensor.
        max_norm: Largest norm after scaling.
    """
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    grads = [grad for p in parameters if (grad := p.raw_grad) is not None]
    locals_ = [getattr(grad, "_local_tensor", grad) for grad in grads]
    if locals_:
        torch._foreach_mul_(locals_, factor.to(locals_[0].device))
        count_writes(grads)
