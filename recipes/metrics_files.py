"""Metrics of a run as `metrics.jsonl` and `metrics.csv`, which hold the same rows.

A row belongs to an optimizer step and is of one of two kinds: training, or validation. A run that continues from step N
drops the rows above N, because it takes those steps again. A row that exists is replaced. A run from the beginning
starts new files.
"""

import csv
import io
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .errors import RecipeError

JSONL, CSV = "metrics.jsonl", "metrics.csv"
VALIDATION_LOSS = "validation_loss"  # column that only rows of validation have
Row = dict[str, float]


class MetricsFiles:
    """The two files of one run.

    Args:
        folder: Output folder; created if it does not exist.
        start_step: Optimizer steps that the run has already taken.

    Attributes:
        rows: Rows of the files, in order.

    Raises:
        RecipeError: The run continues, and the rows of its beginning cannot be read.
    """

    def __init__(self, folder: Path, start_step: int) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.rows: list[Row] = []
        if start_step and (folder / JSONL).is_file():
            self.rows = [row for row in read_rows(folder / JSONL) if row["step"] <= start_step]
        self._keys = {_key(row) for row in self.rows}
        self._columns: list[str] = []
        self._rewrite()

    def append(self, row: Row) -> None:
        """Add a row to both files; it replaces the row of the same kind and step."""
        is_new = _key(row) not in self._keys
        if not is_new:
            self.rows = [other for other in self.rows if _key(other) != _key(row)]
        self.rows.append(row)
        self._keys.add(_key(row))
        if not is_new or not row.keys() <= set(self._columns):
            self._rewrite()
            return
        with (self.folder / JSONL).open("a") as file:
            file.write(_json_lines([row]))
        with (self.folder / CSV).open("a") as file:
            file.write(_csv_lines([row], self._columns))

    def _rewrite(self) -> None:
        self._columns = list(dict.fromkeys(name for row in self.rows for name in row))
        header = _csv_lines([dict(zip(self._columns, self._columns, strict=True))], self._columns) if self.rows else ""
        _replace(self.folder / CSV, header + _csv_lines(self.rows, self._columns))
        _replace(self.folder / JSONL, _json_lines(self.rows))


def read_rows(file: Path) -> list[Row]:
    """Return the rows of a `metrics.jsonl`, without a last line that is incomplete.

    Args:
        file: Path of the file.

    Raises:
        RecipeError: There is no such file, or a line is not a row of metrics.
    """
    if not file.is_file():
        raise RecipeError(f"{file} does not exist. Name the output folder of a run that wrote its metrics there.")
    *lines, rest = file.read_text(errors="replace").split("\n")  # what follows the last line end is incomplete
    rows = [_parse(line, file, number) for number, line in enumerate(lines, 1)]
    if not rest:
        return rows
    try:  # complete but for its line end
        return [*rows, _parse(rest, file, len(lines) + 1)]
    except RecipeError:
        return rows


def _parse(line: str, file: Path, number: int) -> Row:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        raise RecipeError(
            f"Line {number} of {file} was to be a row of metrics, a JSON object with a `step`, but is {line[:60]!r}. "
            "Restore the file, or delete it: a run that continues without it logs its further steps."
        )
    return row


def _key(row: Row) -> tuple[float, bool]:
    return row["step"], VALIDATION_LOSS in row


def _json_lines(rows: Iterable[Row]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _csv_lines(rows: Iterable[dict[str, Any]], columns: Sequence[str]) -> str:
    text = io.StringIO()
    csv.DictWriter(text, columns, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _replace(file: Path, text: str) -> None:
    """Write a file so that a run that is killed leaves the earlier one or this one."""
    draft = file.with_suffix(".draft")
    draft.write_text(text)
    draft.replace(file)
