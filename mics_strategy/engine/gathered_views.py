"""Gathered tensors, and views of them, which write to the sharded tensor that they are of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch.distributed.tensor import DTensor

from mics_strategy.comm.placement import full_tensor, is_sharded
from mics_strategy.comm.process import check_not_forked
from mics_strategy.engine.origins import origin_now
from mics_strategy.errors import LifecycleError

ExactDTensor: TypeAlias = Any  # whose module imports this one
_GIVEN_STRIDES = [getattr(torch.ops.aten, f"as_strided{end}").default for end in ("", "_copy", "_scatter")]


@dataclass(slots=True, eq=False, weakref_slot=True)
class GatheredBase:
    """A tensor and its gathered values, of which views were made.

    The views share the memory of `whole`. A write to one of them is copied to this rank's part of the base; a write to
    the base gathers again, before the next operation on a view.

    Attributes:
        base: Tensor that the views are of.
        whole: Its values on this rank, [base.shape].
        version: Version of the base whose values `whole` holds.
    """

    base: ExactDTensor
    whole: torch.Tensor
    version: tuple[int, int]

    def refresh(self) -> None:
        """Gather again if the base was written to. Collective if it was."""
        self.base.mics_before_read()
        if self.version != version_of(self.base):
            with torch.no_grad():
                self.whole.copy_(self.base.full_tensor())
            self.version = version_of(self.base)

    def write_back(self) -> None:
        """Copy this rank's part of `whole` to the base."""
        keep_part(self.base, self.whole)
        if self.base.mics_memory is not None:
            self.base.mics_memory.writes.num += 1
        number, writes = version_of(self.base)
        self.version = (number + 1, writes)  # torch counts the operation, through the view, when it has ended


def gathered_of(tensor: DTensor) -> GatheredBase | None:
    """The gathered values that views of a tensor or an alias share, or None."""
    memory = getattr(tensor, "mics_memory", None)
    gathered = None if memory is None else memory.gathered()
    if gathered is None or gathered.base._local_tensor.data_ptr() != tensor._local_tensor.data_ptr():
        return None
    if gathered.base._spec != tensor._spec:
        return None
    gathered.refresh()
    return cast("GatheredBase", gathered)


def base_of(tensor: ExactDTensor) -> ExactDTensor:
    """The tensor whose gathered rows a view shows, or the tensor itself."""
    return tensor if tensor.mics_gathered is None else tensor.mics_gathered.base


def version_of(tensor: ExactDTensor) -> tuple[int, int]:
    """Numbers that grow when a tensor is written to.

    An optimizer writes to this rank's part of its states, which torch counts there alone.
    """
    number = 0 if tensor.is_inference() else tensor._version
    if tensor.mics_memory is not None:
        return number, tensor.mics_memory.writes.num
    local = tensor._local_tensor
    return number, 0 if local.is_inference() else local._version


def keep_part(tensor: ExactDTensor, whole: torch.Tensor) -> None:
    """Copy this rank's part of a whole tensor into it. Sends nothing.

    Args:
        tensor: Tensor that is sharded or replicated, not partial.
        whole: Its new values, the same on all ranks, [tensor.shape].
    """
    replicated = DTensor.from_local(whole, tensor.device_mesh, run_check=False)
    tensor._local_tensor.copy_(replicated.redistribute(placements=tensor.placements)._local_tensor)


def gather(tensor: DTensor) -> torch.Tensor:
    """A copy of the whole tensor on every rank, also where each has it anyway. Collective."""
    whole = _whole_of(tensor)
    return whole if is_sharded(tensor) else whole.clone()


def _whole_of(tensor: DTensor) -> torch.Tensor:
    """The whole tensor, of which nothing may be kept: where each rank has it anyway it is the part itself."""
    check_not_forked()
    return full_tensor(tensor, origin_now(tensor))


def check_strides(func: Any, tensor: Any) -> None:
    """Refuse an operation that is told strides in the memory of a tensor, whose gathered values have other ones.

    Raises:
        LifecycleError: The tensor is a transposed one, or columns of one.
    """
    if func in _GIVEN_STRIDES and tensor.mics_gathered is None and not tensor.is_contiguous():
        raise LifecycleError(
            f"`{func._schema.name}` (also of `fill_diagonal_`) on columns or the transpose of a sharded tensor would "
            "touch other elements. Use another operation (`tensor.diagonal().fill_(value)`), or apply it to a copy: "
            "`tensor.full_tensor()`."
        )


class Wholes:
    """The gathered values of the arguments of one operation."""

    def __init__(self) -> None:
        self._wholes: dict[int, torch.Tensor] = {}

    def of(self, tensor: DTensor) -> torch.Tensor:
        """The values of a whole tensor. Collective if it is sharded."""
        if getattr(tensor, "mics_gathered", None) is not None:
            return tensor._local_tensor
        if id(tensor) not in self._wholes:
            gathered = gathered_of(tensor)
            self._wholes[id(tensor)] = _whole_of(tensor) if gathered is None else gathered.whole
        return self._wholes[id(tensor)]

    def keep_parts(self, written: Iterator[ExactDTensor]) -> None:
        """Copy this rank's part of the written values to the shards."""
        for tensor in written:
            if tensor.mics_gathered is None:
                keep_part(tensor, self._wholes[id(tensor)])
