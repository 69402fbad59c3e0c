"""What has been handed to the transport?

Every collective of the training loop is written into a `Ledger` when it is asked for, from the tensors that were really
passed, one entry for each stage.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch

from mics_strategy.collectives import traffic


@dataclass(frozen=True, slots=True)
class Sent:
    """One issued collective: what, over which axis, in which dtype, and the bytes that this rank sends."""

    collective: str
    axis: str
    ranks: int
    dtype: torch.dtype
    full_bytes: int
    sent_bytes: int


@dataclass(slots=True)
class Ledger:
    """The collectives issued since it was last emptied, with their number."""

    entries: Counter[Sent] = field(default_factory=Counter)

    def write(self, collective: str, axis: str, ranks: int, dtype: torch.dtype, full_bytes: int) -> None:
        """Record one collective whose full tensor has `full_bytes`."""
        sent = traffic.SENT_BYTES[collective](full_bytes, ranks)
        self.entries[Sent(collective, axis, ranks, dtype, full_bytes, sent)] += 1

    def write_exchange(self, axis: str, ranks: int, full: torch.Tensor, kept_numel: int) -> None:
        """Record an all-to-all of `full`, of which this rank keeps `kept_numel` elements."""
        full_bytes, sent = full.numel() * full.itemsize, (full.numel() - kept_numel) * full.itemsize
        self.entries[Sent(traffic.ALL_TO_ALL, axis, ranks, full.dtype, full_bytes, sent)] += 1

    def take(self) -> Counter[Sent]:
        """The entries so far; the ledger starts again empty."""
        entries, self.entries = self.entries, Counter()
        return entries
