"""Tables as plain text.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence


def text_table(rows: Sequence[Sequence[str]], *, num_left: int) -> list[str]:
    """Lines of a table whose columns are as wide as their longest cell.

    Args:
        rows: Cells of each row, the header's first; all rows are equally long.
        num_left: Columns that are aligned to the left; the others are numbers, aligned to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if position < num_left else cell.rjust(width)
            for position, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
