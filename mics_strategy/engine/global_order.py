"""What all ranks do in one order: gathers and reductions of units, and the end of an accumulation.

Whatever units and gradients a rank has. What they then find out about each other is in `rank_agreement`.
"""

from __future__ import annotations

from collections.abc import Iterator

from mics_strategy.engine.unit import Unit


class GlobalOrder:
    """One order of all units, the same on all ranks, whichever units this rank runs.

    Where parameters or gradients are kept whole, ranks may run different units, and collectives follow this order.

    Args:
        units: Units by index.

    Attributes:
        units: Units in the order.
        is_agreed: Whether the order follows recorded forwards.
    """

    def __init__(self, units: list[Unit]) -> None:
        self.units = list(units)
        self.is_agreed = False
        self._positions = {unit.index: position for position, unit in enumerate(units)}
        self._num_taken = 0

    def agree(self, forward_orders: list[list[int]]) -> None:
        """Merge the forward orders of all ranks.

        A unit that no rank ran stays next to its neighbor.

        Args:
            forward_orders: Indices of units in the forward order of every rank, the same on all ranks.
        """
        merged: list[int] = []
        for order in (*forward_orders, sorted(self._positions)):
            position = 0
            for index in order:
                if index not in merged:
                    merged.insert(position, index)
                position = merged.index(index) + 1
        by_index = {unit.index: unit for unit in self.units}
        self.units = [by_index[index] for index in merged]
        self._positions = {index: position for position, index in enumerate(merged)}
        self.is_agreed = True

    def restart(self) -> None:
        """Make every unit due again, after parameters have changed."""
        self._num_taken = 0

    def take_until(self, unit: Unit) -> list[Unit]:
        """Take the units up to and including `unit` that were not taken since `restart`."""
        start, self._num_taken = self._num_taken, max(self._num_taken, self._positions[unit.index] + 1)
        return self.units[start : self._num_taken]

    def take_rest(self) -> list[Unit]:
        """Take all units that were not taken since `restart`."""
        return self.take_until(self.units[-1])


class FirstHopOrder:
    """The order of first hops in one backward, the same on all ranks."""

    def __init__(self) -> None:
        self._waiting: list[Unit] = []
        self._complete: set[int] = set()
        self._started: set[int] = set()  # in this backward
        self._started_in_step: set[int] = set()
        self._num_backwards = 0  # in this step
        self._repeated: list[tuple[int, int]] = []  # micro-step and unit, in this step

    def begin(self, order: list[Unit], complete: set[int]) -> None:
        """A backward begins.

        Args:
            order: Units to reduce, first to be reduced first.
            complete: Indices of units that receive no gradients on this rank.
        """
        self._waiting, self._complete = order, complete
        self._started.clear()
        self._num_backwards += 1

    def start(self, unit: Unit) -> bool:
        """A first hop of `unit` starts. Returns whether it is another one."""
        is_another = unit.index in self._started
        if is_another:
            self._repeated.append((self._num_backwards - 1, unit.index))
        self._started.add(unit.index)
        self._started_in_step.add(unit.index)
        return is_another

    def end_step(self) -> tuple[tuple[int, int], ...]:
        """An optimizer has used the gradients. Returns repeated first hops."""
        repeated, self._repeated = tuple(self._repeated), []
        self._num_backwards = 0
        return repeated

    def take_started(self) -> list[int]:
        """Indices of the units that had first hops since the last call, in order."""
        started = sorted(self._started_in_step)
        self._started_in_step.clear()
        return started

    def includes(self, unit: Unit) -> bool:
        """Whether `unit` still waits for its first hop."""
        return unit in self._waiting

    def complete(self, *units: Unit) -> None:
        """Units receive no more gradients in this backward."""
        self._complete.update(unit.index for unit in units)

    def complete_all(self) -> None:
        """No unit receives more gradients."""
        self.complete(*self._waiting)

    def take_due(self) -> Iterator[Unit]:
        """Remove and yield the units whose first hops are due, up to the first incomplete."""
        while self._waiting and self._waiting[0].index in self._complete:
            yield self._waiting.pop(0)

    def take_until(self, unit: Unit) -> list[Unit]:
        """Remove and return `unit` and all units before it."""
        count = self._waiting.index(unit) + 1
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        return taken

    def incomplete_before(self, unit: Unit) -> list[Unit]:
        """Units before `unit` that may still receive gradients."""
        before = self._waiting[: self._waiting.index(unit)] if unit in self._waiting else []
        return [other for other in before if other.index not in self._complete]


class AccumulationBoundary:
    """Whether a backward is the last one before the optimizer step: declared by the loop, or predicted.

    If the last two steps used n backwards each, of the same units on all ranks, the n-th backward since then counts as
    the last one. A wrong prediction changes no sum. If another backward follows, finished means become sums again, and
    its gradients get a second hop of their own. If fewer follow, gradients are finished in the step.

    All ranks predict the same, also where nodes then run other numbers of backwards. Where gradients are not sharded,
    ranks may skip backwards, and nothing is predicted.

    Args:
        predicts: Whether to predict where nothing is declared.

    Attributes:
        declared: Declaration of the loop; None for none.
        is_last: Whether the present backward counts as the last one.
        number: Number of the present or last backward, from 1, since the last step or since gradients were cleared.
    """

    def __init__(self, *, predicts: bool) -> None:
        self.declared: bool | None = None
        self.is_last = False
        self._predicts = predicts
        self.number = 0
        self._lengths: tuple[int, int] = (0, 0)  # backwards of the last two steps; 0 where ranks differ

    def begin_backward(self, number: int) -> None:
        """A backward begins.

        Args:
            number: Number of this backward, from 1, since the last step or since gradients were cleared.
        """
        self.number = number
        self.is_last = self._is_predicted() if self.declared is None else self.declared

    def _is_predicted(self) -> bool:
        before, last = self._lengths
        return self._predicts and before == last == self.number

    def end_step(self, *, is_equal_on_all_ranks: bool) -> None:
        """An optimizer has used the gradients.

        Args:
            is_equal_on_all_ranks: Whether all ranks have run as many backwards, of the same units.
        """
        if self.number:
            self._lengths = (self._lengths[1], self.number if is_equal_on_all_ranks else 0)
        self.number = 0
        self.is_last = False
