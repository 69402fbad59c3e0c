"""The user's handle of a sharded model."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from mics_strategy.comm.consensus import run_on_all_ranks
from mics_strategy.engine import state_dict as state
from mics_strategy.engine.autograd import check_not_traced
from mics_strategy.engine.build import BuildContext
from mics_strategy.engine.hooks import EngineLink, install, register_forward_method
from mics_strategy.engine.internals import Internals
from mics_strategy.engine.module_buffers import ModuleBuffers
from mics_strategy.engine.optimizer.step import StepHooks, adopt, clip_to_norm, total_norm
from mics_strategy.engine.optimizer.target import OptimizerTarget
from mics_strategy.engine.parameter import ShardedParameter
from mics_strategy.engine.plan import OwnedPlan, Plan, StepOrder, plan_step
from mics_strategy.engine.profile.recording import Profile, begin_profile
from mics_strategy.engine.setup import guards
from mics_strategy.engine.step import Engine
from mics_strategy.engine.traffic import TrafficRows, compare
from mics_strategy.engine.unit import unit_plan_of
from mics_strategy.engine.units import UnitSpec
from mics_strategy.errors import CheckpointError, ConfigError, LifecycleError
from mics_strategy.scopes import Scopes
from mics_strategy.sharding_report import ShardingReport, requested


class Sharded:
    """Handle of a sharded model, created by `shard`.

    Attributes:
        model: Model, sharded in place.
        config: Configuration as passed to `shard`.
        buffers: Module buffers of the model, which are not sharded.
        internals: Parts of the engine that checkpoints and frameworks use.
        memory: Bytes that the engine allocated, by purpose.
        grad_codec_steps: Optimizer step from which gradients are sent unquantized; None for never.
    """

    def __init__(
        self,
        model: nn.Module,
        context: BuildContext,
        engine: Engine,
        modules: list[UnitSpec],
        target_class: type[OptimizerTarget] = OptimizerTarget,
    ) -> None:
        self.model = model
        self.config = context.config
        self.memory = context.memory
        self._chosen = context.chosen
        self._groups = context.groups
        self.grad_codec_steps = context.config.grad_codec_steps
        self._engine = engine
        self._units = engine.units
        self._target = target_class(engine, context, self._link(modules))
        self._step_hooks = StepHooks(self._target)
        depths = [module.depth for module in modules]
        self.internals = Internals(engine, context, depths, self._target, self._step_hooks)
        self.buffers = ModuleBuffers(model, context, engine)
        self._profile: Profile | None = None
        self._forward_hooks = install(engine, weakref.WeakMethod(self._pre_forward))

    def _link(self, modules: list[UnitSpec]) -> WeakIdKeyDictionary:
        """Connect sharded parameters with the engine; returns them by their plain ones."""
        sharded_params = WeakIdKeyDictionary()
        for unit, module in zip(self._units, modules, strict=True):
            plain = {entry.name: entry.parameter for entry in module.parameters}
            grad_buckets = iter(self._engine.reducer.grad_buckets.get(unit.index, []))
            for bucket in unit.buckets:
                link = EngineLink(self._engine, bucket, next(grad_buckets) if bucket.spec.trainable else None)
                for position, sharded in enumerate(bucket.sharded_params):
                    sharded.__dict__.update(plain[sharded.mics_name].__dict__)
                    bucket.unsharded.params[position].__dict__ = sharded.__dict__  # attributes that a script sets
                    sharded.mics_link, sharded.mics_position = link, position
                    sharded.mics_memory.finish = link.keep_writes
                    sharded_params[plain[sharded.mics_name]] = sharded
        return sharded_params

    @property
    def steps_done(self) -> int:
        """Optimizer steps so far. Set it when a training is resumed."""
        return self._target.steps_done

    @steps_done.setter
    def steps_done(self, count: int) -> None:
        self._target.steps_done = count

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return self._target.device

    @cached_property
    def _names_by_id(self) -> dict[int, str]:
        """Names of the sharded parameters, by id."""
        slices = (param_slice for unit in self._units for b in unit.buckets for param_slice in b.layout.param_slices)
        return {id(sharded): own.name for sharded, own in zip(self.internals.parameters, slices, strict=True)}

    def register_forward_method(self, module: nn.Module, name: str) -> None:
        """Let a method run as a forward does: with unsharded parameters, on every rank.

        For parts of a model that are called without its forward, such as `model.encode(x)`, in training or evaluation.

        Args:
            module: The model or a module of it, which has the method.
            name: Name of the method.

        Raises:
            ConfigError: `module` is not in this model, or has no such method.
        """
        register_forward_method(self.model, self._forward_hooks, module, name)

    def _pre_forward(self) -> None:
        """Prepare a root forward: check the model once per step, synchronize buffers.

        Raises:
            LifecycleError: Parameters were added, replaced or removed since `shard`, or torch traces the model.
        """
        check_not_traced()
        self._step_hooks.reset_after_error()
        target = self._target
        target.pre_forward(is_training=self.model.training)
        if target.is_check_due:
            target.is_check_due = not guards.check_parameters_unchanged(self.model, self._names_by_id)
        if target.is_step_over and self.model.training and torch.is_grad_enabled():
            self._begin_step()
        self.buffers.pre_forward()

    def _begin_step(self) -> None:
        self._groups.traffic_log.drain()  # traffic of an evaluation belongs to no step
        self._target.is_step_over = False
        if self.grad_codec_steps is not None and self.steps_done >= self.grad_codec_steps:
            self.grad_codec_steps = None
            self._engine.reducer.wait()
            self._groups.disable_grad_codecs()

    @property
    def scopes(self) -> Scopes:
        """Degrees, mesh axes and codecs of all model states in this job."""
        return self._groups.scopes

    def mark_modified(self) -> None:
        """Declare that parameters were written in a way that torch does not count.

        Such writes are those of your own kernels and through `to_local().data`, and ``torch._foreach_*`` on torch 2.11.
        The engine detects all others.
        """
        for parameter in self.internals.parameters:
            parameter.mics_memory.writes.num += 1

    def adopt(self, optimizer: Optimizer) -> Optimizer:
        """Replace plain parameters in an optimizer by the sharded ones. Collective.

        Parameter groups and states are kept.

        Args:
            optimizer: Optimizer that was built before `shard`, on parameters of this model only. Changed in place.

        Returns:
            The same optimizer.

        Raises:
            ConfigError: The optimizer holds other parameters, or needs whole tensors where ranks hold rows. Raised on
                every rank.
        """
        run_on_all_ranks(lambda: adopt(optimizer, self._target, self._step_hooks))
        return optimizer

    def micro_step(self, index: int, *, of: int) -> AbstractContextManager[None]:
        """Declare which micro-step of an optimizer step runs in this context.

        It is a hint: in the last micro-step the second hop overlaps the backward. Without it, the last micro-step is
        predicted from the number of backwards of the last two steps.

        Args:
            index: Number of the micro-step, from 0.
            of: Micro-steps per optimizer step.

        Raises:
            ConfigError: `index` is not in 0 to `of` - 1.
        """
        if not 0 <= index < of:
            raise ConfigError(f"`micro_step({index}, of={of})` is not one of {of} micro-steps. Use 0 to {of - 1}.")
        return self._declaring(is_last=index == of - 1)

    @contextmanager
    def _declaring(self, *, is_last: bool) -> Iterator[None]:
        window = self._engine.reducer.window
        before, window.declared = window.declared, is_last
        try:
            yield
        finally:
            window.declared = before

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        *,
        error_if_nonfinite: bool = False,
        only: Iterable[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Scale gradients so that their norm over all ranks is at most `max_norm`.

        Collective.

        Args:
            max_norm: Largest norm after scaling.
            norm_type: Order of the p-norm; `math.inf` for the largest element.
            error_if_nonfinite: Whether a norm of NaN or infinity raises.
            only: Parameters whose gradients count and are scaled, the same on all ranks; None for all.

        Returns:
            The norm before scaling, a plain scalar tensor, the same on all ranks.

        Raises:
            LifecycleError: The norm is not finite and `error_if_nonfinite` is set.
            ConfigError: `only` holds a tensor that is no parameter of this sharded model, `norm_type` is not positive,
                or `max_norm` is negative or no number.
        """
        if isinstance(max_norm, str) or not max_norm >= 0:
            raise ConfigError(f"`max_norm={max_norm!r}` is not a norm. Use a number from 0 on, such as 1.0.")
        parameters = self.internals.parameters if only is None else self._select(only)
        self._engine.finish_gradients()
        total = total_norm(parameters, self._groups, norm_type)
        if error_if_nonfinite and not bool(torch.isfinite(total)):
            raise LifecycleError(
                f"The gradient norm is {total.item()}, and `error_if_nonfinite` is set. Lower the learning rate or the "
                "loss scale, or find the first NaN."
            )
        clip_to_norm(parameters, total, max_norm)
        return total

    def _select(self, only: Iterable[torch.Tensor]) -> list[ShardedParameter]:
        selected = {id(parameter): parameter for parameter in only}
        foreign = [parameter for parameter in selected.values() if not self._target.owns(parameter)]
        if foreign:
            raise ConfigError(
                f"`only` holds a tensor {list(foreign[0].shape)} that is no parameter of this sharded model. Pass "
                "parameters from `model.parameters()` of after `shard()`."
            )
        return [parameter for parameter in self.internals.parameters if id(parameter) in selected]

    def report(self) -> ShardingReport:
        """How the model is sharded, what memory that takes and what a step sends: ``print(sharded.report())``."""
        config, parameters = self.config, self.internals.parameters
        plan = self._plan_of(self._target.last_step.num_backwards)
        longer = self._plan_of(plan.num_micro_steps + 1)
        fragments = config.outer_round.deal([unit.index for unit in self._units if unit.trainable_buckets]).values()
        with_outer = [self._plan_of(plan.num_micro_steps, tuple(units)) for units in fragments]
        sent = {axis: plan.sent_bytes(axis) for axis in dict.fromkeys(each.axis for each in plan.collectives)}
        return ShardingReport(
            requested=requested(config),
            chosen=self._chosen,
            scopes=self.scopes,
            num_units=len(self._units),
            num_parameters=sum(parameter.numel() for parameter in parameters),
            num_trained=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
            dtypes={p.dtype: (config.param_dtype_of(p.dtype), config.wire_dtype_of(p.dtype)) for p in parameters},
            bytes_by_purpose=dict(self.memory.bytes_by_purpose),
            num_micro_steps=plan.num_micro_steps,
            sent_bytes=sent,
            added_bytes={axis: longer.sent_bytes(axis) - num_bytes for axis, num_bytes in sent.items()},
            outer_round=config.outer_round,
            outer_bytes=[each.sent_bytes() - plan.sent_bytes() for each in with_outer],
            is_delayed=config.second_hop == "delayed",
        )

    @property
    def plan(self) -> Plan:
        """Every collective of an optimizer step with as many micro-steps as the last one.

        Before the first step it is a plan for one micro-step. Every micro-step is planned to run the same units in the
        order of the first training pass, with the gradients that are required now. One that leaves units out, runs
        others than its peers, is interrupted, or comes before a change of `requires_grad` sends something else.
        It has an outer step of what the last step has started one of.
        """
        last = self._target.last_step
        return self._plan_of(last.num_backwards, last.outer_units)

    def _plan_of(self, num_micro_steps: int, outer_units: tuple[int, ...] = ()) -> Plan:
        order = self._engine.order
        in_order = tuple(range(len(self._units)))
        step_order = StepOrder(
            forward=tuple(order.forward_units) if order.is_frozen else in_order,
            backward=tuple(order.backward_units) if order.is_complete else (0, *reversed(in_order[1:])),
            num_micro_steps=num_micro_steps,
            repeated=self._target.last_step.repeated,
            second_hop_every_backward=self._engine.overlap.second_hop_every_backward,
            outer_units=outer_units,
        )
        owned_buckets = [bucket for exchange in self._target.last_exchanges for bucket in exchange.buckets]
        owned = tuple(
            OwnedPlan(
                name=bucket.name,
                assignment=bucket.assignment,
                index=self._groups.trainable_placement.index,
                dtype=bucket.dtype,
            )
            for bucket in owned_buckets
        )
        slots = {id(unit.slot): unit.index for unit in reversed(self._units)}
        units = (unit_plan_of(unit, slots[id(unit.slot)]) for unit in self._units)
        return plan_step(tuple(units), self.scopes, step_order, owned)

    def traffic(self) -> TrafficRows:
        """Issued and planned traffic of this rank in the last step, by collective.

        They are equal for the steps that `plan` describes. `print` shows a table.
        """
        return compare(self.plan, self._target.last_step.issued)

    def profile(self, steps: int = 3, *, path: str | Path | None = None) -> Profile:
        """Record the next optimizer steps of this model on all ranks. Collective.

        Args:
            steps: Steps to record, each from the end of an optimizer step to the end of the next one.
            path: File that receives the trace of all ranks after the last step, ``.json``; None for none.

        Returns:
            The profile, whose `result` exists after the last step. Rank 0 then prints the slowest rank.

        Raises:
            ConfigError: `steps` is no positive number, differs between ranks, or `path` cannot be written.
            LifecycleError: The model is being profiled.

        Cost:
            While it records, about a microsecond for each mark. After the last step a gather of what was recorded.
        """
        self._profile = begin_profile(self.internals, self._profile, steps, path)
        return self._profile

    def full_state_dict(self) -> dict[str, Any]:
        """The plain model's state dict on rank 0's CPU; empty on other ranks. Collective.

        Cost:
            An all-gather of every sharded parameter. Memory: one whole parameter at a time on every rank, all of them
            on rank 0's CPU.
        """
        self._groups.agree_on(None, "full_state_dict (call it on every rank)")
        self._target.show_committed()
        self.buffers.synchronize()
        return state.full_state_dict(self.model)

    def load_full_state_dict(self, state_dict: dict[str, Any], *, strict: bool = True) -> Any:
        """Load a plain state dict that every rank passes as a whole.

        `model.load_state_dict` does the same, but for codecs of differences: their next param sync is then not exact.

        Args:
            state_dict: State dict of the plain model, memory-mapped if it is large.
            strict: Whether missing and unexpected keys raise.

        Returns:
            Missing and unexpected keys, as `torch.nn.Module.load_state_dict` does.
        """
        result = self.model.load_state_dict(state_dict, strict=strict)
        self.internals.set_references()
        return result

    def full_optimizer_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """The plain optimizer's state dict on rank 0's CPU; empty on others. Collective.

        Raises:
            CheckpointError: A state cannot be reassembled from shards.
        """
        if self.config.outer_every:
            raise CheckpointError(
                "`outer_every` is set, and islands have different optimizer states, of which one state dict holds one. "
                "Use a sharded checkpoint (`save_checkpoint`, or `state_dict_type='sharded'`), or save the weights "
                "alone."
            )
        self._groups.agree_on(None, "full_optimizer_state_dict (call it on every rank)")
        return state.full_optimizer_state_dict(optimizer, self._step_hooks.swap_of(optimizer).owner_of, self._groups)

    def load_full_optimizer_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Load a plain optimizer's state dict that every rank passes as a whole.

        It has no residuals of error feedback; those of this model are cleared.

        Raises:
            CheckpointError: The state dict holds another number of parameters.
        """
        state.load_full_optimizer_state_dict(optimizer, state_dict, self._step_hooks.swap_of(optimizer).owner_of)
        for feedback in self.internals.feedback:
            feedback.clear()
