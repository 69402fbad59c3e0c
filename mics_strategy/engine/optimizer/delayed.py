"""Optimizer steps with `second_hop="delayed"`: every second one commits, the others are tentative.

    step    window computes with      reads                          then
    2t      committed parameters      mean g~ of the window before   tentative parameters := Opt(committed, g~)
    2t + 1  tentative parameters      mean of g~ and of window 2t    committed := Opt(committed, mean)

A tentative step is the user's own: clipping, schedules and scalers act on it. It runs on the masters and on copies of
the optimizer's states. Behind it the masters hold the committed parameters again, and the states are those of before;
the tentative parameters wait in memory of their own until a training forward begins the next window. Whatever looks at
the model between windows so sees the committed parameters.

A step that is left out drops its gradients and those in flight. The next window begins anew: with the committed
parameters, and waiting for its own hop.

Source:
    ACCO (arXiv:2406.02613), algorithm 1; the reasons are in docs/design/delayed.md.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary
from typing_extensions import override

from mics_strategy.engine.build import BuildContext
from mics_strategy.engine.delayed_hops import DelayedHops
from mics_strategy.engine.grad_scaler import LOSS_SCALES
from mics_strategy.engine.handle import Sharded
from mics_strategy.engine.module_buffers import ModuleBuffers
from mics_strategy.engine.optimizer.owner_exchange import OwnerExchange
from mics_strategy.engine.optimizer.target import OptimizerTarget
from mics_strategy.engine.parameter import ShardedParameter
from mics_strategy.engine.step import Engine
from mics_strategy.errors import LifecycleError

_MAX_TENTATIVE = 16  # in a row; every second step commits, but behind those that a `GradScaler` leaves out


@dataclass(frozen=True, slots=True)
class SavedStates:
    """States and options of an optimizer before a tentative step."""

    optimizer: Optimizer
    states: dict[Any, Any]
    options: list[dict[str, Any]]

    @classmethod
    def of(cls, optimizer: Optimizer) -> SavedStates:
        """Save them, and leave copies of the states to the optimizer."""
        states = dict(optimizer.state)
        options = [
            {name: copy.copy(value) for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]
        for key, state in states.items():
            is_by_name = isinstance(state, dict)
            optimizer.state[key] = (
                {name: _copied(value, key) for name, value in state.items()} if is_by_name else _copied(state, key)
            )
        return cls(optimizer, states, options)

    def restore(self) -> None:
        """Give them back to the optimizer."""
        self.optimizer.state.clear()
        self.optimizer.state.update(self.states)
        for group, options in zip(self.optimizer.param_groups, self.options, strict=True):
            group.update(options)


def _copied(value: Any, parameter: Any) -> Any:
    if isinstance(value, DTensor) and isinstance(parameter, ShardedParameter) and value.shape == parameter.shape:
        return parameter.like_self(value._local_tensor.clone())
    return value.clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


class DelayedTarget(OptimizerTarget):
    """Engine's side of optimizer steps of which every second one commits."""

    def __init__(self, engine: Engine, context: BuildContext, sharded_params: WeakIdKeyDictionary) -> None:
        super().__init__(engine, context, sharded_params)
        self.hops = cast("DelayedHops", engine.reducer.second_hops)
        self._saved: SavedStates | None = None  # in a tentative step
        self._num_tentative = 0  # in a row
        self.hops.on_finish = self.show_committed
        setattr(self._groups.trainable_placement.device_mesh, LOSS_SCALES, self.hops.scales)
        self._holds_tentative = False  # whether the masters hold the tentative parameters

    @override
    def follow(self, model: nn.Module, buffers: ModuleBuffers) -> None:
        """Begin anew where a state dict is loaded, also into a part of the model."""
        weak = weakref.ref(self)

        def on_load(*_: Any) -> None:
            target = weak()
            if target is not None:
                target.restart()

        for module in model.modules():
            module.register_load_state_dict_post_hook(on_load)

    @override
    def pre_forward(self, *, is_training: bool) -> None:
        if self._saved is not None:  # a tentative step raised
            self._undo()
        is_due = self.hops.is_tentative and is_training
        if self._holds_tentative != is_due and (self._holds_tentative or torch.is_grad_enabled()):
            self._exchange()

    @override
    def show_committed(self) -> None:
        if self._holds_tentative:
            self._exchange()

    @override
    def check_steps_others(self, optimizer: Optimizer) -> None:
        if any(self.owns(parameter) for group in optimizer.param_groups for parameter in group["params"]):
            raise LifecycleError(
                f"{type(optimizer).__name__} steps another optimizer. A tentative step takes back what that one did, "
                'and not the rest. Use the inner optimizer alone, or `second_hop="boundary"`.'
            )

    @override
    def begin_body(self, optimizer: Optimizer) -> None:
        self.show_committed()
        if self._saved is not None:  # the body goes on
            return
        self._check_trains_all(optimizer)
        if getattr(optimizer, "grad_scale", None) is not None:
            raise LifecycleError(
                f"{type(optimizer).__name__} unscales gradients in its step, by the present loss scale. With "
                '`second_hop="delayed"` they may have an earlier one: call `scaler.unscale_(optimizer)` before '
                "`scaler.step(optimizer)`, or build the optimizer with fused=False."
            )
        self._num_tentative = 0 if self.hops.commits else self._num_tentative + 1
        if self._num_tentative > _MAX_TENTATIVE:
            raise LifecycleError(
                f"{_MAX_TENTATIVE} steps in a row were tentative, as each came behind one that was left out. "
                'With `second_hop="delayed"` a training that leaves out every second one never updates: so does one '
                "that clears gradients between two backwards of a step (adversarial inputs, a second model). Use "
                '`second_hop="boundary"`.'
            )
        if not self.hops.commits:
            self._saved = SavedStates.of(optimizer)
            for delayed in self.hops.delayed:
                delayed.tentative.copy_(delayed.bucket.master_shard.data)

    def _check_trains_all(self, optimizer: Optimizer) -> None:
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for delayed in self.hops.delayed:
            for parameter in delayed.bucket.sharded_params:
                if parameter.requires_grad and id(parameter) not in stepped:
                    raise LifecycleError(
                        f"{type(optimizer).__name__} lacks the trained parameter `{parameter.mics_name}`. With "
                        '`second_hop="delayed"` one optimizer steps behind each backward, with all of them. Give it '
                        "all trained parameters (in groups with options of their own), freeze the others, or use "
                        '`second_hop="boundary"`.'
                    )

    @override
    def post_step(self, parameters: Iterable[ShardedParameter], exchanges: list[OwnerExchange]) -> None:
        if self._saved is not None:
            self._undo()
            self.hops.is_tentative = True
        self.hops.awaits_step = False
        super().post_step(parameters, exchanges)

    def _undo(self) -> None:
        """Take a tentative step back; the tentative parameters wait for the next window."""
        if self._saved is not None:
            self._saved.restore()
        self._saved, self._holds_tentative = None, True
        self._exchange()

    def _exchange(self) -> None:
        """Exchange the values of the masters and of the tentative parameters' memory.

        Cost:
            Memory for another copy of the largest master shard of a bucket.
        """
        self.engine.settle_params()
        with torch.no_grad():
            for delayed in self.hops.delayed:
                masters = delayed.bucket.master_shard.data  # without the version counter that an arena shares
                values = masters.clone()
                masters.copy_(delayed.tentative)
                delayed.tentative.copy_(values)
                delayed.bucket.writes.num += 1
        self.engine.global_order.restart()
        self._holds_tentative = not self._holds_tentative

    @override
    def restart(self) -> None:
        self.hops.restart()
        self._holds_tentative = False

    @override
    def finish_delayed(self) -> bool:
        self.check_no_gradients()
        self.show_committed()
        if not self.hops.has_pending:
            return False
        for delayed in self.hops.delayed:
            for parameter in delayed.bucket.sharded_params:
                parameter.grad = None
        self.hops.expose_last()
        return True


def delayed_of(sharded: Sharded) -> DelayedTarget | None:
    """The steps of a sharded model with `second_hop="delayed"`; None with another one."""
    target = sharded.internals.target
    return target if isinstance(target, DelayedTarget) else None


def finish_delayed(sharded: Sharded) -> bool:
    """Finish what is delayed, behind the last step of a training. Collective. The Trainers do so.

    With ``second_hop="delayed"`` gradients of the last one or two windows are left, which no committed step has used:
    they are exposed, without a loss scale. Clip them, call `step` of the optimizer (not a scaler's) and `zero_grad`.

    With `outer_delay` or `outer_fragments` outer steps in flight end now, and all parameters that have stepped since
    take one more, without a delay: then they are equal on all islands. Nothing is left to call. In the middle of a
    training this is a change of it, as a shorter round is.

    Args:
        sharded: Model, with any configuration.

    Returns:
        Whether gradients wait for their step.

    Raises:
        LifecycleError: Gradients of a backward wait for their step, or islands call it behind different steps.

    Cost:
        With outer steps, at most one of the whole model is sent.
    """
    return sharded.internals.target.finish_delayed()
