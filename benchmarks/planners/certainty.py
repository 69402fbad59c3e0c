"""How sure predictions are: errors of rows by the share of the step that waits for collectives.

Rows are the held-out ones of the public runs, and the throughputs that the four papers state, without those that
calibrate. `mics_strategy/planner/certainty.py` has the answer as constants.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from benchmarks.papers.validate import ValidatedRow
from benchmarks.planners.scores import ScoredRow, same_runs
from mics_strategy.planner.certainty import CERTAINTIES
from mics_strategy.text_table import text_table


def errors_by_waiting(runs: Iterable[ScoredRow], papers: Iterable[ValidatedRow]) -> list[list[float]]:
    """Absolute errors of the rows of each kind of `CERTAINTIES`, smallest first."""
    known = [(row.waiting, row.error) for row in runs if row.half == "held out"]
    for row in papers:
        if row.predicted is not None and not row.predicted.is_calibration:
            known.append((row.predicted.waiting, row.error))
    bounds = (0.0, *(kind.waiting_below for kind in CERTAINTIES))
    return [
        sorted(abs(error) for share, error in known if share is not None and error is not None and low <= share < high)
        for low, high in pairwise(bounds)
    ]


def errors_of_pairs(runs: Iterable[ScoredRow]) -> list[float]:
    """Errors of the ratios of two held-out runs that differ in neither model, device nor ranks, smallest first."""
    pairs = (pair for pair in same_runs(row for row in runs if row.half == "held out" and row.error is not None))
    return sorted(abs((1 + (one.error or 0)) / (1 + (other.error or 0)) - 1) for one, other in pairs)


def within(errors: Sequence[float], share: float) -> float:
    """The error that so large a share of the rows does not exceed."""
    return errors[math.ceil(share * len(errors)) - 1]


def certainty_lines(runs: Sequence[ScoredRow], papers: Iterable[ValidatedRow]) -> Iterator[str]:
    """The errors as text."""
    table: list[tuple[str, ...]] = [("step that waits", "rows", "half within", "8 of 10 within", "worst")]
    for kind, errors in zip(CERTAINTIES, errors_by_waiting(runs, papers), strict=True):
        quantiles = (f"{within(errors, share):.1%}" for share in (0.5, 0.8, 1))
        table.append((f"below {min(1.0, kind.waiting_below):.0%}", str(len(errors)), *quantiles))
    pairs = errors_of_pairs(runs)
    table.append(("ratio of two", str(len(pairs)), *(f"{within(pairs, share):.1%}" for share in (0.5, 0.8, 1))))
    yield from text_table(table, num_left=1)
