"""Timelines of training steps, recorded or planned, as rows of intervals.

They have tables of parts, and are written as traces.

A timeline has rows. Each row belongs to one rank and one resource: `COMPUTE_ROW` for what the device of the rank does,
others for the queues or links that run collectives. The intervals of a compute row are disjoint and cover the steps, so
the seconds of its `Part`s add up to the step. Collectives overlap with it and with each other.

A recorded and a planned timeline of the same configuration are compared part by part: equal keys (category, name, unit,
axis) are the same work. The names of work are those of this table.

    compute     forward, backward, recompute of a unit; loss outside of all units
    collective  all_gather, reduce_scatter, all_reduce, all_to_all over an axis, or axes joined by "+", fastest first
    wait        the collective that the device waits for, over its axis
    optimizer   step
    data        between a step, or a micro-step, and the next forward
    idle        what else the host did

Pure.
"""

from __future__ import annotations

import enum
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mics_strategy.errors import ConfigError

COMPUTE_ROW = "compute"
DIFFERS_FROM = 0.2  # of the planned seconds; more is marked


class Category(enum.Enum):
    """What an interval is spent on."""

    COMPUTE = "compute"
    WAIT = "wait"
    OPTIMIZER = "optimizer"
    DATA = "data"
    IDLE = "idle"
    COLLECTIVE = "collective"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartKey:
    """Identity of one kind of work in a step.

    Attributes:
        category: What the time is spent on.
        name: Pass of a unit ("forward"), or collective ("all_gather").
        unit: Name of the unit, or of another payload; empty where there is none.
        axis: Axes that a collective spans, joined by "+"; empty where there is none.
    """

    category: Category
    name: str
    unit: str = ""
    axis: str = ""

    def __str__(self) -> str:
        """The key as text: all_gather layers.3 [inter_node]."""
        axis = f"[{self.axis}]" if self.axis else ""
        return " ".join(filter(None, (self.name, self.unit, axis)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """One piece of work on one row.

    Attributes:
        key: Identity of the work.
        start_s: Start, seconds on the clock of the timeline.
        end_s: End, seconds on the same clock.
        queued_s: Seconds between the submission of a collective and its start.
        sent_bytes: Bytes that this rank sends in a collective.
    """

    key: PartKey
    start_s: float
    end_s: float
    queued_s: float = 0.0
    sent_bytes: int = 0

    def __post_init__(self) -> None:
        """Check the order of the times."""
        if self.end_s < self.start_s or self.queued_s < 0:
            raise ConfigError(
                f"The interval `{self.key}` ends at {self.end_s} s, before its start at {self.start_s} s, or was "
                f"queued for {self.queued_s} s. Pass times of one clock."
            )

    @property
    def seconds(self) -> float:
        """Length, seconds."""
        return self.end_s - self.start_s

    @property
    def submitted_s(self) -> float:
        """Submission, seconds; the start where nothing was queued."""
        return self.start_s - self.queued_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The intervals of one resource of one rank, in the order of their starts.

    Attributes:
        rank: Rank of the job.
        resource: `COMPUTE_ROW`, or name of a queue or link.
        intervals: Intervals; disjoint in a compute row.
    """

    rank: int
    resource: str
    intervals: tuple[Interval, ...]

    def __post_init__(self) -> None:
        """Check that a compute row is in order and disjoint."""
        if self.resource != COMPUTE_ROW:
            return
        for before, after in itertools.pairwise(self.intervals):
            if after.start_s < before.end_s:
                raise ConfigError(
                    f"`{before.key}` and `{after.key}` overlap on the compute row of rank {self.rank}, from "
                    f"{after.start_s} s to {before.end_s} s. Its intervals must be disjoint and in order."
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The mean seconds of one kind of work in one step of a timeline."""

    key: PartKey
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Rows of one or more steps.

    Attributes:
        source: Where it comes from: "recorded" or "planned".
        num_steps: Optimizer steps that every row covers.
        rows: Rows; one compute row for each rank.
    """

    source: str
    num_steps: int
    rows: tuple[Row, ...]

    def __post_init__(self) -> None:
        """Check that there is a step, and one compute row a rank."""
        ranks = [row.rank for row in self.rows if row.resource == COMPUTE_ROW]
        if self.num_steps < 1 or len(ranks) != len(set(ranks)) or set(ranks) != {row.rank for row in self.rows}:
            raise ConfigError(
                f"A timeline of {self.num_steps} steps has compute rows of ranks {ranks}. It needs a step, and one "
                "compute row for each rank."
            )

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that have rows, ascending."""
        return tuple(sorted(row.rank for row in self.rows if row.resource == COMPUTE_ROW))

    def rows_of(self, rank: int) -> tuple[Row, ...]:
        """The rows of one rank, the compute row first.

        Raises:
            ConfigError: The timeline has no such rank.
        """
        rows = sorted((row for row in self.rows if row.rank == rank), key=lambda row: row.resource != COMPUTE_ROW)
        if not rows:
            raise ConfigError(f"Rank {rank} has no row in this timeline of ranks {self.ranks}. Pass one of them.")
        return tuple(rows)

    def step_s(self, rank: int) -> float:
        """Seconds of one step on one rank, the mean: the length of its compute row."""
        intervals = self.rows_of(rank)[0].intervals
        return (intervals[-1].end_s - intervals[0].start_s) / self.num_steps if intervals else 0.0

    def parts(self, rank: int, *, by_unit: bool = True) -> tuple[Part, ...]:
        """Parts of a step on the compute row of one rank, in the order of categories.

        Args:
            rank: Rank of the row.
            by_unit: Whether units have parts of their own.
        """
        return self._sums(self.rows_of(rank)[:1], by_unit)

    def collectives(self, rank: int, *, by_unit: bool = True) -> tuple[Part, ...]:
        """Seconds of each collective of one rank between start and end.

        They overlap with the parts of the compute row.

        Args:
            rank: Rank of the rows.
            by_unit: Whether units have parts of their own.
        """
        return self._sums(self.rows_of(rank)[1:], by_unit)

    def _sums(self, rows: Iterable[Row], by_unit: bool) -> tuple[Part, ...]:
        seconds: dict[PartKey, float] = defaultdict(float)
        for row in rows:
            for interval in row.intervals:
                key = interval.key if by_unit else replace(interval.key, unit="")
                seconds[key] += interval.seconds / self.num_steps
        categories = list(Category)
        keys = sorted(seconds, key=lambda key: categories.index(key.category))  # stable: as they first ran
        return tuple(Part(key=key, seconds=seconds[key]) for key in keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartComparison:
    """One part of a step in two timelines.

    Attributes:
        key: Identity of the work.
        planned_s: Planned seconds in a step; 0 where nothing was planned.
        recorded_s: Recorded seconds in a step; 0 where nothing was recorded.
    """

    key: PartKey
    planned_s: float
    recorded_s: float

    @property
    def differs(self) -> bool:
        """Whether both differ by more than `DIFFERS_FROM` of the planned seconds."""
        return abs(self.recorded_s - self.planned_s) > DIFFERS_FROM * self.planned_s


def compare(planned: Timeline, recorded: Timeline, rank: int, *, by_unit: bool = True) -> tuple[PartComparison, ...]:
    """Both timelines of one rank, part by part, with collectives.

    Recorded parts come first.

    Args:
        planned: Planned timeline.
        recorded: Recorded timeline of the same configuration.
        rank: Rank in both.
        by_unit: Whether units have parts of their own.
    """
    planned_s, recorded_s = (
        {
            part.key: part.seconds
            for part in (*timeline.parts(rank, by_unit=by_unit), *timeline.collectives(rank, by_unit=by_unit))
        }
        for timeline in (planned, recorded)
    )
    keys = [*recorded_s, *(key for key in planned_s if key not in recorded_s)]
    return tuple(
        PartComparison(key=key, planned_s=planned_s.get(key, 0.0), recorded_s=recorded_s.get(key, 0.0)) for key in keys
    )


def table(timeline: Timeline, rank: int, planned: Timeline | None = None, *, by_unit: bool = True) -> str:
    """Parts of one rank's step as text, milliseconds and shares of the step.

    Args:
        timeline: Timeline to show.
        rank: Rank to show.
        planned: Planned timeline for two more columns: planned milliseconds, and a mark where both differ.
        by_unit: Whether units have lines of their own.
    """
    step_s = timeline.step_s(rank)
    parts, collectives = timeline.parts(rank, by_unit=by_unit), timeline.collectives(rank, by_unit=by_unit)
    compared = {} if planned is None else {row.key: row for row in compare(planned, timeline, rank, by_unit=by_unit)}
    missing = [Part(key=key, seconds=0.0) for key in compared if key not in {p.key for p in (*parts, *collectives)}]
    total = Part(key=PartKey(category=Category.IDLE, name="sum of the parts"), seconds=sum(p.seconds for p in parts))
    width = max(12, *(len(str(part.key)) for part in (*parts, *collectives, *missing, total)))
    lines = [f"{'':10}  {'part':{width}}  {'ms':>9}  {'share':>6}{'   planned' if planned is not None else ''}"]
    for part in (*parts, *(part for part in missing if part.key.category is not Category.COLLECTIVE)):
        lines.append(_table_row(part, step_s, width, compared))
    lines.append(_table_row(total, step_s, width, {}, label=""))
    step = Part(key=PartKey(category=Category.IDLE, name="step"), seconds=step_s)
    lines.append(_table_row(step, step_s, width, {}, label=""))
    overlapped = [*collectives, *(part for part in missing if part.key.category is Category.COLLECTIVE)]
    lines += [_table_row(part, step_s, width, compared) for part in overlapped]
    return "\n".join(line.rstrip() for line in lines)


def _table_row(
    part: Part, step_s: float, width: int, compared: dict[PartKey, PartComparison], label: str | None = None
) -> str:
    category = part.key.category.value if label is None else label
    share = part.seconds / step_s if step_s else 0.0
    text = f"{category:10}  {part.key!s:{width}}  {part.seconds * 1e3:9.3f}  {share:6.1%}"
    row = compared.get(part.key)
    if row is None:
        return text
    return f"{text}  {row.planned_s * 1e3:9.3f}{'  differs' if row.differs else ''}"


def chrome_trace(recorded: Timeline | None, planned: Timeline | None = None) -> dict[str, Any]:
    """Timelines as an object of the Chrome trace format, which Perfetto opens.

    A rank is one process for each timeline, the planned one below the recorded one; a row is one thread, or several
    where its intervals overlap. Each timeline begins at 0. A collective is drawn from its submission on.

    Args:
        recorded: Recorded timeline; None to show only the plan.
        planned: Planned timeline. Recorded intervals then name their planned seconds, and are marked where the part
            differs.

    Source:
        Trace Event Format, "Complete Events" and "Metadata Events".
    """
    timelines = [timeline for timeline in (recorded, planned) if timeline is not None]
    events: list[dict[str, Any]] = []
    for position, timeline in enumerate(timelines):
        first_s = min((i.submitted_s for row in timeline.rows for i in row.intervals), default=0.0)
        for rank in timeline.ranks:
            process = len(timelines) * rank + position
            compared: dict[PartKey, PartComparison] = {}
            if timeline is recorded and planned is not None and rank in planned.ranks:
                compared = {row.key: row for row in compare(planned, timeline, rank)}
            events.append(_metadata("process_name", process, 0, name=f"rank {rank} {timeline.source}"))
            events.append(_metadata("process_sort_index", process, 0, sort_index=process))
            events += _events_of(timeline.rows_of(rank), process, first_s, compared)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _events_of(
    rows: Sequence[Row], process: int, first_s: float, compared: dict[PartKey, PartComparison]
) -> Iterator[dict[str, Any]]:
    thread = 0
    for row in rows:
        for lane in _lanes(row.intervals):
            yield _metadata("thread_name", process, thread, name=row.resource)
            yield _metadata("thread_sort_index", process, thread, sort_index=thread)
            for interval in lane:
                yield from _events(interval, process, thread, first_s, compared.get(interval.key))
            thread += 1


def _lanes(intervals: Sequence[Interval]) -> list[list[Interval]]:
    """Intervals dealt to as few lanes as hold no overlap, at least one."""
    lanes: list[list[Interval]] = [[]]
    for interval in sorted(intervals, key=lambda interval: interval.submitted_s):
        free = next((lane for lane in lanes if not lane or lane[-1].end_s <= interval.submitted_s), None)
        if free is None:
            lanes.append([interval])
        else:
            free.append(interval)
    return lanes


def _events(
    interval: Interval, process: int, thread: int, first_s: float, compared: PartComparison | None
) -> Iterator[dict[str, Any]]:
    key = interval.key
    args: dict[str, Any] = {"unit": key.unit, "axis": key.axis}
    if key.category is Category.COLLECTIVE:
        args |= {"sent_bytes": interval.sent_bytes, "queued_ms": interval.queued_s * 1e3}
    if compared is not None:
        args |= {
            "recorded_ms_per_step": compared.recorded_s * 1e3,
            "planned_ms_per_step": compared.planned_s * 1e3,
            "differs": compared.differs,
        }
    where = {"ph": "X", "cat": key.category.value, "pid": process, "tid": thread}
    begin_us = (interval.submitted_s - first_s) * 1e6
    mark = " (differs)" if compared is not None and compared.differs else ""
    length_us = (interval.end_s - interval.submitted_s) * 1e6
    yield {**where, "name": f"{key}{mark}", "ts": begin_us, "dur": length_us, "args": args}
    if interval.queued_s:
        yield {**where, "name": "queued", "ts": begin_us, "dur": interval.queued_s * 1e6, "args": {}}


def _metadata(kind: str, process: int, thread: int, **args: object) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": args}
