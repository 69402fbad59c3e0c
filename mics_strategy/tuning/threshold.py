"""From which size on does a collective go in two stages, and from which should it?

In two stages it sends the fewest bytes over slow links; directly, no message waits for another.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mics_strategy.topology import Span

TunableCollective = tuple[str, Span]  # a collective over ranks of several nodes, several of them in a node
_GROWTH = 4
SIZES_BYTES = tuple(1024 * _GROWTH**step for step in range(7))  # 1 KiB to 4 MiB
RUNS = 6  # of each size in each way; the first is to warm up
_BUDGET_S = 0.4  # for one collective over one span


@dataclass(frozen=True, slots=True, kw_only=True)
class HierarchicalThreshold:
    """From how many bytes of the whole tensor on a collective goes in two stages; a smaller one goes directly.

    Attributes:
        from_bytes: Where `measured` says nothing. 0: all go in two stages.
        measured: What a calibration has found.
        is_untuned: Whether a job may measure what is not measured yet.
    """

    from_bytes: int = 0
    measured: tuple[tuple[TunableCollective, int], ...] = ()
    is_untuned: bool = False

    def for_collective(self, collective: TunableCollective) -> int:
        """The bytes for one collective over one span."""
        return dict(self.measured).get(collective, self.from_bytes)


@dataclass(frozen=True, slots=True)
class SizeTiming:
    """How long a collective of one size takes in each way.

    Attributes:
        full_bytes: Of the whole tensor.
        flat_s: Median of several runs.
        hierarchical_s: The same.
        is_flat_faster: In every run, compared with the one beside it of the other way.
    """

    full_bytes: int
    flat_s: float
    hierarchical_s: float
    is_flat_faster: bool


def is_next_affordable(timings: Sequence[SizeTiming]) -> bool:
    """Whether the next size still fits into the time that a job should wait.

    What a size takes longer than the one before grows with the bytes; latency does not.
    """
    if not timings:
        return True
    last, before = timings[-1], timings[-2 if len(timings) > 1 else -1]
    spent_s = sum(timing.flat_s + timing.hierarchical_s for timing in timings)
    directly_s = last.flat_s + _GROWTH * max(0.0, last.flat_s - before.flat_s)
    in_two_stages_s = last.hierarchical_s + _GROWTH * max(0.0, last.hierarchical_s - before.hierarchical_s)
    return RUNS * (spent_s + directly_s + in_two_stages_s) <= _BUDGET_S


def threshold_bytes(timings: Sequence[SizeTiming]) -> int:
    """The smallest size at which it is not plain that the direct way is faster.

    What a message waits for does not grow with the size, what crosses slow links does: once they are worth it, two
    stages stay so. In doubt they are taken, since they send the fewest bytes over slow links.

    Args:
        timings: With growing sizes.

    Returns:
        Bytes of the whole tensor; 0 where two stages are never plainly slower.
    """
    for place, timing in enumerate(timings):
        if not timing.is_flat_faster:
            return timing.full_bytes if place else 0
    return timings[-1].full_bytes + 1 if timings else 0
