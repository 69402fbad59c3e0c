"""Which unit comes next?

Three kinds of knowledge. The *recorded* order of a first training forward says what to gather ahead in later
ones; it is a hint, and a forward that goes another way only loses the head start. The *live calls* are the
forwards whose backward is still to come: they say exactly in what order the backward will need units, and
while parameters are sharded every rank has the same ones, so what one rank's backward skips it can still
follow. Where parameters are whole, ranks may run different units, and what travels follows the *common* order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch.autograd.graph import Node

from mics_strategy.engine.schedule import reduction_order

if TYPE_CHECKING:
    from mics_strategy.engine.unit import Unit


@dataclass(slots=True, eq=False)
class ForwardCall:
    """One forward of a unit.

    A recomputed one belongs to a backward of its own, inside the backward that asked for it (reentrant checkpoints).

    Attributes:
        unit: Whose forward.
        enter: When it began; counts events of all units, as `leave` does.
        leave: When it ended; -1 before.
        first_node: Sequence number of the first node that it added to autograd's graph.
        versions: Of the unit's buckets when it ended.
        backward: Number of autograd's graph task that has entered it last; -1 for none.
    """

    unit: Unit
    enter: int
    first_node: int
    is_recomputed: bool
    is_evaluation: bool = False
    leave: int = -1
    versions: tuple[int, ...] = ()
    backward: int = -1

    def has_made(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is of this forward, or of a later one, and not just passed through it."""
        return tensor.grad_fn is None or self.has_added(tensor.grad_fn)

    def has_added(self, node: Node) -> bool:
        """Whether a node of autograd's graph is of this forward, or of a later one."""
        return node._sequence_nr() >= self.first_node


@dataclass(slots=True)
class PendingBackwards:
    """Forwards whose backward has not happened, in the order in which they ended."""

    calls: list[ForwardCall] = field(default_factory=list)

    def push(self, call: ForwardCall) -> None:
        """A forward has ended."""
        self.calls.append(call)
        call.unit.num_live_calls += 1

    def pop_until(self, call: ForwardCall) -> Iterator[ForwardCall]:
        """Remove `call`, and remove and give, latest first, the calls that ended after it: the backward skips them.

        Gives nothing for a call that is not live any more: a second backward through one graph.
        """
        if call not in self.calls:
            return
        while True:
            last = self._pop()
            if last is call:
                return
            yield last

    def drop_evaluations(self) -> None:
        """The model trains again: what it was evaluated on, with gradients but without a backward, is over."""
        for call in [call for call in self.calls if call.is_evaluation]:
            self.calls.remove(call)
            call.unit.num_live_calls -= 1

    def drain(self) -> Iterator[ForwardCall]:
        """Remove and give all, latest first."""
        while self.calls:
            yield self._pop()

    def _pop(self) -> ForwardCall:
        call = self.calls.pop()
        call.unit.num_live_calls -= 1
        return call

    @property
    def next(self) -> list[Unit]:
        """The unit that the backward needs next, if any."""
        return [call.unit for call in self.calls[-1:]]

    def reduction_order(self) -> list[Unit]:
        """Units by the time of their first live call, latest first: the order in which they can be complete."""
        calls = sorted(self.calls, key=lambda call: call.enter)
        for call in reversed(calls):
            call.unit.earliest_enter = call.enter
        return reduction_order(call.unit for call in calls)


class GlobalOrder:
    """All units in an order that does not depend on what this rank runs.

    Args:
        units: By index.
    """

    def __init__(self, units: list[Unit]) -> None:
        self.units = list(units)
        self.is_agreed = False
        self._positions = {unit.index: place for place, unit in enumerate(units)}
        self._num_given = 0

    def agree(self, entered: list[list[int]]) -> None:
        """Follow the orders in which the ranks have entered units; a unit that none has entered stays at its neighbour.

        Args:
            entered: Of every rank, the same on all of them.
        """
        merged: list[int] = []
        for order in (*entered, sorted(self._positions)):
            place = 0
            for index in order:
                if index not in merged:
                    merged.insert(place, index)
                place = merged.index(index) + 1
        by_index = {unit.index: unit for unit in self.units}
        self.units = [by_index[index] for index in merged]
        self._positions = {index: place for place, index in enumerate(merged)}
        self.is_agreed = True

    def restart(self) -> None:
        """Parameters have changed: every unit is due again."""
        self._num_given = 0

    def take_until(self, unit: Unit) -> list[Unit]:
        """The units that are due before `unit` or with it, and were not given since `restart`."""
        start, self._num_given = self._num_given, max(self._num_given, self._positions[unit.index] + 1)
        return self.units[start : self._num_given]

    def take_rest(self) -> list[Unit]:
        """All that is still due."""
        return self.take_until(self.units[-1])


@dataclass(slots=True)
class ExecutionOrder:
    """What the first training pass did: the units that its forward entered and that its backward needed, in order."""

    forward: list[int] = field(default_factory=list)
    backward: list[int] = field(default_factory=list)
    is_frozen: bool = False
    is_complete: bool = False
    _cursor: int = -1
    _is_retry: bool = False

    def record_forward(self, index: int) -> None:
        """A unit's forward begins."""
        if not self.is_frozen:
            self.forward.append(index)
            self._cursor = len(self.forward) - 1
            return
        following = self._cursor + 1
        if following < len(self.forward) and self.forward[following] == index:
            self._cursor = following
        elif index in self.forward:
            self._cursor = self.forward.index(index)

    def record_backward(self, index: int) -> None:
        """The backward needs a unit's parameters."""
        if not self.is_complete:
            self.backward.append(index)

    def forget_backward(self) -> None:
        """Other parameters than before get gradients, so the backward may need other units: record it again."""
        self.backward, self.is_complete = [], False

    def freeze(self) -> None:
        """The first forward is over."""
        self.is_frozen = self.is_frozen or bool(self.forward)

    def complete(self, *, followed_all: bool = True) -> None:
        """The first backward is over. One that left a forward behind (a sanity check) says little: record again."""
        if self.is_complete:
            return
        if not followed_all and not self._is_retry:
            self.forward, self.backward, self.is_frozen, self._is_retry = [], [], False, True
        else:
            self.is_complete = bool(self.backward)

    def upcoming(self, count: int) -> list[int]:
        """Indices of the next units, nearest first; none while the order is being recorded."""
        return self.forward[self._cursor + 1 : self._cursor + 1 + count] if self.is_frozen else []
