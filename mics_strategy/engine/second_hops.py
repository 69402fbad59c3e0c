"""The second hops of one optimizer step.

Within a node all ranks run the same backwards, or their first hops fail. Between nodes only the second hops connect
ranks. So

- early second hops, those inside of a backward, start in one order of all units, the same on all ranks. A gradient
  whose predecessors this backward has not reduced waits for the step.
- the small all-reduce of a step says whether all ranks have started the same ones (see `rank_agreement`). A node that
  has run another number of backwards, or other units, makes that an error.

Sums are linear, so a second hop too many changes no number.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from mics_strategy.engine.grad_bucket import GradBucket
from mics_strategy.engine.lifecycle import AccumulatorState
from mics_strategy.engine.memory import StagingPool
from mics_strategy.engine.rank_agreement import AccumulationWindow, RankAgreement, Turns
from mics_strategy.engine.streams import OpChain, OpStream


class SecondHops:
    """The second hops of one optimizer step.

    Args:
        stream: Side stream of second hops.
        wires: Pool of wire buffers.
        unit_grad_buckets: Gradients of the trainable buckets, by unit index, in the order of second hops at the step.
        window: The backwards of the step.
    """

    def __init__(
        self,
        stream: OpStream,
        wires: StagingPool,
        unit_grad_buckets: dict[int, list[GradBucket]],
        window: AccumulationWindow,
    ) -> None:
        self._stream = stream
        self._wires = wires
        self._window = window
        self._places = {
            grad_bucket: (unit, number)
            for unit, grad_buckets in unit_grad_buckets.items()
            for number, grad_bucket in enumerate(grad_buckets)
        }
        self._grad_buckets = [*self._places]
        self._in_flight: dict[GradBucket, OpChain] = {}
        self._finished: list[GradBucket] = []  # not exposed on the parameters yet
        self._turns: Turns[GradBucket] = Turns()  # in this backward
        self._early: list[GradBucket] = []  # started since the last step, in that order
        self._dropped: set[tuple[GradBucket, int]] = set()  # parameters, by position, dropped after that

    def begin_backward(self, turns: Iterable[GradBucket]) -> None:
        """A backward begins.

        Args:
            turns: Gradients that may get a second hop in it, in an order that is the same on all ranks.
        """
        self._turns.begin(turns)

    def take_turns(self, grad_bucket: GradBucket) -> Iterator[GradBucket]:
        """Yield the gradients whose second hops start now, as this one's first has been started."""
        for due in self._turns.take(grad_bucket):
            self._early.append(due)
            yield due

    def start(self, grad_bucket: GradBucket, first_hops: Sequence[OpChain] = ()) -> None:
        """Start a second hop, unless it is in flight.

        Args:
            grad_bucket: Gradient, reduced inside the nodes.
            first_hops: Chains that this rank has not waited for, the last ones of their stream. The hop waits for them
                alone, where it runs.
        """
        if grad_bucket in self._in_flight:
            return
        self._window.record_second_hop(*self._places[grad_bucket])
        buffer = self._wires.acquire(partial(self.wait, grad_bucket))
        dtype, num_cast = grad_bucket.wire_dtype, grad_bucket.casts_second_hop * grad_bucket.accumulator.numel()
        wire = buffer[: num_cast * dtype.itemsize].view(dtype)
        streams = {stream for chain in first_hops for stream in chain.streams}
        self._in_flight[grad_bucket] = self._stream.launch(
            grad_bucket.second_hop(wire, [work for chain in first_hops for work in chain.queued]),
            grad_bucket.finish,
            behind=streams,
            and_current=not streams or bool(wire.numel()),  # which has waited for the last use of the buffer
        )

    def wait(self, grad_bucket: GradBucket) -> None:
        """Wait for a second hop in flight, before anything else happens to the gradient."""
        chain = self._in_flight.pop(grad_bucket, None)
        if chain is not None:
            chain.wait()
            self._finished.append(grad_bucket)

    def drop(self, grad_bucket: GradBucket, position: int) -> None:
        """Wait for a second hop in flight, before one parameter's gradient is dropped.

        What an early second hop has summed belongs to all ranks, so all must drop it.
        """
        if grad_bucket in self._in_flight:
            self.wait(grad_bucket)
        if grad_bucket in self._early:
            self._dropped.add((grad_bucket, position))

    def wait_all(self) -> None:
        """Wait for all second hops."""
        for grad_bucket in list(self._in_flight):
            self.wait(grad_bucket)

    @property
    def due(self) -> set[GradBucket]:
        """Gradients of which this rank holds sums that no second hop has taken."""
        return {
            grad_bucket
            for grad_bucket in self._grad_buckets
            if grad_bucket.state is AccumulatorState.PARTIAL and grad_bucket not in self._in_flight
        }

    def digest(self, *, with_due: bool) -> int:
        """A number for the second hops since the last step, in their order.

        Args:
            with_due: Also for all that this rank is about to start, which are the same on all ranks where gradients
                are sharded. Elsewhere only those count that were started before: no other rank would join them.
        """
        due = self.due if with_due else self.due.intersection(self._early)
        hops = [*self._early, *(grad_bucket for grad_bucket in self._grad_buckets if grad_bucket in due)]
        dropped = sorted((grad_bucket.name, position) for grad_bucket, position in self._dropped)
        return zlib.crc32(" ".join([*(grad_bucket.name for grad_bucket in hops), *map(str, dropped)]).encode())

    def start_due(self, agreement: RankAgreement) -> None:
        """Start all second hops that are due on any rank, as the small all-reduce of the step says."""
        due = self.due
        known = due.union(self._early)
        due.update(g for g in self._grad_buckets if g not in known and agreement.is_pending_elsewhere(g))
        for grad_bucket in (grad_bucket for grad_bucket in self._grad_buckets if grad_bucket in due):
            self.wait(grad_bucket)
            self.start(grad_bucket)
        self._early.clear()
        self._dropped.clear()

    def finish(self, agreement: RankAgreement) -> None:
        """Start what is due, wait for all, and show finished gradients on the parameters that any rank has used."""
        self.start_due(agreement)
        self.wait_all()
        for grad_bucket in self._finished:
            if grad_bucket.state is AccumulatorState.SHARDED:
                positions = agreement.used_positions(grad_bucket)
                if positions:
                    grad_bucket.expose(positions)
                else:
                    grad_bucket.discard_unused()
        self._finished.clear()
