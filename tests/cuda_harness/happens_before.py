"""Which accesses to memory does nothing order? Pure: knows no torch.

Every stream has a vector clock. An operation advances the clock of its stream; recording an event copies the clock, and
who waits for the event takes the larger of both. The host is stream 0: what it launches comes after all it has seen.
Two accesses to one byte, at least one of them a write, must be ordered; time plays no part, so a race is found even in
a run in which it did no harm.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

HOST = 0
Clock = dict[int, int]
Range = tuple[int, int]  # bytes, from and to


@dataclass(frozen=True, slots=True)
class Access:
    """One operation's use of a range of bytes, at `tick` of its stream."""

    range: Range
    stream: int
    tick: int
    is_write: bool
    label: str


@dataclass(slots=True, eq=False)
class Memory:
    """One allocation: who may reuse it when it is freed, and who has used it."""

    owner: int
    accesses: list[Access] = field(default_factory=list)


@dataclass(slots=True)
class Orders:
    """The clocks of all streams, and what they say of accesses.

    Attributes:
        violations: Races, and frees of memory in use, in words.
    """

    names: list[str] = field(default_factory=lambda: ["host"])
    clocks: list[Clock] = field(default_factory=lambda: [{}])
    violations: list[str] = field(default_factory=list)
    _freed: dict[int, list[Access]] = field(default_factory=dict)  # uses of what was freed, by its owner

    def stream(self, name: str) -> int:
        """A new stream, which knows of nothing but what the host has seen."""
        self.names.append(name)
        self.clocks.append({})
        return len(self.names) - 1

    def record(self, stream: int) -> Clock:
        """All that is ordered before what `stream` does next."""
        clock = dict(self.clocks[stream])
        _join(clock, self.clocks[HOST])
        return clock

    def wait(self, stream: int, event: Clock) -> None:
        """Order what `stream` does next behind an event; of the host, block until it."""
        _join(self.clocks[stream], event)

    def launch(self, stream: int, uses: Iterable[tuple[Memory, Range, bool]], label: str) -> int:
        """An operation that reads and writes. Returns its tick.

        Args:
            stream: On which it runs.
            uses: Memory, bytes, and whether they are written.
            label: Label in a report.
        """
        clock = self.clocks[stream]
        _join(clock, self.clocks[HOST])
        tick = clock[stream] = clock.get(stream, 0) + 1
        for memory, range_, is_write in uses:
            self._use(memory, Access(range_, stream, tick, is_write, label))
        return tick

    def _use(self, memory: Memory, now: Access) -> None:
        clock, still_relevant = self.clocks[now.stream], []
        start, end = now.range
        for past in memory.accesses:
            first, last = past.range
            if past.tick == now.tick and past.stream == now.stream:  # of the same operation
                still_relevant.append(past)
                continue
            is_before = clock.get(past.stream, 0) >= past.tick
            if not is_before and first < end and start < last and (past.is_write or now.is_write):
                self._report("race", past, now)
            is_covered = is_before and start <= first and last <= end
            if not (is_covered and (now.is_write or (past.stream == now.stream and not past.is_write))):
                still_relevant.append(past)
        still_relevant.append(now)
        memory.accesses = still_relevant

    def allocate(self, owner: int) -> Memory:
        """Memory for `owner`, which may be any that was freed and is its own, as torch's allocator gives it."""
        clock = self.record(owner)
        for past in self._freed.pop(owner, []):
            if clock.get(past.stream, 0) < past.tick:
                now = Access(past.range, owner, 0, True, "whatever is allocated there next")
                self._report("freed while in use", past, now)
        return Memory(owner)

    def free(self, memory: Memory) -> None:
        """The last reference is gone: `owner` may be given the memory again, whatever other streams still do."""
        self._freed.setdefault(memory.owner, []).extend(a for a in memory.accesses if a.stream != memory.owner)
        memory.accesses = []

    def _report(self, kind: str, past: Access, now: Access) -> None:
        uses = [f"{'write' if a.is_write else 'read'} by {a.label} on {self.names[a.stream]}" for a in (past, now)]
        line = f"{kind}: nothing orders the {uses[0]} before the {uses[1]}"
        if line not in self.violations:
            self.violations.append(line)


def _join(clock: Clock, other: Clock) -> None:
    for stream, tick in other.items():
        if clock.get(stream, 0) < tick:
            clock[stream] = tick
