"""The training step of one sharded model: seven functions, in calling order.

1. `pre_forward`: all-gather the unit unless its slot is current, wait, register its unsharded parameters, prefetch.
2. `post_forward`: register its sharded parameters, remember the call, hook its outputs for the backward.
3. `pre_backward`: release units that autograd no longer needs and start their first hops, all-gather again, prefetch.
4. `on_grad`: collect one gradient; a complete unit starts its first hop when it is its turn.
5. `post_backward`: release every unit; reduce the remaining ones in the order that all ranks share.
6. `finish_gradients`: second hop, once per optimizer step.
7. `post_step`: master shards are new; count the step, forget pending calls; param syncs follow now or at each next
   `pre_forward`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch

from mics_strategy.comm.ranges import NO_RANGE
from mics_strategy.engine.autograd import DoubleBackward, UnshardedParameter
from mics_strategy.engine.checkpointed_regions import CheckpointedRegion
from mics_strategy.engine.grad_bucket import GradBucket
from mics_strategy.engine.lifecycle import UnitPhase, UnshardState
from mics_strategy.engine.memory import levels_of
from mics_strategy.engine.order import ExecutionOrder, ForwardCall, PendingBackwards, TrainingPass
from mics_strategy.engine.parameter import ShardedParameter
from mics_strategy.engine.rank_agreement import GlobalOrder
from mics_strategy.engine.reducer import Reducer
from mics_strategy.engine.schedule import reduces_every_unit
from mics_strategy.engine.streams import outside_transforms
from mics_strategy.engine.unit import GatherResources, Unit
from mics_strategy.errors import LifecycleError

_next_sequence_number: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapPolicy:
    """The moments at which the engine communicates.

    Attributes:
        prefetch: Number of units gathered ahead; 0 gathers each unit when it is needed.
        second_hop_every_backward: Whether gradients are finished after every backward instead of before the step.
        sync_at_once: Whether param syncs run right after the step instead of in front of each unit's next forward.
        keeps_params_unsharded: Whether parameters are never resharded.
    """

    prefetch: int
    second_hop_every_backward: bool
    sync_at_once: bool
    keeps_params_unsharded: bool


class Engine:
    """The engine of one sharded model, from forward to optimizer step.

    Args:
        units: Units by index; the root is the first.
        reducer: Reducer of their gradients.
        resources: Stream and buffers of all-gathers.
        overlap: See `OverlapPolicy`.

    Attributes:
        order: Order of units that the first training pass recorded.
        global_order: Order of units that all ranks share.
        on_gradients: Called when gradients have become final.
        ranges: Ranges of the step, for profiles.
    """

    def __init__(
        self,
        units: list[Unit],
        reducer: Reducer,
        resources: GatherResources,
        overlap: OverlapPolicy,
    ) -> None:
        self.units = units
        self.reducer = reducer
        self.order = ExecutionOrder()
        self.overlap = overlap
        self.ranges = reducer.groups.resources.ranges
        self.on_gradients: Callable[[], None] = lambda: None
        self._resources = resources
        self._pending = PendingBackwards()
        self.global_order = GlobalOrder(units)
        self._clock = 0  # counts beginnings and ends of forwards; see [Note: The clock of a backward] in `order`
        self._in_backward = False
        self._pass = TrainingPass()
        self._training_forward: Unit | None = None  # the outermost unit of a forward with gradients
        self._double_backward = DoubleBackward(self.pre_backward, self._pre_double_backward)

    def pre_forward(self, unit: Unit) -> ForwardCall:
        """Unshard the unit for its forward. Returns the call, for `post_forward`."""
        is_recomputed = self.is_recomputing
        with self.ranges.pre_forward(unit.name, is_recomputed=is_recomputed):
            self._clock += 1
            self.reset_after_error()
            unit.check_params()
            regions = self._enter_regions(unit)
            if not is_recomputed:
                self._record_forward(unit)
            self._unshard(unit, self._next_units(unit, is_recomputed=is_recomputed))
            for region in regions:
                region.save_mark()  # torch ends a recomputation with the last one
            unit.enter_forward()
            return ForwardCall(
                unit,
                self._clock,
                first_node=_next_sequence_number(),
                is_recomputed=is_recomputed,
                is_evaluation=not self.units[0].module.training,
                regions=regions,
            )

    def post_forward(self, call: ForwardCall, outputs: list[torch.Tensor]) -> None:
        """Release the unit's parameters and hook its outputs for the backward.

        Args:
            call: Result of `pre_forward`; the forward has ended, or raised.
            outputs: Tensors that the forward returned; empty when it raised.
        """
        unit = call.unit
        with self.ranges.post_forward(is_recomputed=call.is_recomputed):
            if self._training_forward is not None and not call.is_recomputed:
                self._pass.record(unit, has_graph=torch.is_grad_enabled())
            if self._training_forward is unit:
                self._training_forward = None
            unit.exit_forward()  # may refuse what the forward wrote
            if unit.index == 0 and self.overlap.keeps_params_unsharded:
                for other in self.global_order.take_rest():  # other ranks may have needed them
                    other.start_unshard(self._resources)
            self._clock += 1
            call.leave, call.versions = self._clock, tuple(bucket.version for bucket in unit.buckets)
            has_backward = self.watch(call, outputs)
            if has_backward and not call.is_recomputed:
                self._pending.push(call)
            elif has_backward and unit.index in self._pass.without_graph:
                self._pass.recomputed.add(unit)

    def pre_backward(self, call: ForwardCall, _: torch.Tensor | None = None) -> None:
        """Unshard for the backward of `call`; a gradient of its tensors has arrived."""
        with outside_transforms(), self.ranges.pre_backward(call.unit.name):
            if not self._in_backward:
                self._on_backward_start()
            unit, backward = call.unit, torch._C._current_graph_task_id()
            if torch.is_grad_enabled():  # `create_graph=True`
                self._double_backward.follow(call, torch._C._current_autograd_node())
            if call.graph_task == backward:
                self._unshard_again(unit)
                return
            call.graph_task = backward
            for other in self._pending.pop_until(call):
                self._gather_for_peers(other, call)
                if other.enter < call.enter:  # it encloses this call: autograd runs it without its outputs' hooks
                    other.unit.enter_backward(other.enter)
            self._retire_finished_units(call)
            _check_unchanged(call)
            self._unshard(unit, () if call.is_recomputed else self._reach(unit))
            unit.enter_backward(call.enter)
            if call.is_recomputed:
                unit.earliest_enter = call.enter
                _at_end_of_backward(lambda: self._release(unit))
            else:
                self._recompute(call.regions, call)

    def on_grad(self, unit: Unit, grad_bucket: GradBucket, position: int, parameter: UnshardedParameter) -> None:
        """Collect the gradient that autograd has accumulated on an unsharded parameter.

        Autograd may have entered the unit other than through its outputs. It would have refused resharded parameters
        (see `autograd`).
        """
        recorder = self.ranges.recorder
        with NO_RANGE if recorder is None else recorder.compute.on_grad(unit.name):  # a call less for each parameter
            if not self._in_backward:
                self._on_backward_start()
            if self.reducer.add_grad(unit, grad_bucket, position, parameter):
                self.reducer.launch(self.reducer.complete(unit))

    def post_backward(self) -> None:
        """Reduce the remaining units and release every unit.

        Before that, gather for other ranks what this backward skipped.
        """
        with outside_transforms(), self.ranges.post_backward():
            followed_all = True
            for call in self._pending.drain():
                self._gather_for_peers(call)
                followed_all = False
            for unit in self.units:
                self._release(unit)
            self._double_backward.end()
            self.reducer.end_backward()
            self.order.complete(followed_all=followed_all)
            self._pending.skipped |= self._pass.without_graph
            self._pass.clear()
            self._in_backward = False
            if self.overlap.second_hop_every_backward:
                self.finish_gradients()

    def finish_gradients(self) -> bool:
        """Make every gradient final and visible. Collective. Does nothing inside a backward or if none is due.

        Returns:
            Whether any was due. Then parameters are settled as well.
        """
        if self._in_backward:
            self.reset_after_error()
        if self._in_backward or not self.reducer.is_dirty:
            return False
        with self.ranges.in_engine():
            if self.overlap.keeps_params_unsharded:
                for unit in self.global_order.take_rest():
                    unit.start_unshard(self._resources)
            if not self.global_order.is_agreed:
                self.reducer.finish_first_hops()  # where a rank lacks one, the watchdog sees that others wait for it
                island = self.reducer.groups.island
                self.global_order.agree(island.gather_objects(self.order.forward_units, "units that ran"))
            self.reducer.finish()
            self.settle_params()
            self.on_gradients()
        return True

    def settle_params(self) -> None:
        """Wait for all-gathers in flight, and keep late writes: shards will be written to.

        Some all-gathers are for other ranks alone, or left of a forward that an exception has ended.
        """
        for unit in self.units:
            unit.finish_unshard()
            unit.keep_late_writes()

    def post_step(self, parameters: Iterable[ShardedParameter]) -> None:
        """Count the step; forget pending calls; sync parameters if that is due now.

        The parameters have changed, so graphs of earlier forwards cannot be differentiated any more.

        Args:
            parameters: Those that the optimizer has.
        """
        self.reducer.groups.record_step()
        if any(grad_bucket.feedback.is_unsettled for grad_bucket in self.reducer.all_grad_buckets):
            for parameter in parameters:
                parameter.mics_link.settle_gradient(parameter.mics_position)
        self._pending.clear()
        self._pass.clear()
        self.global_order.restart()
        for unit in self.units:
            unit.reshard_if_changed()
            if self.overlap.sync_at_once:
                unit.sync_params(self._resources)

    @property
    def is_recomputing(self) -> bool:
        """Whether autograd is running, so that a forward now is a recomputation."""
        return self._in_backward and torch._C._current_graph_task_id() != -1

    def watch(self, call: ForwardCall, tensors: Iterable[torch.Tensor]) -> bool:
        """Hook tensors of a forward, for the backward that enters through them.

        Returns whether there are any.
        """
        levels = (level for tensor in tensors for level in levels_of(tensor))
        made = [level for level in levels if level.requires_grad and call.has_made(level)]
        if not made or not torch.is_grad_enabled():
            return False
        for tensor in made:
            tensor.register_hook(partial(self.pre_backward, call))
            hooks: Any = tensor._backward_hooks
            for hook_id in [*hooks] if len(hooks) > 1 else ():  # a user's hook may run nodes of the unit: it runs last
                if getattr(hooks[hook_id], "func", None) != self.pre_backward:
                    hooks[hook_id] = hooks.pop(hook_id)
        return True

    def _record_forward(self, unit: Unit) -> None:
        if self._training_forward is None and torch.is_grad_enabled():
            self._training_forward = unit
            if self.units[0].module.training:
                self._pending.drop_evaluations()
        if self._training_forward is not None:
            self.order.record_forward(unit.index)

    def _unshard(self, unit: Unit, upcoming: Iterable[Unit] = ()) -> None:
        """Unshard a unit; start those that come after it before waiting for it."""
        if self._in_backward:
            self.order.record_backward(unit.index)
        # One after the other: this unit has taken its slot when the next ones look for theirs.
        for started in chain((unit,), self._free_to_prefetch(unit, upcoming)):
            if self.overlap.keeps_params_unsharded:  # other ranks may need those before it in the common order
                for other in self.global_order.take_until(started):
                    other.start_unshard(self._resources)
            started.start_unshard(self._resources)
        unit.finish_unshard()  # after the next ones have started: they are encoded while this one is on the wire

    def _unshard_again(self, unit: Unit) -> None:
        if unit.unshard_state is not UnshardState.UNSHARDED:
            self._unshard(unit)

    def _next_units(self, current: Unit, *, is_recomputed: bool) -> list[Unit]:
        """The units that are needed after `current`, whose forward begins, nearest first."""
        if is_recomputed:
            return self._reach(current) if current.index in self._pass.without_graph else []
        return [self.units[index] for index in self.order.upcoming(self.overlap.prefetch)]

    def _reach(self, current: Unit) -> list[Unit]:
        """The backward has reached `current`. Returns the units that it needs after it, nearest first."""
        if self._pass.without_graph:
            return self._pass.reach(current)[: self.overlap.prefetch]
        return self._pending.upcoming(self.overlap.prefetch)

    def _free_to_prefetch(self, current: Unit, upcoming: Iterable[Unit]) -> Iterator[Unit]:
        """The upcoming units whose slots are free while `current` computes."""
        claimed = {unit.slot for unit in self._pass.recomputed}
        for unit in upcoming:
            resident = unit.slot.resident
            # The gather would overwrite the resident, which a unit in its forward or backward still reads. One that was
            # gathered ahead counts as free.
            is_free = resident in (None, unit) or (isinstance(resident, Unit) and resident.phase is UnitPhase.IDLE)
            if unit is not current and resident is not current and is_free and unit.slot not in claimed:
                yield unit
            claimed.add(unit.slot)  # also if it is not free yet: a later unit must not take it

    def _on_backward_start(self) -> None:
        """Start a backward at its first hook: fix the order of reductions. `post_backward` ends it."""
        for unit in self.units:
            unit.check_hooks()
        self._in_backward = True
        self.reducer.groups.record_backward()
        self.order.freeze()
        self._pending.mark_earliest_enters()
        # All ranks must start first hops in one order. Where parameters and gradients are sharded, all run the same
        # units, and pending calls say it. Elsewhere ranks may differ, and only `turns`, on which they agreed, will do.
        turns = self.global_order.units[::-1]
        order = turns if reduces_every_unit(self.reducer.groups.scopes) else self._pending.reduction_order()
        ran = self._pass.without_graph | self._pending.skipped
        idle = [unit for unit in self.units if unit.num_pending_calls == 0 and unit.index not in ran]
        if self.reducer.begin_backward(order, idle, turns):
            self.order.forget_backward()
        _at_end_of_backward(self.post_backward)

    def _gather_for_peers(self, call: ForwardCall, following: ForwardCall | None = None) -> None:
        """All-gather for ranks that run the backward of `call`; this one skips it.

        Without it, or in another order, ranks wait for each other: each for a collective that its peer starts later.

        Args:
            call: Forward whose backward is skipped.
            following: Forward whose backward this rank enters behind it; None at the end.
        """
        self._retire_finished_units(call)
        self._unshard(call.unit, self._reach(call.unit))
        self._recompute(call.regions, following)

    def _recompute(self, regions: Iterable[CheckpointedRegion], entered: ForwardCall | None) -> None:
        """Recompute regions that are due.

        Where this rank's backward skips them, only all-gather, for its peers.

        Args:
            regions: Regions of a forward whose backward is entered or skipped, outermost first.
            entered: Forward whose backward is entered now or next.
        """
        for region in regions:
            if region.is_due:
                region.is_due = False
                is_needed = entered is not None and region in entered.regions
                if not (is_needed and self._pending.regions.recompute(region)):
                    for unit in region.units:
                        self._unshard(unit)

    def _enter_regions(self, unit: Unit) -> tuple[CheckpointedRegion, ...]:
        """Enter the checkpointed regions around a forward.

        None where parameters are never resharded. Where autograd has begun to recompute a region, as an operator behind
        its last unit reads what the region saved, the backward of that unit is entered first.
        """
        if self.overlap.keeps_params_unsharded:
            return ()
        regions = self._pending.regions.begin_forward(unit)
        call = self._pending.recomputed_before_backward() if self.is_recomputing else None
        if call is not None:
            for region in call.regions:
                region.is_due = False
            self.pre_backward(call)
        return regions

    def _pre_double_backward(self, call: ForwardCall) -> None:
        """Unshard for a backward that differentiates the backward of `call`. It reads parameters in any order."""
        with outside_transforms():
            if not self._in_backward:
                self._on_backward_start()
            _check_unchanged(call)
            self._unshard_again(call.unit)

    def _retire_finished_units(self, call: ForwardCall) -> None:
        """Release units entered after `call` had ended; launch their first hops. Autograd no longer needs them."""
        for unit in self.units:
            if unit.phase is UnitPhase.BACKWARD and unit.backward_enter > call.leave:
                unit.exit_backward()
            if unit.num_pending_calls == 0 and unit.earliest_enter > call.leave:
                unit.earliest_enter = -1
                self.reducer.launch(self.reducer.complete(unit))

    def _release(self, unit: Unit) -> None:
        unit.earliest_enter = -1
        self._pass.recomputed.discard(unit)
        if unit.phase is UnitPhase.BACKWARD:
            unit.exit_backward()

    def reset_after_error(self) -> None:
        """Clean up after a backward that an exception has ended. Autograd does not report it."""
        if not self._in_backward or self.is_recomputing:
            return
        self._in_backward = False
        self._pass.clear()
        self._training_forward = None
        self._double_backward.end()
        self._pending.clear()
        for unit in self.units:
            unit.discard()
        self.reducer.end_interrupted_backward()


def _check_unchanged(call: ForwardCall) -> None:
    if call.versions != tuple(bucket.version for bucket in call.unit.buckets):
        raise LifecycleError(
            f"The parameters of unit `{call.unit.name}` changed between its forward and its backward: by an optimizer "
            "step, a load, or a write into a parameter. Run the backward before you change parameters, or run the "
            "forward again."
        )


def _at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call `callback` when the innermost backward that is running now has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)
