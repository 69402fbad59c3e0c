"""Issued and planned traffic of one optimizer step, side by side.

Pure.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from mics_strategy.comm.traffic import StageTraffic
from mics_strategy.engine.plan import Plan
from mics_strategy.text_table import text_table


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficRow:
    """One kind of collective over one axis in one optimizer step. Bytes are those that this rank sends."""

    axis: str
    collective: str
    planned_count: int
    count: int
    planned_bytes: int
    sent_bytes: int


class TrafficRows(tuple[TrafficRow, ...]):
    """Rows that are printed as a table."""

    __slots__ = ()

    def __str__(self) -> str:
        """One line for each row, below a header."""
        rows = [("axis", "collective", "calls", "planned B", "sent B")]
        rows += [(r.axis, r.collective, f"{r.count}", f"{r.planned_bytes:,}", f"{r.sent_bytes:,}") for r in self]
        return "\n".join(text_table(rows, num_left=2))


def compare(plan: Plan, issued: Counter[StageTraffic]) -> TrafficRows:
    """The planned and the issued traffic of a step, by axis and collective.

    Args:
        plan: Plan of the step.
        issued: Collectives that were issued in the step, with their counts.
    """
    planned_count: Counter[tuple[str, str]] = Counter()
    planned_bytes: Counter[tuple[str, str]] = Counter()
    for planned in plan.collectives:
        planned_count[planned.axis, planned.collective] += 1
        planned_bytes[planned.axis, planned.collective] += planned.sent_bytes
    count: Counter[tuple[str, str]] = Counter()
    sent_bytes: Counter[tuple[str, str]] = Counter()
    for entry, times in issued.items():
        count[entry.axis, entry.collective] += times
        sent_bytes[entry.axis, entry.collective] += times * entry.sent_bytes
    keys = dict.fromkeys([*planned_count, *count])
    return TrafficRows(
        TrafficRow(
            axis=axis,
            collective=collective,
            planned_count=planned_count[axis, collective],
            count=count[axis, collective],
            planned_bytes=planned_bytes[axis, collective],
            sent_bytes=sent_bytes[axis, collective],
        )
        for axis, collective in keys
    )
