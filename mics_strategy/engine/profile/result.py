"""What recorded steps were spent on: by part, by rank, beside a plan.

Ranks wait for each other, so their steps are equally long. The slowest rank is the one that spends most time outside of
waits, and the reason is the part in which it spends more than the median rank.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mics_strategy.errors import ConfigError
from mics_strategy.timeline import Category, PartKey, Row, Timeline, chrome_trace, table

MAX_GATHERED = 100_000  # intervals of all ranks, about 20 MB on the wire; with more, each rank keeps its own


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSteps:
    """One rank's recorded steps, as all ranks know them.

    Attributes:
        rank: The rank.
        step_s: Seconds of one step, the mean.
        seconds: Seconds of one step by part of the compute row, all units together.
        rows: Rows of the rank; empty where all ranks together have too many intervals, or nobody reads them.
    """

    rank: int
    step_s: float
    seconds: dict[PartKey, float]
    rows: tuple[Row, ...]

    @property
    def busy_s(self) -> float:
        """Seconds of one step outside of waits."""
        return sum(seconds for key, seconds in self.seconds.items() if key.category is not Category.WAIT)


def rank_steps(rows: tuple[Row, ...], num_steps: int, *, keeps_rows: bool) -> RankSteps:
    """The steps of one rank.

    Args:
        rows: Rows of the rank.
        num_steps: Steps that they cover.
        keeps_rows: Whether the rows are part of it.
    """
    timeline = Timeline(source="recorded", num_steps=num_steps, rows=rows)
    rank = rows[0].rank
    seconds: dict[PartKey, float] = defaultdict(float)
    for part in timeline.parts(rank):
        key = part.key
        seconds[PartKey(category=key.category, name=key.name, axis=key.axis)] += part.seconds
    return RankSteps(
        rank=rank,
        step_s=timeline.step_s(rank),
        seconds=dict(seconds),
        rows=rows if keeps_rows else (),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRank:
    """A rank that others wait for.

    Attributes:
        rank: The rank.
        busy_s: Its seconds outside of waits in one step.
        median_busy_s: Those of the median rank.
        reason: Part in which it spends more than the median rank, by the most seconds.
        excess_s: Those seconds more.
    """

    rank: int
    busy_s: float
    median_busy_s: float
    reason: PartKey
    excess_s: float

    def __str__(self) -> str:
        """Its times and its reason."""
        return (
            f"{self.busy_s * 1e3:.1f} ms of a step outside of waits, {self.median_busy_s * 1e3:.1f} ms on the median "
            f"rank. It spends {self.excess_s * 1e3:.1f} ms more than that one in {self.reason.category.value} "
            f"({self.reason})."
        )


def compare_with_median(rank: RankSteps, ranks: Sequence[RankSteps]) -> SlowRank:
    """A rank beside the median of all of them."""
    excess = {
        key: seconds - statistics.median(steps.seconds.get(key, 0.0) for steps in ranks)
        for key, seconds in rank.seconds.items()
        if key.category is not Category.WAIT
    }
    reason = max(excess, key=lambda key: excess[key])
    return SlowRank(
        rank=rank.rank,
        busy_s=rank.busy_s,
        median_busy_s=statistics.median(steps.busy_s for steps in ranks),
        reason=reason,
        excess_s=excess[reason],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileResult:
    """Recorded steps of all ranks.

    Attributes:
        rank: This rank.
        num_steps: Recorded optimizer steps.
        own_rows: Rows of this rank.
        ranks: Steps of every rank, in rank order, the same on all ranks.
    """

    rank: int
    num_steps: int
    own_rows: tuple[Row, ...]
    ranks: tuple[RankSteps, ...]

    @property
    def has_all_rows(self) -> bool:
        """Whether every rank knows the rows of all ranks."""
        return all(steps.rows for steps in self.ranks)

    @property
    def timeline(self) -> Timeline:
        """The rows of all ranks; of this rank where all have too many intervals."""
        rows = tuple(row for steps in self.ranks for row in steps.rows) if self.has_all_rows else self.own_rows
        return Timeline(source="recorded", num_steps=self.num_steps, rows=rows)

    @property
    def step_s(self) -> float:
        """Seconds of one step on this rank, the mean."""
        return self.ranks[self.rank].step_s

    @property
    def slowest(self) -> SlowRank | None:
        """The rank that the others wait for; None in a job of one rank."""
        if len(self.ranks) < 2:
            return None
        return compare_with_median(max(self.ranks, key=lambda steps: steps.busy_s), self.ranks)

    def table(self, planned: Timeline | None = None, *, by_unit: bool = True) -> str:
        """This rank's parts of a step as text.

        Args:
            planned: Planned timeline of the same configuration: two more columns, with marks where both differ.
            by_unit: Whether units have lines of their own.
        """
        return table(self.timeline, self.rank, planned, by_unit=by_unit)

    def metrics(self) -> dict[str, float]:
        """Seconds of one step by category on this rank, for a logger or tracker."""
        seconds: dict[str, float] = {f"mics/{category.value}_s": 0.0 for category in _STEP_CATEGORIES}
        for key, part_s in self.ranks[self.rank].seconds.items():
            seconds[f"mics/{key.category.value}_s"] += part_s
        return {"mics/step_s": self.step_s, **seconds}

    def write_trace(self, path: str | Path, planned: Timeline | None = None) -> Path | None:
        """Write the timeline as one file for Perfetto or chrome://tracing. Not collective.

        Rank 0 writes the rows of all ranks. Where all ranks together have too many intervals (`MAX_GATHERED`), each
        rank writes its own, with its number in the name: trace.rank3.json.

        Args:
            path: File to write, ``.json``.
            planned: Planned timeline of the same configuration, on the rows below.

        Returns:
            The file; None on a rank that wrote none.

        Raises:
            ConfigError: The name of the file does not end in ``.json``, or its folder cannot be made.
        """
        file = check_trace_path(path)
        if not self.has_all_rows:
            file = file.with_suffix(f".rank{self.rank}.json")
        elif self.rank != 0:
            return None
        make_trace_folder(file)
        file.write_text(json.dumps(chrome_trace(self.timeline, planned)))
        return file

    def summary(self) -> str:
        """The step and the slowest rank in one line."""
        slowest = "" if self.slowest is None else f" Rank {self.slowest.rank} is the slowest: {self.slowest}"
        return f"Profiled {self.num_steps} steps of {self.step_s * 1e3:.1f} ms.{slowest}"


_STEP_CATEGORIES = tuple(category for category in Category if category is not Category.COLLECTIVE)


def check_trace_path(path: str | Path) -> Path:
    """The path of a trace.

    Raises:
        ConfigError: Its name does not end in ``.json``.
    """
    file = Path(path)
    if file.suffix != ".json":
        raise ConfigError(f"`path={str(path)!r}` does not end in .json. Viewers of traces need that: use trace.json.")
    return file


def make_trace_folder(file: Path) -> None:
    """Make the folder of a trace, if it is missing.

    Raises:
        ConfigError: It cannot be made.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"`path={str(file)!r}`: its folder cannot be made ({error}). Use another one.") from error
