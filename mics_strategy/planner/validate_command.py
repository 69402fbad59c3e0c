"""The command ``mics validate``: published results beside predictions."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from mics_strategy.errors import MiCSError
from mics_strategy.planner.published.row import read_rows
from mics_strategy.planner.validate import report_json, report_lines, validate


def parser() -> argparse.ArgumentParser:
    """Make the parser of the command's options."""
    options = argparse.ArgumentParser(prog="mics validate", description="Compares predictions with published results.")
    options.add_argument("--rows", type=Path, required=True, help="table of published results, CSV")
    options.add_argument("--json", action="store_true", help="print JSON, with all assumptions and reasons")
    options.add_argument("--brief", action="store_true", help="leave out assumptions and reasons")
    return options


def main(arguments: Sequence[str]) -> int:
    """Run the command; return its exit code, 0 on success."""
    options = parser().parse_args(arguments)
    try:
        rows = validate(read_rows(options.rows))
    except MiCSError as error:
        print(f"mics validate: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(report_json(rows), indent=1))
    else:
        print("\n".join(report_lines(rows, has_assumptions=not options.brief)))
    return 0
