"""How does any torch optimizer step on shards?

Outside a step an optimizer sees sharded parameters: clipping, gradient scalers, state dicts and schedulers
work on DTensors. Inside a step it sees plain local tensors, because dispatching a fused update through
DTensor costs several times the update. The exchange happens in torch's own step hooks, after a closure if
there is one, so every way of calling ``step`` is covered, for optimizers built after `shard()` and for
adopted ones.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from mics_strategy.errors import ConfigError, LifecycleError
from mics_strategy.sharding.parameter import ShardedParameter

_NEEDS_WHOLE_TENSORS = ("Muon", "Adafactor")
_KEEPS_PARAMETERS = ("LBFGS",)  # a list of its own, from which shards cannot be hidden in a step


class StepObserver(Protocol):
    """Who must know when an optimizer steps."""

    keeps_optimizer_whole: bool

    def owns(self, parameter: torch.Tensor) -> bool:
        """Whether `parameter` is one of the sharded ones."""

    def replaced(self, parameter: torch.Tensor) -> ShardedParameter | None:
        """The sharded parameter that took the place of a plain one."""

    def before_update(self) -> None:
        """Gradients are about to be read."""

    def after_update(self, stepped: list[ShardedParameter]) -> None:
        """These parameters have new values."""


class LocalStep:
    """One optimizer, seen from its step hooks.

    Args:
        optimizer: Steps on sharded parameters.
        owns: Tells the parameters of this model from those of another one.
    """

    def __init__(self, optimizer: Optimizer, owns: Callable[[torch.Tensor], bool]) -> None:
        self._optimizer_ref = weakref.ref(optimizer)  # whoever keeps this object by its optimizer must not keep both
        self._owns = owns
        self._locals: dict[ShardedParameter, nn.Parameter] = {}
        self._wrapped: dict[int, DTensor] = {}
        self.is_local = False

    @property
    def _optimizer(self) -> Optimizer:
        optimizer = self._optimizer_ref()
        if optimizer is None:
            raise LifecycleError("The optimizer of a step is gone. Keep it as long as its model trains.")
        return optimizer

    def enter(self) -> list[ShardedParameter]:
        """Show the optimizer local tensors. Returns the parameters that will be stepped."""
        stepped = []
        for group in self._optimizer.param_groups:
            group["params"] = [self._local_of(p) if self._owns(p) else p for p in group["params"]]
        self._wrapped.clear()
        for sharded, local in self._locals.items():
            grad = sharded.stored_grad
            local.grad = grad.to_local() if isinstance(grad, DTensor) else grad
            if grad is not None:
                stepped.append(sharded)
            if sharded in self._optimizer.state:
                state = self._optimizer.state.pop(sharded)
                self._optimizer.state[local] = {key: self._unwrap(value) for key, value in state.items()}
        self.is_local = True
        return stepped

    def leave(self) -> None:
        """Show the optimizer sharded parameters again, its new states as DTensors like them."""
        if not self.is_local:
            return
        self.is_local = False
        back = {local: sharded for sharded, local in self._locals.items()}
        for group in self._optimizer.param_groups:
            group["params"] = [back.get(p, p) for p in group["params"]]
        for sharded, local in self._locals.items():
            local.grad = None
            if local in self._optimizer.state:
                state = self._optimizer.state.pop(local)
                self._optimizer.state[sharded] = {key: self._wrap(value, sharded) for key, value in state.items()}

    def _local_of(self, parameter: torch.Tensor) -> nn.Parameter:
        sharded = cast("ShardedParameter", parameter)
        local = self._locals.get(sharded)
        if local is None:
            local = self._locals[sharded] = nn.Parameter(sharded.local.detach(), requires_grad=sharded.requires_grad)
        return local

    def _unwrap(self, value: Any) -> Any:
        if isinstance(value, DTensor):
            local = value.to_local()
            self._wrapped[id(local)] = value
            return local
        return value

    def _wrap(self, value: Any, sharded: ShardedParameter) -> Any:
        """A state of the parameter's own shape becomes a DTensor like it; counters and the like stay as they are."""
        if (
            not isinstance(value, torch.Tensor)
            or value.shape != sharded.local.shape
            or value.dim() != sharded.dim()
            or not value.dim()
        ):
            return value
        known = self._wrapped.get(id(value))
        if known is not None:
            return known
        return DTensor.from_local(
            value,
            sharded.device_mesh,
            sharded.placements,
            run_check=False,
            shape=sharded.shape,
            stride=sharded.stride(),
        )


class StepHooks:
    """What happens around the steps of one sharded model's optimizers, while this object lives.

    Args:
        observer: The sharded model, held weakly.
    """

    def __init__(self, observer: StepObserver) -> None:
        self._observer = weakref.ref(observer)
        self._steps: weakref.WeakKeyDictionary[Optimizer, LocalStep] = weakref.WeakKeyDictionary()
        self._stepped: weakref.WeakKeyDictionary[Optimizer, list[ShardedParameter]] = weakref.WeakKeyDictionary()
        _all_models[self] = None

    def check(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer that still holds plain parameters of before `shard()`."""
        observer, known = self._observer(), self._steps.get(optimizer)
        if known is not None:
            known.leave()  # a step that raised has left it local
        if observer is not None:
            refuse_stale(optimizer, _parameters(optimizer), observer)

    def before(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Let the optimizer see local tensors. Returns the arguments for its step."""
        observer = self._observer()
        if observer is None or not any(observer.owns(p) for p in _parameters(optimizer)):
            return args, kwargs
        refuse_unfit(optimizer, observer)
        step = self._steps.setdefault(optimizer, LocalStep(optimizer, self._owns))
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer itself
        if closure is None:
            self._enter(optimizer, step, observer)
            return args, kwargs
        wrapped = self._around_closure(optimizer, step, observer, closure)
        return ((args[0], wrapped, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": wrapped})

    def _owns(self, parameter: torch.Tensor) -> bool:
        observer = self._observer()
        return observer is not None and observer.owns(parameter)

    def _enter(self, optimizer: Optimizer, step: LocalStep, observer: StepObserver) -> None:
        observer.before_update()
        self._stepped[optimizer] = step.enter()

    def _around_closure(
        self, optimizer: Optimizer, step: LocalStep, observer: StepObserver, closure: Callable[[], Any]
    ) -> Callable[[], Any]:
        def closure_on_sharded() -> Any:
            step.leave()
            result = closure()
            self._enter(optimizer, step, observer)
            return result

        return closure_on_sharded

    def after(self, optimizer: Optimizer) -> None:
        """Let the optimizer see sharded parameters again, and tell the model."""
        observer, step = self._observer(), self._steps.get(optimizer)
        if observer is None or step is None:
            return
        step.leave()
        observer.after_update(self._stepped.pop(optimizer, []))


_all_models: weakref.WeakKeyDictionary[StepHooks, None] = weakref.WeakKeyDictionary()  # in the order of shard()


def _before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    models = list(_all_models)
    for model in models:
        model.check(optimizer)
    refuse_mixture(optimizer)
    for model in models:
        args, kwargs = model.before(optimizer, args, kwargs)
    return args, kwargs


def _after_step(optimizer: Optimizer, _: tuple[Any, ...], __: dict[str, Any]) -> None:
    for model in list(_all_models):
        model.after(optimizer)


# Once for all models: torch goes through its table while a hook runs, so nothing may be added or removed later.
register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def refuse_mixture(optimizer: Optimizer) -> None:
    """Refuse sharded parameters beside others, whose gradients no rank would share: replicas would drift apart.

    Raises:
        ConfigError: Naming the first parameter that no sharded model has.
    """
    parameters = _parameters(optimizer)
    if not any(isinstance(parameter, ShardedParameter) for parameter in parameters):
        return
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if parameter.requires_grad and not isinstance(parameter, ShardedParameter):
                raise ConfigError(
                    f"Parameter {position} of group {index} of {type(optimizer).__name__}, shape "
                    f"{tuple(parameter.shape)}, belongs to no sharded model, so each rank would train its own. Make "
                    "it a parameter of the model before `shard()`, or give it an optimizer of its own."
                )


def refuse_stale(optimizer: Optimizer, parameters: list[torch.Tensor], observer: StepObserver) -> None:
    """An optimizer built before `shard()` holds parameters that no model uses: it would train nothing, in silence.

    Raises:
        ConfigError: Naming the first such parameter.
    """
    for parameter in parameters:
        sharded = observer.replaced(parameter)
        if sharded is not None:
            raise ConfigError(
                f"{type(optimizer).__name__} was built before `shard()` and still holds the plain "
                f"`{sharded.mics_name}`, which the model no "
                "longer uses. Call `optimizer = sharded.adopt(optimizer)`, or build the optimizer after `shard()`."
            )


def refuse_unfit(optimizer: Optimizer, observer: StepObserver) -> None:
    """Refuse optimizers whose update of an element needs more than that element.

    Raises:
        ConfigError: For the ones known to need whole tensors.
    """
    for cls in type(optimizer).__mro__:
        if cls.__name__ in _KEEPS_PARAMETERS:
            raise ConfigError(
                f"{type(optimizer).__name__} needs whole tensors of all parameters together, which no scope offers. "
                "Use an elementwise optimizer (AdamW, SGD, ...)."
            )
        if cls.__name__ in _NEEDS_WHOLE_TENSORS and not observer.keeps_optimizer_whole:
            raise ConfigError(
                f"{type(optimizer).__name__} needs whole tensors, and each rank holds shards of them. Use an "
                "elementwise optimizer (AdamW, SGD, ...) or keep optimizer states whole with `optimizer='none'`."
            )


def adopt(optimizer: Optimizer, observer: StepObserver) -> None:
    """Point an optimizer that was built on the plain parameters at the sharded ones, its states included.

    Raises:
        ConfigError: The optimizer holds a parameter that is not of this model.
    """
    refuse_unfit(optimizer, observer)
    swaps: dict[torch.Tensor, ShardedParameter] = {}
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            sharded = observer.replaced(parameter)
            if sharded is not None:
                swaps[parameter] = sharded
            elif not observer.owns(parameter):
                raise ConfigError(
                    f"Parameter {position} of group {index} of {type(optimizer).__name__}, shape "
                    f"{tuple(parameter.shape)}, is not a parameter of the "
                    "sharded model. Give the optimizer this model's parameters only, one optimizer per sharded model."
                )
    for group in optimizer.param_groups:
        group["params"] = [swaps.get(parameter, parameter) for parameter in group["params"]]
    for plain, sharded in swaps.items():
        if plain in optimizer.state:
            state = optimizer.state.pop(plain)
            optimizer.state[sharded] = {key: _shard_like(value, sharded) for key, value in state.items()}


def _shard_like(value: Any, sharded: ShardedParameter) -> Any:
    if not isinstance(value, torch.Tensor) or value.shape != sharded.shape or not value.dim():
        return value
    piece = sharded.mics_region.slice_of(value.detach(), sharded.mics_index).clone().to(sharded.device)
    return DTensor.from_local(
        piece,
        sharded.device_mesh,
        sharded.placements,
        run_check=False,
        shape=sharded.shape,
        stride=sharded.stride(),
    )
