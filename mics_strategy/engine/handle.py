"""What can be done with a sharded model?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from mics_strategy.comm.consensus import run_on_all_ranks
from mics_strategy.engine import state_dict as state
from mics_strategy.engine.hooks import EngineLink
from mics_strategy.engine.module_buffers import ModuleBuffers
from mics_strategy.engine.optimizer import norm
from mics_strategy.engine.optimizer.step import StepHooks, adopt
from mics_strategy.engine.optimizer.target import OptimizerTarget
from mics_strategy.engine.plan import OwnedPlan, Plan, StepOrder, TrafficRow, compare, plan_step
from mics_strategy.engine.setup import guards
from mics_strategy.engine.unit import unit_plan_of
from mics_strategy.errors import ConfigError, LifecycleError

if TYPE_CHECKING:
    from mics_strategy.engine.build import BuildContext
    from mics_strategy.engine.parameter import ShardedParameter
    from mics_strategy.engine.step import Engine
    from mics_strategy.engine.unit import Unit
    from mics_strategy.engine.units import UnitSpec
    from mics_strategy.scopes import Scopes


class Sharded:
    """A sharded model. Made by `shard`.

    Attributes:
        model: The model, sharded in place.
        config: As given.
        buffers: Those of the model, which are not sharded.
        memory: Bytes that the engine has allocated, by purpose.
        grad_codec_steps: The step from which gradients travel as they are; None for never.
    """

    def __init__(self, model: nn.Module, context: BuildContext, engine: Engine, modules: list[UnitSpec]) -> None:
        self.model = model
        self.config = context.config
        self.memory = context.memory
        self._groups = context.groups
        self.grad_codec_steps = context.config.grad_codec_steps
        self._engine = engine
        self._units = engine.units
        self._target = OptimizerTarget(engine, context, self._link(modules))
        self._step_hooks = StepHooks(self._target)
        self.buffers = ModuleBuffers(model, context, engine)

    def _link(self, modules: list[UnitSpec]) -> WeakIdKeyDictionary:
        """Connect the sharded parameters with the engine. Returns them by the plain ones that they replaced."""
        sharded_params = WeakIdKeyDictionary()
        for unit, module in zip(self._units, modules, strict=True):
            plain = {entry.name: entry.parameter for entry in module.parameters}
            gradients = iter(self._engine.reducer.gradients.get(unit.index, []))
            for bucket in unit.buckets:
                link = EngineLink(self._engine, bucket, next(gradients) if bucket.spec.trainable else None)
                for position, sharded in enumerate(bucket.sharded_params):
                    sharded.__dict__.update(plain[sharded.mics_name].__dict__)  # marks that users put on parameters
                    sharded.mics_owner, sharded.mics_position = link, position
                    sharded_params[plain[sharded.mics_name]] = sharded
        return sharded_params

    @property
    def steps_done(self) -> int:
        """Optimizer steps so far; set it when a training is resumed."""
        return self._target.steps_done

    @steps_done.setter
    def steps_done(self, count: int) -> None:
        self._target.steps_done = count

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return self._target.device

    @property
    def parameters(self) -> list[ShardedParameter]:
        """All sharded parameters, unit by unit."""
        return [sharded for unit in self._units for bucket in unit.buckets for sharded in bucket.sharded_params]

    @property
    def units(self) -> list[Unit]:
        """The units, in module order; the root is the first."""
        return self._units

    def pre_forward(self) -> None:
        """The model is about to run: see once per step that it is still the model that was sharded."""
        self._step_hooks.recover()
        target = self._target
        if target.is_check_due:
            buckets = [bucket for unit in self._units for bucket in unit.buckets]
            pairs = [
                pair
                for bucket in buckets
                for pair in zip(bucket.sharded_params, bucket.layout.param_slices, strict=True)
            ]
            known = {id(sharded): region.name for sharded, region in pairs}
            target.is_check_due = not guards.check_parameters_unchanged(self.model, known)
        if target.is_step_over and self.model.training and torch.is_grad_enabled():
            self._begin_step()
        self.buffers.pre_forward()

    def _begin_step(self) -> None:
        self._groups.traffic_log.drain()  # what evaluation has sent belongs to no step
        self._target.is_step_over = False
        if self.grad_codec_steps is not None and self.steps_done >= self.grad_codec_steps:
            self.grad_codec_steps = None
            self._groups.disable_grad_codecs()

    @property
    def scopes(self) -> Scopes:
        """Ranks and axes of every model state in this job, and what is encoded between them."""
        return self._groups.scopes

    def mark_modified(self) -> None:
        """Say that parameters were written behind torch's back: by a kernel of your own, or through `to_local().data`.

        Every other way of writing into a parameter is noticed, but for ``torch._foreach_*`` on torch 2.11.
        """
        for parameter in self.parameters:
            parameter.mics_write_count += 1

    def reset_after_error(self) -> None:
        """Clean up after a backward that raised, before anything looks at the model's parameters."""
        self._engine.reset_after_error()

    def adopt(self, optimizer: Optimizer) -> Optimizer:
        """Point an optimizer that was built on the plain parameters at the sharded ones; groups and states are kept.

        Args:
            optimizer: Built before `shard`, on parameters of this model only. Changed in place.

        Returns:
            The same optimizer.

        Raises:
            ConfigError: On every rank, for an optimizer over other parameters, or one that needs whole
                tensors.
        """
        run_on_all_ranks(lambda: adopt(optimizer, self._target, self._step_hooks))
        return optimizer

    @contextmanager
    def micro_step(self, index: int, *, of: int) -> Iterator[None]:
        """Say which micro-step of a step runs inside; the last one sends its second hop under the backward.

        Args:
            index: From 0.
            of: Micro-steps per optimizer step.
        """
        if not 0 <= index < of:
            raise ConfigError(f"`micro_step({index}, of={of})` is not one of {of} micro-steps. Use 0 to {of - 1}.")
        reducer = self._engine.reducer
        before, reducer.is_boundary = reducer.is_boundary, index == of - 1
        try:
            yield
        finally:
            reducer.is_boundary = before

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        *,
        error_if_nonfinite: bool = False,
        only: Iterable[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Scale the gradients so that their norm over all ranks is at most `max_norm`.

        Args:
            max_norm: The largest norm to leave.
            norm_type: Of the p-norm; `math.inf` for the largest element.
            error_if_nonfinite: Raise when the norm is NaN or infinite.
            only: The parameters whose gradients count and are scaled, the same on all ranks; None means all.

        Returns:
            The norm before, a plain scalar tensor, the same on all ranks.

        Raises:
            LifecycleError: The norm is not finite and `error_if_nonfinite` is set.
            ConfigError: `only` holds what is no parameter of this sharded model.
        """
        parameters = self.parameters if only is None else self._select(only)
        self._engine.finish_gradients()
        total = norm.total_norm(parameters, self._groups, norm_type)
        if error_if_nonfinite and not bool(torch.isfinite(total)):
            raise LifecycleError(
                f"The gradient norm is {total.item()}. Lower the learning rate or the loss scale, or look for the "
                "first NaN."
            )
        norm.clip(parameters, total, max_norm)
        return total

    def _select(self, only: Iterable[torch.Tensor]) -> list[ShardedParameter]:
        chosen = {id(parameter): parameter for parameter in only}
        foreign = [parameter for parameter in chosen.values() if not self._target.owns(parameter)]
        if foreign:
            raise ConfigError(
                f"`only` holds a tensor {list(foreign[0].shape)} that is no parameter of this sharded model. Pass "
                "those that `model.parameters()` gives after sharding."
            )
        return [each for each in self.parameters if id(each) in chosen]

    def finish_gradients(self) -> None:
        """Make every gradient the mean over all ranks now, as stepping, clipping and reading `grad` do. Collective."""
        self._engine.finish_gradients()

    @property
    def plan(self) -> Plan:
        """Every collective of an optimizer step with as many micro-steps as the last one had (before it, one)."""
        recorded = self._engine.order
        in_order = tuple(range(len(self._units)))
        shape = StepOrder(
            forward=tuple(recorded.forward) if recorded.is_frozen else in_order,
            backward=tuple(recorded.backward) if recorded.is_complete else (0, *reversed(in_order[1:])),
            num_micro_steps=self._target.last_step[0],
            second_hop_every_backward=self._engine.overlap.second_hop_every_backward,
        )
        dealt = [bucket for wholes in self._target.stepped_whole for bucket in wholes.buckets]
        whole = tuple(
            OwnedPlan(
                name=bucket.name,
                assignment=bucket.assignment,
                index=self._groups.trainable_placement.index,
                dtype=bucket.dtype,
            )
            for bucket in dealt
        )
        slots = {id(unit.slot): unit.index for unit in reversed(self._units)}
        gradients = self._engine.reducer.gradients
        units = (unit_plan_of(unit, gradients.get(unit.index, []), slots[id(unit.slot)]) for unit in self._units)
        return plan_step(tuple(units), self.scopes, shape, whole)

    def traffic(self) -> tuple[TrafficRow, ...]:
        """What the last optimizer step sent beside what was planned for it, by axis and collective, for this rank."""
        return compare(self.plan, self._target.last_step[1])

    def full_state_dict(self) -> dict[str, Any]:
        """The plain model's state dict, whole tensors on rank 0's CPU; empty on other ranks. Collective.

        Cost: one whole parameter at a time on every rank, all of them on rank 0's CPU.
        """
        self.buffers.synchronize()
        return state.full_state_dict(self.model)

    def load_full_state_dict(self, state_dict: dict[str, Any], *, strict: bool = True) -> Any:
        """Load a plain state dict; every rank passes the whole one (memory-mapped, if it is large).

        Returns:
            Missing and unexpected keys, as `torch.nn.Module.load_state_dict` does.
        """
        return state.load_full_state_dict(self.model, state_dict, strict=strict)

    def full_optimizer_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """The plain optimizer's state dict on rank 0's CPU; empty on other ranks. Collective."""
        return state.full_optimizer_state_dict(optimizer, self._step_hooks.step_of(optimizer).owner_of, self._groups)

    def load_full_optimizer_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Load a plain optimizer's state dict; every rank passes the whole one."""
        state.load_full_optimizer_state_dict(optimizer, state_dict, self._step_hooks.step_of(optimizer).owner_of)

    def owner_of(self, optimizer: Optimizer, parameter: torch.Tensor) -> int | None:
        """The shard index of the ranks that alone have the states of `parameter`; None where each has its rows."""
        return self._step_hooks.step_of(optimizer).owner_of(parameter)

    @property
    def index(self) -> int:
        """Which shard of the optimizer scope this rank holds."""
        return self._groups.trainable_placement.index

    @property
    def replica(self) -> tuple[int, int]:
        """This rank's number among those that hold the same shards, and their count."""
        span = self.scopes.span(self.scopes.optimizer, self.scopes.world_size)
        return span.index(self._groups.rank), span.size

    @property
    def pending_micro_steps(self) -> int:
        """Micro-steps since the last optimizer step whose gradients are still here. Not in any checkpoint."""
        return self._engine.backwards.num_pending

    def warn_pending_gradients(self) -> None:
        """Say once, on rank 0, that the checkpoint which is being made will not hold gradients that are here."""
        self._engine.backwards.warn_pending_gradients()

    @property
    def generators(self) -> list[torch.Generator]:
        """What stochastic rounding of codecs draws from, on this rank."""
        return self._groups.generators

    def synchronize_buffers(self) -> None:
        """Give every rank rank 0's buffers. Collective."""
        self.buffers.synchronize()

    def sharded_param_for(self, parameter: torch.Tensor) -> ShardedParameter | None:
        """The model's sharded parameter: `parameter` itself, or the one that replaced it; None for any other tensor."""
        if self._target.owns(parameter):
            return cast("ShardedParameter", parameter)
        return self._target.sharded_param_for(parameter)
