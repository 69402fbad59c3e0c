"""The gradients of one bucket, from autograd to the optimizer.

1. `BackwardGrads` collects the gradients of one backward. A gradient stays where autograd has stored it until the next
   one comes from another bucket. Then all are copied in one call, into the flat buffer, in the wire dtype. Some stay in
   place until the first hop has read them (see `zero_copy`).
2. First hop, in every backward: the flat buffer is reduce-scattered over the gradient scope, and this rank's slice is
   added to the accumulator; a large parameter chunk by chunk. Gradients that are not sharded are added to the
   accumulator directly, also in one call.
3. Second hop, once per optimizer step: the accumulator is reduce-scattered over the axes that the optimizer scope has
   beyond the gradient scope, all-reduced over replicas, and divided by the number of ranks.

The accumulator holds a *sum* while its state is PARTIAL; the result holds the *mean* once it is SHARDED. A finished
gradient that receives more is turned back into a sum, so finishing early costs traffic and never correctness. With a
wire in fp16, gradients are divided before they are summed (see `predivisor_of`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from mics_strategy.comm.communicator import AnyCommunicator
from mics_strategy.comm.work import Prologue, QueuedWork, Work
from mics_strategy.comm.workspace import once_per_buffer
from mics_strategy.engine.backward_grads import BackwardGrads, sparse_gradients
from mics_strategy.engine.bucket import Bucket
from mics_strategy.engine.bucket_specs import casts_second_hop
from mics_strategy.engine.exact_dtensor import ExactDTensor
from mics_strategy.engine.feedback import GradFeedback, predivisor_of
from mics_strategy.engine.lifecycle import ACCUMULATOR_TRANSITIONS, AccumulatorState, GradFlag, GradFlags, transition
from mics_strategy.engine.memory import GradCopies
from mics_strategy.engine.parameter import fast_attributes, grad_as_dtensor
from mics_strategy.engine.schedule import first_hop_chunks
from mics_strategy.engine.streams import Op
from mics_strategy.engine.tensor_memory import TensorMemory, check_not_kept
from mics_strategy.engine.zero_copy import plan_in_place_reduce


def _references_of_slot() -> int:
    """References to a tensor's object that `grad` of a parameter holds, by torch."""
    parameter, grad = torch.nn.Parameter(torch.zeros(1)), torch.zeros(1)
    num = sys.getrefcount(grad)
    parameter.grad = grad
    return sys.getrefcount(grad) - num


_REFERENCES_OF_SLOT = _references_of_slot()


@dataclass(frozen=True, slots=True, kw_only=True)
class GradMemory:
    """Memory of one bucket's gradient, which lives as long as the model.

    Attributes:
        accumulator: [numel_at(gradient scope)], fp32 or wider, or bf16 where that was chosen.
        result: [shard_numel], fp32 or wider: the gradient that the optimizer reads; the accumulator itself when both
            scopes agree.
        result_cast: [shard_numel] in the parameters' dtype when that is another one; otherwise `result`.
        feedback: Residuals of error feedback.
    """

    accumulator: torch.Tensor
    result: torch.Tensor
    result_cast: torch.Tensor
    feedback: GradFeedback


class GradBucket:
    """The gradient of one trainable bucket.

    Args:
        bucket: The bucket.
        memory: Sums and residuals.
        staging: [elements of the largest chunk of a first hop] in the wire dtype, in a buffer that all buckets use in
            turn, and until which gradients stay where autograd has stored them; None where each first hop borrows one.

    Attributes:
        feedback: Residuals of error feedback.
        state: State of the accumulator.
        flags: Flags of the parameters.
        backward: Gradients of the present backward.
    """

    def __init__(
        self,
        bucket: Bucket,
        memory: GradMemory,
        staging: torch.Tensor | None = None,
    ) -> None:
        self.bucket = bucket
        self.accumulator = memory.accumulator
        self.result = memory.result
        self.feedback = memory.feedback
        self.wire_dtype = wire_dtype = bucket.spec.wire_dtype
        self.state = AccumulatorState.NONE
        self.flags = GradFlags(len(bucket.layout.param_slices))
        self._result_cast = memory.result_cast
        groups = bucket.groups
        self._predivisor = predivisor_of(wire_dtype, groups.scopes.world_size)
        self._divisor = groups.scopes.world_size / self._predivisor
        is_sent_as_stored = self._predivisor == 1 and bucket.spec.num_first_hop_chunks == 1
        self._in_place = plan_in_place_reduce(groups.grad_comm, bucket.spec) if is_sent_as_stored else None
        self.collected = BackwardGrads(self.name, self.flags, staging)
        self._copies = GradCopies(bucket.layout)
        self._padding_views = {
            degree: once_per_buffer(partial(_padding_views, bucket, degree)) for degree in {1, groups.scopes.grads}
        }
        self._dtensors = [self._new_dtensor(position) for position in range(len(bucket.layout.param_slices))]

    def _new_dtensor(self, position: int) -> tuple[Any, TensorMemory]:
        param_slice, shards = self.bucket.layout.param_slices[position], self.bucket.groups.trainable_placement
        return grad_as_dtensor(param_slice.view_in(self._result_cast, shards.index), param_slice, shards)

    @property
    def name(self) -> str:
        """Name of the bucket, for errors."""
        return self.bucket.spec.name

    @property
    def casts_second_hop(self) -> bool:
        """Whether the second hop sends a copy of the accumulator, in the wire dtype."""
        return casts_second_hop(self.bucket.spec, self.bucket.groups.scopes)

    def add(self, position: int, grad: torch.Tensor) -> None:
        """Take one parameter's gradient; the caller then drops its own reference.

        It is kept as it is until `copy_kept`, unless it is part of a graph: then it may be modified.

        Raises:
            ConfigError: The gradient is sparse.
        """
        if grad.layout is not torch.strided:
            raise sparse_gradients(self.bucket.layout.param_slices[position].name)
        if grad.requires_grad:
            self._dtensors[position][1].has_lost_graph = True
        collected = self.collected
        earlier = collected.kept.pop(position, None)
        if earlier is None and not self.flags.has(GradFlag.ARRIVED, position):
            collected.num_arrived += 1
        if collected.staging is not None:
            collected.keep_until_reduced(position, grad, earlier)
            return
        if earlier is not None:
            self._copy({position: earlier})
        if grad.requires_grad:
            self._copy({position: grad.detach()})
        else:
            collected.kept[position] = grad

    def copy_kept(self) -> None:
        """Copy kept gradients into the flat buffer, or add them to the accumulator.

        Those that the first hop reads in place stay, and all where it copies them itself.
        """
        if self.collected.kept and self.collected.staging is None:
            self._copy(self._take_copied())

    def _take_copied(self) -> dict[int, torch.Tensor]:
        """Take the kept gradients, but not those that the first hop reads in place."""
        kept = self.collected.kept
        stay = {} if self._in_place is None else self._in_place.select(kept, self.flags)
        self.collected.kept = stay
        return {position: grad for position, grad in kept.items() if position not in stay} if stay else kept

    def _copy(self, grads: dict[int, torch.Tensor]) -> None:
        """Copy gradients into the flat buffer, or add them to the accumulator."""
        flat = self.collected.flat if self.collected.staging is None else self.collected.staging
        if flat is not None:
            self._copies.copy(flat, grads, GradFlag.ARRIVED, self.flags)
        else:
            self._start_accumulating()
            if self._predivisor > 1:
                dtype = self.accumulator.dtype
                grads = {position: grad.to(dtype) / self._predivisor for position, grad in grads.items()}
            self._copies.copy(self.accumulator, grads, GradFlag.ACCUMULATED, self.flags)
            self.flags.apply("accumulate", grads)
        self.flags.apply("add_grad", grads)

    @property
    def first_hop_chunks(self) -> list[tuple[int, int]]:
        """Ranges of elements of this rank's slice: the chunks of the first hop."""
        numel = self.bucket.layout.numel_at(self.bucket.groups.scopes.grads)
        return first_hop_chunks(numel, self.bucket.spec.num_first_hop_chunks)

    def first_hop(self) -> Iterator[Op]:
        """Ops of the first hop of the collected gradients; missing gradients are zeros."""
        staging, chunks = self.collected.staging, self.first_hop_chunks
        if staging is None or len(chunks) == 1:
            yield self._reduce_scatter
            return
        grad = self.collected.kept.get(0)
        self.flags.apply("add_grad", self.collected.kept)
        accumulate, _ = self._begin_reduce()
        for start, end in chunks:
            yield partial(self._reduce_chunk, grad, staging, slice(start, end), accumulate)
        self.collected.finish_reduce()

    def _begin_reduce(self) -> tuple[bool, dict[int, torch.Tensor]]:
        """Whether the accumulator has earlier gradients, and those that are read in place."""
        kept = self.collected.start_reduce()
        self._start_accumulating()
        if accumulate := self.flags.any(GradFlag.ACCUMULATED):
            self._zero(self.accumulator, self.flags.positions_without(GradFlag.ACCUMULATED))
        self.flags.apply("start_reduce")
        return accumulate, kept

    def _reduce_chunk(
        self, grad: torch.Tensor | None, buffer: torch.Tensor, chunk: slice, accumulate: bool
    ) -> Work | None:
        """Start the reduce-scatter of one chunk of a single gradient, None for zeros.

        The work before has ended, in the order of the stream.
        """
        comm, out = self.bucket.groups.grad_comm, self.accumulator[chunk]
        if comm is None:
            return None
        full = buffer[: comm.size * out.numel()]
        if grad is None:
            full.zero_()
        else:
            full.view(comm.size, -1).copy_(grad.detach().reshape(comm.size, -1)[:, chunk])
        if self._predivisor > 1:
            full.div_(self._predivisor)
        work = comm.for_bytes(full.numel() * full.itemsize).reduce_scatter(out, full, accumulate, self.name)
        if grad is not None:
            work.keep_alive([grad])
        return work

    def _reduce_scatter(self) -> Work | None:
        comm, flat = self.bucket.groups.grad_comm, self.collected.flat
        if comm is None or flat is None:
            return None
        copied: dict[int, torch.Tensor] = {}
        staging = self.collected.staging
        if staging is not None:
            flat, copied = staging, self._take_copied()  # the device may still read them when the host goes on
            self._copy(copied)
        self.flags.apply("add_grad", self.collected.kept)  # read in place
        if staging is not None or not self.collected.is_zero:
            self._zero(flat, self.flags.positions_without(GradFlag.ARRIVED))
            if self.bucket.groups.scopes.codecs.first_hop is not None:
                self._zero_padding(flat, degree=1)
            if self._predivisor > 1:
                flat.div_(self._predivisor)
        accumulate, kept = self._begin_reduce()
        if self._in_place is not None:
            work = self._in_place.reduce_scatter(self.accumulator, kept, flat, accumulate, self.name)
        else:
            comm = comm.for_bytes(flat.numel() * flat.itemsize)
            residual = self.feedback.residual("grad_reduce_scatter", comm)
            work = comm.reduce_scatter(self.accumulator, flat, accumulate, self.name, residual)
        return work.keep_alive(copied.values()).then(self.collected.finish_reduce)

    def _start_accumulating(self) -> None:
        """Make the gradient a sum to which more can be added."""
        previous = self.state
        if previous is AccumulatorState.PARTIAL:
            return
        self.state = transition(ACCUMULATOR_TRANSITIONS, previous, "accumulate", self.name)
        if previous is AccumulatorState.NONE:
            self.flags.apply("start_accumulation")
            return
        self._mean_to_sum()
        self.flags.apply("resume_accumulation")
        if self.accumulator.data_ptr() == self.result.data_ptr():
            self.flags.apply("accumulate", self.flags.positions_with(GradFlag.HAS_PRIOR_MEAN))

    def _mean_to_sum(self) -> None:
        """Turn the mean back into a sum.

        The sums of all replicas then add up to the mean times the divisor. In a narrower dtype of the parameters only
        what was written to the gradients is taken over, so that the other values are not rounded.
        """
        for parameter, (exposed, _) in zip(self.bucket.sharded_params, self._dtensors, strict=True):
            if parameter.raw_grad is exposed:
                parameter.raw_grad = None
        if self._result_cast is not self.result:
            cast = self._result_cast
            is_unchanged = cast == self.result.to(cast.dtype)
            self.result.copy_(torch.where(is_unchanged, self.result, cast.to(self.result.dtype)))
        replica_comm = self.bucket.groups.replica_comm
        num_replicas = 1 if replica_comm is None else replica_comm.size
        self.result.mul_(self._divisor / num_replicas)

    def second_hop(self, wire: torch.Tensor, first_hops: Sequence[QueuedWork]) -> Iterator[Op]:
        """Ops of the second hop: from the gradient to the optimizer scope, and over the replicas.

        Args:
            wire: [numel_at(gradient scope)] in the wire dtype, or empty unless `casts_second_hop`.
            first_hops: First hops that communication threads have not ended.
        """
        groups, prologue = self.bucket.groups, Prologue(first_hops, self._prepare_second_hop(wire))
        if groups.second_scatter_comm is not None:
            yield partial(self._scatter_second_hop, groups.second_scatter_comm, wire, prologue)
        elif groups.replica_comm is None:
            prologue.run()
        if groups.replica_comm is not None:
            yield partial(
                self._all_reduce, groups.replica_comm, prologue if groups.second_scatter_comm is None else None
            )

    def _prepare_second_hop(self, wire: torch.Tensor) -> Callable[[], None]:
        """Make the gradient a sum of all parameters; return the local work that does it, behind the first hops."""
        if self.state is not AccumulatorState.PARTIAL:
            self._start_accumulating()  # other ranks have a sum; this rank adds zeros
        missing, scopes = self.flags.positions_without(GradFlag.ACCUMULATED), self.bucket.groups.scopes
        self.flags.apply("accumulate")

        def prepare() -> None:
            self._zero(self.accumulator, missing)
            if scopes.codecs.second_hop is not None:
                self._zero_padding(self.accumulator, scopes.grads)
            if self.casts_second_hop:
                wire.copy_(self.accumulator)

        return prepare

    def _scatter_second_hop(self, comm: AnyCommunicator, wire: torch.Tensor, prologue: Prologue) -> Work:
        """Reduce-scatter the accumulator over the axes that the optimizer scope has beyond the gradient scope."""
        if accumulate := self.flags.any(GradFlag.HAS_PRIOR_MEAN):
            self._zero(self.result, self.flags.positions_without(GradFlag.HAS_PRIOR_MEAN))
        full = wire if self.casts_second_hop else self.accumulator
        comm = comm.for_bytes(full.numel() * full.itemsize)
        residual = self.feedback.residual("second_hop_reduce_scatter", comm)
        return comm.reduce_scatter(self.result, full, accumulate, self.name, residual, prologue)

    def _all_reduce(self, comm: AnyCommunicator, prologue: Prologue | None) -> Work:
        """All-reduce the result over the replicas."""
        comm = comm.for_bytes(self.result.numel() * self.wire_dtype.itemsize)
        residual = self.feedback.residual("second_hop_all_reduce", comm)
        return comm.all_reduce(self.result, self.wire_dtype, self.name, residual, prologue)

    def finish(self) -> None:
        """Divide the sum by the number of ranks, once."""
        self.feedback.add_carry(self.result)
        if self._divisor > 1:
            self.result.div_(self._divisor)
        if self._result_cast is not self.result:
            self._result_cast.copy_(self.result)
        self.state = transition(ACCUMULATOR_TRANSITIONS, self.state, "finish", self.name)
        self.flags.apply("finish")

    def discard_unused(self) -> None:
        """Drop the gradient: no rank has used any parameter of the bucket."""
        self._discard(self.flags.positions_with(GradFlag.MAYBE_USED))
        self.state = transition(ACCUMULATOR_TRANSITIONS, self.state, "zero_grad", self.name)

    def _discard(self, positions: list[int]) -> None:
        """Drop finished gradients of parameters that no rank has used.

        They hold what residuals have sent, which is sent again.
        """
        self.feedback.send_again(positions, self.result, self._divisor)
        self.flags.apply("discard_unused", positions)

    def expose(self, positions: list[int]) -> None:
        """Expose gradients on the parameters at `positions`.

        A gradient that was set on a parameter directly is added.
        """
        self._discard([p for p in self.flags.positions_with(GradFlag.MAYBE_USED) if p not in positions])
        with fast_attributes():
            for position in positions:
                parameter, (exposed, memory) = self.bucket.sharded_params[position], self._dtensors[position]
                stored = parameter.raw_grad
                if stored is not None and stored is not exposed:
                    check_not_kept(stored, parameter.mics_name)
                    exposed._local_tensor.add_(stored._local_tensor if isinstance(stored, DTensor) else stored)
                    if isinstance(stored, ExactDTensor) and stored._spec == exposed._spec:
                        memory.give(stored, exposed)  # more is added to it, as autograd would
                memory.finish = memory.finish or parameter.mics_link.finish_gradients
                memory.writes.num += 1
                parameter.raw_grad = exposed

    def zero_grad(self, position: int, *, is_kept: bool) -> None:
        """Drop one parameter's gradient, but not what the flat buffer is collecting.

        Args:
            position: Position of the parameter.
            is_kept: Result of `is_kept`. What a script has kept gets memory of its own: the engine writes to its memory
                again.
        """
        if self.collected.kept and self.collected.flat is None:
            self.collected.kept.pop(position, None)
        exposed, memory = self._dtensors[position]
        memory.has_lost_graph, memory.assigned = False, None
        if is_kept:
            self._dtensors[position] = self._new_dtensor(position)
            memory.add(exposed)
            memory.leave()
        self.feedback.drop(position)
        self.flags.apply("zero_grad", [position])
        if not self.flags.any(GradFlag.MAYBE_USED):
            self.state = transition(ACCUMULATOR_TRANSITIONS, self.state, "zero_grad", self.name)

    def is_kept(self, position: int) -> bool:
        """Whether a script has kept the gradient, or a view of it."""
        exposed, memory = self._dtensors[position]
        is_in_slot = self.bucket.sharded_params[position].raw_grad is exposed
        if exposed._use_count() > 1 + is_in_slot:  # in a graph, or the gradient of another parameter as well
            return True
        num_own = 3 + (_REFERENCES_OF_SLOT if is_in_slot else 0)  # the tuple, the variable, the argument
        return sys.getrefcount(exposed) > num_own or bool(memory.shared) or bool(memory.plain)

    def _zero(self, buffer: torch.Tensor, positions: list[int]) -> None:
        if not positions:
            return
        rows = buffer.view(-1, self.bucket.layout.shard_numel)
        slices = [self.bucket.layout.param_slices[position] for position in positions]
        torch._foreach_zero_([rows[:, part.offset : part.offset + part.chunk_numel] for part in slices])

    def _zero_padding(self, buffer: torch.Tensor, degree: int) -> None:
        """Zero the padding: it holds other units' gradients, or NaN.

        The scale of a quantized block would cover the padding.

        Args:
            buffer: [numel_at(degree)].
            degree: Degree of the scope at which `buffer` is this rank's slice.
        """
        if views := self._padding_views[degree](buffer):
            torch._foreach_zero_(views)


def _padding_views(bucket: Bucket, degree: int, buffer: torch.Tensor) -> list[torch.Tensor]:
    """Views of the padding in this rank's slice at a scope of `degree`."""
    groups, layout = bucket.groups, bucket.layout
    rows = layout.shard_slices(degree)[groups.scopes.span(1, degree).index(groups.rank)]
    return layout.padding_views(buffer, rows)
