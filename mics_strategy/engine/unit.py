"""One unit: how it unshards and reshards.

A unit is a module whose own parameters are gathered together, usually one transformer layer. It is bound to one slot
for good. Parameters that are still in the slot when the unit is needed again (the last layers at the start of the
backward, the first ones at the start of the next micro-step) are not gathered again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import nn

from mics_strategy.comm.process_groups import ProcessGroups
from mics_strategy.engine.aliases import Alias
from mics_strategy.engine.autograd import UnshardedParameter, check_not_traced
from mics_strategy.engine.bucket import Bucket
from mics_strategy.engine.bucket_specs import bucket_plan, cast_piece, needs_flat_gather
from mics_strategy.engine.lifecycle import PHASE_TRANSITIONS, UNSHARD_TRANSITIONS, UnitPhase, UnshardState, transition
from mics_strategy.engine.memory import Slot, StagingPool, levels_of, staging_views
from mics_strategy.engine.parameter import ShardedParameter
from mics_strategy.engine.plan import ROOT_NAME, UnitPlan
from mics_strategy.engine.schedule import needs_unshard
from mics_strategy.engine.streams import Op, OpChain, OpStream, outside_transforms
from mics_strategy.engine.tensor_memory import TensorMemory
from mics_strategy.errors import LifecycleError

_NOTHING = torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherResources:
    """The stream and the buffers of all-gathers of parameters.

    Attributes:
        stream: Side stream of all-gathers.
        flat: Flat buffers in the compute dtype, for all buckets of one unit, or for one bucket at a time if the stream
            orders all-gathers.
        cast: Buffers for this rank's shards of one unit in the compute dtype.
        is_stream_ordered: See `ProcessGroups.is_stream_ordered`.
    """

    stream: OpStream
    flat: StagingPool
    cast: StagingPool
    is_stream_ordered: bool


class Unit:
    """A module whose own parameters are gathered, used and released together.

    Args:
        name: Qualified name of the module; empty for the root.
        index: Position among the units, in module order; the root is 0.
        module: The module.
        buckets: Its parameters by dtype and trainability.
        slot: Slot in which it is unsharded.

    Attributes:
        unshard_state: Whether the slot holds the parameters.
        phase: Pass that uses the parameters.
        num_pending_calls: Number of forwards whose backward is still to come.
        earliest_enter: Clock at which the first of those forwards began, while their backward runs; otherwise -1.
        backward_enter: Clock at which the forward began whose backward has entered the unit last.
    """

    def __init__(self, name: str, index: int, module: nn.Module, buckets: list[Bucket], slot: Slot) -> None:
        self.name = name or ROOT_NAME
        self.index = index
        self.module = module
        self.buckets = buckets
        self.slot = slot
        self.unshard_state = UnshardState.SHARDED
        self.phase = UnitPhase.IDLE
        self.num_pending_calls = 0
        self.earliest_enter = -1
        self.backward_enter = -1
        self._staging = _StagingViews(buckets)
        self._forward_depth = 0
        self._pending_unshard: OpChain | None = None
        self._locations: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] | None = None
        self._aliases: list[tuple[Alias, nn.Parameter, nn.Parameter]] = []

    @property
    def trainable_buckets(self) -> list[Bucket]:
        """Buckets that have gradients."""
        return [bucket for bucket in self.buckets if bucket.spec.trainable]

    def lends(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a parameter, or a view of one, in a shared slot."""
        if not self.slot.is_shared:
            return False
        *_, tensor = levels_of(tensor)
        return (
            type(tensor) in (torch.Tensor, nn.Parameter, UnshardedParameter)
            and tensor.layout is torch.strided
            and any(bucket.unsharded.holds(tensor) for bucket in self.buckets)
        )

    def start_unshard(self, resources: GatherResources) -> None:
        """Start the all-gather, unless the slot already holds the current parameters.

        Args:
            resources: Stream and buffers of all-gathers.
        """
        if not needs_unshard(self.buckets, is_resident=self.unshard_state is not UnshardState.SHARDED):
            return
        with outside_transforms():
            self.finish_unshard()
            self._pending_unshard = None
            self._take_slot()
            self._reshard()
            self.unshard_state = transition(UNSHARD_TRANSITIONS, self.unshard_state, "start_unshard", self.name)
            ops: list[Op] = []
            for bucket, flat, cast_shard in self._staging.acquire(resources, self.finish_unshard):
                if bucket.versions.needs_sync(bucket.version):
                    ops.append(partial(bucket.sync_params, flat, cast_shard))
                ops.append(partial(bucket.unshard, flat, cast_shard))
            self._pending_unshard = resources.stream.launch(ops, behind=self.slot.users)
            self.slot.users = self._pending_unshard.users

    def _take_slot(self) -> None:
        """Become the resident of the slot; evict the present one."""
        resident = self.slot.resident
        if resident is not None and resident is not self:
            resident.evict()
        self.slot.resident = self

    def sync_params(self, resources: GatherResources) -> None:
        """Bring stepped parameters to the parameter scope now, not before the next use.

        Nothing of an all-gather of the former values may be pending then: it would write them over the new ones.
        """
        self.finish_unshard()
        for bucket, flat, cast_shard in self._staging.acquire(resources, self.finish_unshard):
            if bucket.versions.needs_sync(bucket.version):
                resources.stream.launch([partial(bucket.sync_params, flat, cast_shard)]).wait()

    def finish_unshard(self) -> None:
        """Make the gathered parameters usable on the current stream.

        It may be another stream than in the last forward or backward.
        """
        if self._pending_unshard is None:
            return
        if self.unshard_state is not UnshardState.UNSHARDING:
            self._pending_unshard.wait()
            return
        with outside_transforms():
            self._pending_unshard.wait()
            self.unshard_state = transition(UNSHARD_TRANSITIONS, self.unshard_state, "finish_unshard", self.name)
            for bucket in self.buckets:
                bucket.unsharded.unshard(bucket.versions.unsharded)

    def evict(self) -> None:
        """Give up the slot, also of a unit that was gathered ahead and not used."""
        self.finish_unshard()
        self.keep_late_writes()
        if self.phase is UnitPhase.FORWARD:
            raise LifecycleError(
                f"Unit `{self.name}` is in its forward while another unit needs its slot. Units that are used at the "
                "same time must be nested in one another. Pass the outer class to `shard(units=...)`, or raise "
                "`prefetch`."
            )
        self._reshard()

    def keep_late_writes(self) -> None:
        """Keep what a script has written, after a forward, into parameters that the forward has handed out."""
        for bucket in self.buckets:
            bucket.keep_late_writes()

    def reshard_if_changed(self) -> None:
        """Refuse accesses to values that are older than the parameters."""
        if self.unshard_state is UnshardState.UNSHARDED and needs_unshard(self.buckets, is_resident=True):
            self._reshard()

    def _reshard(self) -> None:
        """Refuse accesses to the unsharded parameters (see `storage_guard`)."""
        if self.unshard_state is UnshardState.UNSHARDED:  # in every other state they are refused already
            self.unshard_state = transition(UNSHARD_TRANSITIONS, self.unshard_state, "reshard", self.name)
            for bucket in self.buckets:
                bucket.unsharded.reshard()

    def check_params(self) -> None:
        """Check what a script has done to the sharded parameters. Called before a forward's first collective."""
        check_not_traced()
        may_train = torch.is_grad_enabled()  # an adapter is made trainable for a moment, to be a reference
        for bucket in self.buckets:
            if TensorMemory.has_checks or (may_train and not bucket.spec.trainable):
                for sharded in bucket.sharded_params:
                    sharded.check_use()
                    if may_train:
                        check_still_frozen(bucket, sharded)

    def check_hooks(self) -> None:
        """Check that no script has hooks that the backward would not run."""
        for bucket in self.buckets if TensorMemory.has_checks else ():
            for sharded in bucket.sharded_params:
                sharded.check_hooks()

    def enter_forward(self) -> None:
        """Register the unsharded parameters, for a forward or a recomputation."""
        if self._forward_depth == 0:
            self.phase = transition(PHASE_TRANSITIONS, self.phase, "enter_forward", self.name)
            self._register_unsharded()
        self._forward_depth += 1

    def exit_forward(self) -> None:
        """Keep what the forward wrote into parameters; register the sharded ones. The forward may have raised."""
        self._forward_depth -= 1
        if self._forward_depth == 0:
            self.phase = transition(PHASE_TRANSITIONS, self.phase, "exit_forward", self.name)
            try:
                self._check_not_outdated()
                for bucket in self.buckets:
                    bucket.keep_writes()
            except LifecycleError:
                self._reshard()
                raise  # the refused values are gathered over before the next use
            finally:
                if self.phase is UnitPhase.IDLE:
                    self._restore_sharded()

    def _check_not_outdated(self) -> None:
        for bucket in self.buckets if self.unshard_state is UnshardState.UNSHARDED else ():
            if not bucket.unsharded.is_master and bucket.version != bucket.versions.unsharded:
                raise LifecycleError(
                    f"A sharded parameter of unit `{self.name}` was written, through a reference from outside, in a "
                    "forward of this unit, which has used the values of before. Write it before the forward, or write "
                    "`module.weight` in the forward."
                )

    def enter_backward(self, enter_clock: int) -> None:
        """Register the unsharded parameters for the backward of one forward.

        The forward was entered at `enter_clock`.
        """
        self.backward_enter = enter_clock
        self.phase = transition(PHASE_TRANSITIONS, self.phase, "enter_backward", self.name)
        self._register_unsharded()

    def exit_backward(self) -> None:
        """Register the sharded parameters: no backward of this unit follows in this pass.

        Raises:
            LifecycleError: A script has written to an unsharded parameter in the backward.
        """
        self.phase = transition(PHASE_TRANSITIONS, self.phase, "exit_backward", self.name)
        self._restore_sharded()
        for bucket in self.buckets if self.unshard_state is UnshardState.UNSHARDED else ():
            if written := bucket.unsharded.written():
                bucket.writes.num += 1  # unsharded parameters that are kept get the shards' values again
                self._reshard()
                raise LifecycleError(
                    f"Parameter `{bucket.layout.param_slices[written[0]].name}` was written in a backward, where a "
                    "module holds what was gathered, which is gathered again. Write into it after the backward."
                )

    def discard(self) -> None:
        """Reset the unit after a pass that an exception has ended."""
        self._forward_depth = 0
        self.num_pending_calls = 0
        self.phase = UnitPhase.IDLE
        self._restore_sharded()

    def restart(self, groups: ProcessGroups) -> None:
        """Drop a pass that is in progress, and what was gathered; use other process groups from now on."""
        self.discard()
        self._pending_unshard = None
        self.unshard_state = UnshardState.SHARDED
        self.earliest_enter = self.backward_enter = -1
        self.slot.resident, self.slot.users = None, ()
        for bucket in self.buckets:
            bucket.rebind(groups)
            for parameter in bucket.unsharded.params:
                parameter.raw_grad = None

    def register_sharded(self, aliases: Mapping[str, Iterable[Alias]]) -> None:
        """Register the sharded parameters, whatever is registered now.

        Args:
            aliases: Other references that modules hold, by name of the parameter. They follow the parameter from now.
        """
        for module, attribute, _, sharded in self._attributes():
            module._parameters[attribute] = sharded
        for bucket in self.buckets:
            forms = zip(bucket.layout.param_slices, bucket.unsharded.params, bucket.sharded_params, strict=True)
            self._aliases += [
                (alias, unsharded, cast("nn.Parameter", sharded))
                for param_slice, unsharded, sharded in forms
                for alias in aliases[param_slice.name]
            ]
        for alias, _, sharded in self._aliases:
            alias.container[alias.key] = sharded

    def _register_unsharded(self) -> None:
        for bucket in self.buckets:
            bucket.copy_requires_grad()
        try:
            for module, attribute, unsharded, sharded in self._attributes():
                if module._parameters[attribute] is sharded:  # not what `torch.func.functional_call` has put there
                    module._parameters[attribute] = unsharded
        except KeyError as error:
            raise LifecycleError(
                f"Unit `{self.name}` has lost its parameter {error} after `shard()`, to a parametrization, a weight "
                "norm, pruning or a script. Change the model first, then shard it."
            ) from error
        for alias, unsharded, sharded in self._aliases:
            alias.replace(sharded, unsharded)

    def _restore_sharded(self) -> None:
        for module, attribute, unsharded, sharded in self._attributes():
            if module._parameters[attribute] is unsharded:
                module._parameters[attribute] = sharded
        for alias, unsharded, sharded in self._aliases:
            alias.replace(unsharded, sharded)

    def _attributes(self) -> list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]]:
        """Attributes of modules that refer to a parameter, with both of its forms.

        The forms are the unsharded and the sharded one.
        """
        if self._locations is None:
            self._locations = [
                (module, attribute, unsharded, cast("nn.Parameter", sharded))
                for bucket in self.buckets
                for locations, unsharded, sharded in zip(
                    bucket.spec.locations, bucket.unsharded.params, bucket.sharded_params, strict=True
                )
                for module, attribute in locations
            ]
        return self._locations


class _StagingViews:
    """Views of the staging buffers that a unit borrows for an all-gather."""

    def __init__(self, buckets: list[Bucket]) -> None:
        self.needs_flat = any(needs_flat_gather(bucket.spec, bucket.groups.scopes) for bucket in buckets)
        self._buckets = buckets
        sizes = [(bucket.layout.full_numel, bucket.spec.param_dtype) for bucket in buckets]
        self._flats = staging_views(sizes)
        self._flat_of_bucket = [staging_views([size]) for size in sizes]
        self._casts = staging_views([cast_piece(bucket.spec, bucket.groups.scopes) for bucket in buckets])

    def acquire(
        self, resources: GatherResources, on_reuse: Callable[[], None]
    ) -> Iterator[tuple[Bucket, torch.Tensor, torch.Tensor]]:
        """Every bucket with its flat buffer and its cast shard, both in the compute dtype."""
        cast = self._casts(resources.cast.acquire(on_reuse))
        if resources.is_stream_ordered:
            flat = resources.flat.acquire(_nothing_to_finish) if self.needs_flat else _NOTHING
            flats = [views(flat)[0] for views in self._flat_of_bucket]
        else:
            flats = self._flats(resources.flat.acquire(on_reuse) if self.needs_flat else _NOTHING)
        return zip(self._buckets, flats, cast, strict=True)


def _nothing_to_finish() -> None:
    """An all-gather into a flat buffer is behind the previous one on their stream."""


def unit_plan_of(unit: Unit, slot: int) -> UnitPlan:
    """The properties of a unit that the plan of a step depends on; frozen parameters have no gradients now.

    Args:
        unit: The unit.
        slot: Index of the first unit that is bound to its slot.
    """
    buckets = (bucket_plan(bucket.spec, has_gradients=bucket.num_requiring_grad > 0) for bucket in unit.buckets)
    return UnitPlan(name=unit.name, slot=slot, buckets=tuple(buckets))


def check_still_frozen(bucket: Bucket, sharded: ShardedParameter) -> None:
    """Check that a parameter is frozen still, as it was when the model was sharded.

    Raises:
        LifecycleError: It requires gradients now, without gradient memory.
    """
    if sharded.requires_grad and not bucket.spec.trainable:
        raise LifecycleError(
            f"`{sharded.mics_name}` was frozen when the model was sharded and requires gradients now, but has no "
            "memory for them. Unfreeze it before `shard()`; freezing it afterwards is allowed."
        )
