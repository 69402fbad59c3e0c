"""Comparison of the planner with published results: `python -m benchmarks.papers.validate --rows FILE`.

Every row of a table is predicted, or has the reason why it cannot be. One set of constants for each cluster, from its
datasheet or from a measurement of another group, and one set of assumptions for each system (`published.toml`): nothing
is adjusted to a row.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.papers.predict import Kind, Predicted, predict
from benchmarks.papers.row import PublishedRow, read_rows
from benchmarks.papers.testbed import NotPredictable
from mics_strategy.errors import MiCSError
from mics_strategy.text_table import text_table

_PROG = "python -m benchmarks.papers.validate"
_FEW = 4  # rows of a table that is not named


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidatedRow:
    """One published result beside its prediction.

    Attributes:
        row: Row.
        predicted: Prediction; None where there is none.
        reason: Why there is none; empty where there is one.
    """

    row: PublishedRow
    predicted: Predicted | None
    reason: str = ""

    @property
    def error(self) -> float | None:
        """Predicted over published, less 1.

        None without a prediction, or where the published value is 0.

        For rows that say whether something runs: 0 where the prediction is right, 1 where it is wrong.
        """
        published = self.row.value
        if self.predicted is None or published is None:
            return None
        if self.predicted.kind is Kind.RUNS:
            return float(self.predicted.value != published)
        if self.predicted.compared:
            return self.predicted.compared - 1
        return self.predicted.value / published - 1 if published else None


def validate(rows: Iterable[PublishedRow]) -> list[ValidatedRow]:
    """Predict every row of a table."""
    return [_validated(row) for row in rows]


def _validated(row: PublishedRow) -> ValidatedRow:
    if row.value is None:
        return ValidatedRow(row=row, predicted=None, reason=f"published value `{row.text('value')}` is no number")
    try:
        return ValidatedRow(row=row, predicted=predict(row))
    except NotPredictable as reason:
        return ValidatedRow(row=row, predicted=None, reason=str(reason))


def median_errors(rows: Iterable[ValidatedRow]) -> dict[Kind, tuple[float, int]]:
    """Median of absolute errors and number of rows, by kind.

    Rows that calibrate are left out.
    """
    errors: dict[Kind, list[float]] = {}
    for row in rows:
        if row.predicted is not None and not row.predicted.is_calibration and row.error is not None:
            errors.setdefault(row.predicted.kind, []).append(abs(row.error))
    return {kind: (statistics.median(errors[kind]), len(errors[kind])) for kind in Kind if kind in errors}


def table_lines(rows: Iterable[ValidatedRow]) -> Iterator[str]:
    """Medians of absolute errors by table or section of the papers, the largest first, as text.

    Tables with few rows are put together. Rows that calibrate are left out. A median of all rows is that of the largest
    table above all; that of the tables counts each of them once.
    """
    errors: dict[str, list[float]] = {}
    for row in rows:
        if row.predicted is not None and not row.predicted.is_calibration and row.error is not None:
            name = f"{row.row.text('paper')}, {row.row.text('section')}"
            errors.setdefault(name, []).append(abs(row.error))
    few = [error for found in errors.values() if len(found) < _FEW for error in found]
    large = sorted((item for item in errors.items() if len(item[1]) >= _FEW), key=lambda item: -len(item[1]))
    table = [("table", "rows", "median error")]
    table += [(name, str(len(found)), f"{statistics.median(found):.1%}") for name, found in large]
    if few:
        table.append((f"others, with fewer than {_FEW} rows each", str(len(few)), f"{statistics.median(few):.1%}"))
    if errors:
        of_tables = statistics.median(statistics.median(found) for found in errors.values())
        table.append((f"median of the {len(errors)} tables' medians", "", f"{of_tables:.1%}"))
    yield from text_table(table, num_left=1)


def report_lines(rows: list[ValidatedRow], *, has_assumptions: bool) -> Iterator[str]:
    """The comparison as text: rows, assumptions, and the median error of each kind."""
    header = ("id", "system", "model", "ranks", "metric", "published", "predicted", "error")
    yield from text_table([header, *map(_cells, rows)], num_left=3)
    if has_assumptions:
        yield ""
        for row in rows:
            text = "; ".join(row.predicted.assumptions) if row.predicted else f"not predictable: {row.reason}"
            yield f"{row.row.text('id') or '-'}: {text}"
    yield ""
    predicted = [row for row in rows if row.predicted is not None]
    yield f"{len(rows)} rows: {len(predicted)} predicted, {len(rows) - len(predicted)} with a reason why not"
    medians = [("kind", "rows", "median error")]
    medians += [(kind.value, str(count), f"{median:.1%}") for kind, (median, count) in median_errors(rows).items()]
    yield from text_table(medians, num_left=1)
    yield ""
    yield from table_lines(rows)


def _cells(row: ValidatedRow) -> tuple[str, ...]:
    source = row.row
    error = "" if row.error is None else f"{row.error:+.1%}"
    if row.predicted is not None and row.predicted.kind is Kind.RUNS:
        error = "wrong" if row.error else "right"
    value = "-" if row.predicted is None else f"{row.predicted.value:.4g}"
    return (
        source.text("id") or "-",
        source.text("system")[:30],
        source.text("model")[:16],
        source.text("total_gpus"),
        source.text("metric")[:36],
        f"{source.text('value')} {source.text('unit')}"[:18],
        value,
        error,
    )


def report_json(rows: list[ValidatedRow]) -> dict[str, Any]:
    """The comparison as an object of JSON."""
    return {
        "rows": [
            {
                "id": row.row.text("id"),
                "metric": row.row.text("metric"),
                "unit": row.row.text("unit"),
                "published": row.row.value,
                "predicted": None if row.predicted is None else row.predicted.value,
                "error": row.error,
                "kind": None if row.predicted is None else row.predicted.kind.value,
                "is_calibration": row.predicted is not None and row.predicted.is_calibration,
                "assumptions": [] if row.predicted is None else list(row.predicted.assumptions),
                "reason": row.reason or None,
            }
            for row in rows
        ],
        "median_errors": {
            kind.value: {"median": median, "rows": count} for kind, (median, count) in median_errors(rows).items()
        },
    }


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    options = argparse.ArgumentParser(prog=_PROG, description="Compares predictions with published results.")
    options.add_argument("--rows", type=Path, required=True, help="table of published results, CSV")
    options.add_argument("--json", action="store_true", help="print JSON, with all assumptions and reasons")
    options.add_argument("--brief", action="store_true", help="leave out assumptions and reasons")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code, 0 on success."""
    options = parser().parse_args(arguments)
    try:
        rows = validate(read_rows(options.rows))
    except MiCSError as error:
        print(f"{_PROG}: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(report_json(rows), indent=1))
    else:
        print("\n".join(report_lines(rows, has_assumptions=not options.brief)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
