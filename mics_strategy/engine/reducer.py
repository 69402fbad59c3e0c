"""The reducer: when gradients are reduced, first and second hop.

Ranks may use different parameters, so a rank must not decide by the gradients that it happens to have. Within a
backward, units are reduced in one order, the same on all ranks: the reverse of the order in which they were entered or,
where ranks may run different units, the reverse of the global order. A complete unit waits for those before it. At the
end of the backward the others follow, with zeros where no gradient arrived.

With the second hop, one small all-reduce counts the ranks that have used each parameter. Only a rank that has not used
all parameters itself has to read the counts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain

import torch

from mics_strategy.comm.process_groups import ProcessGroups
from mics_strategy.engine.autograd import UnshardedParameter
from mics_strategy.engine.grad_bucket import GradBucket
from mics_strategy.engine.lifecycle import AccumulatorState, GradBufferState
from mics_strategy.engine.memory import StagingPool
from mics_strategy.engine.rank_agreement import AccumulationWindow, RankAgreement, Turns
from mics_strategy.engine.schedule import RepeatedHops
from mics_strategy.engine.second_hops import SecondHops
from mics_strategy.engine.streams import OpChain, Streams, current_stream
from mics_strategy.engine.unit import Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class ReducerBuffers:
    """Buffers of reductions.

    Attributes:
        flat_pools: Pools of the flat buffers of trainable buckets, by unit index.
        flat_views: Views of such a buffer for each trainable bucket, by unit index.
        zero_grads: Returns zeros, as large as the largest flat buffer; allocated at the first call. A unit without a
            gradient sends them, so that it takes no buffer from a unit that has one. Never written to, so any number
            of collectives may read them.
    """

    flat_pools: dict[int, StagingPool]
    flat_views: dict[int, Callable[[torch.Tensor], list[torch.Tensor]]]
    zero_grads: Callable[[], torch.Tensor]


@dataclass(slots=True)
class Reducer:
    """Reduces the gradients of all units of one model.

    Attributes:
        grad_buckets: Gradients of the trainable buckets, by unit index.
        units: All units, by index.
        groups: Process groups.
        streams: Side streams of reductions.
        buffers: See `ReducerBuffers`.
        overlap_reduce: Whether a first hop may overlap with the rest of the backward.
        overlap_second_hop: Whether a second hop may start before the last backward has ended.
        agreement: The small all-reduce of a step.
        window: The backwards since the last optimizer step.
        second_hops: Second hops of one optimizer step.
        is_dirty: Whether a backward has begun since gradients were last finished.
    """

    grad_buckets: dict[int, list[GradBucket]]
    units: list[Unit]
    groups: ProcessGroups
    streams: Streams
    buffers: ReducerBuffers
    overlap_reduce: bool
    overlap_second_hop: bool
    agreement: RankAgreement
    window: AccumulationWindow
    second_hops: SecondHops
    is_dirty: bool = False
    _expected: dict[int, int] = field(default_factory=dict)  # gradients of a unit in one backward
    _turns: Turns[Unit] = field(default_factory=Turns)  # of first hops, in this backward
    _first_hops: deque[tuple[Unit, list[OpChain]]] = field(default_factory=deque)  # in flight: one between launches
    _collecting: GradBucket | None = None  # that has received the last gradients

    @property
    def all_grad_buckets(self) -> Iterator[GradBucket]:
        """The gradients of all units."""
        return chain.from_iterable(self.grad_buckets.values())

    @property
    def holds_gradients(self) -> bool:
        """Whether this rank has sums or means of gradients that were not cleared."""
        return any(grad_bucket.state is not AccumulatorState.NONE for grad_bucket in self.all_grad_buckets)

    @property
    def num_pending_backwards(self) -> int:
        """Number of backwards whose gradients no optimizer step has used."""
        return self.window.number if self.holds_gradients else 0

    def begin_backward(self, order: list[Unit], idle: list[Unit], turns: list[Unit]) -> bool:
        """Begin a backward.

        Returns whether other parameters than in the previous one require gradients.

        Args:
            order: Units that may receive gradients on some rank, first to be reduced first.
            idle: Units that this rank has not run.
            turns: All units, in the order of early second hops.
        """
        self.window.begin_backward(adds=self.holds_gradients)
        self.is_dirty = True
        previous, self._expected = (
            self._expected,
            {unit.index: sum(bucket.num_requiring_grad for bucket in unit.trainable_buckets) for unit in self.units},
        )
        self._turns.begin((unit for unit in order if self._expected[unit.index]), idle)
        agreed = self.agreement.agreed_units  # a unit that no rank runs must not hold up those behind it
        trained = [unit.index for unit in turns if self._expected[unit.index]]
        self.second_hops.begin_backward(
            turn for index in trained if agreed is None or index in agreed for turn in self.grad_buckets[index]
        )
        self.launch(self._turns.take())
        return bool(previous) and previous != self._expected

    def add_grad(self, unit: Unit, grad_bucket: GradBucket, position: int, parameter: UnshardedParameter) -> bool:
        """Take the gradient that autograd has accumulated on a parameter.

        Returns whether it was the unit's last one.
        """
        grad, parameter.raw_grad = parameter.raw_grad, None
        if grad is None:
            return False
        if grad_bucket is not self._collecting:
            self._copy_collected()
            if self.groups.grad_comm is not None and grad_bucket.collected.state is not GradBufferState.FILLING:
                self._acquire_buffer(unit)
            grad_bucket.collected.follow(current_stream(grad_bucket.accumulator.device))
            self._collecting = grad_bucket
        grad_bucket.add(position, grad)
        grad_buckets = self.grad_buckets[unit.index]
        if len(grad_buckets) == 1:
            return grad_bucket.collected.num_arrived >= self._expected[unit.index]
        return sum(other.collected.num_arrived for other in grad_buckets) >= self._expected[unit.index]

    def _copy_collected(self) -> None:
        """Copy the gradients of the bucket that has received the last ones to its flat buffer.

        Nothing where buckets share one staging buffer (CUDA, without codecs): the first hop copies, on its stream.
        """
        grad_bucket, self._collecting = self._collecting, None
        if grad_bucket is not None:
            self.second_hops.wait(grad_bucket)
            grad_bucket.collected.join_streams()
            grad_bucket.copy_kept()

    def complete(self, unit: Unit) -> Iterable[Unit]:
        """A unit receives no more gradients in this backward. Returns the units whose first hops are due now.

        A unit whose turn is over was not expected: a reentrant checkpoint, or gradients that arrive a second time.
        """
        if unit in self._turns:
            return self._turns.take(unit)
        return (unit,) if self._is_filling(unit) else ()

    def end_backward(self) -> None:
        """Reduce the remaining units in order, then those that received gradients twice."""
        self.launch(self._turns.take_rest())
        self.launch(unit for unit in reversed(self.units) if self._is_filling(unit))
        self._copy_collected()
        for grad_bucket in self.all_grad_buckets:
            grad_bucket.collected.end()
        if self.window.is_last:
            self.finish_first_hops()

    def _acquire_buffer(self, unit: Unit) -> None:
        """Borrow the buffer in which this backward's gradients of `unit` are collected."""
        self._wait_for(unit)  # its own first hop of an earlier backward
        pool = self.buffers.flat_pools[unit.index]
        buffer = pool.acquire(
            lambda: self._send_buffer(unit), lambda: self._is_filling(unit), lambda: self._may_send(unit)
        )
        self._bind_buffer(unit, buffer, is_zero=False)

    def _bind_buffer(self, unit: Unit, buffer: torch.Tensor, *, is_zero: bool) -> None:
        views = self.buffers.flat_views[unit.index](buffer)
        for grad_bucket, flat in zip(self.grad_buckets[unit.index], views, strict=True):
            grad_bucket.collected.bind_buffer(flat, is_zero=is_zero)

    def _send_buffer(self, unit: Unit) -> None:
        """Reduce what the buffer of `unit` holds, in order: another unit needs the buffer."""
        if self._is_filling(unit) and unit in self._turns:
            self.launch(self._turns.take_until(unit))
        if self._is_filling(unit):
            self.launch([unit])
        self._wait_for(unit)

    def _may_send(self, unit: Unit) -> bool:
        """Whether `unit` may start: no unit before it waits for its first gradient."""
        return all(self._is_filling(other) for other in self._turns.unready_before(unit))

    def _is_filling(self, unit: Unit) -> bool:
        """Whether gradients of `unit` have arrived that no first hop has taken."""
        for grad_bucket in self.grad_buckets.get(unit.index, ()):  # `any` would cost more, in each `on_grad`
            if grad_bucket.collected.state is GradBufferState.FILLING:
                return True
        return False

    def launch(self, units: Iterable[Unit]) -> None:
        """Start the first hops of units.

        Second hops start in an order that all ranks have in common (`SecondHops.take_turns`), never in the order in
        which gradients arrive, as that may differ between ranks.
        """
        for unit in units:
            self._copy_collected()
            # A unit's second first hop in one backward (a reentrant checkpoint, late gradients) waits for the one in
            # flight: else a second hop that waits for its turn behind that would start while the new one is in flight.
            # Its first one in a backward waits for its own of an earlier backward.
            is_another = self.window.record_first_hop(unit.index)
            if is_another or any(other is unit for other, _ in self._first_hops):
                self.finish_first_hops()
            chains: list[OpChain] = []
            if self.groups.grad_comm is not None:
                grad_buckets = self.grad_buckets[unit.index]
                for grad_bucket in grad_buckets:
                    self.second_hops.wait(grad_bucket)
                    grad_bucket.collected.join_streams()
                if grad_buckets[0].collected.state is not GradBufferState.FILLING:
                    self._bind_buffer(unit, self.buffers.zero_grads(), is_zero=True)
                stream = self.streams.reduce_scatter
                for grad_bucket in grad_buckets:
                    chains.append(stream.launch(grad_bucket.first_hop()))
            if chains:
                self._first_hops.append((unit, chains))
            if self.window.is_last and self.overlap_second_hop:
                # A second hop waits for first hops on its own stream or thread, not for what the host does next. First
                # hops of one stream end in order, so that the last one stands for those of other units.
                for grad_bucket in self.grad_buckets[unit.index]:
                    self.second_hops.wait(grad_bucket)  # that of an earlier backward, which was also a boundary
                    for due in self.second_hops.take_turns(grad_bucket):
                        self.second_hops.start(due, chains[-1:])
            self.finish_first_hops(but=int(self.overlap_reduce))  # the next one does not need the newest's buffer yet

    def finish_first_hops(self, *, but: int = 0) -> None:
        """Wait for all first hops but the newest ones, on the current stream.

        Args:
            but: Number of first hops that stay in flight.
        """
        while len(self._first_hops) > but:
            for op_chain in self._first_hops.popleft()[1]:
                op_chain.wait()

    def _wait_for(self, unit: Unit) -> None:
        """Wait until the buffer of a unit's first hop is free. Its second hop starts later, in order."""
        for op_chain in chain.from_iterable(chains for other, chains in self._first_hops if other is unit):
            op_chain.wait()

    def finish(self) -> None:
        """Make every gradient the mean over all ranks, and expose it. Collective."""
        self.is_dirty = False
        self.agreement.raise_if_desynced()
        self.finish_first_hops()
        hops = self.second_hops
        self.agreement.reduce(hops.due, hops.digest(with_due=self.groups.grad_comm is not None), self.window)
        hops.finish(self.agreement)

    def end_step(self) -> RepeatedHops:
        """An optimizer has used the gradients. Returns what was sent repeatedly."""
        return self.window.end_step(is_equal_on_all_ranks=self.agreement.agreed_units is not None)

    def wait(self) -> None:
        """Wait for all hops in flight, and for second hops due right behind them."""
        self.finish_first_hops()
        self.second_hops.wait_all()

    def zero_grad(self, grad_bucket: GradBucket, position: int, *, is_kept: bool) -> None:
        """Drop one parameter's gradient, with its parts in flight. `is_kept` is that of `GradBucket`."""
        if self._first_hops:
            self.finish_first_hops()
        self.second_hops.drop(grad_bucket, position)
        grad_bucket.zero_grad(position, is_kept=is_kept)

    def end_interrupted_backward(self) -> None:
        """Reduce what has arrived before an exception has ended a backward.

        Torch keeps that on parameters, too. All that is due is reduced, as other ranks may have come further. Gradients
        that have come a second time are dropped.
        """
        self.launch(self._turns.take_rest())
        self.finish_first_hops()
        self._copy_collected()
        for grad_bucket in self.all_grad_buckets:
            grad_bucket.collected.discard()
