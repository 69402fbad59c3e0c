"""Event simulation of tasks that wait for each other on streams and share links.

A *stream* runs its tasks one after the other, in the order in which they were added. A *resource* is shared: n tasks
that use it at the same time each get an n-th of it. A task without a resource has its stream alone.

One resource is the device, all others are links. The device is slower while a link is in use, because collectives take
part of its processors and of its memory's bandwidth; a link is slower while the device computes, where collectives need
its processors. Slow-downs of links that were measured one by one add up; the stated one of all others counts once.

The simulation is deterministic: equal tasks give equal times.

Pure.

Source:
    The overlap of collectives with compute as resources of an event simulation: AMSP (arXiv:2311.00257) section V-B.
    Equal shares of a link: processor sharing.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

ALONE, DEVICE = "", "device"


class Task(NamedTuple):
    """One piece of work.

    Attributes:
        stream: Name of the stream.
        resource: Name of the shared resource; `ALONE` for none, `DEVICE` for what collectives slow down.
        seconds: Time of the task alone.
        after: Indices of tasks that end before it starts.
    """

    stream: str
    resource: str
    seconds: float
    after: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """Slow-downs of the device and one link by each other.

    They are in times of what each takes alone, and at least 1.

    Attributes:
        device: Time of the device while the link is in use.
        link: Time of the link while the device computes.
    """

    device: float = 1.0
    link: float = 1.0


@dataclass(slots=True)
class _Resource:
    """Tasks that use one resource now, with the seconds that each still needs alone."""

    rest: dict[int, float] = field(default_factory=dict)
    updated_s: float = 0.0
    slowdown: float = 1.0
    _next_end: tuple[float, int] | None = None  # until something changes

    def advance(self, now_s: float) -> None:
        self._next_end = None
        if self.rest:
            done = (now_s - self.updated_s) / (len(self.rest) * self.slowdown)
            for index in self.rest:
                self.rest[index] -= done
        self.updated_s = now_s

    def next_end(self) -> tuple[float, int]:
        """Time at which the next task ends, if nothing else starts or ends, and the task."""
        if self._next_end is None:
            if len(self.rest) == 1:
                ((index, seconds),) = self.rest.items()
            else:
                seconds, index = min((seconds, index) for index, seconds in self.rest.items())
            end_s = max(self.updated_s, self.updated_s + seconds * len(self.rest) * self.slowdown)
            self._next_end = end_s, index
        return self._next_end


@dataclass(frozen=True, slots=True)
class Times:
    """Start and end of every task, seconds."""

    start_s: list[float]
    end_s: list[float]


def run(tasks: Sequence[Task], device_slowdown: float = 1.0, links: Mapping[str, Slowdown] | None = None) -> Times:
    """Simulate tasks.

    Each starts as soon as its stream is free and the tasks in front of it have ended.

    Args:
        tasks: Tasks. Those of a stream run in this order; `after` names only earlier tasks.
        device_slowdown: Time of a task on the device while a link is in use that `links` does not name, in times of
            that otherwise.
        links: Slow-downs by the name of the link.

    Cost:
        Time: O(tasks x streams).
    """
    simulation = _Simulation(tasks, device_slowdown, links or {})
    simulation.run()
    return Times(simulation.start_s, simulation.end_s)


@dataclass(slots=True)
class _Stream:
    """Tasks of one stream by index, in order."""

    queue: list[int] = field(default_factory=list)
    head: int = 0
    is_busy: bool = False


class _Simulation:
    """State of one simulation."""

    def __init__(self, tasks: Sequence[Task], device_slowdown: float, links: Mapping[str, Slowdown]) -> None:
        self.tasks = tasks
        self.start_s = [0.0] * len(tasks)
        self.end_s = [0.0] * len(tasks)
        self._device_slowdown = device_slowdown
        self._links = links
        self._slows = device_slowdown != 1.0 or any(slowdown != Slowdown() for slowdown in links.values())
        self._num_waiting = [len(task.after) for task in tasks]
        self._followers: list[tuple[int, ...]] = [()] * len(tasks)
        self._streams = {task.stream: _Stream() for task in tasks}
        self._stream_of = [self._streams[task.stream] for task in tasks]
        for index, task in enumerate(tasks):
            self._stream_of[index].queue.append(index)
            for before in task.after:
                self._followers[before] += (index,)
        self._resources = {task.resource: _Resource() for task in tasks if task.resource != ALONE}
        self._alone: list[tuple[float, int]] = []

    def run(self) -> None:
        for stream in self._streams.values():
            self._start_head(stream, 0.0)
        while (event := self._next_event()) is not None:
            now_s, index = event
            self._end(index, now_s)

    def _next_event(self) -> tuple[float, int] | None:
        first = self._alone[0] if self._alone else None
        for resource in self._resources.values():
            if resource.rest:
                event = resource.next_end()
                if first is None or event < first:
                    first = event
        return first

    def _end(self, index: int, now_s: float) -> None:
        task, stream = self.tasks[index], self._stream_of[index]
        if task.resource == ALONE:
            heapq.heappop(self._alone)
        else:
            resource = self._resources[task.resource]
            resource.advance(now_s)
            del resource.rest[index]
            if self._slows:
                self._update_slowdowns(task, now_s)
        self.end_s[index] = now_s
        stream.is_busy = False
        followers = self._followers[index]
        for follower in followers:
            self._num_waiting[follower] -= 1
        self._start_head(stream, now_s)
        for follower in followers:
            if not self._num_waiting[follower]:
                self._start_head(self._stream_of[follower], now_s)

    def _start_head(self, stream: _Stream, now_s: float) -> None:
        if stream.is_busy or stream.head == len(stream.queue):
            return
        index = stream.queue[stream.head]
        if self._num_waiting[index]:
            return
        task = self.tasks[index]
        stream.head += 1
        stream.is_busy = True
        self.start_s[index] = now_s
        if task.resource == ALONE:
            heapq.heappush(self._alone, (now_s + task.seconds, index))
            return
        resource = self._resources[task.resource]
        resource.advance(now_s)
        resource.rest[index] = task.seconds
        if self._slows:
            self._update_slowdowns(task, now_s)

    def _update_slowdowns(self, task: Task, now_s: float) -> None:
        """Slow the device by the links in use, and the links by the device. A task has just started or ended."""
        device = self._resources.get(DEVICE)
        if device is None:
            return
        used = {name for name, resource in self._resources.items() if resource.rest and name != DEVICE}
        measured = [name for name in self._links if name in used]
        device.advance(now_s)
        device.slowdown = self._device_slowdown if len(measured) < len(used) else 1.0
        device.slowdown += sum(self._links[name].device - 1.0 for name in measured)
        for name in measured:
            if task.resource in (DEVICE, name):
                resource = self._resources[name]
                resource.advance(now_s)
                resource.slowdown = self._links[name].link if device.rest else 1.0
