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

from mics_strategy.agreement import gather_objects
from mics_strategy.errors import LifecycleError
from mics_strategy.sharding.buffers import StagingRing, levels_of
from mics_strategy.sharding.double_backward import DoubleBackward
from mics_strategy.sharding.gradients.gradient import BucketGradient
from mics_strategy.sharding.gradients.reducer import Reducer
from mics_strategy.sharding.lifecycle import Content, Phase
from mics_strategy.sharding.order import Call, CommonOrder, LiveCalls, RecordedOrder
from mics_strategy.sharding.streams import Streams, outside_transforms
from mics_strategy.sharding.unit import Unit

_log = logging.getLogger(__name__)
_next_sequence_number: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherBuffers:
    """What travels towards the units: the flat form of one, and this rank's shard of it in the compute dtype."""

    staging: StagingRing
    cast: StagingRing


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
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
        timing: See `Timing`.
    """

    def __init__(
        self, units: list[Unit], reducer: Reducer, streams: Streams, buffers: GatherBuffers, timing: Timing
    ) -> None:
        self.units = units
        self.reducer = reducer
        self.recorded = RecordedOrder()
        self._streams = streams
        self._buffers = buffers
        self._timing = timing
        self._live = LiveCalls()
        self._common = CommonOrder(units)
        self._has_whole_parameters = reducer.mesh.gather_params is None
        self.num_backwards = 0
        self._num_unused = 0  # backwards since the last step or the last clearing of gradients
        self._is_pending_told = False
        self._clock = 0
        self._in_backward = False
        self._hidden: set[int] = set()  # units that ran without gradients in a forward with them: to be recomputed
        self._training_forward: Unit | None = None  # the outermost unit of a forward with gradients
        self._double_backward = DoubleBackward(self._before_backward, self._before_second_order)
        self.on_gradients: Callable[[], None] = lambda: None  # called when gradients have become final

    @property
    def is_recomputing(self) -> bool:
        """Whether autograd is at work, so that a forward now is a recomputation."""
        return self._in_backward and torch._C._current_graph_task_id() != -1

    def before_forward(self, unit: Unit) -> Call:
        """Make the unit's parameters usable. Returns the call, for `after_forward`."""
        self._clock += 1
        self.recover()
        unit.refuse_unfrozen()
        self._unshard(unit)
        unit.enter_forward()
        if not self.is_recomputing:
            if self._training_forward is None and torch.is_grad_enabled():
                self._training_forward = unit
                if self.units[0].module.training:
                    self._live.drop_evaluations()
            if self._training_forward is not None:
                self.recorded.enter(unit.index)
                if not torch.is_grad_enabled():
                    self._hidden.add(unit.index)
            self._start_ahead(unit, (self.units[index] for index in self.recorded.ahead(self._timing.prefetch)))
        return Call(
            unit,
            self._clock,
            first_node=_next_sequence_number(),
            is_recomputed=self.is_recomputing,
            is_evaluation=not self.units[0].module.training,
        )

    def after_forward(self, call: Call, outputs: list[torch.Tensor]) -> None:
        """Release the unit's parameters and watch its outputs for the backward.

        Args:
            call: What `before_forward` returned; the forward has ended, or raised.
            outputs: Tensors that the forward returned; empty when it raised.
        """
        unit = call.unit
        unit.exit_forward()
        if self._training_forward is unit:
            self._training_forward = None
        if unit.index == 0 and self._has_whole_parameters:
            self._bring(self._common.rest())  # what other ranks may have needed
        self._clock += 1
        call.leave, call.versions = self._clock, tuple(bucket.version for bucket in unit.buckets)
        if self.watch(call, outputs) and not call.is_recomputed:
            self._live.push(call)

    def watch(self, call: Call, tensors: Iterable[torch.Tensor]) -> bool:
        """See when a backward enters a forward through one of the tensors that it has made; whether there are any."""
        made = [level for each in tensors for level in levels_of(each) if level.requires_grad and call.has_made(level)]
        if not made or not torch.is_grad_enabled():
            return False
        for tensor in made:
            tensor.register_hook(lambda _: self._before_backward(call))
        return True

    def _unshard(self, unit: Unit) -> None:
        if self._in_backward:
            self.recorded.need(unit.index)
        self._start(unit)
        unit.finish_unshard()

    def _start(self, unit: Unit) -> None:
        if self._has_whole_parameters:
            self._bring(self._common.up_to(unit))
        self._bring([unit])

    def _bring(self, units: list[Unit]) -> None:
        for unit in units:
            unit.start_unshard(self._streams, self._buffers.staging, self._buffers.cast, again=self._in_backward)

    def _start_ahead(self, current: Unit, following: Iterable[Unit]) -> None:
        """Gather the following units while `current` computes, as far as their slots are free."""
        for unit in following:
            tenant = unit.slot.tenant
            is_free = tenant is None or tenant is unit or (isinstance(tenant, Unit) and tenant.phase is Phase.IDLE)
            if unit is not current and tenant is not current and is_free and self._timing.prefetch:
                self._start(unit)

    def _enter_pass(self) -> None:
        """The first sign of a backward: agree on the order of reductions and ask to be told of its end."""
        if self._in_backward:
            return
        self._in_backward = True
        self.num_backwards += 1
        self.reducer.mesh.note_backward()
        self._num_unused = self._num_unused + 1 if self.reducer.holds_gradients else 1
        self.recorded.freeze()
        order = self._live.reduction_order()
        if self._has_whole_parameters or self.reducer.mesh.reduce_grads is None:  # ranks may have run different units
            order = self._common.units[::-1]
        ran = self._hidden.union(unit.index for unit in self.units if unit.num_live_calls)
        if self.reducer.begin_backward(order, {unit.index for unit in self.units} - ran):
            self.recorded.forget_needed()
        _at_end_of_backward(self._end_backward)

    @outside_transforms
    def _before_backward(self, call: Call) -> None:
        """The gradient of something that a forward made has arrived: its unit's backward is next, or under way."""
        self._enter_pass()
        unit, backward = call.unit, torch._C._current_graph_task_id()
        if torch.is_grad_enabled():  # `create_graph=True`
            self._double_backward.follow(call, torch._C._current_autograd_node())
        if call.backward == backward:
            if unit.content is not Content.UNSHARDED:
                self._unshard(unit)
            return
        call.backward = backward
        for other in self._live.pop_until(call):
            self._follow(other)
            if other.enter < call.enter:  # around this call: autograd goes through it without having met its outputs
                other.unit.enter_backward(other.enter)
        self._complete_before(call)
        _refuse_changes(call)
        self._unshard(unit)
        unit.enter_backward(call.enter)
        if call.is_recomputed:
            unit.earliest_enter = call.enter
            _at_end_of_backward(lambda: self._release(unit))
        self._start_next(unit)

    def _follow(self, call: Call) -> None:
        """Gather and reduce in the order of ranks whose backward goes through `call`, which this rank's skips.

        In another order each rank waits for a collective that the other one starts only later.
        """
        self._complete_before(call)
        self._unshard(call.unit)
        self._start_next(call.unit)

    def _start_next(self, unit: Unit) -> None:
        """Gather ahead for the call that is before `unit`'s in the forward."""
        following = self._live.next
        if following is not None:
            self._start_ahead(unit, [following])

    @outside_transforms
    def _before_second_order(self, call: Call) -> None:
        """A backward differentiates the backward of `call`, and reads the parameters in any order."""
        self._enter_pass()
        _refuse_changes(call)
        if call.unit.content is not Content.UNSHARDED:
            self._unshard(call.unit)

    def _complete_before(self, call: Call) -> None:
        """Release the units that were entered after `call` had left: autograd is done with them."""
        for unit in self.units:
            if unit.phase is Phase.BACKWARD and unit.backward_enter > call.leave:
                unit.exit_backward()
            if unit.num_live_calls == 0 and unit.earliest_enter > call.leave:
                unit.earliest_enter = -1
                self.reducer.complete(unit)

    def _release(self, unit: Unit) -> None:
        unit.earliest_enter = -1
        if unit.phase is Phase.BACKWARD:
            unit.exit_backward()

    def on_gradient(self, unit: Unit, gradient: BucketGradient, position: int, parameter: nn.Parameter) -> None:
        """Autograd has accumulated the gradient of an unsharded parameter.

        It may have entered the unit other than through the forward's outputs: had it needed parameters that were
        resharded, it would have refused (see `saved_versions`).
        """
        self._enter_pass()
        self.reducer.collect(unit, gradient, position, parameter)

    @outside_transforms
    def _end_backward(self) -> None:
        """Autograd is done: follow what other ranks may have run, send what is left, release everything."""
        num_left = 0
        for call in self._live.drain():
            self._follow(call)
            num_left += 1
        for unit in self.units:
            self._release(unit)
        self._double_backward.end()
        self.reducer.end_backward()
        self.recorded.complete(followed_all=not num_left)
        self._hidden.clear()
        self._in_backward = False
        if self._timing.second_hop_every_backward:
            self.finish_gradients()

    def _abandon_backward(self) -> None:
        """An exception ended a backward; the model is used again."""
        self._in_backward = False
        self._hidden.clear()
        self._training_forward = None
        self._double_backward.end()
        for _ in self._live.drain():
            pass
        for unit in self.units:
            unit.abandon()
        self.reducer.abandon()

    def recover(self) -> None:
        """Clean up after a backward that an exception has ended; nothing tells the engine of it when it happens."""
        if self._in_backward and not self.is_recomputing:
            self._abandon_backward()

    def finish_gradients(self) -> None:
        """Make every gradient final and visible. Collective; does nothing inside a backward or when nothing is due."""
        self.recover()
        if self._in_backward or not self.reducer.is_dirty:
            return
        if self._has_whole_parameters:
            self._bring(self._common.rest())
        if not self._common.is_agreed:
            self._common.agree(gather_objects(self.recorded.entered))
        self.reducer.finish()
        for unit in self.units:  # what was gathered for other ranks, too: the optimizer is about to write what is read
            unit.finish_unshard()
        self.on_gradients()

    @property
    def num_pending(self) -> int:
        """Backwards whose gradients are here and were used by no optimizer step."""
        return self._num_unused if self.reducer.holds_gradients else 0

    def tell_pending(self) -> None:
        """Say once, on rank 0, that gradients which are here will not be in a checkpoint."""
        count, was_told = self.num_pending, self._is_pending_told
        self._is_pending_told = was_told or count > 0
        if count and not was_told and self.reducer.mesh.rank == 0:
            _log.warning(
                "Saved after %d micro-steps whose gradients no optimizer step has used. Gradients are not saved: who "
                "resumes from here goes on without them. Save right after an optimizer step to lose nothing.",
                count,
            )

    def after_step(self) -> None:
        """Parameters have changed: graphs from before cannot be backpropagated any more."""
        self.reducer.mesh.note_step()
        self._num_unused = 0
        for _ in self._live.drain():
            pass
        self._common.restart()
        if self._timing.update_at_once:
            for unit in self.units:
                unit.update(self._streams, self._buffers.staging, self._buffers.cast)


def _refuse_changes(call: Call) -> None:
    if call.versions != tuple(bucket.version for bucket in call.unit.buckets):
        raise LifecycleError(
            f"The parameters of unit `{call.unit.name}` changed between its forward and its backward (an optimizer "
            "step, a load, or a write into a parameter). Run the backward before changing parameters, or run the "
            "forward again."
        )


def _at_end_of_backward(callback: Callable[[], None]) -> None:
    """Have `callback` called when the backward that is running now (the innermost one) has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)
