"""Exchange of row-sharded tensors with the ranks that own them as a whole.

Before a step, one all-to-all for each bucket sends the rows of every tensor and of its gradient to the tensor's owner,
which updates the whole tensor. After the step, another all-to-all sends the rows of the new values back. All-gathers,
reductions, clipping and checkpoints use rows only; between steps the values on owners are not valid.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch.distributed.tensor import DTensor

from mics_strategy.comm.control import ControlGroup
from mics_strategy.comm.work import Work
from mics_strategy.comm.workspace import aligned_bytes
from mics_strategy.engine.bucket import Bucket
from mics_strategy.engine.layout import TENSORS_TO_OWNERS, TENSORS_TO_SHARDS, OwnerAssignment, ParamSlice, assign_owners
from mics_strategy.engine.memory import MemoryTracker, StagingPool, arena, carve_views
from mics_strategy.engine.parameter import LocalParameter, ShardedParameter


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedBucket:
    """Parameters of one bucket that are updated as whole tensors.

    Attributes:
        name: Name of the bucket.
        parameters: Parameters of one dtype, in the order of `assignment.param_slices`.
        assignment: Owner of each parameter.
    """

    name: str
    parameters: tuple[ShardedParameter, ...]
    assignment: OwnerAssignment

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the values and of their gradients."""
        return self.parameters[0].dtype


def assign_owners_by_bucket(
    buckets: list[Bucket], selected: set[ShardedParameter], owners: dict[ShardedParameter, int], num_ranks: int
) -> list[OwnedBucket]:
    """Assign owners to the selected parameters of `buckets`.

    A parameter of an earlier optimizer keeps its owner: states may be loaded from that one.

    Args:
        buckets: Buckets in the order that all ranks share.
        selected: Parameters to update as whole tensors.
        owners: Owners of the parameters that have one already. Updated in place.
        num_ranks: Ranks of the optimizer scope.

    Returns:
        The buckets that hold a selected parameter, with those parameters only.
    """
    buckets = [bucket for bucket in buckets if selected.intersection(bucket.sharded_params)]
    members_by_bucket = [
        [parameter for parameter in bucket.sharded_params if parameter in selected] for bucket in buckets
    ]
    new = [parameter for members in members_by_bucket for parameter in members if parameter not in owners]
    owner_bytes = [0] * num_ranks
    for parameter, owner in owners.items():
        owner_bytes[owner] += parameter.numel() * parameter.element_size()
    owners.update(zip(new, assign_owners([p.numel() * p.element_size() for p in new], owner_bytes), strict=True))
    return [
        OwnedBucket(
            name=bucket.spec.name,
            parameters=tuple(members),
            assignment=OwnerAssignment(
                param_slices=tuple(parameter.mics_slice for parameter in members),
                owners=tuple(owners[parameter] for parameter in members),
                ranks=num_ranks,
            ),
        )
        for bucket, members in zip(buckets, members_by_bucket, strict=True)
    ]


class OwnerExchange:
    """Exchange of the tensors that one optimizer updates on their owners.

    Args:
        buckets: Parameters to exchange, and their owners.
        comm: Control group of the optimizer scope.
        index: Index of this rank in that group.
        memory: Tracker of the allocated bytes.
        device: Device of the model.

    Attributes:
        buckets: Parameters to exchange, and their owners.

    Cost:
        Memory: values and gradient of every owned tensor, and staging buffers for two buckets.
    """

    def __init__(
        self,
        buckets: Sequence[OwnedBucket],
        comm: ControlGroup,
        index: int,
        memory: MemoryTracker,
        device: torch.device,
    ) -> None:
        self.buckets = tuple(buckets)
        self._comm = comm
        self._index = index
        owned = [(bucket, param_slice) for bucket in buckets for param_slice, _ in self._owned(bucket)]
        sizes = [(param_slice.numel, bucket.dtype) for bucket, param_slice in owned]
        values, grads = (arena(memory, "owned tensors", sizes, device) for _ in range(2))
        self._values: dict[ShardedParameter, LocalParameter] = {}
        self._grads: dict[ShardedParameter, torch.Tensor] = {}
        parameters = [parameter for bucket in buckets for _, parameter in self._owned(bucket)]
        for parameter, value, grad in zip(parameters, values, grads, strict=True):
            self._values[parameter] = LocalParameter(value.view(parameter.shape), requires_grad=True)
            self._grads[parameter] = grad.view(parameter.shape)
        staging = max((aligned_bytes(*self._staging_sizes(bucket, TENSORS_TO_OWNERS)) for bucket in buckets), default=0)
        self._staging = StagingPool(memory, "owner staging buffers", min(2, len(buckets)), staging, device)
        self._empty = torch.empty(0, device=device)

    def _owned(self, bucket: OwnedBucket) -> Iterator[tuple[ParamSlice, ShardedParameter]]:
        for param_slice, owner, parameter in zip(
            bucket.assignment.param_slices, bucket.assignment.owners, bucket.parameters, strict=True
        ):
            if owner == self._index:
                yield param_slice, parameter

    def _staging_sizes(self, bucket: OwnedBucket, sides: int) -> list[tuple[int, torch.dtype]]:
        assignment = bucket.assignment
        numels = (sum(assignment.rows_numels(self._index)), sum(assignment.whole_numels(self._index)))
        return [(sides * numel, bucket.dtype) for numel in numels]

    def step_views(self) -> Iterator[tuple[ShardedParameter, LocalParameter]]:
        """Each parameter and its tensor for a step. It is the whole tensor on the owner and an empty one elsewhere."""
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                value = self._values.get(parameter)
                yield parameter, LocalParameter(self._empty.to(parameter.dtype)) if value is None else value

    def owners(self) -> dict[ShardedParameter, int]:
        """The rank of the optimizer scope that updates each parameter."""
        return {p: owner for b in self.buckets for p, owner in zip(b.parameters, b.assignment.owners, strict=True)}

    def to_owners(self) -> None:
        """Send the rows of values and gradients to the owners. Collective.

        A rank without a gradient sends zeros, so sizes do not depend on the gradients.

        Cost:
            One all-to-all for each bucket: twice the elements of this rank's rows of tensors owned by others.
        """
        with torch.no_grad():
            for transfer in [self._send_to_owners(bucket) for bucket in self.buckets]:
                transfer.wait()
        for parameter, value in self._values.items():
            value.grad = None if parameter.raw_grad is None else self._grads[parameter].detach()  # a script may keep it

    def to_shards(self) -> None:
        """Send the rows of new values from the owners to all shards. Collective.

        Cost:
            One all-to-all for each bucket: the elements of the owned tensors in other ranks' rows.
        """
        with torch.no_grad():
            for transfer in [self._send_to_shards(bucket) for bucket in self.buckets]:
                transfer.wait()

    def _send_to_owners(self, bucket: OwnedBucket) -> _InFlight:
        transfer = _InFlight()
        sent, received = self._acquire_staging(bucket, transfer, TENSORS_TO_OWNERS)
        rows = ([parameter.local for parameter in bucket.parameters], [*map(_local_grad, bucket.parameters)])
        for piece, side, position in self._row_views(bucket, sent, TENSORS_TO_OWNERS):
            piece.copy_(rows[side][position])

        def unpack() -> None:
            for piece, part in self._full_views(bucket, received, (self._values, self._grads)):
                part.copy_(piece)

        send_numels, recv_numels = bucket.assignment.to_owners_numels(self._index)
        label = f"values and gradients of {bucket.name}"
        transfer.work = self._comm.all_to_all(received, recv_numels, sent, send_numels, label).then(unpack)
        return transfer

    def _send_to_shards(self, bucket: OwnedBucket) -> _InFlight:
        transfer = _InFlight()
        received, sent = self._acquire_staging(bucket, transfer, TENSORS_TO_SHARDS)
        for piece, part in self._full_views(bucket, sent, (self._values,)):
            piece.copy_(part)

        def unpack() -> None:
            for piece, _, position in self._row_views(bucket, received, TENSORS_TO_SHARDS):
                bucket.parameters[position].local.copy_(piece)

        send_numels, recv_numels = bucket.assignment.to_shards_numels(self._index)
        label = f"new values of {bucket.name}"
        transfer.work = self._comm.all_to_all(received, recv_numels, sent, send_numels, label).then(unpack)
        return transfer

    def _acquire_staging(self, bucket: OwnedBucket, transfer: _InFlight, sides: int) -> list[torch.Tensor]:
        """Staging views for this rank's rows and for its owned tensors. They are valid until the buffer is reused."""
        return carve_views(self._staging.acquire(transfer.wait), self._staging_sizes(bucket, sides))

    def _row_views(
        self, bucket: OwnedBucket, flat: torch.Tensor, sides: int
    ) -> Iterator[tuple[torch.Tensor, int, int]]:
        """Views of `flat` for this rank's rows, with side (0 value, 1 grad) and position.

        The order is by owner, then side, then position in the bucket.
        """
        start = 0
        for owner, side in product(range(bucket.assignment.ranks), range(sides)):
            for position, (parameter, param_owner) in enumerate(
                zip(bucket.parameters, bucket.assignment.owners, strict=True)
            ):
                if param_owner == owner:
                    rows = parameter.local
                    yield flat[start : start + rows.numel()].view(rows.shape), side, position
                    start += rows.numel()

    def _full_views(
        self,
        bucket: OwnedBucket,
        flat: torch.Tensor,
        tensors_by_side: Sequence[Mapping[ShardedParameter, torch.Tensor]],
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Views of `flat` by source rank, paired with the same rows of the whole tensors."""
        start = 0
        for index, tensors in product(range(bucket.assignment.ranks), tensors_by_side):
            for param_slice, parameter in self._owned(bucket):
                part = param_slice.narrow(tensors[parameter].detach(), index)
                yield flat[start : start + part.numel()].view(part.shape), part
                start += part.numel()


@dataclass(slots=True)
class _InFlight:
    """One all-to-all in flight. Its staging buffer is free after `wait`."""

    work: Work | None = None

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()


def _local_grad(parameter: ShardedParameter) -> torch.Tensor:
    """This rank's rows of the gradient, or zeros without a gradient."""
    grad = parameter.raw_grad
    if grad is None:
        return torch.zeros_like(parameter.local)
    return grad.to_local() if isinstance(grad, DTensor) else grad
