"""Choice of the size from which a collective is hierarchical, from timings.

A hierarchical collective (several stages) sends the fewest bytes over slow links. In a flat one, no message waits for
another.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_GROWTH = 4
SIZES_BYTES = tuple(1024 * _GROWTH**step for step in range(7))  # 1 KiB to 4 MiB
RUNS = 6  # of each size with each algorithm; the first one warms up
_BUDGET_S = 0.4  # for one collective over one span


@dataclass(frozen=True, slots=True)
class SizeTiming:
    """Times of a collective of one size with each algorithm.

    Attributes:
        full_bytes: Bytes of the full tensor.
        flat_s: Time of the flat algorithm, median of several runs, seconds.
        hierarchical_s: Time of the hierarchical algorithm, median of several runs, seconds.
        is_flat_faster: Whether the flat algorithm is faster in every pair of adjacent runs.
    """

    full_bytes: int
    flat_s: float
    hierarchical_s: float
    is_flat_faster: bool


def is_next_affordable(timings: Sequence[SizeTiming]) -> bool:
    """Whether timing the next size fits into the time that a job should wait.

    The estimate extrapolates the difference between the last two sizes, which grows with the bytes; latency does not.
    """
    if not timings:
        return True
    last, previous = timings[-1], timings[-2 if len(timings) > 1 else -1]
    spent_s = sum(timing.flat_s + timing.hierarchical_s for timing in timings)
    flat_s = last.flat_s + _GROWTH * max(0.0, last.flat_s - previous.flat_s)
    hierarchical_s = last.hierarchical_s + _GROWTH * max(0.0, last.hierarchical_s - previous.hierarchical_s)
    return RUNS * (spent_s + flat_s + hierarchical_s) <= _BUDGET_S


def threshold_bytes(timings: Sequence[SizeTiming]) -> int:
    """The smallest size at which the flat algorithm is not clearly faster.

    The waits between messages do not grow with the size, the bytes on inter-node links do. So once the hierarchical
    algorithm is worth its messages, it stays so. It is also chosen in doubt, since it sends the fewest bytes over
    inter-node links.

    Args:
        timings: Timings by growing size.

    Returns:
        Bytes of the full tensor; 0 where the hierarchical algorithm is never clearly slower.
    """
    for position, timing in enumerate(timings):
        if not timing.is_flat_faster:
            return timing.full_bytes if position else 0
    return timings[-1].full_bytes + 1 if timings else 0
