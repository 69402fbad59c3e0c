"""Errors of predictions, by source, by class and by half.

Pure.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.papers.row import PublishedRow
from mics_strategy.text_table import text_table

FITTED_SOURCE = "llm-foundry"
"""The source whose rows constants may be fitted on; all other sources are held out.

It is the largest one, about half of all rows, and the one that the catalog's efficiencies are from.
"""
_DIFFERENT = 0.05  # two published values differ, for the order of pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRow:
    """A row beside its prediction.

    Attributes:
        row: Row.
        predicted: Predicted value in the row's unit; None where there is none.
        fits: Whether the same model says that the run fits into memory; None without a prediction.
        waiting: Share of the predicted step that waits for collectives; None where it is not known.
        reason: Why there is no prediction; empty where there is one.
        assumptions: Assumptions of the prediction.
    """

    row: PublishedRow
    predicted: float | None
    fits: bool | None = None
    waiting: float | None = None
    reason: str = ""
    assumptions: tuple[str, ...] = ()

    @property
    def error(self) -> float | None:
        """Predicted over published, less 1; None without either."""
        published = self.row.value
        return None if self.predicted is None or not published else self.predicted / published - 1

    @property
    def half(self) -> str:
        """The half of the rows to which the row's source belongs."""
        return "fitted" if FITTED_SOURCE in self.row.text("source") else "held out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Errors of some rows; all are absolute, and relative to the published values.

    Attributes:
        count: Rows.
        refused: Rows without a prediction.
        too_large: Rows that are said not to fit into memory, though they ran.
        median: Median error.
        mean: Mean error.
        worst: Greatest error, with its sign.
    """

    count: int
    refused: int
    too_large: int
    median: float
    mean: float
    worst: float

    @classmethod
    def of(cls, rows: Sequence[ScoredRow]) -> Score:
        """The score of some rows."""
        errors = [row.error for row in rows if row.error is not None]
        sizes = [abs(error) for error in errors] or [float("nan")]
        return cls(
            count=len(rows),
            refused=len(rows) - len(errors),
            too_large=sum(row.fits is False for row in rows),
            median=statistics.median(sizes),
            mean=statistics.fmean(sizes),
            worst=max(errors, key=abs, default=float("nan")),
        )


def score_lines(rows: Sequence[ScoredRow], *, num_worst: int = 0) -> Iterator[str]:
    """The scores as text: by half, by source and by class, and the worst rows."""
    header = ("rows of", "count", "median", "mean", "worst", "refused", "too large")
    table = [header, _cells("all", rows)]
    for title, key in _GROUPS:
        table += [_cells(f"{title} {name}", group) for name, group in grouped(rows, key)]
    yield from text_table(table, num_left=1)
    kept, pairs = order_kept(rows)
    yield ""
    if pairs:
        share = f"{kept} of {pairs} pairs of one model and device that differ by more than 5 %: {kept / pairs:.1%}"
        yield f"order kept in {share}"
    worst = sorted((row for row in rows if row.error is not None), key=lambda row: -abs(row.error or 0))[:num_worst]
    for row in worst:
        yield f"{row.row.text('id')}: {row.error:+.1%}, {row.row.text('system')}, {row.row.text('model')}"


def grouped(rows: Iterable[ScoredRow], key: Callable[[ScoredRow], str]) -> list[tuple[str, list[ScoredRow]]]:
    """Rows by a key, the largest group first."""
    groups: dict[str, list[ScoredRow]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return sorted(groups.items(), key=lambda item: -len(item[1]))


def order_kept(rows: Iterable[ScoredRow]) -> tuple[int, int]:
    """Pairs of configurations of one model, source and cluster whose order is kept, and all such pairs."""
    kept = pairs = 0
    for _, group in grouped(rows, _setting):
        known = [(row.row.value, row.predicted) for row in group if row.row.value and row.predicted]
        for index, (one, predicted_one) in enumerate(known):
            for other, predicted_other in known[:index]:
                if abs(one / other - 1) > _DIFFERENT and abs(other / one - 1) > _DIFFERENT:
                    pairs += 1
                    kept += (one > other) == (predicted_one > predicted_other)
    return kept, pairs


def same_runs(rows: Iterable[ScoredRow]) -> Iterator[tuple[ScoredRow, ScoredRow]]:
    """Pairs of rows that differ in neither model, source, device nor number of GPUs."""
    for _, group in grouped(rows, lambda row: f"{_setting(row)}|{row.row.text('total_gpus')}"):
        yield from itertools.combinations(group, 2)


def _setting(row: ScoredRow) -> str:
    return "|".join(row.row.text(column) for column in ("source", "model", "gpu_type", "unit"))


def _cells(name: str, rows: Sequence[ScoredRow]) -> tuple[str, ...]:
    score = Score.of(rows)
    errors = (f"{score.median:.1%}", f"{score.mean:.1%}", f"{score.worst:+.1%}")
    if score.refused == score.count:
        errors = ("-", "-", "-")
    return (name, str(score.count), *errors, str(score.refused), str(score.too_large))


_GROUPS: tuple[tuple[str, Callable[[ScoredRow], str]], ...] = (
    ("half:", lambda row: row.half),
    ("source:", lambda row: row.row.text("source")[:44]),
    ("class:", lambda row: row.row.text("class")),
)
