"""Local tensors in place of sharded parameters while an optimizer steps.

A step runs on plain local tensors, because dispatching a fused update through DTensor costs several times the update.
A local tensor holds this rank's rows of a parameter. For a parameter that is updated as a whole tensor, it holds all of
it on the owner and nothing on other ranks.

An optimizer whose update depends on more than these tensors is refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from mics_strategy.comm.placement import full_tensor, is_sharded
from mics_strategy.engine.exact_dtensor import ExactDTensor
from mics_strategy.engine.optimizer.kinds import is_torch_own
from mics_strategy.engine.optimizer.locality import UpdateLocality, locality_by_group
from mics_strategy.engine.optimizer.owner_exchange import OwnerExchange
from mics_strategy.engine.optimizer.target import OptimizerTarget
from mics_strategy.engine.parameter import LocalParameter, ShardedParameter, fast_attributes
from mics_strategy.engine.tensor_memory import TensorMemory
from mics_strategy.errors import ConfigError, LifecycleError

T = TypeVar("T")
_KEEPS_PARAMETERS = ("LBFGS",)  # keep a second list of the parameters, which a step hook cannot swap
_SHARDS_BY_ITSELF = "ZeroRedundancyOptimizer"
_ELEMENTWISE = "an elementwise optimizer (AdamW, SGD, ...)"


@dataclass(slots=True, eq=False)
class _SwappedParam:
    """One parameter in its two forms.

    Attributes:
        sharded: The sharded parameter.
        local: The local tensor in its place.
        storage: Memory of the local tensor.
        address: Its address.
        owner: Rank that updates the whole tensor; None where every rank updates its rows.
        states: States as DTensors, by name, while the optimizer holds local ones.
        is_stepped: Whether the parameter has a gradient in this step.
        shown_grad: Gradient that the local tensor was given; None without one.
        num_writes: Writes to the sharded parameter before the optimizer was given the local tensor.
    """

    sharded: ShardedParameter
    local: nn.Parameter
    storage: torch.Tensor
    address: int
    owner: int | None = None
    states: dict[Any, DTensor] = field(default_factory=dict)
    is_stepped: bool = False
    shown_grad: torch.Tensor | None = None
    num_writes: int = 0

    def swap_grad_in(self) -> None:
        """Set the gradient on the local tensor, which requires one if the parameter does now."""
        grad = self.sharded.raw_grad
        self.is_stepped = grad is not None
        if self.local.requires_grad != self.sharded.requires_grad:
            self.local.requires_grad_(self.sharded.requires_grad)
        # Only the owner sees whether a step clears a whole tensor's gradient, so every rank keeps it.
        if self.owner is None and grad is not None:
            local_grad = grad._local_tensor if isinstance(grad, DTensor) else grad  # `to_local` costs more
            self.shown_grad = self.local.grad = local_grad.detach()

    def swap_grad_out(self) -> int:
        """Set the gradient to that of the local tensor if this is another one, or None.

        The step replaced or cleared it, or `zero_grad` after a step that raised. A script that keeps the tensor that it
        was shown gets a copy, as the engine writes to its memory again.

        Returns:
            Address of that memory; -1 for none.
        """
        grad = self.local.grad
        shown = grad if self.shown_grad is None else self.shown_grad
        if self.shown_grad is not None and grad is not shown:
            self.sharded.grad = None if grad is None else self.sharded.like_self(grad)
        self.local.grad = self.shown_grad = None
        if shown is None:
            return -1
        address, kept = shown.data_ptr() or -1, weakref.ref(shown)
        del grad, shown
        tensor = kept()
        if tensor is not None:
            tensor.data = tensor.clone()
        return address

    def restore_storage(self) -> None:
        """Copy the values: ``parameter.data = ...`` has replaced the memory."""
        self.storage.copy_(self.local.detach())
        self.local.data = self.storage

    def unwrap(self, state: dict[Any, Any]) -> None:
        """Replace DTensors by their local tensors, in place.

        Whole tensors that a script has set are replaced by their rows, rows of a parameter with an owner by the whole
        tensor on the owner alone. Collective for those.
        """
        sharded = self.sharded
        placements = sharded._spec.placements
        for key, value in [*state.items()]:
            if self.owner is not None and isinstance(value, DTensor) and value.shape == sharded.shape and value.dim():
                state[key] = full_tensor(value)
                if self.owner != sharded.mics_index:
                    del state[key]
            elif isinstance(value, DTensor) and (value._spec.placements == placements or not value.dim()):
                self.states[key] = value
                state[key] = value._local_tensor
            elif (
                isinstance(value, torch.Tensor) and value.shape == sharded.shape and value.dim() and self.owner is None
            ):
                whole = full_tensor(value) if isinstance(value, DTensor) else value
                state[key] = sharded.mics_slice.narrow(whole, sharded.mics_index).clone()

    def wrap(self, state: dict[Any, Any], written: list[int]) -> _SwappedParam | None:
        """Replace local tensors by DTensors like the parameter, in place.

        Only those of the parameter's shape. Other states, such as counters, stay unchanged, and so do states of whole
        tensors, which only the owner has.

        States at an address of `written`, views of the gradient and values that were replaced, are copied.

        Returns:
            This parameter if the step has computed states of the sharded one, which the next would not understand.
        """
        shape, bypassed = self.storage.shape, None
        for key, value in state.items():
            dtensor = self.states.get(key)
            if dtensor is not None and dtensor._local_tensor is value and value.data_ptr() not in written:
                state[key] = dtensor
            elif isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
                kept = state[key] = value.clone() if value.data_ptr() in written else value
                if self.owner is None and value.shape == shape and value.dim():
                    state[key] = self.sharded.like_self(kept, f"`{key}` of {self.sharded.mics_origin}")
            elif is_sharded(value) and value.dim() and value.shape == self.sharded.shape:
                bypassed = self
        self.states.clear()
        return bypassed


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
        self._params: dict[int, _SwappedParam] = {}  # by id of the sharded parameter
        self._by_local: dict[int, _SwappedParam] = {}  # by id of the local tensor
        self.exchanges: list[OwnerExchange] = []
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
        _check_keeps_no_ids(optimizer, set().union(*groups))
        if not target.has_whole_states:
            localities = locality_by_group(optimizer, target.update_locality)
            _check_locality(optimizer, localities, target.optimizer_layout)
            grouped = zip(optimizer.param_groups, localities, strict=True)
            whole_params = [
                p
                for group, locality in grouped
                if locality is UpdateLocality.PER_TENSOR
                for p in group["params"]
                if target.owns(p)
            ]
            self._assign_owners([p for p in whole_params if self.owner_of(p) is None])
        self._groups = groups

    def _assign_owners(self, parameters: list[ShardedParameter]) -> None:
        if not parameters:
            return
        exchange = self.target.assign_owners(parameters)
        self.exchanges.append(exchange)
        step_views = dict(exchange.step_views())
        for parameter, owner in exchange.owners().items():
            local = step_views[parameter]
            self._add(_SwappedParam(parameter, local, local.detach(), local.data_ptr(), owner))

    def owner_of(self, parameter: torch.Tensor) -> int | None:
        """The rank of the optimizer scope that owns `parameter`; None without an owner."""
        param = self._params.get(id(parameter))
        return None if param is None else param.owner

    def swap_in(self) -> None:
        """Replace sharded parameters in the optimizer by local tensors.

        Collective where tensors are updated on their owners.

        Raises:
            LifecycleError: A tensor that a script has assigned was written to later.
        """
        if self.is_local:
            return
        if TensorMemory.has_checks:
            _check_assigned(parameter for group in self._optimizer.param_groups for parameter in group["params"])
        self.target.begin_body(self._optimizer)
        for group in self._optimizer.param_groups:
            group["params"] = self._locals_of(group["params"])
        for exchange in self.exchanges:
            exchange.to_owners()
        states = self._optimizer.state
        with fast_attributes():
            for param in self._params.values():
                param.swap_grad_in()
                state = states.pop(param.sharded, None)
                if state is not None:
                    param.unwrap(state)
                if state:
                    states[param.local] = state
                if param.owner is not None:
                    param.num_writes = param.sharded.mics_memory.num_writes
        self.is_local = True
        self._random_states = self.target.random.begin()

    def swap_out(self) -> None:
        """Put sharded parameters back into the optimizer, with new states as DTensors. Sends nothing.

        Raises:
            LifecycleError: The step went around `param_groups`.
        """
        if not self.is_local:
            return
        owned = [param for param in self._params.values() if param.owner is not None] if self.exchanges else []
        bypassed = next((p for p in owned if p.sharded.mics_memory.num_writes != p.num_writes), None)
        self.is_local = False
        self.target.random.end(self._random_states)
        by_local = self._by_local
        for group in self._optimizer.param_groups:
            group["params"] = [by_local[id(p)].sharded if id(p) in by_local else p for p in group["params"]]
        states = self._optimizer.state
        with fast_attributes():
            for param in self._params.values():
                is_moved = param.local.data_ptr() != param.address
                state, written = states.pop(param.local, None), [param.swap_grad_out()]
                if state is not None:
                    bypassed = param.wrap(state, [*written, param.address] if is_moved else written) or bypassed
                    states[param.sharded] = state
                if is_moved:
                    param.restore_storage()
                if param.is_stepped:
                    param.sharded.mics_memory.writes.num += 1
        self._is_sync_due = bool(self.exchanges)
        if bypassed is not None:
            raise LifecycleError(
                f"`{type(self._optimizer).__name__}.step` computed with `{bypassed.sharded.mics_name}` from a list of "
                "its own or from the model, where its states or new values would be lost. In a step, take parameters "
                "from `self.param_groups`: they hold this rank's rows, or whole tensors on their owner."
            )

    def sync_owned(self) -> None:
        """Swap out, and send new values of owned tensors to all shards. Collective."""
        self.swap_out()
        if self._is_sync_due:
            self._is_sync_due = False
            for exchange in self.exchanges:
                exchange.to_shards()

    def _locals_of(self, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        """The local tensors of the model's parameters; other parameters unchanged."""
        local_params: list[torch.Tensor] = []
        for parameter, known in zip(parameters, map(self._params.get, map(id, parameters)), strict=True):
            param = known
            if param is None and self.target.owns(parameter):
                param = self._add_rows(cast("ShardedParameter", parameter))
            local_params.append(parameter if param is None else param.local)
        return local_params

    def _add_rows(self, sharded: ShardedParameter) -> _SwappedParam:
        """Add a parameter of which every rank updates its rows."""
        storage = sharded.local.detach()
        # Torch's own bodies keep no sets or dicts of parameters; it looks for overrides of a subclass in each call.
        kind = nn.Parameter if is_torch_own(self._optimizer) else LocalParameter
        local = kind(storage, requires_grad=sharded.requires_grad)
        return self._add(_SwappedParam(sharded, local, storage, storage.data_ptr()))

    def _add(self, param: _SwappedParam) -> _SwappedParam:
        self._params[id(param.sharded)] = self._by_local[id(param.local)] = param
        param.local.__dict__ = param.sharded.__dict__
        return param


def _swap_out(weak: weakref.ref[LocalParamSwap]) -> None:
    swap = weak()
    if swap is not None:
        swap.swap_out()


def _check_assigned(parameters: Iterable[torch.Tensor]) -> None:
    """Raise where a tensor that a script has set as a parameter or gradient was written to later."""
    for parameter in parameters:
        if isinstance(parameter, ShardedParameter):
            for tensor in (parameter, parameter.raw_grad):
                if isinstance(tensor, ExactDTensor) and tensor.mics_memory is not None:
                    tensor.mics_memory.check_assigned()


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


def check_param_groups_only(optimizer: Optimizer) -> None:
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


def _check_keeps_no_ids(optimizer: Optimizer, ids: set[int]) -> None:
    """Raise for an optimizer with ids of its parameters, which are other objects in a step.

    Args:
        optimizer: Optimizer that is about to step.
        ids: Those of its parameters.

    Raises:
        ConfigError: One of its collections has some of them.
    """
    for name, values in vars(optimizer).items():
        if isinstance(values, (dict, set, frozenset, list, tuple)) and not ids.isdisjoint(
            value for value in values if isinstance(value, int)
        ):
            raise ConfigError(
                f"`{type(optimizer).__name__}.{name}` has the `id()` of parameters. In a step, local tensors are in "
                "their place, which have other ids but are found in sets and dicts: keep the parameters themselves."
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
            f"{name} couples parameters: the update of one tensor depends on other tensors. Each rank steps on its own "
            f"shards only. Use {_ELEMENTWISE}, or replicate all states with the preset 'ddp'."
        )
    if UpdateLocality.PER_TENSOR in localities and optimizer_layout == "rows":
        raise ConfigError(
            f"{name} needs whole tensors, but each rank holds rows of them. Assign whole tensors to ranks with "
            "`optimizer_layout='tensors'`, replicate all states with the preset 'ddp', or use "
            f"{_ELEMENTWISE}."
        )
