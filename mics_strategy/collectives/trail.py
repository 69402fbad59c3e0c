"""Were all ranks of a group asked for the same collectives, in the same order?

A rank that runs other units than its peers starts other collectives. Where the sizes agree the transport does not
notice, and a unit is filled with the parameters of another one. So each group keeps a trail, and one number per rank,
sent along with something that travels anyway, tells whether the trails of all groups agree.

Pure.
"""

from __future__ import annotations

import zlib
from collections import deque
from dataclasses import dataclass, field

STEPS = "optimizer steps"  # name of the trail that counts them
_MODULUS = (1 << 18) - 5  # the balances of a thousand ranks fit into 32 bits


@dataclass(slots=True, kw_only=True)
class CollectiveFingerprint:
    """What one group was asked for, as this rank knows it.

    Attributes:
        ranks: Of the group.
        index: Which of them this is.
        count: Collectives so far.
        recent: What the last of them moved.
    """

    ranks: tuple[int, ...]
    index: int
    count: int = 0
    recent: deque[str] = field(default_factory=lambda: deque(maxlen=256))
    _hash: int = 0

    def update(self, what: str) -> None:
        """The group is asked to move `what`."""
        self.count += 1
        self.recent.append(what)
        self._hash = zlib.crc32(what.encode(), self._hash)

    @property
    def digest(self) -> int:
        """Adds up to 0 over the ranks of the group when their trails agree; else but for 1 case in 250,000 not."""
        own = self._hash % _MODULUS
        return own * (len(self.ranks) - 1) if self.index == 0 else -own

    def describe(self, place: int) -> str:
        """What the collective number `place` has moved."""
        start = self.count - len(self.recent)
        if place >= self.count:
            return "nothing"
        return f"`{self.recent[place - start]}`" if place >= start else "something long ago"


def first_mismatch(fingerprints: list[dict[str, CollectiveFingerprint]]) -> str:
    """Where two ranks of a group have parted, in words.

    Args:
        fingerprints: By rank, then by name.
    """
    counts = [of_rank[STEPS].count if STEPS in of_rank else 0 for of_rank in fingerprints]
    fewest, most = counts.index(min(counts)), counts.index(max(counts))
    if fewest != most:
        return (
            f"rank {fewest} has run {counts[fewest]} optimizer steps and rank {most} {counts[most]}. A rank without a "
            "loss, as of an empty batch, must run a backward, too: of a loss that is zero, as by `(outputs.sum() * "
            "0).backward()`"
        )
    for rank, own in enumerate(fingerprints):
        for name, trail in own.items():
            first = fingerprints[trail.ranks[0]][name]
            start = max(0, first.count - len(first.recent), trail.count - len(trail.recent))
            for place in range(start, max(first.count, trail.count)):
                if first.describe(place) != trail.describe(place):
                    return (
                        f"as transfer {place} of {name}, rank {first.ranks[0]} moved {first.describe(place)} and "
                        f"rank {rank} moved {trail.describe(place)}"
                    )
    return "they parted more transfers ago than are kept"
