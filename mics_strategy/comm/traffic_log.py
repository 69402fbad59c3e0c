"""What has been handed to the transport?

Every collective of the training loop is written into a `TrafficLog` when it is asked for, from the tensors that were
really passed, one entry for each stage.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch

from mics_strategy.comm import traffic


@dataclass(frozen=True, slots=True)
class IssuedCollective:
    """One issued collective: what, over which axis, in which dtype, and the bytes that this rank sends."""

    collective: str
    axis: str
    size: int
    dtype: torch.dtype
    full_bytes: int
    sent_bytes: int


@dataclass(slots=True)
class TrafficLog:
    """The collectives issued since it was last emptied, with their number."""

    entries: Counter[IssuedCollective] = field(default_factory=Counter)

    def record(self, collective: str, axis: str, size: int, dtype: torch.dtype, full_bytes: int) -> None:
        """Record one collective whose full tensor has `full_bytes`."""
        sent = traffic.SENT_BYTES[collective](full_bytes, size)
        self.entries[IssuedCollective(collective, axis, size, dtype, full_bytes, sent)] += 1

    def record_all_to_all(self, axis: str, size: int, full: torch.Tensor, kept_numel: int) -> None:
        """Record an all-to-all of `full`, of which this rank keeps `kept_numel` elements."""
        full_bytes, sent = full.numel() * full.itemsize, (full.numel() - kept_numel) * full.itemsize
        self.entries[IssuedCollective(traffic.ALL_TO_ALL, axis, size, full.dtype, full_bytes, sent)] += 1

    def drain(self) -> Counter[IssuedCollective]:
        """The entries so far; the traffic_log starts again empty."""
        entries, self.entries = self.entries, Counter()
        return entries
