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

import torch
from torch.distributed.tensor import DTensor

from mics_strategy.collectives.ops import Handle
from mics_strategy.sharding.bucket import Bucket
from mics_strategy.sharding.gradients.loose import plan_loose
from mics_strategy.sharding.lifecycle import COLLECTION, GRADIENT, Collection, Gradient, advance
from mics_strategy.sharding.parameter import label_gradient


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


class BucketGradient:
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
        self.collection = Collection.EMPTY
        self.state = Gradient.NONE
        self._all = frozenset(range(len(bucket.layout.regions)))
        self.used: set[int] = set()  # this rank has contributed, in this window
        self._live: set[int] = set()  # some rank may have contributed, in this window
        self._fired: set[int] = set()  # arrived in this backward
        self._written: set[int] = set()  # the accumulator holds a sum of it
        self._kept: set[int] = set()  # the result holds an earlier mean of it
        self._flat: torch.Tensor | None = None
        self._is_zero = False
        self._places: dict[int, list[torch.Tensor | None]] = {}
        self._paddings: dict[int, list[torch.Tensor]] = {}
        self._result_cast = result_cast
        self._is_one_buffer = accumulator.data_ptr() == result.data_ptr()
        mesh = bucket.mesh
        self._predivisor = predivisor_of(wire_dtype, mesh.scopes.world_size)
        self._divisor = mesh.scopes.world_size / self._predivisor
        self._loose = plan_loose(mesh.reduce_grads, bucket.spec, wire_dtype) if self._predivisor == 1 else None
        self._replicas = mesh.second_reduce.size if mesh.second_reduce is not None else 1
        shards = mesh.trained
        self._labels: list[DTensor] = [
            label_gradient(region.local_view(result_cast, shards.index), region, shards)
            for region in bucket.layout.regions
        ]

    @property
    def is_sharded(self) -> bool:
        """Whether gradients are reduced in every backward."""
        return self.bucket.mesh.reduce_grads is not None

    @property
    def num_fired(self) -> int:
        """Parameters whose gradient has arrived in this backward."""
        return len(self._fired)

    def begin_collecting(self, flat: torch.Tensor, *, is_zero: bool) -> None:
        """Use `flat`, [full_numel] in the wire dtype, until this backward's first hop has landed.

        Args:
            flat: The flat form.
            is_zero: It holds zeros, others read it too, and nothing will be collected.
        """
        self._flat, self._is_zero = flat, is_zero
        self.collection = advance(COLLECTION, self.collection, "collect", self.name)

    def collect(self, position: int, grad: torch.Tensor) -> None:
        """Take one parameter's gradient; the caller then drops its own reference."""
        if self._flat is not None:
            self._collect_for_sum(self._flat, position, grad)
        else:
            self._open()
            if self._predivisor > 1:
                grad = grad.to(self.accumulator.dtype) / self._predivisor
            self._write(self.accumulator, position, grad, position in self._written)
            self._written.add(position)
        self._fired.add(position)
        self.used.add(position)

    def _collect_for_sum(self, flat: torch.Tensor, position: int, grad: torch.Tensor) -> None:
        """Keep a gradient until the first hop, in the flat form or where it is."""
        is_first = position not in self._fired
        if self._loose is not None:
            if is_first and self._loose.keep(position, grad):
                return
            before = self._loose.pop(position)
            if before is not None:
                self._write(flat, position, before, add=False)
        self._write(flat, position, grad, add=not is_first)

    def _write(self, flat: torch.Tensor, position: int, grad: torch.Tensor, add: bool) -> None:
        """Put a gradient into its place. Flat forms are few and stay, so the views are made once."""
        grad = grad.detach() if grad.requires_grad else grad
        layout = self.bucket.layout
        places = self._places.get(flat.data_ptr())
        if places is None:
            places = [layout.even_view(flat, each) for each in range(len(layout.regions))]
            self._places[flat.data_ptr()] = places
        place = places[position]
        if place is not None and grad.is_contiguous():
            pairs = [(place, grad.view(place.shape))]
        else:
            pairs = list(layout.pieces(flat, grad, position))
        for piece, part in pairs:
            piece.add_(part) if add else piece.copy_(part)

    def end_backward(self) -> None:
        """The next backward starts with nothing collected."""
        self._fired.clear()

    def abandon(self) -> None:
        """Forget what an interrupted backward collected but did not send."""
        self._fired.clear()
        self._flat = None
        if self._loose is not None:
            self._loose.clear()
        if self.collection is not Collection.REDUCING:
            self.collection = advance(COLLECTION, self.collection, "abandon", self.name)

    def launch(self) -> Handle | None:
        """Start the first hop of what was collected; parameters without a gradient count as zero."""
        across, flat = self.bucket.mesh.reduce_grads, self._flat
        if across is None or flat is None:
            return None
        if not self._is_zero:
            self._zero(flat, self._all - self._fired)
            if self.bucket.mesh.scopes.codecs.first_hop is not None:
                self._zero_padding(flat, degree=1)
            if self._predivisor > 1:
                flat.div_(self._predivisor)
        self._fired.clear()
        self.collection = advance(COLLECTION, self.collection, "launch", self.name)
        self._open()
        accumulate = bool(self._written)
        if accumulate:
            self._zero(self.accumulator, self._all - self._written)
        self._written.update(self._all)
        self._flat = None
        reduce = across.reduce if self._loose is None else self._loose.reduce
        return reduce(self.accumulator, flat, accumulate, self.name).then(self._landed)

    def _landed(self) -> None:
        self.collection = advance(COLLECTION, self.collection, "land", self.name)

    def _open(self) -> None:
        """Make the gradient a sum to which more can be added."""
        before = self.state
        self.state = advance(GRADIENT, before, "accumulate", self.name)
        if before is Gradient.PARTIAL:
            return
        if before is Gradient.NONE:
            self._kept.clear()
        else:
            self._reopen()
        self._written = set(self._kept) if self._is_one_buffer else set()
        self._live = set(self._all)

    def _reopen(self) -> None:
        """From the mean back to a sum: the parts of all replicas together are again the mean times the divisor."""
        for parameter, shown in zip(self.bucket.sharded, self._labels, strict=True):
            if parameter.stored_grad is shown:
                parameter.stored_grad = None
        if self._result_cast is not self.result:
            self.result.copy_(self._result_cast)
        self.result.mul_(self._divisor / self._replicas)

    def scatter(self, wire: torch.Tensor) -> Handle | None:
        """Sum over the axes that the optimizer scope has and the gradient scope lacks, keeping this rank's slice.

        Args:
            wire: [numel_at(gradient scope)] in the wire dtype; used when that is not the accumulator's.
        """
        if self.state is not Gradient.PARTIAL:
            self._open()  # other ranks have something, this one adds zeros
        self._zero(self.accumulator, self._all - self._written)
        self._written.update(self._all)
        scopes = self.bucket.mesh.scopes
        if scopes.codecs.second_hop is not None:
            self._zero_padding(self.accumulator, scopes.grads)
        across = self.bucket.mesh.second_scatter
        if across is None:
            return None
        if self._kept:
            self._zero(self.result, self._all - self._kept)
        full = self.accumulator
        if self.wire_dtype != full.dtype:
            full = wire.copy_(full)
        return across.reduce(self.result, full, bool(self._kept), self.name)

    def all_reduce(self) -> Handle | None:
        """Sum over the replicas."""
        across = self.bucket.mesh.second_reduce
        return None if across is None else across.all_reduce(self.result, self.wire_dtype, self.name)

    def finish(self) -> None:
        """Divide, once, by the number of ranks."""
        if self._divisor > 1:
            self.result.div_(self._divisor)
        if self._result_cast is not self.result:
            self._result_cast.copy_(self.result)
        self.state = advance(GRADIENT, self.state, "finish", self.name)
        self._kept = set(self._all)
        self._live.clear()

    def forget_unused(self) -> None:
        """No rank has used any parameter of the bucket: there is no gradient."""
        self.state = advance(GRADIENT, self.state, "clear", self.name)

    def publish(self, position: int) -> None:
        """Let the parameter at `position` show its gradient; one that was set or penalised directly is added."""
        self._live.add(position)
        parameter, shown = self.bucket.sharded[position], self._labels[position]
        stored = parameter.stored_grad
        if stored is not None and stored is not shown:
            shown.to_local().add_(stored.to_local() if isinstance(stored, DTensor) else stored)
        parameter.stored_grad = shown

    def clear(self, position: int) -> None:
        """Forget one parameter's gradient."""
        for positions in (self.used, self._live, self._written, self._kept):
            positions.discard(position)
        if not self._live:
            self.state = advance(GRADIENT, self.state, "clear", self.name)

    def _zero(self, buffer: torch.Tensor, positions: frozenset[int] | set[int]) -> None:
        rows = buffer.view(-1, self.bucket.layout.shard_numel)
        for position in positions:
            region = self.bucket.layout.regions[position]
            rows[:, region.offset : region.offset + region.chunk_numel].zero_()

    def _zero_padding(self, buffer: torch.Tensor, degree: int) -> None:
        """Leave nothing beside the parameters that a block's scale would have to cover: other units' gradients, NaN.

        Args:
            buffer: [numel_at(degree)]; those of one address are alike, so the views are made once.
            degree: Of the scope at which it is this rank's slice.
        """
        views = self._paddings.get(buffer.data_ptr())
        if views is None:
            mesh, layout = self.bucket.mesh, self.bucket.layout
            rows = layout.slices(degree)[mesh.scopes.span(1, degree).index(mesh.rank)]
            views = self._paddings[buffer.data_ptr()] = layout.padding_views(buffer, rows)
        if views:
            torch._foreach_zero_(views)
