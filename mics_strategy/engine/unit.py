"""How does one unit unshard and reshard?

A unit is a module whose own parameters travel together, usually one transformer layer. It is bound to one
slot for good. What is still in the slot when the unit is needed again (the last layers at the start of the
backward, the first ones at the start of the next micro-step) is not gathered again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from mics_strategy.engine.lifecycle import PHASE_TRANSITIONS, UNSHARD_TRANSITIONS, UnitPhase, UnshardState, transition
from mics_strategy.engine.memory import CachedViews, Slot, StagingPool
from mics_strategy.engine.plan import BucketPlan, UnitPlan
from mics_strategy.engine.streams import Op, OpChain, OpStream, outside_transforms
from mics_strategy.errors import LifecycleError

if TYPE_CHECKING:
    from mics_strategy.engine.bucket import Bucket
    from mics_strategy.engine.grad_bucket import GradBucket
    from mics_strategy.engine.parameter import ShardedParameter

_NOTHING = torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherResources:
    """What every all-gather of parameters uses.

    Attributes:
        stream: Side stream of all-gathers.
        flat: Flat buffers for all buckets of one unit in the compute dtype.
        cast: Buffers for this rank's shards of one unit in the compute dtype.
    """

    stream: OpStream
    flat: StagingPool
    cast: StagingPool


class Unit:
    """A module whose own parameters are gathered, used and released together.

    Args:
        name: Qualified name of the module; empty for the root.
        index: Position among the units, in module order; the root is 0.
        module: The module.
        buckets: Its parameters by dtype and trainability.
        slot: Where it is unsharded.

    Attributes:
        needs_staging: Whether anything that arrives takes the flat form first.
    """

    def __init__(self, name: str, index: int, module: nn.Module, buckets: list[Bucket], slot: Slot) -> None:
        self.name = name or "(root)"
        self.index = index
        self.module = module
        self.buckets = buckets
        self.slot = slot
        self.unshard_state = UnshardState.SHARDED
        self.phase = UnitPhase.IDLE
        self.num_live_calls = 0
        self.earliest_enter = -1
        self.backward_enter = -1
        self._flats = CachedViews([(bucket.layout.full_numel, bucket.spec.param_dtype) for bucket in buckets])
        self._casts = CachedViews([bucket.cast_size for bucket in buckets])
        self.needs_staging = any(bucket.needs_staging for bucket in buckets)
        self._forward_depth = 0
        self._pending_unshard: OpChain | None = None
        self._locations: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] | None = None

    @property
    def trainable(self) -> list[Bucket]:
        """Buckets that have gradients."""
        return [bucket for bucket in self.buckets if bucket.spec.trainable]

    @property
    def is_up_to_date(self) -> bool:
        """Whether the slot holds (or is about to hold) the current parameters, so that nothing has to travel."""
        return self.unshard_state is not UnshardState.SHARDED and all(
            bucket.unsharded_version == bucket.version for bucket in self.buckets
        )

    def start_unshard(self, resources: GatherResources, *, for_backward: bool) -> None:
        """Start the all-gather, unless the slot already holds the current parameters.

        Args:
            resources: Stream and buffers of all-gathers.
            for_backward: Whether a backward needs the parameters, after the forward of the same step.
        """
        if self.is_up_to_date:
            return
        with outside_transforms():
            self.finish_unshard()
            self._pending_unshard = None
            self._take_slot()
            for bucket in self.buckets:
                bucket.saved_versions.reshard()  # also where its own memory gets other values
            if self.unshard_state is UnshardState.UNSHARDED:
                self.unshard_state = transition(UNSHARD_TRANSITIONS, self.unshard_state, "evict", self.name)
            self.unshard_state = transition(UNSHARD_TRANSITIONS, self.unshard_state, "gather", self.name)
            ops: list[Op] = []
            for bucket, flat, narrow in self._with_buffers(resources):
                if bucket.synced_version != bucket.version:
                    ops.append(partial(bucket.sync_params, flat, narrow))
                ops.append(partial(bucket.unshard, flat, for_backward=for_backward))
            self._pending_unshard = resources.stream.launch(ops)
        for bucket in self.buckets:
            bucket.unsharded_version = bucket.version

    def _take_slot(self) -> None:
        """Evict the present resident of the slot."""
        resident = self.slot.resident
        if resident is not None and resident is not self:
            resident.evict()
        self.slot.resident = self

    def sync_params(self, resources: GatherResources) -> None:
        """Bring the optimizer's result to the parameter scope now, instead of in front of the next use."""
        for bucket, flat, narrow in self._with_buffers(resources):
            if bucket.synced_version != bucket.version:
                resources.stream.launch([partial(bucket.sync_params, flat, narrow)]).wait()

    def _with_buffers(self, resources: GatherResources) -> Iterator[tuple[Bucket, torch.Tensor, torch.Tensor]]:
        """Every bucket with views of its flat buffer and of its cast shard, both in the compute dtype."""
        flat = resources.flat.acquire(self.finish_unshard) if self.needs_staging else _NOTHING
        narrow = resources.cast.acquire(self.finish_unshard)
        return zip(self.buckets, self._flats.views_of(flat), self._casts.views_of(narrow), strict=True)

    def finish_unshard(self) -> None:
        """Make the gathered parameters usable on the current stream, which may differ from the last use's."""
        if self._pending_unshard is None:
            return
        if self.unshard_state is not UnshardState.UNSHARDING:
            self._pending_unshard.wait()
            return
        with outside_transforms():
            self._pending_unshard.wait()
            self.unshard_state = transition(UNSHARD_TRANSITIONS, self.unshard_state, "arrive", self.name)
            for bucket in self.buckets:
                bucket.saved_versions.unshard(bucket.unsharded_version)

    def evict(self) -> None:
        """Give the slot up; autograd refuses a backward that still needs the parameters (see `saved_versions`)."""
        self.finish_unshard()
        if self.phase is UnitPhase.FORWARD:
            raise LifecycleError(
                f"Unit `{self.name}` is in its forward while another unit needs its slot. Units that are used at the "
                "same time must be "
                "nested in one another; pass the outer class to `shard(units=...)`, or raise `prefetch`."
            )
        if self.unshard_state is UnshardState.UNSHARDED:
            self.unshard_state = transition(UNSHARD_TRANSITIONS, self.unshard_state, "evict", self.name)
        for bucket in self.buckets:
            bucket.saved_versions.reshard()

    def check_still_frozen(self) -> None:
        """See, before anything moves, that no parameter requires gradients for which there is no memory."""
        for bucket in self.buckets:
            if not bucket.spec.trainable:
                for sharded in bucket.sharded_params:
                    check_still_frozen(bucket, sharded)

    def enter_forward(self) -> None:
        """Put the whole parameters into the module, for a forward or a recomputation."""
        if self._forward_depth == 0:
            self.phase = transition(PHASE_TRANSITIONS, self.phase, "enter_forward", self.name)
            self._register_unsharded()
        self._forward_depth += 1

    def exit_forward(self) -> None:
        """The forward is over, or has raised."""
        self._forward_depth -= 1
        if self._forward_depth == 0:
            self.phase = transition(PHASE_TRANSITIONS, self.phase, "exit_forward", self.name)
            for bucket in self.buckets:
                bucket.keep_writes()
            if self.phase is UnitPhase.IDLE:
                self._register_sharded()

    def enter_backward(self, entered: int) -> None:
        """Put the whole parameters into the module, for the backward of the forward that was entered then."""
        self.backward_enter = entered
        self.phase = transition(PHASE_TRANSITIONS, self.phase, "enter_backward", self.name)
        self._register_unsharded()

    def exit_backward(self) -> None:
        """No backward of this unit can follow in this pass."""
        self.phase = transition(PHASE_TRANSITIONS, self.phase, "exit_backward", self.name)
        self._register_sharded()

    def discard(self) -> None:
        """Forget a pass that an exception ended."""
        self._forward_depth = 0
        self.num_live_calls = 0
        self.phase = UnitPhase.IDLE
        self._register_sharded()

    def register_sharded(self) -> None:
        """Put the sharded parameters into the modules, whatever is there."""
        for module, attribute, _, sharded in self._places():
            module._parameters[attribute] = sharded

    def _register_unsharded(self) -> None:
        for module, attribute, unsharded, sharded in self._places():
            if module._parameters[attribute] is sharded:  # not what `torch.func.functional_call` has put there
                module._parameters[attribute] = unsharded
                if unsharded.requires_grad != sharded.requires_grad:
                    unsharded.requires_grad_(sharded.requires_grad)

    def _register_sharded(self) -> None:
        for module, attribute, unsharded, sharded in self._places():
            if module._parameters[attribute] is unsharded:
                module._parameters[attribute] = sharded

    def _places(self) -> list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]]:
        """Every attribute that refers to a parameter, with its two forms. Made once, as parameters stay the same."""
        if self._locations is None:
            self._locations = [
                (module, attribute, unsharded, cast("nn.Parameter", sharded))
                for bucket in self.buckets
                for homes, unsharded, sharded in zip(
                    bucket.spec.locations, bucket.unsharded_params, bucket.sharded_params, strict=True
                )
                for module, attribute in homes
            ]
        return self._locations


def unit_plan_of(unit: Unit, gradients: Iterable[GradBucket], slot: int) -> UnitPlan:
    """The properties of a unit that the plan of a step depends on.

    Args:
        unit: The unit; frozen parameters have no gradients now.
        gradients: Gradients of its trainable buckets.
        slot: Index of the first unit that is bound to its slot.
    """
    gradient_of = {gradient.bucket: gradient for gradient in gradients}
    buckets = []
    for bucket in unit.buckets:
        gradient = gradient_of.get(bucket)
        buckets.append(
            BucketPlan(
                layout=bucket.layout,
                param_dtype=bucket.spec.param_dtype,
                wire_dtype=bucket.spec.param_dtype if gradient is None else gradient.wire_dtype,
                sum_dtype=bucket.spec.param_dtype if gradient is None else gradient.accumulator.dtype,
                trainable=bucket.spec.trainable,
                has_gradients=any(sharded.requires_grad for sharded in bucket.sharded_params),
            )
        )
    return UnitPlan(name=unit.name, slot=slot, buckets=tuple(buckets))


def check_still_frozen(bucket: Bucket, sharded: ShardedParameter) -> None:
    """A parameter that was frozen when the model was sharded has no gradient memory.

    Raises:
        LifecycleError: It requires gradients now.
    """
    if sharded.requires_grad and not bucket.spec.trainable:
        raise LifecycleError(
            f"`{sharded.mics_name}` was frozen when the model was sharded and requires gradients now, but has no "
            "memory for them. Unfreeze it before `shard()`; freezing it afterwards is allowed."
        )
