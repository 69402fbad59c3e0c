"""Choice of the size from which a collective is hierarchical, from timings.

A hierarchical collective (several stages) sends the fewest bytes over slow links. In a flat one, no message waits for
another.

Pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from mics_strategy.comm.route import NEVER

_GROWTH = 4
SIZES_BYTES = tuple(1024 * _GROWTH**step for step in range(10))  # 1 KiB to 256 MiB
POINT_TO_POINT_SIZES_BYTES = SIZES_BYTES[:7]  # to 4 MiB: beyond that, the bytes decide
FLAT, HIERARCHICAL = "flat", "hierarchical"
RUNS = 6  # of each size with each algorithm; the first one warms up
_BUDGET_S = 0.4  # for one collective over one span


@dataclass(frozen=True, slots=True)
class SizeTiming:
    """Times of a collective of one size with each algorithm.

    Attributes:
        full_bytes: Bytes of the full tensor.
        flat_s: Time of the flat algorithm, median of several runs, seconds.
        hierarchical_s: Time of the hierarchical algorithm, median of several runs, seconds.
        winner: The algorithm that is faster in every pair of adjacent runs, `FLAT` or `HIERARCHICAL`; "" for neither.
    """

    full_bytes: int
    flat_s: float
    hierarchical_s: float
    winner: str


def is_next_affordable(timings: Sequence[SizeTiming], num_in_a_row: int) -> bool:
    """Whether timing the next size fits into the time that a job should wait.

    The estimate extrapolates the difference between the last two sizes, which grows with the bytes; latency does not.

    Args:
        timings: Timings by growing size.
        num_in_a_row: Collectives in each run.
    """
    if not timings:
        return True
    last, previous = timings[-1], timings[-2 if len(timings) > 1 else -1]
    spent_s = sum(timing.flat_s + timing.hierarchical_s for timing in timings)
    flat_s = last.flat_s + _GROWTH * max(0.0, last.flat_s - previous.flat_s)
    hierarchical_s = last.hierarchical_s + _GROWTH * max(0.0, last.hierarchical_s - previous.hierarchical_s)
    return RUNS * num_in_a_row * (spent_s + flat_s + hierarchical_s) <= _BUDGET_S


def threshold_bytes(timings: Sequence[SizeTiming], *, flat_in_doubt: bool) -> int:
    """The size from which a collective is hierarchical.

    The waits between messages do not grow with the size, the bytes on inter-node links do. So once the hierarchical
    algorithm is worth its messages, it stays so.

    Args:
        timings: Timings by growing size.
        flat_in_doubt: Whether the flat algorithm is chosen where neither is plainly faster. NCCL's ring enters a node
            once, so it sends about as few bytes between nodes, and keeps the links inside and between them busy at
            once. Where a flat collective sends every row from rank to rank, the hierarchical one sends the fewest.

    Returns:
        Bytes of the full tensor: 0 for any size, `NEVER` for none.
    """
    if flat_in_doubt:
        largest = itertools.takewhile(lambda timing: timing.winner == HIERARCHICAL, reversed(timings))
        return min((timing.full_bytes for timing in largest), default=NEVER)
    for position, timing in enumerate(timings):
        if timing.winner != FLAT:
            return timing.full_bytes if position else 0
    return timings[-1].full_bytes + 1 if timings else 0
