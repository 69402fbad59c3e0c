"""In what order do gradients leave?

Ranks may use different parameters, so a rank must not decide by what it happens to have: within a backward,
units are reduced in one order that follows from the forward alone, the reverse of the order in which they
were entered. A unit that is complete waits for those before it; at the end of the backward the rest follows,
with zeros where nothing arrived. In the second hop one small count of users per parameter travels along: it
tells which units and parameters any rank has used, and only a rank that did not use all of them itself has to
look at it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from mics_strategy.engine.lifecycle import AccumulatorState, GradBufferState
from mics_strategy.engine.memory import CachedViews, StagingPool
from mics_strategy.engine.rank_agreement import DesyncCheck, UsedParamMap

if TYPE_CHECKING:
    from mics_strategy.comm.process_groups import ProcessGroups
    from mics_strategy.engine.grad_bucket import GradBucket
    from mics_strategy.engine.streams import OpChain, Streams
    from mics_strategy.engine.unit import Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class ReducerBuffers:
    """Where gradients wait and travel.

    Args:
        flat_pools: By unit index, lends the flat buffer of the unit's trainable buckets.
        zero_grad_pool: As large as the largest of them, for a unit whose turn comes without a gradient: it never
            takes the buffer of one that waits. Nobody writes to it, so any number of transfers may read it.
        second_hop: Lends the wire form of one bucket for its second hop, where that is not the dtype of the sum.
        usage: Counts the users of every trainable parameter.
    """

    flat_pools: dict[int, StagingPool]
    zero_grad_pool: torch.Tensor
    second_hop: StagingPool
    usage: torch.Tensor


@dataclass(frozen=True, slots=True)
class FirstHop:
    """A first hop under way; `starts_second_hop` when the second hop may follow as soon as it has landed."""

    unit: Unit
    chains: list[OpChain]
    starts_second_hop: bool

    @property
    def has_completed(self) -> bool:
        """Whether the second hop may follow at once."""
        return self.starts_second_hop and bool(self.chains) and all(chain.has_completed for chain in self.chains)


@dataclass(slots=True)
class Reducer:
    """Takes gradients from autograd to the optimizer, all units of one model.

    Args:
        gradients: By unit index, the gradients of its trainable buckets.
        units: All units, by index.
        groups: Process groups.
        streams: Where reductions run.
        buffers: See `ReducerBuffers`.
        overlap_reduce: Whether a first hop may run under the rest of the backward.
        overlap_second_hop: Whether a second hop may start before the last backward has ended.
        desync_check: Sees that ranks do the same.
    """

    gradients: dict[int, list[GradBucket]]
    units: list[Unit]
    groups: ProcessGroups
    streams: Streams
    buffers: ReducerBuffers
    overlap_reduce: bool
    overlap_second_hop: bool
    desync_check: DesyncCheck
    is_boundary: bool | None = None  # None: nobody has said
    is_dirty: bool = False
    _flats: dict[int, CachedViews] = field(default_factory=dict)
    _order: list[Unit] = field(default_factory=list)
    _expected: dict[int, int] = field(default_factory=dict)  # gradients of a unit in one backward
    _ready: set[int] = field(default_factory=set)
    _in_flight: deque[FirstHop] = field(default_factory=deque)
    _second: dict[GradBucket, OpChain] = field(default_factory=dict)
    _sent_last: set[GradBucket] = field(default_factory=set)  # by the last backward, on all ranks
    _unpublished: list[GradBucket] = field(default_factory=list)  # finished, not yet shown on the parameters

    @property
    def holds_gradients(self) -> bool:
        """Whether this rank has sums or means of gradients that were not cleared."""
        return any(gradient.state is not AccumulatorState.NONE for of in self.gradients.values() for gradient in of)

    def begin_backward(self, order: list[Unit], idle: set[int]) -> bool:
        """A backward starts. Returns whether other parameters than in the one before require gradients.

        Args:
            order: Units that may receive gradients on some rank, first to be reduced first.
            idle: Indices of those among them that this rank has not run.
        """
        self.is_dirty = True
        self._sent_last.clear()
        before, self._expected = (
            self._expected,
            {
                unit.index: sum(sharded.requires_grad for bucket in unit.trainable for sharded in bucket.sharded_params)
                for unit in self.units
            },
        )
        self._order = [unit for unit in order if self._expected[unit.index]]
        self._ready = idle
        self.launch(self._take_in_order())
        return bool(before) and before != self._expected

    def collect(self, unit: Unit, gradient: GradBucket, position: int, parameter: nn.Parameter) -> bool:
        """Take the gradient that autograd has accumulated on a parameter; whether it was the unit's last one."""
        grad, parameter.grad = parameter.grad, None
        if grad is None:
            return False
        if self._in_flight:
            self._start_second_hops(self._complete_arrived())
        self._wait_second_hop(gradient)
        if gradient.is_sharded and gradient.buffer_state is not GradBufferState.FILLING:
            self._acquire_buffer(unit)
        gradient.add(position, grad)
        gradients = self.gradients[unit.index]
        num_arrived = gradient.num_arrived if len(gradients) == 1 else sum(each.num_arrived for each in gradients)
        return num_arrived >= self._expected[unit.index]

    def take_ready(self, unit: Unit) -> Iterator[Unit]:
        """Remove and give the units whose turn it is now that no more gradients of `unit` will come in this backward.

        A unit outside the order was not foreseen: a reentrant checkpoint, or gradients that arrive a second time.
        """
        if unit in self._order:
            self._ready.add(unit.index)
            yield from self._take_in_order()
        elif self._is_filling(unit):
            yield unit

    def _take_in_order(self) -> Iterator[Unit]:
        while self._order and self._order[0].index in self._ready:
            yield self._order.pop(0)

    def end_backward(self) -> None:
        """Reduce what is left, in order, then what no order foresaw (a unit that received gradients twice)."""
        self._ready.update(unit.index for unit in self._order)
        self.launch(self._take_in_order())
        self.launch(unit for unit in reversed(self.units) if self._is_filling(unit))
        for gradients in self.gradients.values():
            for gradient in gradients:
                gradient.end_backward()
        if self.is_boundary:
            self._start_second_hops(self._complete(down_to=0))

    def _acquire_buffer(self, unit: Unit) -> None:
        """Borrow the buffer in which this backward's gradients of `unit` are collected."""
        self._wait_for(unit)  # its own first hop of an earlier backward
        ring = self.buffers.flat_pools[unit.index]
        buffer = ring.acquire(
            lambda: self._release_buffer(unit), lambda: self._is_filling(unit), lambda: self._may_send(unit)
        )
        self._bind_buffer(unit, buffer, is_zero=False)

    def _bind_buffer(self, unit: Unit, buffer: torch.Tensor, *, is_zero: bool) -> None:
        gradients = self.gradients[unit.index]
        if unit.index not in self._flats:
            self._flats[unit.index] = CachedViews(
                [(each.bucket.layout.full_numel, each.wire_dtype) for each in gradients]
            )
        for gradient, flat in zip(gradients, self._flats[unit.index].views_of(buffer), strict=True):
            gradient.bind_buffer(flat, is_zero=is_zero)

    def _release_buffer(self, unit: Unit) -> None:
        """Another unit needs the buffer of `unit`: reduce what it holds, and every unit whose turn is before."""
        if self._is_filling(unit) and unit in self._order:
            count = self._order.index(unit) + 1
            first, self._order = self._order[:count], self._order[count:]
            self.launch(first)
        if self._is_filling(unit):
            self.launch([unit])
        self._wait_for(unit)

    def _may_send(self, unit: Unit) -> bool:
        """Whether the turn of `unit` may come now: nothing is still expected of the units before it."""
        before = self._order[: self._order.index(unit)] if unit in self._order else []
        return all(other.index in self._ready or self._is_filling(other) for other in before)

    def _is_filling(self, unit: Unit) -> bool:
        """Whether gradients of `unit` have arrived that no first hop has taken."""
        return any(gradient.buffer_state is GradBufferState.FILLING for gradient in self.gradients.get(unit.index, []))

    def launch(self, units: Iterable[Unit]) -> None:
        """Start the first hops of units.

        Second hops start here only, or behind all first hops, as far as ranks could differ: in an order that follows
        from that of the launches, whatever gradients a rank has.
        """
        for unit in units:
            self._start_second_hops(self._complete_until(unit))  # its own first hop of an earlier backward
            chains: list[OpChain] = []
            if self.groups.grad_comm is not None:
                gradients = self.gradients[unit.index]
                for gradient in gradients:
                    self._wait_second_hop(gradient)
                if gradients[0].buffer_state is not GradBufferState.FILLING:
                    self._bind_buffer(unit, self.buffers.zero_grad_pool, is_zero=True)
                stream = self.streams.reduce_scatter
                for gradient in gradients:
                    chains.append(stream.launch([gradient.reduce_scatter]))
            self._in_flight.append(FirstHop(unit, chains, bool(self.is_boundary) and self.overlap_second_hop))
            self._start_second_hops(self._complete(down_to=1 if self.overlap_reduce else 0))

    def _complete_arrived(self) -> Iterator[GradBucket]:
        """Complete the first hops that have ended, without waiting for another unit's turn."""
        while self._in_flight and self._in_flight[0].has_completed:
            yield from self._complete_next()

    def _complete(self, *, down_to: int) -> Iterator[GradBucket]:
        """Complete the oldest first hops until `down_to` are in flight."""
        while len(self._in_flight) > down_to:
            yield from self._complete_next()

    def _complete_until(self, unit: Unit) -> Iterator[GradBucket]:
        """Complete the first hops of `unit`, and all before them."""
        while any(hop.unit is unit for hop in self._in_flight):
            yield from self._complete_next()

    def _complete_next(self) -> Iterator[GradBucket]:
        """Wait for the oldest first hop, and give the gradients whose second hop is due now."""
        hop = self._in_flight.popleft()
        for chain in hop.chains:
            chain.wait()
        for gradient in self.gradients[hop.unit.index] if hop.starts_second_hop else ():
            self._wait_second_hop(gradient)  # that of an earlier backward which was also called the last
            self._sent_last.add(gradient)
            yield gradient

    def _wait_for(self, unit: Unit) -> None:
        """Make the buffer of a unit's first hop free. Its second hop starts when it is its turn."""
        for chain in (chain for hop in self._in_flight if hop.unit is unit for chain in hop.chains):
            chain.wait()

    def _start_second_hops(self, gradients: Iterable[GradBucket]) -> None:
        """Start second hops whose first hops are complete; not those that were started already."""
        for gradient in gradients:
            if gradient in self._second:
                continue
            buffer = self.buffers.second_hop.acquire(partial(self._wait_second_hop, gradient))
            wire = buffer[: second_hop_bytes(gradient, self.groups)].view(gradient.wire_dtype)
            self._second[gradient] = self.streams.second_hop.launch(
                [partial(gradient.reduce_scatter_outer, wire), gradient.all_reduce], gradient.finish
            )

    def _wait_second_hop(self, gradient: GradBucket) -> None:
        """Wait for a second hop under way, before anything else happens to the gradient."""
        chain = self._second.pop(gradient, None)
        if chain is not None:
            chain.wait()
            self._unpublished.append(gradient)

    def finish(self) -> None:
        """Make every gradient the mean over all ranks, and show it on the parameters. Collective."""
        self.is_dirty = False
        self.desync_check.raise_if_desynced()
        self._start_second_hops(self._complete(down_to=0))
        gradients = [gradient for of_unit in self.gradients.values() for gradient in of_unit]
        usage = UsedParamMap(self.buffers.usage, gradients, self.groups, self.desync_check.replicas.difference())
        self._start_second_hops(
            gradient
            for index in sorted(self.gradients, reverse=True)
            for gradient in self.gradients[index]
            if gradient.state is AccumulatorState.PARTIAL
            or (gradient not in self._sent_last and usage.is_pending_elsewhere(gradient))
        )
        self._sent_last.clear()
        for gradient in list(self._second):
            self._wait_second_hop(gradient)
        usage.wait()
        self.desync_check.record()
        for gradient in (each for each in self._unpublished if each.state is AccumulatorState.SHARDED):
            used = usage.positions(gradient)
            for position in used:
                gradient.expose(position)
            if not used:
                gradient.discard_unused()
        self._unpublished.clear()

    def clear(self, gradient: GradBucket, position: int) -> None:
        """Forget one parameter's gradient, parts under way included."""
        self._start_second_hops(self._complete(down_to=0))
        self._wait_second_hop(gradient)
        gradient.clear(position)

    def discard(self) -> None:
        """Forget an interrupted backward."""
        self._start_second_hops(self._complete(down_to=0))
        self._order = []
        for gradients in self.gradients.values():
            for gradient in gradients:
                gradient.discard()


def second_hop_bytes(gradient: GradBucket, groups: ProcessGroups) -> int:
    """Bytes of the wire form of a bucket's second hop; none where it is the accumulator itself."""
    if groups.outer_grad_comm is None or gradient.wire_dtype == gradient.accumulator.dtype:
        return 0
    return gradient.accumulator.numel() * gradient.wire_dtype.itemsize
