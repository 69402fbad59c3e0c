"""Tables of rows that go through the stages of a collective in pieces.

A full tensor is a table with one row for each rank, by its index. The ranks of one stage have rows at a distance of
`Route.strides`, and before stage k of an all-gather a rank has `strides[k]` adjacent rows, of the stages before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from mics_strategy.comm.algorithms import Completion


@dataclass(frozen=True, slots=True)
class PieceTable:
    """Adjacent rows, all cut into the same chunks. A piece is one chunk of one row.

    Attributes:
        values: [rows, n], contiguous.
        chunks: Start and end of each chunk in a row.
        ranks_per_row: Ranks that have a share of each row.
        residual: [rows, n] fp32, what earlier encodings of the rows have lost; None without feedback.
        scratch: [n] fp32, for differences of a chunk; None unless the rows are payloads of them.
    """

    values: torch.Tensor
    chunks: list[tuple[int, int]]
    ranks_per_row: int = 1
    residual: torch.Tensor | None = None
    scratch: torch.Tensor | None = None

    def piece(self, row: int, chunk: int) -> torch.Tensor:
        """The piece as a view."""
        start, end = self.chunks[chunk]
        return self.values[row, start:end]

    def residual_piece(self, row: int, chunk: int) -> torch.Tensor | None:
        """The residual of a piece as a view; None without feedback."""
        start, end = self.chunks[chunk]
        return None if self.residual is None else self.residual[row, start:end]

    def pieces_of(self, row: int) -> list[tuple[int, int]]:
        """All pieces of one row."""
        return [(row, chunk) for chunk in range(len(self.chunks))]


def nothing() -> None:
    """The completion of data that is there already."""


def finish_all(started: list[Completion]) -> None:
    """The completion of several stages."""
    for finish in started:
        finish()
