"""Reports on the terminal: sections of lines and tables.

They are printed with rich or as plain text, with the same words. Rich is used where it is installed and the output is a
terminal; it wraps cells that are too wide.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from mics_strategy.text_table import text_table


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One part of a report.

    Attributes:
        title: Title; empty for none.
        rows: Cells of a table, the header's first; none for no table.
        num_left: Columns of the table that are aligned to the left.
        lines: Lines below the table.
    """

    title: str = ""
    rows: tuple[tuple[str, ...], ...] = ()
    num_left: int = 0
    lines: tuple[str, ...] = ()


def report_text(sections: Sequence[Section]) -> str:
    """Sections as plain text, with an empty line between them."""
    return "\n\n".join("\n".join(_section_lines(section)) for section in sections)


def _section_lines(section: Section) -> list[str]:
    title = [f"{section.title}:"] if section.title else []
    return [*title, *(text_table(section.rows, num_left=section.num_left) if section.rows else ()), *section.lines]


def print_report(sections: Sequence[Section], output: TextIO) -> None:
    """Print sections, with rich where it is installed and `output` is a terminal."""
    if output.isatty() and importlib.util.find_spec("rich") is not None:
        print_rich(sections, output)
    else:
        print(report_text(sections), file=output)


def print_rich(sections: Sequence[Section], output: TextIO, width: int | None = None) -> None:
    """Print sections with rich.

    Args:
        sections: Sections.
        output: File to print to.
        width: Columns of the terminal; None for those that it has.
    """
    console: Any = importlib.import_module("rich.console").Console(file=output, width=width, highlight=False)
    make_table: Any = importlib.import_module("rich.table").Table
    for number, section in enumerate(sections):
        if number:
            console.print()
        if section.title:
            console.print(f"{section.title}:", style="bold", markup=False)
        if section.rows:
            table = make_table(box=importlib.import_module("rich.box").SIMPLE_HEAD, pad_edge=False)
            for position, name in enumerate(section.rows[0]):
                table.add_column(name, justify="left" if position < section.num_left else "right", overflow="fold")
            for row in section.rows[1:]:
                table.add_row(*(importlib.import_module("rich.text").Text(cell) for cell in row))
            console.print(table)
        for line in section.lines:
            console.print(line, markup=False, soft_wrap=False)
