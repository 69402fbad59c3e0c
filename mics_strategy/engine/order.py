"""Which unit is next: the recorded order, and the pending one.

- `ExecutionOrder` records the first training forward, to prefetch units in later ones. It is a hint: a forward in
  another order gathers units that it does not use next, for which others lose their slots.
- `PendingBackwards` holds the forwards whose backward is still to come. It gives the exact order in which the backward
  needs units. While parameters are sharded, it is the same on every rank, so a rank whose backward skips a unit can
  still take part in its collectives.

What all ranks start in one order is in `rank_agreement`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch.autograd.graph import Node

from mics_strategy.engine.checkpointed_regions import CheckpointedRegion, CheckpointedRegions
from mics_strategy.engine.schedule import reduction_order
from mics_strategy.engine.unit import Unit

# [Note: The clock of a backward]
#
# Autograd says when it enters the backward of a unit (a gradient of the unit's outputs arrives), but not when it leaves
# it. The engine counts the beginnings and ends of forwards, and a backward runs through that time in reverse:
#
#     root     |1---------------------------8|        root:   enter 1, leave 8
#     block 0     |2---3|                             block 0: enter 2, leave 3
#     block 1              |4---5|                    block 1: enter 4, leave 5
#     block 0                       |6---7|           block 0: enter 6, leave 7   (shared weights, called twice)
#     clock   ------------------------------>
#     backward <-----------------------------
#
# When the call (enter 2, leave 3) is entered, every forward with enter > 3 is behind the backward: block 1 is
# released and, as no call of it is pending, its first hop may start. The root (enter 1) is not: it encloses the call.
# Block 0 was entered at 6 already, but its gradients are complete only behind its earliest call:
# `Unit.earliest_enter`, which is 2.
#
# A call between two entered ones was skipped (its loss was not used). `PendingBackwards.pop_until` yields these,
# because other ranks may run them and need this rank in their collectives.


@dataclass(slots=True, eq=False)
class ForwardCall:
    """One forward of a unit.

    A recomputed one runs inside of a backward; with reentrant checkpoints it has a nested backward of its own.

    Attributes:
        unit: Unit of the forward.
        enter: Number of the event at which it began, counted over all units.
        first_node: Sequence number of the first node that it added to autograd's graph.
        is_recomputed: Whether it recomputes activations in a backward.
        is_evaluation: Whether the model was in evaluation mode.
        regions: Checkpointed regions around it, outermost first.
        leave: Number of the event at which it ended; -1 before.
        versions: Versions of the unit's buckets when it ended.
        graph_task: Id of the last autograd graph task that entered its backward; -1 for none.
    """

    unit: Unit
    enter: int
    first_node: int
    is_recomputed: bool
    is_evaluation: bool = False
    regions: tuple[CheckpointedRegion, ...] = ()
    leave: int = -1
    versions: tuple[int, ...] = ()
    graph_task: int = -1

    def has_made(self, tensor: torch.Tensor) -> bool:
        """Whether this or a later forward computed a tensor, not just passed it through, as a leaf."""
        return tensor.grad_fn is not None and self.has_added(tensor.grad_fn)

    def has_added(self, node: Node) -> bool:
        """Whether this forward, or a later one, added a node to autograd's graph."""
        return node._sequence_nr() >= self.first_node


@dataclass(slots=True)
class PendingBackwards:
    """Forwards whose backward is still to come, in the order in which they ended.

    Attributes:
        calls: The forwards.
        regions: Checkpointed regions of the model.
        skipped: Indices of units that the backward of another loss may still follow.
    """

    calls: list[ForwardCall] = field(default_factory=list)
    regions: CheckpointedRegions = field(default_factory=CheckpointedRegions)
    skipped: set[int] = field(default_factory=set)

    def push(self, call: ForwardCall) -> None:
        """Add a forward that has ended."""
        self.calls.append(call)
        call.unit.num_pending_calls += 1

    def pop_until(self, call: ForwardCall) -> Iterator[ForwardCall]:
        """Remove `call` and the calls that ended after it; yield the latter, latest first.

        The backward skips the yielded calls. Yields nothing if `call` was removed before, as in a second backward
        through one graph.
        """
        if call not in self.calls:
            return
        while True:  # calls that ended later were skipped by this backward; see [Note: The clock of a backward]
            last = self._pop()
            if last is call:
                return
            self.skipped.add(last.unit.index)
            yield last

    def drop_evaluations(self) -> None:
        """Remove evaluation forwards without a backward, when the model trains again."""
        for call in [call for call in self.calls if call.is_evaluation]:
            self.calls.remove(call)
            call.unit.num_pending_calls -= 1

    def drain(self) -> Iterator[ForwardCall]:
        """Remove and yield all calls, latest first."""
        while self.calls:
            last = self._pop()
            self.skipped.add(last.unit.index)
            yield last

    def _pop(self) -> ForwardCall:
        call = self.calls.pop()
        call.unit.num_pending_calls -= 1
        return call

    def upcoming(self, count: int) -> list[Unit]:
        """The next `count` units that the backward needs, nearest first."""
        units: list[Unit] = []
        for call in reversed(self.calls):
            if len(units) == count:
                break
            if call.unit not in units:
                units.append(call.unit)
        return units

    def recomputed_before_backward(self) -> ForwardCall | None:
        """The last call of a region that autograd recomputes; None where the engine began."""
        if self.regions.engine_recomputes:
            return None
        for call in reversed(self.calls):
            if any(region.is_due and region.is_recomputing for region in call.regions):
                return call
        return None

    def clear(self) -> None:
        """Remove all calls."""
        for _ in self.drain():
            pass
        self.skipped.clear()

    def mark_earliest_enters(self) -> None:
        """Set on each unit when the first of its pending forwards began."""
        for call in sorted(self.calls, key=lambda call: call.enter, reverse=True):
            call.unit.earliest_enter = call.enter

    def reduction_order(self) -> list[Unit]:
        """Units by first pending call, latest first: the order of complete gradients."""
        calls = sorted(self.calls, key=lambda call: call.enter)
        units = {call.unit.index: call.unit for call in calls}
        return [units[index] for index in reduction_order(call.unit.index for call in calls)]


@dataclass(slots=True)
class TrainingPass:
    """Units whose forwards have ended in one training pass.

    A backward with reentrant checkpoints follows it in reverse, and removes the units that it reaches: a checkpointed
    forward leaves no call in `PendingBackwards`. A checkpoint around several units recomputes them in the order of the
    forward.

    Attributes:
        without_graph: Indices of the units that ran without gradients, in reentrant checkpoints.
        recomputed: Those of them that were recomputed and whose backward has not ended.
    """

    without_graph: set[int] = field(default_factory=set)
    recomputed: set[Unit] = field(default_factory=set)
    _units: list[Unit] = field(default_factory=list)
    _behind: list[Unit] = field(default_factory=list)  # units after the last one reached

    def record(self, unit: Unit, *, has_graph: bool) -> None:
        """Record the end of a forward."""
        self._units.append(unit)
        if not has_graph:
            self.without_graph.add(unit.index)

    def reach(self, unit: Unit) -> list[Unit]:
        """The backward has reached a unit. Returns those that it needs after it, nearest first.

        Units that the forward ran after it belong to the same checkpoint, unless they did at the last call already:
        then this backward skips them.
        """
        if unit not in self._units:
            return []
        position = len(self._units) - 1 - self._units[::-1].index(unit)
        before, behind = self._units[:position], self._units[position + 1 :]
        if behind == self._behind:
            behind = []
        self._units, self._behind = before + behind, behind
        return list(dict.fromkeys([*behind, *reversed(before)]))

    def clear(self) -> None:
        """Start a new pass."""
        self._units, self._behind = [], []
        self.without_graph.clear()
        self.recomputed.clear()


@dataclass(slots=True)
class ExecutionOrder:
    """Order of units in the first training pass.

    Attributes:
        forward_units: Indices of the units that the forward ran.
        backward_units: Indices of the units that the backward needed.
        is_frozen: Whether the forward order is final.
        is_complete: Whether the backward order is final.
    """

    forward_units: list[int] = field(default_factory=list)
    backward_units: list[int] = field(default_factory=list)
    is_frozen: bool = False
    is_complete: bool = False
    _cursor: int = -1
    _is_retry: bool = False

    def record_forward(self, index: int) -> None:
        """Record the beginning of a unit's forward, or follow it in the recorded order."""
        if not self.is_frozen:
            self.forward_units.append(index)
            self._cursor = len(self.forward_units) - 1
            return
        following = self._cursor + 1
        if following < len(self.forward_units) and self.forward_units[following] == index:
            self._cursor = following
        elif index in self.forward_units:
            self._cursor = self.forward_units.index(index)

    def record_backward(self, index: int) -> None:
        """Record that the backward needs a unit's parameters."""
        if not self.is_complete:
            self.backward_units.append(index)

    def forget_backward(self) -> None:
        """Record the backward again, after other parameters require gradients."""
        self.backward_units, self.is_complete = [], False

    def freeze(self) -> None:
        """Make the forward order final, at the end of the first forward."""
        self.is_frozen = self.is_frozen or bool(self.forward_units)

    def complete(self, *, followed_all: bool = True) -> None:
        """Make the backward order final, at the end of the first backward.

        Args:
            followed_all: Whether the backward went through every forward. If not, as after a sanity check, both orders
                are recorded once more.
        """
        if self.is_complete:
            return
        if not followed_all and not self._is_retry:
            self.forward_units, self.backward_units, self.is_frozen, self._is_retry = [], [], False, True
        else:
            self.is_complete = bool(self.backward_units)

    def upcoming(self, count: int) -> list[int]:
        """Indices of the next `count` units, nearest first; empty while recording."""
        return self.forward_units[self._cursor + 1 : self._cursor + 1 + count] if self.is_frozen else []
