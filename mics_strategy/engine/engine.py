"""What happens when a unit is about to run, has run, or gets its gradient?

The engine owns no tensors. Hooks tell it what the model does; it tells units to gather and release, and the
reducer to collect and send. Nothing is assumed about the training loop: gathers follow the forward that
really runs, the backward follows the calls that it left behind, and what a loop forgets to say costs overlap
only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from mics_strategy.comm.consensus import gather_objects
from mics_strategy.engine.double_backward import DoubleBackward
from mics_strategy.engine.grad_bucket import GradBucket
from mics_strategy.engine.lifecycle import UnitPhase, UnshardState
from mics_strategy.engine.memory import StagingPool, levels_of
from mics_strategy.engine.order import ExecutionOrder, ForwardCall, GlobalOrder, PendingBackwards
from mics_strategy.engine.reducer import Reducer
from mics_strategy.engine.streams import Streams, outside_transforms
from mics_strategy.engine.unit import Unit
from mics_strategy.errors import LifecycleError

_log = logging.getLogger(__name__)
_next_sequence_number: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherBuffers:
    """What travels towards the units: the flat form of one, and this rank's shard of it in the compute dtype."""

    staging: StagingPool
    cast: StagingPool


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapPolicy:
    """When the engine communicates.

    Attributes:
        prefetch: Units gathered ahead; 0 gathers each when it is needed.
        second_hop_every_backward: Finish gradients after every backward instead of before the step.
        update_at_once: Bring the optimizer's result to the parameter scope right after the step, not in front of the
            next forward of each unit.
    """

    prefetch: int
    second_hop_every_backward: bool
    update_at_once: bool


class Engine:
    """Follows one sharded model through forward, backward and step.

    Args:
        units: By index; the root is the first.
        reducer: Takes the gradients.
        streams: Where gathers run.
        buffers: For gathers.
        overlap: See `Timing`.
    """

    def __init__(
        self, units: list[Unit], reducer: Reducer, streams: Streams, buffers: GatherBuffers, overlap: OverlapPolicy
    ) -> None:
        self.units = units
        self.reducer = reducer
        self.order = ExecutionOrder()
        self._streams = streams
        self._buffers = buffers
        self._overlap = overlap
        self._pending = PendingBackwards()
        self._global_order = GlobalOrder(units)
        self._has_whole_parameters = reducer.groups.param_comm is None
        self.num_backwards = 0
        self._num_unused = 0  # backwards since the last step or the last clearing of gradients
        self._has_warned_pending = False
        self._clock = 0
        self._in_backward = False
        self._checkpointed_units: set[int] = (
            set()
        )  # units that ran without gradients in a forward with them: to be recomputed
        self._training_forward: Unit | None = None  # the outermost unit of a forward with gradients
        self._double_backward = DoubleBackward(self._pre_backward, self._pre_double_backward)
        self.on_gradients: Callable[[], None] = lambda: None  # called when gradients have become final

    @property
    def is_recomputing(self) -> bool:
        """Whether autograd is at work, so that a forward now is a recomputation."""
        return self._in_backward and torch._C._current_graph_task_id() != -1

    def pre_forward(self, unit: Unit) -> ForwardCall:
        """Make the unit's parameters usable. Returns the call, for `post_forward`."""
        self._clock += 1
        self.reset_after_error()
        unit.check_still_frozen()
        self._unshard(unit)
        unit.enter_forward()
        if not self.is_recomputing:
            if self._training_forward is None and torch.is_grad_enabled():
                self._training_forward = unit
                if self.units[0].module.training:
                    self._pending.drop_evaluations()
            if self._training_forward is not None:
                self.order.record_forward(unit.index)
                if not torch.is_grad_enabled():
                    self._checkpointed_units.add(unit.index)
            self._prefetch(unit, (self.units[index] for index in self.order.upcoming(self._overlap.prefetch)))
        return ForwardCall(
            unit,
            self._clock,
            first_node=_next_sequence_number(),
            is_recomputed=self.is_recomputing,
            is_evaluation=not self.units[0].module.training,
        )

    def post_forward(self, call: ForwardCall, outputs: list[torch.Tensor]) -> None:
        """Release the unit's parameters and watch its outputs for the backward.

        Args:
            call: What `pre_forward` returned; the forward has ended, or raised.
            outputs: Tensors that the forward returned; empty when it raised.
        """
        unit = call.unit
        unit.exit_forward()
        if self._training_forward is unit:
            self._training_forward = None
        if unit.index == 0 and self._has_whole_parameters:
            self._launch_all_gathers(self._global_order.take_rest())  # what other ranks may have needed
        self._clock += 1
        call.leave, call.versions = self._clock, tuple(bucket.version for bucket in unit.buckets)
        if self.watch(call, outputs) and not call.is_recomputed:
            self._pending.push(call)

    def watch(self, call: ForwardCall, tensors: Iterable[torch.Tensor]) -> bool:
        """See when a backward enters a forward through one of the tensors that it has made; whether there are any."""
        made = [level for each in tensors for level in levels_of(each) if level.requires_grad and call.has_made(level)]
        if not made or not torch.is_grad_enabled():
            return False
        for tensor in made:
            tensor.register_hook(lambda _: self._pre_backward(call))
        return True

    def _unshard(self, unit: Unit) -> None:
        if self._in_backward:
            self.order.record_backward(unit.index)
        self._launch_unshard(unit)
        unit.finish_unshard()

    def _launch_unshard(self, unit: Unit) -> None:
        if self._has_whole_parameters:
            self._launch_all_gathers(self._global_order.take_until(unit))
        self._launch_all_gathers([unit])

    def _launch_all_gathers(self, units: list[Unit]) -> None:
        for unit in units:
            unit.start_unshard(self._streams, self._buffers.staging, self._buffers.cast, for_backward=self._in_backward)

    def _prefetch(self, current: Unit, following: Iterable[Unit]) -> None:
        """Gather the following units while `current` computes, as far as their slots are free."""
        for unit in following:
            tenant = unit.slot.resident
            is_free = tenant is None or tenant is unit or (isinstance(tenant, Unit) and tenant.phase is UnitPhase.IDLE)
            if unit is not current and tenant is not current and is_free and self._overlap.prefetch:
                self._launch_unshard(unit)

    def _on_backward_start(self) -> None:
        """The first sign of a backward: agree on the order of reductions and ask to be told of its end."""
        if self._in_backward:
            return
        self._in_backward = True
        self.num_backwards += 1
        self.reducer.groups.record_backward()
        self._num_unused = self._num_unused + 1 if self.reducer.holds_gradients else 1
        self.order.freeze()
        order = self._pending.reduction_order()
        if self._has_whole_parameters or self.reducer.groups.grad_comm is None:  # ranks may have run different units
            order = self._global_order.units[::-1]
        ran = self._checkpointed_units.union(unit.index for unit in self.units if unit.num_live_calls)
        if self.reducer.begin_backward(order, {unit.index for unit in self.units} - ran):
            self.order.forget_backward()
        _at_end_of_backward(self._on_backward_end)

    @outside_transforms
    def _pre_backward(self, call: ForwardCall) -> None:
        """The gradient of something that a forward made has arrived: its unit's backward is next, or under way."""
        self._on_backward_start()
        unit, backward = call.unit, torch._C._current_graph_task_id()
        if torch.is_grad_enabled():  # `create_graph=True`
            self._double_backward.follow(call, torch._C._current_autograd_node())
        if call.backward == backward:
            if unit.unshard_state is not UnshardState.UNSHARDED:
                self._unshard(unit)
            return
        call.backward = backward
        for other in self._pending.pop_until(call):
            self._run_skipped(other)
            if other.enter < call.enter:  # around this call: autograd goes through it without having met its outputs
                other.unit.enter_backward(other.enter)
        self._retire_finished_units(call)
        _check_unchanged(call)
        self._unshard(unit)
        unit.enter_backward(call.enter)
        if call.is_recomputed:
            unit.earliest_enter = call.enter
            _at_end_of_backward(lambda: self._release(unit))
        self._prefetch_next(unit)

    def _run_skipped(self, call: ForwardCall) -> None:
        """Gather and reduce in the order of ranks whose backward goes through `call`, which this rank's skips.

        In another order each rank waits for a collective that the other one starts only later.
        """
        self._retire_finished_units(call)
        self._unshard(call.unit)
        self._prefetch_next(call.unit)

    def _prefetch_next(self, unit: Unit) -> None:
        """Gather ahead for the call that is before `unit`'s in the forward."""
        following = self._pending.next
        if following is not None:
            self._prefetch(unit, [following])

    @outside_transforms
    def _pre_double_backward(self, call: ForwardCall) -> None:
        """A backward differentiates the backward of `call`, and reads the parameters in any order."""
        self._on_backward_start()
        _check_unchanged(call)
        if call.unit.unshard_state is not UnshardState.UNSHARDED:
            self._unshard(call.unit)

    def _retire_finished_units(self, call: ForwardCall) -> None:
        """Release the units that were entered after `call` had left: autograd is done with them."""
        for unit in self.units:
            if unit.phase is UnitPhase.BACKWARD and unit.backward_enter > call.leave:
                unit.exit_backward()
            if unit.num_live_calls == 0 and unit.earliest_enter > call.leave:
                unit.earliest_enter = -1
                self.reducer.complete(unit)

    def _release(self, unit: Unit) -> None:
        unit.earliest_enter = -1
        if unit.phase is UnitPhase.BACKWARD:
            unit.exit_backward()

    def on_grad(self, unit: Unit, gradient: GradBucket, position: int, parameter: nn.Parameter) -> None:
        """Autograd has accumulated the gradient of an unsharded parameter.

        It may have entered the unit other than through the forward's outputs: had it needed parameters that were
        resharded, it would have refused (see `saved_versions`).
        """
        self._on_backward_start()
        self.reducer.add(unit, gradient, position, parameter)

    @outside_transforms
    def _on_backward_end(self) -> None:
        """Autograd is done: follow what other ranks may have run, send what is left, release everything."""
        num_left = 0
        for call in self._pending.drain():
            self._run_skipped(call)
            num_left += 1
        for unit in self.units:
            self._release(unit)
        self._double_backward.end()
        self.reducer.end_backward()
        self.order.complete(followed_all=not num_left)
        self._checkpointed_units.clear()
        self._in_backward = False
        if self._overlap.second_hop_every_backward:
            self.finish_gradients()

    def _discard_backward(self) -> None:
        """An exception ended a backward; the model is used again."""
        self._in_backward = False
        self._checkpointed_units.clear()
        self._training_forward = None
        self._double_backward.end()
        for _ in self._pending.drain():
            pass
        for unit in self.units:
            unit.discard()
        self.reducer.discard()

    def reset_after_error(self) -> None:
        """Clean up after a backward that an exception has ended; nothing tells the engine of it when it happens."""
        if self._in_backward and not self.is_recomputing:
            self._discard_backward()

    def finish_gradients(self) -> None:
        """Make every gradient final and visible. Collective; does nothing inside a backward or when nothing is due."""
        self.reset_after_error()
        if self._in_backward or not self.reducer.is_dirty:
            return
        if self._has_whole_parameters:
            self._launch_all_gathers(self._global_order.take_rest())
        if not self._global_order.is_agreed:
            self._global_order.agree(gather_objects(self.order.forward))
        self.reducer.finish()
        for unit in self.units:  # what was gathered for other ranks, too: the optimizer is about to write what is read
            unit.finish_unshard()
        self.on_gradients()

    @property
    def num_pending(self) -> int:
        """Backwards whose gradients are here and were used by no optimizer step."""
        return self._num_unused if self.reducer.holds_gradients else 0

    def warn_pending_gradients(self) -> None:
        """Say once, on rank 0, that gradients which are here will not be in a checkpoint."""
        count, was_told = self.num_pending, self._has_warned_pending
        self._has_warned_pending = was_told or count > 0
        if count and not was_told and self.reducer.groups.rank == 0:
            _log.warning(
                "Saved after %d micro-steps whose gradients no optimizer step has used. Gradients are not saved: who "
                "resumes from here goes on without them. Save right after an optimizer step to lose nothing.",
                count,
            )

    def post_step(self) -> None:
        """Parameters have changed: graphs from before cannot be backpropagated any more."""
        self.reducer.groups.record_step()
        self._num_unused = 0
        for _ in self._pending.drain():
            pass
        self._global_order.restart()
        if self._overlap.update_at_once:
            for unit in self.units:
                unit.sync_params(self._streams, self._buffers.staging, self._buffers.cast)


def _check_unchanged(call: ForwardCall) -> None:
    if call.versions != tuple(bucket.version for bucket in call.unit.buckets):
        raise LifecycleError(
            f"The parameters of unit `{call.unit.name}` changed between its forward and its backward (an optimizer "
            "step, a load, or a write into a parameter). Run the backward before changing parameters, or run the "
            "forward again."
        )


def _at_end_of_backward(callback: Callable[[], None]) -> None:
    """Have `callback` called when the backward that is running now (the innermost one) has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)
