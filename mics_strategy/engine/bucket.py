"""Where are one bucket's tensors, and how do its parameters get from shard to whole?

Levels, each a tensor that may be the same memory as the one before:

- `master`: this rank's shard at the optimizer scope, in the parameters' own dtype; what the optimizer
  updates. Frozen parameters, which none updates, have it whole where parameters are not sharded.
- `params_shard`: this rank's shard at the parameter scope, in the compute dtype. It is `master` itself when
  scope and dtype agree, and none when parameters are not sharded.
- `secondary`: a shard at a smaller scope, which a forward leaves for the backward; mostly none.
- `whole`: the parameters themselves, in a slot (or for good, when parameters are not sharded).

`update` goes from the first to the second once per optimizer step, `unshard` from the second (or the secondary) to
the last.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from operator import attrgetter
from typing import TYPE_CHECKING

import torch
from torch import nn

from mics_strategy.comm.placement import digest
from mics_strategy.engine.autograd import SavedVersions, UnshardedParameter
from mics_strategy.engine.zero_copy import plan_in_place_gather
from mics_strategy.errors import LifecycleError

if TYPE_CHECKING:
    from mics_strategy.comm.communicator import AnyCommunicator, Communicator
    from mics_strategy.comm.process_groups import ProcessGroups
    from mics_strategy.comm.work import Work
    from mics_strategy.engine.layout import BucketLayout
    from mics_strategy.engine.parameter import ShardedParameter

_COUNT_OF_WRITES = attrgetter("_version")
_COUNT_OF_CHANGES = attrgetter("mics_write_count")


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketSpec:
    """What a bucket is to hold, before anything is allocated.

    `locations` lists for each parameter the (module, attribute) pairs that refer to it; more than one when it is
    tied. `coalesce_all_gather` and `coalesce_reduce_scatter` say what travels as several tensors in one launch.
    """

    name: str
    layout: BucketLayout
    locations: tuple[tuple[tuple[nn.Module, str], ...], ...]
    master_dtype: torch.dtype
    param_dtype: torch.dtype
    trainable: bool
    coalesce_all_gather: bool = False
    coalesce_reduce_scatter: bool = False


class Bucket:
    """The parameters of one unit that share dtype and trainability.

    Args:
        spec: Names, shapes, dtypes.
        groups: The process groups.
        master_shard: [shard_numel], a piece of the optimizer arena.
        param_shard: [numel_at(params scope)], or None (see the module's docstring).
        secondary_shard: [numel_at(secondary scope)] in the compute dtype, or None.
        unsharded_buffer: [unpadded_numel] in the compute dtype: a piece of a slot, or memory of its own.
    """

    def __init__(
        self,
        spec: BucketSpec,
        groups: ProcessGroups,
        master_shard: torch.Tensor,
        param_shard: torch.Tensor | None,
        secondary_shard: torch.Tensor | None,
        unsharded_buffer: torch.Tensor,
    ) -> None:
        self.spec = spec
        self.layout = spec.layout
        self.groups = groups
        self.placement = groups.trainable_placement if spec.trainable else groups.frozen_placement
        self.master_shard = master_shard
        self.param_shard = param_shard
        self.secondary_shard = secondary_shard
        self.unsharded_buffer = unsharded_buffer
        views = self.layout.unpadded_views(unsharded_buffer)
        # Each with a version counter of its own: a write to one in a forward is no modification of the others.
        self.unsharded_params: list[nn.Parameter] = [
            UnshardedParameter(view.data, requires_grad=spec.trainable) for view in views
        ]
        self._unsharded_views = [view.data for view in views]
        self.saved_versions = SavedVersions(spec.name, self.unsharded_params)
        self.sharded_params: list[ShardedParameter] = []
        full_bytes = spec.layout.full_numel * spec.param_dtype.itemsize
        sync_bytes = full_bytes if param_shard is None else param_shard.numel() * param_shard.itemsize
        self._sync_comm = _for_bytes(self.placement.sync_comm, sync_bytes)
        self._param_comm = _for_bytes(groups.param_comm, full_bytes)
        self._secondary_comm = _for_bytes(groups.secondary_comm, full_bytes)
        self._zero_copy = plan_in_place_gather(
            self._unshard_comm, spec.layout, self._unsharded_views, spec.name, coalesces=spec.coalesce_all_gather
        )
        self._copies: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self.synced_version = -1
        self._secondary_version = -1
        self.unsharded_version = -1

    @property
    def version(self) -> int:
        """Grows whenever a parameter of the bucket may have changed. Read often, so the loops are C's."""
        return int(sum(map(_COUNT_OF_WRITES, self._watched)) + sum(map(_COUNT_OF_CHANGES, self.sharded_params)))

    @cached_property
    def _watched(self) -> list[torch.Tensor]:
        """The parameters and their shards, each with a count of the writes that torch has seen."""
        return [tensor for each in self.sharded_params for tensor in (each, each.local)]

    @property
    def is_aliased(self) -> bool:
        """Whether the parameters are the master itself: nothing ever has to move."""
        return (
            self.unsharded_buffer.data_ptr() == self.master_shard.data_ptr()
            and self.unsharded_buffer.dtype == self.master_shard.dtype
            and self.layout.full_numel > 0
        )

    @property
    def cast_size(self) -> tuple[int, torch.dtype]:
        """Elements, and their dtype, of what an update sends when that is not the master itself."""
        return self.layout.shard_numel if self.placement.sync_comm is not None else 0, self.spec.param_dtype

    @property
    def _unshard_comm(self) -> Communicator | None:
        """The communicator of the last all-gather, whose result the parameters are; None where there is none."""
        if self.param_shard is None:
            return self._sync_comm
        return self._param_comm if self.secondary_shard is None else self._secondary_comm

    @property
    def needs_staging(self) -> bool:
        """Whether anything that arrives takes the flat form first."""
        keeps_secondary = self.secondary_shard is not None and self._param_comm is not None
        return keeps_secondary or (self._unshard_comm is not None and self._zero_copy is None)

    @property
    def needs_cast(self) -> bool:
        """Whether an update changes the dtype."""
        return self.spec.param_dtype != self.spec.master_dtype

    def sync_params(self, flat: torch.Tensor, cast: torch.Tensor) -> Work | None:
        """Bring the optimizer's result to the parameter scope.

        Args:
            flat: [full_numel] in the compute dtype; used where parameters are not sharded.
            cast: [shard_numel] in the compute dtype; used where a sync changes the dtype and sends something.

        Returns:
            The all-gather over the axes that the optimizer scope has and the parameter scope lacks; None where nothing
            has to be sent.
        """
        self.synced_version = self.version
        comm = self._sync_comm
        if comm is None:
            self._sync_in_place()
            return None
        shard = cast.copy_(self.master_shard) if self.needs_cast else self.master_shard
        if self.param_shard is not None:
            return comm.all_gather(self.param_shard, shard, self.spec.name)
        if self._zero_copy is not None:
            return self._zero_copy(shard)
        return comm.all_gather(flat, shard, self.spec.name).then(partial(self._copy_out, flat))

    def _sync_in_place(self) -> None:
        if self.param_shard is not None:
            if self.param_shard.data_ptr() != self.master_shard.data_ptr():
                self.param_shard.copy_(self.master_shard)
        elif not self.is_aliased:
            self.unsharded_buffer.copy_(self.master_shard)

    def unshard(self, flat: torch.Tensor, *, for_backward: bool) -> Work | None:
        """All-gather the parameters.

        Args:
            flat: [full_numel] in the compute dtype.
            for_backward: Whether to gather the secondary shards, if a forward has left them.

        Returns:
            The all-gather, which ends with the parameters in place; None where they are not sharded.
        """
        self.unsharded_version = self.synced_version
        comm, shard = self._param_comm, self.param_shard
        keeps_secondary = self.secondary_shard is not None
        if for_backward and keeps_secondary and self._secondary_version == self.synced_version:
            comm, shard, keeps_secondary = self._secondary_comm, self.secondary_shard, False
            if comm is None and shard is not None:  # the secondary scope is this rank alone
                self._copy_out(shard)
        if comm is None or shard is None:
            return None
        if keeps_secondary:
            return comm.all_gather(flat, shard, self.spec.name).then(partial(self._keep_secondary, flat))
        if self._zero_copy is not None:
            return self._zero_copy(shard)
        return comm.all_gather(flat, shard, self.spec.name).then(partial(self._copy_out, flat))

    def _keep_secondary(self, flat: torch.Tensor) -> None:
        """Copy the parameters out, and this rank's secondary shard for the backward."""
        if self.secondary_shard is not None:
            index = self.groups.secondary_span.index(self.groups.rank)
            self.secondary_shard.copy_(flat.view(-1, self.secondary_shard.numel())[index])
            self._secondary_version = self.synced_version
        self._copy_out(flat)

    def _copy_out(self, flat: torch.Tensor) -> None:
        """From the flat form to the parameters themselves. Stagings are few and stay, so the views are made once."""
        pairs = self._copies.get(flat.data_ptr())
        if pairs is None:
            pairs = self._copies[flat.data_ptr()] = self._pair_views(flat)
        with torch.no_grad():
            torch._foreach_copy_(*pairs)

    def _pair_views(self, flat: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Views of the parameters, and of their places in the flat form."""
        targets, sources = [], []
        for position, view in enumerate(self._unsharded_views):
            for piece, part in self.layout.copy_pairs(flat, view, position):
                is_scalar = self.layout.param_slices[position].dim is None
                targets.append(view if is_scalar else part)
                sources.append(piece[0] if is_scalar else piece)
        return targets, sources

    def keep_writes(self) -> bool:
        """Bring what a forward has written into the unsharded parameters to this rank's shard; whether there is any.

        Every rank must have written the same, which is checked in the next step: each keeps its own rows. Of a shard in
        another dtype only the elements change that were written.

        Raises:
            LifecycleError: The written parameter holds decoded numbers, not those of the shards.
        """
        written = self.saved_versions.written()
        if not written:
            return False
        if self.groups.scopes.has_quantized_params:
            raise LifecycleError(
                f"A forward wrote into parameter `{self.layout.param_slices[written[0]].name}`, whose gathered values "
                "were encoded (`weight_codec`) and would replace the exact ones. Write into it after "
                "`optimizer.step()`, under `torch.no_grad()`, or use weight_codec='none'."
            )
        master = self.master_shard.data  # not a write that the version counter of all other parameters should see
        for position in written:
            region, index = self.layout.param_slices[position], self.placement.index
            shard = region.view_in(master, index)
            own = region.narrow(self._unsharded_views[position], index)
            shard.copy_(torch.where(own == shard.to(own.dtype), shard, own.to(shard.dtype)))
            self.sharded_params[position].mics_write_count += 1
            self.groups.write_digests.append(digest(self._unsharded_views[position]))
        self.saved_versions.accept_writes(self.version)
        return True

    def load(self, position: int, value: torch.Tensor) -> None:
        """Keep this rank's piece of the whole parameter `value`."""
        region = self.layout.param_slices[position]
        index = self.placement.index
        region.view_in(self.master_shard, index).copy_(region.narrow(value, index))


def _for_bytes(comm: AnyCommunicator | None, full_bytes: int) -> Communicator | None:
    return None if comm is None else comm.for_bytes(full_bytes)
