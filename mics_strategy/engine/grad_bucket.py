"""What happens to one bucket's gradients?

1. `collect`: autograd's gradient of a parameter is copied into the flat form, in the wire dtype, and freed; or it is
   kept as it is until the first hop has ended, where ranks read it there (see `loose`).
2. First hop, in every backward: the flat form is summed over the gradient scope and this rank's slice is
   added to the accumulator. (Gradients that are not sharded are added to the accumulator directly.)
3. Second hop, once per optimizer step: the accumulator is summed over the remaining ranks, scattered over the
   axes that the optimizer scope has and the gradient scope lacks, and divided by the number of ranks.

The accumulator holds a *sum* while the gradient is PARTIAL, the result its *mean* once it is SHARDED. A
finished gradient that receives more is turned back into a sum, so finishing early costs traffic and never
correctness. Of a wire in fp16 the sum is that of gradients divided beforehand (see `predivisor_of`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from mics_strategy.engine.lifecycle import (
    ACCUMULATOR_TRANSITIONS,
    GRAD_BUFFER_TRANSITIONS,
    AccumulatorState,
    GradBufferState,
    GradFlag,
    GradFlags,
    transition,
)
from mics_strategy.engine.parameter import grad_as_dtensor
from mics_strategy.engine.zero_copy import plan_in_place_reduce

if TYPE_CHECKING:
    from mics_strategy.comm.work import Work
    from mics_strategy.engine.bucket import Bucket


def predivisor_of(wire_dtype: torch.dtype, num_ranks: int) -> int:
    """What gradients are divided by before they are summed: 1, but for fp16, of which sums would overflow.

    A power of two near the square root of the number of ranks: about half of the division comes before the sum,
    the rest behind it, so that neither large gradients overflow nor small ones vanish.

    Source:
        FSDP2 (torch 2.13, `_get_gradient_divide_factors`), whose numbers these are.
    """
    factor = 1
    while wire_dtype == torch.float16 and num_ranks % factor == 0 and num_ranks / factor > factor:
        factor *= 2
    return factor


class GradBucket:
    """The gradient of one trainable bucket, from autograd to the optimizer.

    Args:
        bucket: Whose gradient.
        accumulator: [numel_at(gradient scope)], fp32 or wider.
        result: [shard_numel], same dtype: what the optimizer reads; the accumulator itself when both scopes
            agree.
        result_cast: [shard_numel] in the parameters' dtype when that is another one; otherwise `result`.
        wire_dtype: Dtype in which gradients travel.
    """

    def __init__(
        self,
        bucket: Bucket,
        accumulator: torch.Tensor,
        result: torch.Tensor,
        result_cast: torch.Tensor,
        wire_dtype: torch.dtype,
    ) -> None:
        self.bucket = bucket
        self.name = bucket.spec.name
        self.accumulator = accumulator
        self.result = result
        self.wire_dtype = wire_dtype
        self.buffer_state = GradBufferState.EMPTY
        self.state = AccumulatorState.NONE
        self.flags = GradFlags(len(bucket.layout.param_slices))
        self.num_arrived = 0  # parameters whose gradient has arrived in this backward
        self._flat: torch.Tensor | None = None
        self._is_zero = False
        self._strided_views: dict[int, list[torch.Tensor | None]] = {}
        self._paddings: dict[int, list[torch.Tensor]] = {}
        self._result_cast = result_cast
        self._is_one_buffer = accumulator.data_ptr() == result.data_ptr()
        groups = bucket.groups
        self._predivisor = predivisor_of(wire_dtype, groups.scopes.world_size)
        self._divisor = groups.scopes.world_size / self._predivisor
        self._zero_copy = (
            plan_in_place_reduce(groups.grad_comm, bucket.spec, wire_dtype) if self._predivisor == 1 else None
        )
        self._replicas = groups.replica_comm.size if groups.replica_comm is not None else 1
        shards = groups.trainable_placement
        self._dtensors: list[DTensor] = [
            grad_as_dtensor(region.view_in(result_cast, shards.index), region, shards)
            for region in bucket.layout.param_slices
        ]

    @property
    def is_sharded(self) -> bool:
        """Whether gradients are reduced in every backward."""
        return self.bucket.groups.grad_comm is not None

    def bind_buffer(self, flat: torch.Tensor, *, is_zero: bool) -> None:
        """Use `flat`, [full_numel] in the wire dtype, until this backward's first hop has landed.

        Args:
            flat: The flat form.
            is_zero: It holds zeros, others read it too, and nothing will be collected.
        """
        self._flat, self._is_zero = flat, is_zero
        self.buffer_state = transition(GRAD_BUFFER_TRANSITIONS, self.buffer_state, "collect", self.name)

    def add(self, position: int, grad: torch.Tensor) -> None:
        """Take one parameter's gradient; the caller then drops its own reference."""
        if self._flat is not None:
            self._stage(self._flat, position, grad)
        else:
            self._start_accumulating()
            if self._predivisor > 1:
                grad = grad.to(self.accumulator.dtype) / self._predivisor
            self._copy_in(self.accumulator, position, grad, self.flags.has(GradFlag.ACCUMULATED, position))
            self.flags.apply("accumulate", position)
        self.num_arrived += not self.flags.has(GradFlag.ARRIVED, position)
        self.flags.apply("arrive", position)

    def _stage(self, flat: torch.Tensor, position: int, grad: torch.Tensor) -> None:
        """Keep a gradient until the first hop, in the flat form or where it is."""
        is_first = not self.flags.has(GradFlag.ARRIVED, position)
        if self._zero_copy is not None:
            if is_first and self._zero_copy.keep(position, grad):
                return
            before = self._zero_copy.pop(position)
            if before is not None:
                self._copy_in(flat, position, before, add=False)
        self._copy_in(flat, position, grad, add=not is_first)

    def _copy_in(self, flat: torch.Tensor, position: int, grad: torch.Tensor, add: bool) -> None:
        """Put a gradient into its place. Flat forms are few and stay, so the views are made once."""
        grad = grad.detach() if grad.requires_grad else grad
        layout = self.bucket.layout
        places = self._strided_views.get(flat.data_ptr())
        if places is None:
            places = [layout.strided_view(flat, each) for each in range(len(layout.param_slices))]
            self._strided_views[flat.data_ptr()] = places
        place = places[position]
        if place is not None and grad.is_contiguous():
            pairs = [(place, grad.view(place.shape))]
        else:
            pairs = list(layout.copy_pairs(flat, grad, position))
        for piece, part in pairs:
            piece.add_(part) if add else piece.copy_(part)

    def _forget_arrivals(self) -> None:
        self.flags.apply_to_all("end_backward")
        self.num_arrived = 0

    def end_backward(self) -> None:
        """The next backward starts with nothing collected."""
        self._forget_arrivals()

    def discard(self) -> None:
        """Forget what an interrupted backward collected but did not send."""
        self._forget_arrivals()
        self._flat = None
        if self._zero_copy is not None:
            self._zero_copy.clear()
        if self.buffer_state is not GradBufferState.REDUCING:
            self.buffer_state = transition(GRAD_BUFFER_TRANSITIONS, self.buffer_state, "abandon", self.name)

    def reduce_scatter(self) -> Work | None:
        """Start the first hop of what was collected; parameters without a gradient count as zero."""
        comm, flat = self.bucket.groups.grad_comm, self._flat
        if comm is None or flat is None:
            return None
        if not self._is_zero:
            self._zero(flat, self.flags.lacking(GradFlag.ARRIVED))
            if self.bucket.groups.scopes.codecs.first_hop is not None:
                self._zero_padding(flat, degree=1)
            if self._predivisor > 1:
                flat.div_(self._predivisor)
        self.buffer_state = transition(GRAD_BUFFER_TRANSITIONS, self.buffer_state, "launch", self.name)
        self._start_accumulating()
        accumulate = self.flags.any(GradFlag.ACCUMULATED)
        if accumulate:
            self._zero(self.accumulator, self.flags.lacking(GradFlag.ACCUMULATED))
        self.flags.apply_to_all("reduce")
        self.num_arrived = 0
        self._flat = None
        comm = comm.for_bytes(flat.numel() * flat.itemsize)
        reduce_scatter = comm.reduce_scatter if self._zero_copy is None else self._zero_copy.reduce_scatter
        return reduce_scatter(self.accumulator, flat, accumulate, self.name).then(self._on_reduced)

    def _on_reduced(self) -> None:
        self.buffer_state = transition(GRAD_BUFFER_TRANSITIONS, self.buffer_state, "land", self.name)

    def _start_accumulating(self) -> None:
        """Make the gradient a sum to which more can be added."""
        before = self.state
        self.state = transition(ACCUMULATOR_TRANSITIONS, before, "accumulate", self.name)
        if before is AccumulatorState.PARTIAL:
            return
        if before is AccumulatorState.NONE:
            self.flags.apply_to_all("start_window")
            return
        self._mean_to_sum()
        self.flags.apply_to_all("reopen_window")
        if self._is_one_buffer:
            for position in self.flags.having(GradFlag.HAS_PRIOR_MEAN):
                self.flags.apply("accumulate", position)

    def _mean_to_sum(self) -> None:
        """From the mean back to a sum: the parts of all replicas together are again the mean times the divisor."""
        for parameter, shown in zip(self.bucket.sharded_params, self._dtensors, strict=True):
            if parameter.raw_grad is shown:
                parameter.raw_grad = None
        if self._result_cast is not self.result:
            self.result.copy_(self._result_cast)
        self.result.mul_(self._divisor / self._replicas)

    def reduce_scatter_outer(self, wire: torch.Tensor) -> Work | None:
        """Sum over the axes that the optimizer scope has and the gradient scope lacks, keeping this rank's slice.

        Args:
            wire: [numel_at(gradient scope)] in the wire dtype; used when that is not the accumulator's.
        """
        if self.state is not AccumulatorState.PARTIAL:
            self._start_accumulating()  # other ranks have something, this one adds zeros
        self._zero(self.accumulator, self.flags.lacking(GradFlag.ACCUMULATED))
        self.flags.apply_to_all("accumulate")
        scopes = self.bucket.groups.scopes
        if scopes.codecs.second_hop is not None:
            self._zero_padding(self.accumulator, scopes.grads)
        comm = self.bucket.groups.outer_grad_comm
        if comm is None:
            return None
        accumulate = self.flags.any(GradFlag.HAS_PRIOR_MEAN)
        if accumulate:
            self._zero(self.result, self.flags.lacking(GradFlag.HAS_PRIOR_MEAN))
        full = self.accumulator
        if self.wire_dtype != full.dtype:
            full = wire.copy_(full)
        return comm.for_bytes(full.numel() * full.itemsize).reduce_scatter(self.result, full, accumulate, self.name)

    def all_reduce(self) -> Work | None:
        """Sum over the replicas."""
        comm = self.bucket.groups.replica_comm
        if comm is None:
            return None
        comm = comm.for_bytes(self.result.numel() * self.wire_dtype.itemsize)
        return comm.all_reduce(self.result, self.wire_dtype, self.name)

    def finish(self) -> None:
        """Divide, once, by the number of ranks."""
        if self._divisor > 1:
            self.result.div_(self._divisor)
        if self._result_cast is not self.result:
            self._result_cast.copy_(self.result)
        self.state = transition(ACCUMULATOR_TRANSITIONS, self.state, "finish", self.name)
        self.flags.apply_to_all("finish")

    def discard_unused(self) -> None:
        """No rank has used any parameter of the bucket: there is no gradient."""
        self.state = transition(ACCUMULATOR_TRANSITIONS, self.state, "clear", self.name)

    def expose(self, position: int) -> None:
        """Let the parameter at `position` show its gradient; one that was set or penalised directly is added."""
        self.flags.apply("expose", position)
        parameter, shown = self.bucket.sharded_params[position], self._dtensors[position]
        stored = parameter.raw_grad
        if stored is not None and stored is not shown:
            shown.to_local().add_(stored.to_local() if isinstance(stored, DTensor) else stored)
        parameter.raw_grad = shown

    def clear(self, position: int) -> None:
        """Forget one parameter's gradient."""
        self.flags.apply("clear", position)
        if not self.flags.any(GradFlag.MAYBE_USED):
            self.state = transition(ACCUMULATOR_TRANSITIONS, self.state, "clear", self.name)

    def _zero(self, buffer: torch.Tensor, positions: list[int]) -> None:
        rows = buffer.view(-1, self.bucket.layout.shard_numel)
        for position in positions:
            region = self.bucket.layout.param_slices[position]
            rows[:, region.offset : region.offset + region.chunk_numel].zero_()

    def _zero_padding(self, buffer: torch.Tensor, degree: int) -> None:
        """Leave nothing beside the parameters that a block's scale would have to cover: other units' gradients, NaN.

        Args:
            buffer: [numel_at(degree)]; those of one address are alike, so the views are made once.
            degree: Of the scope at which it is this rank's slice.
        """
        views = self._paddings.get(buffer.data_ptr())
        if views is None:
            groups, layout = self.bucket.groups, self.bucket.layout
            rows = layout.shard_slices(degree)[groups.scopes.span(1, degree).index(groups.rank)]
            views = self._paddings[buffer.data_ptr()] = layout.padding_views(buffer, rows)
        if views:
            torch._foreach_zero_(views)
