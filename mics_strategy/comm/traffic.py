"""Bytes that one rank sends in a collective: closed formulas, and a log of what was really submitted.

Plans are priced with the formulas. Every collective of the training loop is recorded in a `TrafficLog` when it is
submitted, from the tensors that were really passed, with one entry for each stage. Tests compare the two.

Pure.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch

ALL_GATHER = "all_gather"
REDUCE_SCATTER = "reduce_scatter"
ALL_REDUCE = "all_reduce"
ALL_TO_ALL = "all_to_all"  # with pieces of any sizes: a rank sends what it holds for others


def all_gather_bytes(full_bytes: int, size: int) -> int:
    """Bytes sent per rank by an all-gather of `full_bytes` over `size` ranks.

    Source:
        MiCS (arXiv:2205.00119) section 3.3, ``(p - 1) M / p``.
    """
    return full_bytes // size * (size - 1)


def reduce_scatter_bytes(full_bytes: int, size: int) -> int:
    """Bytes sent per rank by a reduce-scatter of `full_bytes` over `size` ranks.

    Source:
        MiCS (arXiv:2205.00119) section 3.4, ``(p - 1) M / p``.
    """
    return full_bytes // size * (size - 1)


def all_reduce_bytes(full_bytes: int, size: int) -> int:
    """Bytes sent per rank by a ring all-reduce of `full_bytes`, rounded down.

    Source:
        AMSP (arXiv:2311.00257), cost of a ring all-reduce, ``2 (p - 1) v / p``.
    """
    return 2 * full_bytes * (size - 1) // size


SENT_BYTES = {ALL_GATHER: all_gather_bytes, REDUCE_SCATTER: reduce_scatter_bytes, ALL_REDUCE: all_reduce_bytes}


@dataclass(frozen=True, slots=True)
class CollectiveTraffic:
    """One stage of a collective, and the bytes that this rank sends.

    Attributes:
        collective: Name of the collective: "all_gather", "reduce_scatter", "all_reduce" or "all_to_all".
        axis: Names of the mesh axes that it spans.
        size: Ranks that take part.
        dtype: Dtype on the wire.
        full_bytes: Bytes of the full tensor.
        sent_bytes: Bytes that this rank sends.
    """

    collective: str
    axis: str
    size: int
    dtype: torch.dtype
    full_bytes: int
    sent_bytes: int


@dataclass(slots=True)
class TrafficLog:
    """The collectives issued since the log was last drained, with their counts."""

    entries: Counter[CollectiveTraffic] = field(default_factory=Counter)

    def record(self, collective: str, axis: str, size: int, dtype: torch.dtype, full_bytes: int) -> None:
        """Record one collective whose full tensor has `full_bytes`."""
        sent_bytes = SENT_BYTES[collective](full_bytes, size)
        self.entries[CollectiveTraffic(collective, axis, size, dtype, full_bytes, sent_bytes)] += 1

    def record_all_to_all(self, axis: str, size: int, full: torch.Tensor, kept_numel: int) -> None:
        """Record an all-to-all of `full`, of which this rank keeps `kept_numel` elements."""
        full_bytes, sent_bytes = full.numel() * full.itemsize, (full.numel() - kept_numel) * full.itemsize
        self.entries[CollectiveTraffic(ALL_TO_ALL, axis, size, full.dtype, full_bytes, sent_bytes)] += 1

    def drain(self) -> Counter[CollectiveTraffic]:
        """Return the entries so far, and empty the log."""
        entries, self.entries = self.entries, Counter()
        return entries
