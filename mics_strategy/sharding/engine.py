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
from mics_strategy.sharding.buffers import StagingRing
from mics_strategy.sharding.gradients.gradient import BucketGradient
from mics_strategy.sharding.gradients.reducer import Reducer
from mics_strategy.sharding.lifecycle import Phase
from mics_strategy.sharding.order import Call, CommonOrder, LiveCalls, RecordedOrder
from mics_strategy.sharding.streams import Streams
from mics_strategy.sharding.unit import Unit

_log = logging.getLogger(__name__)


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
        self.on_gradients: Callable[[], None] = lambda: None  # called when gradients have become final

    @property
    def is_recomputing(self) -> bool:
        """Whether autograd is at work, so that a forward now is a recomputation."""
        return self._in_backward and torch._C._current_graph_task_id() != -1

    def before_forward(self, unit: Unit) -> int:
        """Make the unit's parameters usable. Returns the time of the call, for `after_forward`."""
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
        return self._clock

    def after_forward(self, unit: Unit, entered: int, outputs: list[torch.Tensor]) -> None:
        """Release the unit's parameters and watch its outputs for the backward.

        Args:
            unit: Whose forward has ended (or raised).
            entered: What `before_forward` returned.
            outputs: Tensors that the forward returned; empty when it raised.
        """
        unit.exit_forward()
        if self._training_forward is unit:
            self._training_forward = None
        if unit.index == 0 and self._has_whole_parameters:
            self._bring(self._common.rest())  # what other ranks may have needed
        watched = [tensor for tensor in outputs if tensor.requires_grad]
        if not watched or not torch.is_grad_enabled():
            return
        self._clock += 1
        call = Call(
            unit,
            entered,
            self._clock,
            versions=tuple(bucket.version for bucket in unit.buckets),
            is_recomputed=self.is_recomputing,
            is_evaluation=not self.units[0].module.training,
        )
        if not call.is_recomputed:
            self._live.push(call)
        _before_gradient(watched, lambda: self._before_backward(call))

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
            if unit is not current and is_free and self._timing.prefetch:
                self._start(unit)

    def _enter_pass(self) -> None:
        """The first sign of a backward: agree on the order of reductions and ask to be told of its end."""
        if self._in_backward:
            return
        self._in_backward = True
        self.num_backwards += 1
        self._num_unused = self._num_unused + 1 if self.reducer.holds_gradients else 1
        self.recorded.freeze()
        order = self._live.reduction_order()
        if self._has_whole_parameters or self.reducer.mesh.reduce_grads is None:  # ranks may have run different units
            order = self._common.units[::-1]
        ran = self._hidden.union(unit.index for unit in self.units if unit.num_live_calls)
        if self.reducer.begin_backward(order, {unit.index for unit in self.units} - ran):
            self.recorded.forget_needed()
        _at_end_of_backward(self._end_backward)

    def _before_backward(self, call: Call) -> None:
        """The gradient of a unit's output has arrived: its backward is next."""
        self._enter_pass()
        unit = call.unit
        skipped = list(self._live.pop_until(call))
        self._complete_before(call)
        for other in skipped:
            self._unshard(other.unit)
            if other.enter < call.enter:  # around this call: autograd goes through it without having met its outputs
                other.unit.enter_backward(other.enter)
        if call.versions != tuple(bucket.version for bucket in unit.buckets):
            raise LifecycleError(
                f"The parameters of unit `{unit.name}` changed between its forward and its backward (an optimizer "
                "step, a load, or a write "
                "into a parameter). Run the backward before changing parameters, or run the forward again."
            )
        self._unshard(unit)
        unit.enter_backward(call.enter)
        if call.is_recomputed:
            unit.earliest_enter = call.enter
            _at_end_of_backward(lambda: self._release(unit))
        following = self._live.next
        if following is not None:
            self._start_ahead(unit, [following])

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
        """Autograd has accumulated the gradient of an unsharded parameter."""
        self._enter_pass()
        if unit.phase is not Phase.BACKWARD and gradient.bucket.params_shard is not None:
            raise LifecycleError(
                f"A gradient of unit `{unit.name}` arrived although its backward was never announced, so its "
                "parameters may not have been "
                "gathered. Let its forward return tensors, or tuples, lists, dicts or dataclasses of tensors."
            )
        self.reducer.collect(unit, gradient, position, parameter)

    def _end_backward(self) -> None:
        """Autograd is done: follow what other ranks may have run, send what is left, release everything."""
        for unit in self.units:
            self._release(unit)
        left = list(self._live.drain())
        for call in left:
            self._unshard(call.unit)
        self.reducer.end_backward()
        self.recorded.complete(followed_all=not left)
        self._hidden.clear()
        self._in_backward = False
        if self._timing.second_hop_every_backward:
            self.finish_gradients()

    def _abandon_backward(self) -> None:
        """An exception ended a backward; the model is used again."""
        self._in_backward = False
        self._hidden.clear()
        self._training_forward = None
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
        self._num_unused = 0
        for _ in self._live.drain():
            pass
        self._common.restart()
        if self._timing.update_at_once:
            for unit in self.units:
                unit.update(self._streams, self._buffers.staging, self._buffers.cast)


def _before_gradient(outputs: list[torch.Tensor], callback: Callable[[], None]) -> None:
    """Have `callback` called once in a backward, before the first gradient of any of `outputs` goes further."""
    if len(outputs) > 1:
        torch.autograd.graph.register_multi_grad_hook(outputs, lambda _: callback(), mode="any")
    else:  # the same, at a quarter of the cost
        outputs[0].register_hook(lambda _: callback())


def _at_end_of_backward(callback: Callable[[], None]) -> None:
    """Have `callback` called when the backward that is running now (the innermost one) has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)
