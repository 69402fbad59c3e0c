"""The tensors of one bucket, from the master shard to the unsharded parameters.

Each level is a tensor that may be the same memory as the one before:

- `master_shard`: this rank's shard at the optimizer scope, in the parameters' own dtype, which the optimizer updates.
  Frozen parameters, which no optimizer updates, have their full tensors here where `params="replicate"`.
- `param_shard`: this rank's shard at the parameter scope, in the compute dtype. It is `master_shard` itself when
  scope and dtype agree, and None where only the scope does, or with `params="replicate"`.
- `secondary_shard`: a shard at a smaller scope, which the first all-gather after a change leaves for later ones; mostly
  None.
- `unsharded`: the parameters themselves, in a slot, or with `params="replicate"` in memory of their own.

`sync_params` goes from the first level to the second, once per optimizer step. `unshard` goes from the second or third
to the last; where there is no second, it casts the first before every all-gather.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from operator import attrgetter

import torch

from mics_strategy.comm.communicator import AnyCommunicator, Communicator
from mics_strategy.comm.placement import digest
from mics_strategy.comm.process_groups import ProcessGroups
from mics_strategy.comm.work import Work
from mics_strategy.comm.workspace import once_per_buffer
from mics_strategy.engine.autograd import SavedVersions, UnshardedParameter
from mics_strategy.engine.bucket_specs import BucketSpec, casts_each_gather
from mics_strategy.engine.layout import BucketLayout
from mics_strategy.engine.parameter import ShardedParameter, fast_attributes
from mics_strategy.engine.schedule import ParamVersions, full_numel, unshard_role
from mics_strategy.engine.storage_guard import StorageGuard, with_own_storage
from mics_strategy.engine.tensor_memory import WriteCount
from mics_strategy.engine.zero_copy import plan_in_place_gather
from mics_strategy.errors import LifecycleError

_NUM_WRITES = attrgetter("_version")
_REQUIRES_GRAD = attrgetter("requires_grad")


def param_comms(groups: ProcessGroups, *, trainable: bool) -> dict[str, AnyCommunicator | None]:
    """Communicators of a bucket's parameters by role; None where nothing is sent."""
    placement = groups.trainable_placement if trainable else groups.frozen_placement
    return {
        "param_sync": placement.sync_comm,
        "param_all_gather": groups.param_comm,
        "secondary_all_gather": groups.secondary_comm,
    }


class UnshardedParams:
    """The unsharded parameters of one bucket, in its unsharded buffer.

    They cannot be accessed while resharded, unless the optimizer's own memory holds them (see `storage_guard`).

    Args:
        spec: Names, shapes, dtypes.
        buffer: [unpadded_numel] in the compute dtype.
        is_master: Whether the buffer is the master shard itself, whose values are always current.
        poisons: Whether values that are no longer valid are overwritten with NaN, and integers with -1.

    Attributes:
        buffer: See `Args`.
        is_master: See `Args`.
        params: The parameters as modules use them. Each has a version counter of its own: a forward that writes to one
            does not modify the others.
        views: The same memory, for the engine's reads and writes at any time, which autograd does not count.
        saved_versions: Version counters of `params`.
    """

    def __init__(
        self, spec: BucketSpec, buffer: torch.Tensor, *, is_master: bool = False, poisons: bool = False
    ) -> None:
        self.buffer = buffer
        self.is_master = is_master
        self.views = [view.data for view in spec.layout.unpadded_views(buffer)]
        self._guard = None if is_master or buffer.is_meta else StorageGuard(self.views)
        own = map(with_own_storage, self.views) if self._guard is None else self._guard.tensors
        self.params: list[UnshardedParameter] = [
            UnshardedParameter(tensor, requires_grad=spec.trainable) for tensor in own
        ]
        self.saved_versions = SavedVersions(spec.name, self.params)
        self._layout = spec.layout
        self._copies = once_per_buffer(partial(_plan_copy, self._layout, self.views))
        self._poisoned = buffer.view(torch.uint8) if poisons else None
        self.reshard()

    def unshard(self, content: int) -> None:
        """Allow accesses: the buffer holds the parameters at version `content`."""
        self.saved_versions.unshard(content)
        if self._guard is not None:
            self._guard.open()

    def reshard(self) -> None:
        """Refuse accesses until the buffer holds the parameters again."""
        self.saved_versions.reshard()
        if self._guard is not None:
            self._guard.close()
        if self._poisoned is not None:
            self._poisoned.fill_(0xFF)  # NaN in fp64, fp32, fp16 and bf16

    def written(self) -> list[int]:
        """Positions of the parameters that were written to since `unshard`; none where accesses are refused."""
        return [] if self._guard is not None and self._guard.is_closed else self.saved_versions.written()

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor, which has a storage, is one of `params` or a view of one."""
        return self._guard is not None and self._guard.guards(tensor)

    def copy_from(self, flat: torch.Tensor) -> None:
        """Copy the parameters out of a flat buffer, [full_numel].

        Cost:
            On CUDA one launch where all ranks have equal parts of every parameter, else one for each view. The gaps
            between parameters are copied as well, into scratch memory as large as the largest gap of all ranks.
        """
        with torch.no_grad():
            self._copies(flat)()


def _plan_copy(layout: BucketLayout, views: list[torch.Tensor], flat: torch.Tensor) -> Callable[[], object]:
    """The copy out of one flat buffer.

    Rows are split with the gaps between parameters, which go to scratch memory. A CPU copies views faster.
    """
    targets, sources = _pair_views(layout, views, flat)
    ranks, slices = layout.ranks, layout.param_slices
    is_even = len(targets) == len(slices) and all(target.shape[:1] == (ranks,) for target in targets)
    if not (flat.is_cuda and is_even and all(target.is_contiguous() for target in targets)):
        return partial(torch._foreach_copy_, targets, sources)
    ends = [*(param_slice.offset for param_slice in slices[1:]), layout.shard_numel]
    gaps = [end - s.offset - s.chunk_numel for s, end in zip(slices, ends, strict=True)]
    with torch.inference_mode(False):
        scratch = flat.new_empty(ranks * max(gaps))
    sizes, outs = [], []
    for target, gap in zip(targets, gaps, strict=True):
        rows = target.view(ranks, -1)
        for out in (rows, scratch[: ranks * gap].view(ranks, gap)) if gap else (rows,):
            sizes.append(out.shape[1])
            outs.append(out)
    return partial(torch.split_with_sizes_copy, flat.view(ranks, -1), sizes, 1, out=outs)


def _pair_views(
    layout: BucketLayout, views: list[torch.Tensor], flat: torch.Tensor
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Views of the parameters, and of their places in the flat buffer."""
    targets, sources = [], []
    for position, view in enumerate(views):
        for flat_part, param_part in layout.copy_pairs(flat, view, position):
            is_scalar = layout.param_slices[position].dim is None
            targets.append(view if is_scalar else param_part)
            sources.append(flat_part[0] if is_scalar else flat_part)
    return targets, sources


class Bucket:
    """The parameters of one unit that share dtype and trainability.

    Args:
        spec: Names, shapes, dtypes.
        groups: The process groups.
        master_shard: [shard_numel], a piece of the optimizer arena.
        param_shard: [numel_at(params scope)], or None (see the module's docstring).
        secondary_shard: [numel_at(secondary scope)] in the compute dtype, or None.
        unsharded: The unsharded parameters, in a slot or in memory of their own.

    Attributes:
        placement: Shard that this rank holds.
        unsharded: See `Args`.
        sharded_params: The sharded parameters, views of `master_shard`.
        writes: Writes to the sharded parameters that torch's version counters may miss.
        versions: Versions of the parameters in the buffers.
    """

    def __init__(
        self,
        spec: BucketSpec,
        groups: ProcessGroups,
        master_shard: torch.Tensor,
        param_shard: torch.Tensor | None,
        secondary_shard: torch.Tensor | None,
        unsharded: UnshardedParams,
    ) -> None:
        self.spec = spec
        self.layout = spec.layout
        self.groups = groups
        self.placement = groups.trainable_placement if spec.trainable else groups.frozen_placement
        self.master_shard = master_shard
        self.param_shard = param_shard
        self.secondary_shard = secondary_shard
        self.unsharded = unsharded
        self.sharded_params: list[ShardedParameter] = []
        self.writes = WriteCount()
        self.versions = ParamVersions(has_secondary=secondary_shard is not None)
        self._casts_each_gather = casts_each_gather(spec, groups.scopes)
        self._version_kept = -1  # of the last write into unsharded parameters that the shards have
        self._comms: dict[str, Communicator | None] = {}
        for role, comm in param_comms(groups, trainable=spec.trainable).items():
            full_bytes = full_numel(role, spec.layout, groups.scopes) * spec.param_dtype.itemsize
            self._comms[role] = None if comm is None else comm.for_bytes(full_bytes)
        self._zero_copy = plan_in_place_gather(self._comms[unshard_role(groups.scopes)], spec, self.unsharded.views)

    def rebind(self, groups: ProcessGroups) -> None:
        """Use other process groups, with the shard as it is. What was gathered from it no longer counts."""
        sharded_params, writes, memory = self.sharded_params, self.writes, (self.param_shard, self.secondary_shard)
        self.unsharded.reshard()
        Bucket.__init__(self, self.spec, groups, self.master_shard, *memory, self.unsharded)
        self.sharded_params, self.writes = sharded_params, writes

    @property
    def version(self) -> int:
        """Version of the parameters, which grows whenever one of them may have changed.

        Read often, so the loop is C's.
        """
        return int(sum(map(_NUM_WRITES, self._locals)) + self.writes.num)

    @cached_property
    def _locals(self) -> list[torch.Tensor]:
        """The local shards. Torch counts writes to them. `writes` counts those to the sharded parameters."""
        return [sharded.local for sharded in self.sharded_params]

    @property
    def num_requiring_grad(self) -> int:
        """Number of parameters that require a gradient now."""
        with fast_attributes():
            return sum(map(_REQUIRES_GRAD, self.sharded_params))

    def copy_requires_grad(self) -> None:
        """Let the unsharded parameters require gradients where the sharded ones do now."""
        sharded_params, unsharded_params = self.sharded_params, self.unsharded.params
        with fast_attributes():
            if list(map(_REQUIRES_GRAD, sharded_params)) != list(map(_REQUIRES_GRAD, unsharded_params)):
                for sharded, unsharded in zip(sharded_params, unsharded_params, strict=True):
                    unsharded.requires_grad_(sharded.requires_grad)

    @property
    def needs_cast(self) -> bool:
        """Whether parameters are gathered in another dtype than the optimizer's."""
        return self.spec.param_dtype != self.spec.master_dtype

    def sync_params(self, flat: torch.Tensor, cast: torch.Tensor) -> Work | None:
        """Bring the stepped parameters to the parameter scope.

        Args:
            flat: [full_numel] in the compute dtype; used with `params="replicate"`.
            cast: [shard_numel] in the compute dtype; used where a sync changes the dtype and sends something.

        Returns:
            The all-gather over the axes that the optimizer scope has beyond the parameter scope; None where nothing is
            sent.
        """
        self.versions.param_shard = self.version
        comm = self._comms["param_sync"]
        if comm is None:
            self._sync_in_place()
            return None
        shard = cast.copy_(self.master_shard) if self.needs_cast else self.master_shard
        if self.param_shard is not None:
            return comm.all_gather(self.param_shard, shard, self.spec.name)
        if self._zero_copy is not None:
            return self._zero_copy(shard)
        return comm.all_gather(flat, shard, self.spec.name).then(partial(self.unsharded.copy_from, flat))

    def _sync_in_place(self) -> None:
        if self.param_shard is None and not (self.unsharded.is_master or self._casts_each_gather):
            self.unsharded.buffer.copy_(self.master_shard)

    def unshard(self, flat: torch.Tensor, cast: torch.Tensor) -> Work | None:
        """All-gather the parameters.

        Args:
            flat: [full_numel] in the compute dtype.
            cast: [shard_numel] in the compute dtype; used where every all-gather casts the master shard.

        Returns:
            The all-gather, which ends with the parameters in place; None where they are unsharded.
        """
        role = self.versions.note_gather()
        is_secondary = role == "secondary_all_gather"
        comm, shard = self._comms[role], self.secondary_shard if is_secondary else self.param_shard
        if self._casts_each_gather and not is_secondary:
            shard = cast.copy_(self.master_shard)
        if shard is None:
            return None
        if comm is None:
            if is_secondary:  # the secondary scope is this rank alone
                self.unsharded.copy_from(shard)
            return None
        if self.versions.has_secondary and not is_secondary:
            return comm.all_gather(flat, shard, self.spec.name).then(partial(self._keep_secondary, flat))
        if self._zero_copy is not None:
            return self._zero_copy(shard)
        return comm.all_gather(flat, shard, self.spec.name).then(partial(self.unsharded.copy_from, flat))

    def _keep_secondary(self, flat: torch.Tensor) -> None:
        """Copy the parameters out, and this rank's secondary shard for later all-gathers."""
        if self.secondary_shard is not None:
            index = self.groups.secondary_span.index(self.groups.rank)
            self.secondary_shard.copy_(flat.view(-1, self.secondary_shard.numel())[index])
            self.versions.keep_secondary()
        self.unsharded.copy_from(flat)

    def set_reference(self, shard: torch.Tensor) -> None:
        """Set what param syncs of differences add to. Collective.

        Args:
            shard: [shard_numel] in the compute dtype, what ranks have of this rank's shard.
        """
        comm = self.groups.exact_sync_comm
        if comm is not None and (full := self.param_shard) is not None:
            comm.for_bytes(full.numel() * full.itemsize).all_gather(full, shard, self.spec.name).wait()

    def reference(self, position: int) -> torch.Tensor | None:
        """What all ranks have received of this rank's part of a parameter."""
        if self.param_shard is None:
            return None
        index = self.placement.index
        rows_per_shard = self.layout.ranks // self.groups.scopes.params
        shard = self.param_shard.view(rows_per_shard, -1)[index % rows_per_shard]
        return self.layout.param_slices[position].view_in(shard, index)

    def keep_writes(self) -> bool:
        """Copy a forward's writes into unsharded parameters to this rank's shard.

        Returns whether there are any.

        All ranks must have written the same values, which the next step checks: each rank keeps its own rows. In a
        shard of another dtype only the written elements change.

        Raises:
            LifecycleError: The written parameter has decoded values, not those of the shards.
        """
        written = self.unsharded.written()
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
            param_slice, index = self.layout.param_slices[position], self.placement.index
            shard = param_slice.view_in(master, index)
            local = param_slice.narrow(self.unsharded.views[position], index)
            shard.copy_(torch.where(local == shard.to(local.dtype), shard, local.to(shard.dtype)))
            self.writes.num += 1
            self.groups.resources.call_watch.records.compare(digest(self.unsharded.views[position]))
        self._version_kept = self.version
        self.unsharded.saved_versions.accept_writes(self.version)
        return True

    def keep_late_writes(self) -> None:
        """Keep what a script has written, outside of a backward, into parameters that a forward has handed out.

        Raises:
            LifecycleError: The sharded parameters have changed before, so that these hold the values of before.
        """
        if torch._C._current_graph_task_id() != -1 or not (written := self.unsharded.written()):
            return
        if not self.unsharded.is_master and self.version not in (self.versions.unsharded, self._version_kept):
            raise LifecycleError(
                f"`{self.layout.param_slices[written[0]].name}`, as a forward has handed it out (`module.weight`), was "
                "written after the sharded parameter had changed, of which it is no copy any more. Write into the "
                "parameters of the model: `dict(model.named_parameters())`."
            )
        self.keep_writes()
        self.versions.unsharded = self.version  # all ranks have written the same, so nothing is to be gathered

    def load(self, position: int, value: torch.Tensor) -> None:
        """Keep this rank's part of the full parameter `value`."""
        param_slice = self.layout.param_slices[position]
        index = self.placement.index
        param_slice.view_in(self.master_shard, index).copy_(param_slice.narrow(value, index))
