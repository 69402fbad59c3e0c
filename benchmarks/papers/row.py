"""One row of a table of published results, read as far as it states something.

The columns are those of `COLUMNS`; more may be there. Cells of numbers may have units, notes in parentheses and ranges
around the number; what has no number counts as not stated.

Pure.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mics_strategy.errors import ConfigError

COLUMNS = (
    *("id", "paper", "system", "baseline", "model", "params", "layers", "hidden", "heads", "vocab", "seq_len"),
    *("gpu_type", "gpus_per_node", "nodes", "total_gpus", "interconnect_inter", "micro_batch", "global_batch"),
    *("grad_accum_steps", "partition_config", "activation_ckpt", "precision", "metric", "value", "unit"),
)
REQUIRED = ("system", "metric", "value", "unit")
_YES, _NO = ("y", "yes", "true", "full", "all"), ("n", "no", "false", "none", "off")
_MAX_COUNT = 10**7  # no cluster, batch or model of a paper has more of anything
_SCALES = {"": 1.0, "k": 1024.0, "m": 2.0**20}  # of tokens: 4M is 4 x 2^20, 1K is 1024


@dataclass(frozen=True, slots=True)
class PublishedRow:
    """One published result.

    Attributes:
        cells: Cells by column, stripped; columns that the table lacks are empty.
    """

    cells: Mapping[str, str]

    def text(self, column: str) -> str:
        """A cell."""
        return self.cells.get(column, "")

    def words(self, column: str) -> str:
        """A cell in lower case."""
        return self.text(column).lower()

    def number(self, column: str) -> float | None:
        """The first number of a cell, without its unit; None where it states none."""
        match = re.search(r"\d[\d,]*\.?\d*(?:e[+-]?\d+)?", self.words(column))
        return float(match[0].replace(",", "")) if match else None

    def count(self, column: str) -> int | None:
        """A cell that is a whole number from 1 to `_MAX_COUNT`; None where it states none."""
        number = self.number(column)
        return int(number) if number is not None and 1 <= number <= _MAX_COUNT and number == int(number) else None

    @property
    def value(self) -> float | None:
        """The published value; None where the cell is no number."""
        try:
            return float(self.text("value").rstrip("Mx%"))
        except ValueError:
            return None

    @property
    def ranks_per_node(self) -> int | None:
        """Ranks of a node."""
        ranks, nodes, total = (self.count(name) for name in ("gpus_per_node", "nodes", "total_gpus"))
        return total // nodes if ranks is None and total and nodes else ranks

    @property
    def world_size(self) -> int | None:
        """Ranks of the job."""
        ranks, nodes, total = (self.count(name) for name in ("gpus_per_node", "nodes", "total_gpus"))
        return nodes * ranks if total is None and nodes and ranks else total

    @property
    def recomputes(self) -> bool | None:
        """Whether activations are recomputed."""
        word = self.words("activation_ckpt")
        return True if word in _YES else False if word in _NO else None

    def tokens(self, column: str) -> int | None:
        """Tokens of a batch, as in "1 (4096 tokens)" or "4M tokens"; None for samples."""
        match = re.search(r"([\d.]+)\s*([km]?)\s*tokens", self.words(column))
        return round(float(match[1]) * _SCALES[match[2]]) if match else None

    @property
    def node_bytes_per_s(self) -> float | None:
        """Bytes per second of a node's adapters, as `interconnect_inter` states them.

        A "b" is a bit, a "B" a byte.
        """
        match = re.search(r"(\d[\d.]*)\s*([MGT])(b|B)(?:ps|it/s|/s)", self.text("interconnect_inter"))
        if match is None:
            return None
        return float(match[1]) * {"M": 1e6, "G": 1e9, "T": 1e12}[match[2]] / {"b": 8, "B": 1}[match[3]]

    @property
    def num_parameters(self) -> float | None:
        """Parameters by the model's name or the column `params`."""
        for column in ("params", "model"):
            match = re.search(r"(?<![\w.-])(?:[a-z]+-)?(\d+(?:\.\d+)?)\s*([bm])\b(?!\s*-\s*\d)", self.words(column))
            if match:
                return float(match[1]) * {"b": 1e9, "m": 1e6}[match[2]]
        return None


def read_rows(path: Path) -> list[PublishedRow]:
    """Read a table of published results.

    Raises:
        ConfigError: The file does not exist, is no table, or lacks a column without which no row says anything.
    """
    if not path.is_file():
        raise ConfigError(f"`{path}` is no file. Give a table of published results as CSV.")
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            missing = [name for name in REQUIRED if name not in (reader.fieldnames or ())]
            if missing:
                raise ConfigError(
                    f"{path} has no column {', '.join(missing)}. Use the columns {', '.join(COLUMNS)}; others may be "
                    "left empty or out."
                )
            return [
                PublishedRow({k: (v or "").strip() for k, v in row.items() if isinstance(k, str)}) for row in reader
            ]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path} is not a table in CSV: {error}. Save it as comma-separated UTF-8.") from error
