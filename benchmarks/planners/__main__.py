"""Errors of the planner on public runs: `python -m benchmarks.planners --rows FILE`.

Every row of a table is predicted, or has the reason why it cannot be. Nothing is adjusted to a row or to a source.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from benchmarks.papers.row import PublishedRow, read_rows
from benchmarks.papers.testbed import NotPredictable
from benchmarks.papers.validate import validate
from benchmarks.planners.cells import published_value
from benchmarks.planners.certainty import certainty_lines
from benchmarks.planners.run import predict_run
from benchmarks.planners.scores import ScoredRow, score_lines
from mics_strategy.errors import ConfigError, MiCSError

_PROG = "python -m benchmarks.planners"
_PAPERS = Path(__file__).parents[2] / "docs" / "papers" / "results.csv"


def score_rows(rows: Iterable[PublishedRow]) -> list[ScoredRow]:
    """Predict every row of a table."""
    return [_scored(row) for row in rows]


def _scored(row: PublishedRow) -> ScoredRow:
    value = published_value(row)
    if value is None:
        reason = f"`value` is `{row.text('value')}`, no number above 0 in its `unit`. Write it in digits, as 3500."
        return ScoredRow(row=PublishedRow({**row.cells, "value": ""}), predicted=None, reason=reason)
    row = PublishedRow({**row.cells, "value": str(value)})
    try:
        run = predict_run(row)
    except NotPredictable as reason:
        return ScoredRow(row=row, predicted=None, reason=str(reason))
    return ScoredRow(row=row, predicted=run.value, fits=run.fits, waiting=run.waiting, assumptions=run.assumptions)


def public_rows() -> list[PublishedRow]:
    """The rows that come along."""
    with resources.as_file(resources.files(__package__).joinpath("rows.csv")) as path:
        return read_rows(path)


def rows_of_others(rows: Iterable[PublishedRow], path: Path) -> list[ScoredRow]:
    """The predictions of another planner, a CSV file with the columns `id`, `predicted` and, if it likes, `reason`.

    A row that the file leaves out has no prediction.

    Raises:
        ConfigError: The file is no such table, or names an unknown row, or one twice.
    """
    known = {row.text("id"): row for row in rows}
    scored = {}
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            for cells in csv.DictReader(file):
                predicted = (cells["predicted"] or "").strip()
                row, reason = known[cells["id"]], cells.get("reason") or "no prediction"
                value = float(predicted) if predicted else None
                if cells["id"] in scored or (value is not None and not 0 < value < math.inf):
                    raise ValueError(f"row {cells['id']} is there twice, or {predicted} is no finite number above 0")
                scored[cells["id"]] = ScoredRow(row=row, predicted=value, reason="" if predicted else reason)
    except (OSError, KeyError, ValueError, csv.Error) as error:
        raise ConfigError(f"{path} is no table of predictions: {error!r}. Give `id` and `predicted` as CSV.") from error
    left_out = (ScoredRow(row=row, predicted=None, reason="no prediction") for row in known.values())
    return [scored.get(row.row.text("id"), row) for row in left_out]


def report_json(rows: Iterable[ScoredRow]) -> list[dict[str, Any]]:
    """The rows as a list for JSON."""
    return [_as_json(row) for row in rows]


def _finite(value: float | None) -> float | None:
    return value if value is None or math.isfinite(value) else None  # JSON has no others


def _as_json(row: ScoredRow) -> dict[str, Any]:
    fields: dict[str, Any] = {"id": row.row.text("id"), "published": _finite(row.row.value), "predicted": row.predicted}
    if row.predicted is None:
        return {**fields, "error": None, "reason": row.reason}
    return {**fields, "error": row.error, "fits": row.fits, "assumptions": list(row.assumptions)}


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    options = argparse.ArgumentParser(prog=_PROG, description="Errors of the planner on public training runs.")
    options.add_argument("--rows", type=Path, help="table of runs, CSV; by default the rows that come along")
    options.add_argument("--predictions", type=Path, help="predictions of another planner: CSV with id and predicted")
    options.add_argument("--json", action="store_true", help="print a list of rows with their errors")
    options.add_argument(
        "--certainty", action="store_true", help="print how sure predictions are, with the papers' rows"
    )
    options.add_argument("--worst", type=int, default=10, help="worst rows to print")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code, 0 on success."""
    options = parser().parse_args(arguments)
    try:
        table = public_rows() if options.rows is None else read_rows(options.rows)
        rows = score_rows(table) if options.predictions is None else rows_of_others(table, options.predictions)
    except MiCSError as error:
        print(f"{_PROG}: {error}", file=sys.stderr)
        return 1
    if options.certainty:
        print("\n".join(certainty_lines(rows, validate(read_rows(_PAPERS)))))
    elif options.json:
        print(json.dumps(report_json(rows), indent=1))
    else:
        print("\n".join(score_lines(rows, num_worst=options.worst)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
