"""Local tensors in place of sharded parameters while an optimizer steps.

A step runs on plain local tensors, because dispatching a fused update through DTensor costs several times the update.
A local tensor holds this rank's rows of a parameter. For a parameter that is updated as a whole tensor, it holds all of
it on the owner and nothing on other ranks.

An optimizer whose update depends on more than these tensors is refused.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from mics_strategy.engine.optimizer.locality import UpdateLocality, locality_by_group
from mics_strategy.errors import ConfigError, LifecycleError

if TYPE_CHECKING:
    from mics_strategy.engine.optimizer.owner_exchange import OwnerExchange
    from mics_strategy.engine.optimizer.target import OptimizerTarget
    from mics_strategy.engine.parameter import ShardedParameter

T = TypeVar("T")
_KEEPS_PARAMETERS = ("LBFGS",)  # keep a second list of the parameters, which a step hook cannot swap
_SHARDS_BY_ITSELF = "ZeroRedundancyOptimizer"
_ELEMENTWISE = "an elementwise optimizer (AdamW, SGD, ...)"


class LocalParamSwap:
    """Swap of an optimizer's sharded parameters for local tensors, for one model.

    Args:
        optimizer: Optimizer with sharded parameters, referenced weakly.
        target: Engine's side of the optimizer's steps, referenced weakly.

    Attributes:
        exchanges: Exchanges of the tensors that this optimizer updates on their owners.
        is_local: Whether the optimizer holds local tensors now.
    """

    def __init__(self, optimizer: Optimizer, target: OptimizerTarget) -> None:
        self._optimizer_ref = weakref.ref(optimizer)  # weak: the optimizer is the key of the cache that holds this
        self._target_ref = weakref.ref(target)
        self._groups: list[list[int]] = []  # parameters of each group by id, at the last `prepare`
        self._locals: dict[ShardedParameter, nn.Parameter] = {}
        self._wrapped: dict[int, tuple[torch.Tensor, DTensor]] = {}  # by id; the tensor keeps its id from reuse
        self._storage: dict[ShardedParameter, torch.Tensor] = {}  # memory of each local tensor
        self._visible: list[ShardedParameter] = []  # parameters whose gradient is set on the local tensor
        self._stepped: list[ShardedParameter] = []  # parameters with a gradient in this step
        self.exchanges: list[OwnerExchange] = []
        self._owners: dict[ShardedParameter, int] = {}  # owners of the tensors that are updated as a whole
        self.is_local = False
        self._is_sync_due = False
        self._random_states: list[torch.Tensor] = []  # states of the random generators before the step
        weak = weakref.ref(self)
        optimizer.register_state_dict_pre_hook(lambda _: _swap_out(weak))  # after a step that raised
        optimizer.register_load_state_dict_pre_hook(lambda *_: _swap_out(weak))

    @property
    def _optimizer(self) -> Optimizer:
        return deref(self._optimizer_ref)

    @property
    def target(self) -> OptimizerTarget:
        """Engine's side of the optimizer's steps."""
        return deref(self._target_ref)

    def prepare(self) -> None:
        """Find the tensors that must be updated as a whole, and assign their owners.

        Runs again when the groups hold other parameters than at the last call.

        Raises:
            ConfigError: An update depends on more than the tensors that one rank can hold.
        """
        optimizer, target = self._optimizer, self.target
        if self.is_local:
            return  # a step raised; it was prepared before
        groups = [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]
        if groups == self._groups:
            return
        _check_param_groups_only(optimizer)
        if not target.has_whole_states:
            fallback = UpdateLocality.PER_TENSOR if target.optimizer_layout == "tensors" else UpdateLocality.ELEMENTWISE
            localities = locality_by_group(optimizer, target.device, fallback)
            _check_locality(optimizer, localities, target.optimizer_layout)
            grouped = zip(optimizer.param_groups, localities, strict=True)
            whole_params = [
                p
                for group, locality in grouped
                if locality is UpdateLocality.PER_TENSOR
                for p in group["params"]
                if target.owns(p)
            ]
            self._assign_owners([p for p in whole_params if p not in self._owners])
        self._groups = groups

    def _assign_owners(self, parameters: list[ShardedParameter]) -> None:
        if not parameters:
            return
        exchange = self.target.assign_owners(parameters)
        self.exchanges.append(exchange)
        self._owners.update(exchange.owners())
        self._locals.update(exchange.step_views())
        self._storage.update({parameter: local.detach() for parameter, local in self._locals.items()})

    def owner_of(self, parameter: torch.Tensor) -> int | None:
        """The rank of the optimizer scope that owns `parameter`; None without an owner."""
        return self._owners.get(cast("ShardedParameter", parameter))

    def swap_in(self) -> None:
        """Replace sharded parameters in the optimizer by local tensors.

        Collective where tensors are updated on their owners.
        """
        for group in self._optimizer.param_groups:
            group["params"] = [self._local_of(p) if self.target.owns(p) else p for p in group["params"]]
        for exchange in self.exchanges:
            exchange.to_owners()
        self._wrapped.clear()
        self._stepped.clear()
        states = self._optimizer.state
        for sharded, local in self._locals.items():
            grad = sharded.raw_grad
            if grad is not None:
                self._stepped.append(sharded)
            if sharded not in self._owners:
                local.grad = grad._local_tensor if isinstance(grad, DTensor) else grad  # `to_local` costs more
            state = states.pop(sharded, None)
            if state is not None:
                states[local] = {key: self._unwrap(value) for key, value in state.items()}
        # Only the owner sees whether a step clears a whole tensor's gradient, so every rank keeps it.
        self._visible = [p for p, local in self._locals.items() if local.grad is not None and p not in self._owners]
        self.is_local = True
        self._random_states = self.target.random.begin()

    def swap_out(self) -> None:
        """Put sharded parameters back into the optimizer, with new states as DTensors.

        Sends nothing.
        """
        if not self.is_local:
            return
        self.is_local = False
        self.target.random.end(self._random_states)
        sharded_by_local = {local: sharded for sharded, local in self._locals.items()}
        for group in self._optimizer.param_groups:
            group["params"] = [sharded_by_local.get(p, p) for p in group["params"]]
        for sharded in self._visible:
            if self._locals[sharded].grad is None:  # cleared by the step, or by `zero_grad` after a step that raised
                sharded.grad = None
        states = self._optimizer.state
        for sharded, local in self._locals.items():
            local.grad = None
            storage = self._storage[sharded]
            if local.data_ptr() != storage.data_ptr():  # `parameter.data = ...` replaced its memory
                storage.copy_(local.detach())
                local.data = storage
            state = states.pop(local, None)
            if state is not None:
                states[sharded] = {key: self._wrap(value, sharded) for key, value in state.items()}
        self._wrapped.clear()
        self._is_sync_due = bool(self.exchanges)
        for sharded in self._stepped:
            sharded.mics_write_count += 1

    def sync_owned(self) -> None:
        """Swap out, and send new values of owned tensors to all shards. Collective."""
        self.swap_out()
        if self._is_sync_due:
            self._is_sync_due = False
            for exchange in self.exchanges:
                exchange.to_shards()

    def _local_of(self, parameter: torch.Tensor) -> nn.Parameter:
        sharded = cast("ShardedParameter", parameter)
        local = self._locals.get(sharded)
        if local is None:
            self._storage[sharded] = sharded.local.detach()
            local = self._locals[sharded] = nn.Parameter(self._storage[sharded], requires_grad=sharded.requires_grad)
        return local

    def _unwrap(self, value: Any) -> Any:
        if isinstance(value, DTensor):
            local: torch.Tensor = value._local_tensor
            self._wrapped[id(local)] = local, value
            return local
        return value

    def _wrap(self, value: Any, sharded: ShardedParameter) -> Any:
        """Wrap a state of the parameter's shape in a DTensor like the parameter.

        Other states, such as counters, are returned unchanged, and so are states of whole tensors, which only the
        owner has.
        """
        pair = self._wrapped.get(id(value))
        if pair is not None and value.shape == sharded.local.shape:
            return pair[1]
        if (
            sharded in self._owners
            or not isinstance(value, torch.Tensor)
            or value.shape != sharded.local.shape
            or value.dim() != sharded.dim()
            or not value.dim()
        ):
            return value
        return sharded.like_self(value)


def _swap_out(weak: weakref.ref[LocalParamSwap]) -> None:
    swap = weak()
    if swap is not None:
        swap.swap_out()


def deref(reference: weakref.ref[T]) -> T:
    """The object that `reference` refers to.

    Raises:
        LifecycleError: The object was deleted.
    """
    referent = reference()
    if referent is None:
        raise LifecycleError(
            "The optimizer or the model of this step was deleted. Keep references to both as long as the model trains."
        )
    return referent


def _check_param_groups_only(optimizer: Optimizer) -> None:
    """Raise for optimizers with references to parameters outside of `param_groups`.

    Args:
        optimizer: Optimizer that is about to step.

    Raises:
        ConfigError: The optimizer is one of those known to do so.
    """
    if any(cls.__name__ == _SHARDS_BY_ITSELF for cls in type(optimizer).__mro__):
        inner = getattr(optimizer, "_optim_constructor", None)
        name = getattr(inner, "__name__", "its `optimizer_class`")
        raise ConfigError(
            f"{_SHARDS_BY_ITSELF} assigns whole parameters to ranks, but these parameters are sharded already. Use "
            f"{name} itself. `ShardConfig.optimizer` shards its states."
        )
    if any(cls.__name__ in _KEEPS_PARAMETERS for cls in type(optimizer).__mro__):
        raise ConfigError(
            f"{type(optimizer).__name__} needs whole tensors of all parameters together. No scope provides them. Use "
            f"{_ELEMENTWISE}."
        )


def _check_locality(optimizer: Optimizer, localities: list[UpdateLocality], optimizer_layout: str) -> None:
    """Raise for an optimizer whose update depends on more than the tensors on a rank.

    Args:
        optimizer: Optimizer that is about to step.
        localities: Update locality of each parameter group.
        optimizer_layout: `ShardConfig.optimizer_layout`, `"rows"` or `"tensors"`.

    Raises:
        ConfigError: A group needs whole tensors and the layout is `"rows"`, or needs all tensors together.
    """
    name = type(optimizer).__name__
    if UpdateLocality.GLOBAL in localities:
        raise ConfigError(
            f"{name} couples parameters: in a dry run on small tensors, the update of one tensor depended on other "
            f"tensors. Each rank steps on its own shards only. Use {_ELEMENTWISE}, or replicate the optimizer states "
            "with `optimizer='none'`."
        )
    if UpdateLocality.PER_TENSOR in localities and optimizer_layout == "rows":
        raise ConfigError(
            f"{name} needs whole tensors, but each rank holds rows of them. Assign whole tensors to ranks with "
            "`optimizer_layout='tensors'`, replicate the optimizer states with `optimizer='none'`, or use "
            f"{_ELEMENTWISE}."
        )
