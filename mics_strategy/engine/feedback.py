"""Error feedback of the gradients of one bucket.

A residual holds what this rank's encodings of a bucket's gradients have lost so far; the next payload brings it (see
`Quantizer.encode`). Over all steps the sums of decoded gradients then differ from those of the gradients by the
residuals of the last step only.

Residuals of gradients that are dropped before their parameter's optimizer has stepped are zeroed, for the parameters
whose gradients are dropped: a step that a gradient scaler skips, an abandoned accumulation, or the gradients that one
of two optimizers does not use leave nothing behind. Gradients that no optimizer has used are not in a checkpoint, nor
is what their encodings have lost.

Residuals are also sent for a parameter that no rank has used, and then no gradient shows them. Their sum is sent again,
exactly, with the next gradient.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from mics_strategy.comm.communicator import Communicator
from mics_strategy.comm.process_groups import ProcessGroups
from mics_strategy.engine.bucket_specs import BucketSpec, residual_numels
from mics_strategy.engine.layout import BucketLayout, ParamSlice
from mics_strategy.engine.memory import MemoryTracker, arena
from mics_strategy.engine.schedule import full_numel
from mics_strategy.errors import LifecycleError


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """The residual of one role's collectives.

    Attributes:
        values: [residual_numel] fp32, in the unit of the gradients' sum.
        start: First element in the bucket's flat buffer.
        numel: Elements that belong to the flat buffer; those behind are padding of an all-reduce.
    """

    values: torch.Tensor
    start: int
    numel: int

    def rows(self, shard_numel: int) -> range:
        """Rows of the flat buffer that have the elements, the ends perhaps in part."""
        return range(self.start // shard_numel, -(-(self.start + self.numel) // shard_numel))

    def table(self, shard_numel: int) -> torch.Tensor:
        """The elements in whole rows, [rows, shard_numel], filled up with zeros.

        A view where the elements are whole rows.
        """
        rows = self.rows(shard_numel)
        if self.numel == len(rows) * shard_numel:
            return self.values[: self.numel].view(len(rows), shard_numel)
        table = self.values.new_zeros(len(rows) * shard_numel)
        first = self.start - rows.start * shard_numel
        table[first : first + self.numel] = self.values[: self.numel]
        return table.view(len(rows), shard_numel)


class GradFeedback:
    """The residuals of one bucket's gradients, by role.

    Args:
        layout: Layout of the bucket.
        residuals: Residuals by role; empty without feedback.
        predivisor: Divisor of the gradients before their sum.

    Attributes:
        carry: [shard_numel] fp32, sum of residuals of all ranks for this rank's shard, added to the next sum: of
            another number of ranks, loaded, or of parameters that no rank has used. None for none.
    """

    def __init__(self, layout: BucketLayout, residuals: dict[str, Residual], predivisor: int) -> None:
        self.layout = layout
        self.residuals = residuals
        self.predivisor = predivisor
        self.carry: torch.Tensor | None = None
        self._unsettled: set[int] = set()  # positions of parameters with gradients that no optimizer has used

    @property
    def is_unsettled(self) -> bool:
        """Whether gradients were sent that no optimizer has used."""
        return bool(self._unsettled)

    def residual(self, role: str, comm: Communicator) -> torch.Tensor | None:
        """The residual for a collective that is about to encode; None without feedback."""
        if not comm.route.has_feedback:
            return None
        self._unsettle()
        return self.residuals[role].values

    def settle(self, position: int) -> None:
        """An optimizer has used what was sent of the gradient at `position`."""
        self._unsettled.discard(position)

    def _unsettle(self) -> None:
        self._unsettled.update(range(len(self.layout.param_slices)))

    def add_carry(self, total: torch.Tensor) -> None:
        """Add the carry to a sum, once."""
        if self.carry is not None:
            total.add_(self.carry)
            if self.carry.is_cuda:
                self.carry.record_stream(torch.cuda.current_stream(self.carry.device))
            self.carry = None
            self._unsettle()

    def send_again(self, positions: list[int], mean: torch.Tensor, divisor: float) -> None:
        """Add what was sent for parameters that no rank has used to the carry.

        Args:
            positions: Positions of these parameters in the bucket.
            mean: [shard_numel], mean gradient of this rank's shard.
            divisor: Factor from the mean to the sum.

        Cost:
            Memory of the carry, from the first such parameter on until the next sum.
        """
        sent = [position for position in positions if position in self._unsettled]
        if not sent:
            return
        if self.carry is None:
            self.carry = torch.zeros_like(mean, dtype=torch.float32)
        for param_slice in (self.layout.param_slices[position] for position in sent):
            start, end = param_slice.offset, param_slice.offset + param_slice.chunk_numel
            self.carry[start:end].add_(mean[start:end], alpha=divisor)
        self._unsettled.difference_update(sent)  # nothing of it is lost

    def drop(self, position: int) -> None:
        """Forget the gradients of the parameter at `position` that no optimizer has used."""
        if position not in self._unsettled:
            return
        for residual in self.residuals.values():
            for part in self._parts(residual, self.layout.param_slices[position]):
                part.zero_()

    def without_unsettled(self, role: str) -> torch.Tensor:
        """The residual of a role as if unused gradients had been dropped.

        Itself where an optimizer has used all gradients, else a copy.
        """
        residual = self.residuals[role]
        if not self._unsettled:
            return residual.values
        copy = dataclasses.replace(residual, values=residual.values.clone())
        for position in self._unsettled:
            for part in self._parts(copy, self.layout.param_slices[position]):
                part.zero_()
        return copy.values

    def clear(self) -> None:
        """Forget everything."""
        self.carry = None
        self._unsettled.clear()
        for residual in self.residuals.values():
            residual.values.zero_()

    def _parts(self, residual: Residual, param_slice: ParamSlice) -> Iterator[torch.Tensor]:
        """Views of the elements of one parameter in a residual."""
        shard_numel = self.layout.shard_numel
        first, last = param_slice.offset, param_slice.offset + param_slice.chunk_numel
        rows = residual.rows(shard_numel)
        if residual.numel == len(rows) * shard_numel:
            yield residual.table(shard_numel)[:, first:last]
            return
        for row in rows:
            start, end = (max(0, row * shard_numel + place - residual.start) for place in (first, last))
            yield residual.values[start : min(end, residual.numel)]


def make_feedback(
    buckets: list[BucketSpec], groups: ProcessGroups, memory: MemoryTracker, device: torch.device
) -> list[GradFeedback]:
    """Allocate the residuals of all trainable buckets.

    Cost:
        Memory: 4 bytes for each element of the full tensor of a reduce-scatter or all-reduce of which all stages are
        quantized; where only the inter-node stage is, for each element of this rank's slice.
    """
    numels = [residual_numels(bucket, groups.scopes) for bucket in buckets]
    sizes = [(numel, torch.float32) for by_role in numels for numel in by_role.values()]
    pieces = iter(arena(memory, "error feedback", sizes, device) if sizes else [])
    feedbacks = []
    for bucket, by_role in zip(buckets, numels, strict=True):
        residuals = {role: _residual(role, bucket, groups, next(pieces)) for role in by_role}
        predivisor = predivisor_of(bucket.wire_dtype, groups.scopes.world_size)
        feedbacks.append(GradFeedback(bucket.layout, residuals, predivisor))
    return feedbacks


def _residual(role: str, bucket: BucketSpec, groups: ProcessGroups, values: torch.Tensor) -> Residual:
    """The residual of one role, with its place in the flat buffer."""
    comm = {
        "grad_reduce_scatter": groups.grad_comm,
        "second_hop_reduce_scatter": groups.second_scatter_comm,
        "second_hop_all_reduce": groups.replica_comm,
    }[role]
    numel, count = full_numel(role, bucket.layout, groups.scopes), values.numel()
    if comm is None:
        raise LifecycleError(f"A residual of {role} over one rank. This is a defect; please report it.")
    route = comm.for_bytes(numel * bucket.wire_dtype.itemsize).route
    first = comm.index // route.strides[route.num_quantized] * count
    inner_degree = groups.scopes.degrees_of(role)[0]
    start = groups.scopes.span(1, inner_degree).index(groups.rank) * numel + first
    return Residual(values=values, start=start, numel=max(0, min(count, numel - first)))


def predivisor_of(wire_dtype: torch.dtype, num_ranks: int) -> int:
    """The divisor of gradients before their sum: 1 except for fp16.

    Sums in fp16 would overflow.

    It is a power of two near the square root of the number of ranks. About half of the division comes before the sum
    and the rest after it, so neither large gradients overflow nor small ones vanish.

    Source:
        FSDP2 (torch 2.13, `_get_gradient_divide_factors`), which uses the same numbers.
    """
    factor = 1
    while wire_dtype == torch.float16 and num_ranks % factor == 0 and num_ranks / factor > factor:
        factor *= 2
    return factor
