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
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from mics_strategy.engine.grad_bucket import GradBucket
from mics_strategy.engine.lifecycle import AccumulatorState
from mics_strategy.engine.memory import StagingPool
from mics_strategy.engine.rank_agreement import UsedParamMap
from mics_strategy.engine.schedule import RepeatedHop, RepeatedHops
from mics_strategy.engine.streams import OpChain, OpStream


class SecondHops:
    """The second hops of one optimizer step.

    Args:
        stream: Side stream of second hops.
        wires: Pool of wire buffers.
        unit_gradients: Gradients of the trainable buckets, by unit index, in the order of second hops at the step.
    """

    def __init__(
        self,
        stream: OpStream,
        wires: StagingPool,
        unit_gradients: dict[int, list[GradBucket]],
    ) -> None:
        self._stream = stream
        self._wires = wires
        self._places = {
            gradient: (unit, number)
            for unit, gradients in unit_gradients.items()
            for number, gradient in enumerate(gradients)
        }
        self._gradients = [*self._places]
        self._in_flight: dict[GradBucket, OpChain] = {}
        self._finished: list[GradBucket] = []  # not exposed on the parameters yet
        self._turns: list[GradBucket] = []  # still to come in this backward
        self._ready: set[GradBucket] = set()  # whose first hops were started in this backward
        self._early: list[GradBucket] = []  # started since the last step, in that order
        self._dropped: set[tuple[GradBucket, int]] = set()  # parameters, by position, dropped after that
        self._num_backwards = 0  # in this step
        self._starts: defaultdict[GradBucket, list[int]] = defaultdict(list)  # backwards of this step before each
        self._usage_reductions: list[int] = []  # and before each small all-reduce

    def begin_backward(self, turns: Iterable[GradBucket]) -> None:
        """A backward begins.

        Args:
            turns: Gradients that may get a second hop in it, in an order that is the same on all ranks.
        """
        self._num_backwards += 1
        self._turns = [*reversed([*turns])]
        self._ready.clear()

    def take_turns(self, gradient: GradBucket) -> Iterator[GradBucket]:
        """Yield the gradients whose second hops start now, as this one's first has been started."""
        self._ready.add(gradient)
        while self._turns and self._turns[-1] in self._ready:
            due = self._turns.pop()
            self._early.append(due)
            yield due

    def start(self, gradient: GradBucket, first_hops: Sequence[OpChain] = ()) -> None:
        """Start a second hop, unless it is in flight.

        Args:
            gradient: Gradient, reduced inside the nodes.
            first_hops: Chains that this rank has not waited for, the last ones of their stream. The hop waits for them
                alone, where it runs.
        """
        if gradient in self._in_flight:
            return
        self._starts[gradient].append(self._num_backwards)
        buffer = self._wires.acquire(partial(self.wait, gradient))
        wire_bytes = gradient.accumulator.numel() * gradient.wire_dtype.itemsize if gradient.casts_second_hop else 0
        wire = buffer[:wire_bytes].view(gradient.wire_dtype)
        streams = {stream for chain in first_hops for stream in chain.streams}
        self._in_flight[gradient] = self._stream.launch(
            gradient.second_hop(wire, [work for chain in first_hops for work in chain.queued]),
            gradient.finish,
            behind=streams,
            and_current=not streams or bool(wire.numel()),  # which has waited for the last use of the buffer
        )

    def wait(self, gradient: GradBucket) -> None:
        """Wait for a second hop in flight, before anything else happens to the gradient."""
        chain = self._in_flight.pop(gradient, None)
        if chain is not None:
            chain.wait()
            self._finished.append(gradient)

    def drop(self, gradient: GradBucket, position: int) -> None:
        """Wait for a second hop in flight, before one parameter's gradient is dropped.

        What an early second hop has summed belongs to all ranks, so all must drop it.
        """
        if gradient in self._in_flight:
            self.wait(gradient)
        if gradient in self._early:
            self._dropped.add((gradient, position))

    def wait_all(self) -> None:
        """Wait for all second hops."""
        for gradient in list(self._in_flight):
            self.wait(gradient)

    @property
    def due(self) -> set[GradBucket]:
        """Gradients of which this rank holds sums that no second hop has taken."""
        return {
            gradient
            for gradient in self._gradients
            if gradient.state is AccumulatorState.PARTIAL and gradient not in self._in_flight
        }

    def digest(self, *, with_due: bool) -> int:
        """A number for the second hops since the last step, in their order.

        Args:
            with_due: Also for all that this rank is about to start, which are the same on all ranks where gradients
                are sharded. Elsewhere only those count that were started before: no other rank would join them.
        """
        due = self.due if with_due else self.due.intersection(self._early)
        hops = [*self._early, *(gradient for gradient in self._gradients if gradient in due)]
        dropped = sorted((gradient.name, position) for gradient, position in self._dropped)
        return zlib.crc32(" ".join([*(gradient.name for gradient in hops), *map(str, dropped)]).encode())

    def start_due(self, usage: UsedParamMap) -> None:
        """Start all second hops that are due on any rank.

        Args:
            usage: What the small all-reduce of the step says.
        """
        due = self.due
        known = due.union(self._early)
        due.update(g for g in self._gradients if g not in known and usage.is_pending_elsewhere(g))
        for gradient in (gradient for gradient in self._gradients if gradient in due):
            self.wait(gradient)
            self.start(gradient)
        self._usage_reductions.append(self._num_backwards)
        self._early.clear()
        self._dropped.clear()

    def finish(self, usage: UsedParamMap) -> None:
        """Start what is due, wait for all, and show finished gradients.

        Args:
            usage: What the small all-reduce of the step says.
        """
        self.start_due(usage)
        self.wait_all()
        self._expose(usage)

    def end_step(self) -> RepeatedHops:
        """An optimizer has used the gradients. Returns hops that others followed."""
        hops = [
            RepeatedHop(micro_step=number - 1, unit=unit, bucket=bucket)
            for gradient, (unit, bucket) in self._places.items()
            for number in self._starts[gradient][:-1]
        ]
        usage_reductions = tuple(number - 1 for number in self._usage_reductions[:-1])
        self._starts.clear()
        self._usage_reductions.clear()
        self._num_backwards = 0
        return RepeatedHops(hops=tuple(hops), usage_reductions=usage_reductions)

    def _expose(self, usage: UsedParamMap) -> None:
        """Show finished gradients on the parameters that any rank has used."""
        for gradient in self._finished:
            if gradient.state is AccumulatorState.SHARDED:
                positions = usage.positions(gradient)
                if positions:
                    gradient.expose(positions)
                else:
                    gradient.discard_unused()
        self._finished.clear()
