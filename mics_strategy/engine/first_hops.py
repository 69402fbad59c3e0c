"""The order of first hops in one backward, the same on all ranks, whatever gradients a rank has."""

from __future__ import annotations

from collections.abc import Iterator

from mics_strategy.engine.unit import Unit


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
