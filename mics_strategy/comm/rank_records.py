"""What ranks of a job have done on sharded tensors, for the comparison in every optimizer step."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from mics_strategy.comm.desync import CollectiveFingerprint


class RankRecords:
    """Records of what this rank has done together with others, or alike, since the last model was made.

    Args:
        rank: Rank of this process.

    Attributes:
        moment: Number of optimizer steps and of reductions of gradients.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._fingerprints: dict[tuple[tuple[int, ...], bool], CollectiveFingerprint] = {}
        self._common_values: torch.Tensor | None = None
        self.moment = 0

    def record(self, label: str, ranks: Sequence[int], *, is_ordered: bool = True) -> None:
        """Add a collective, or what ranks do alike, to the fingerprint of its ranks.

        Args:
            label: Its payload; the same on all ranks.
            ranks: Its ranks, of which this is one, in the same order on all.
            is_ordered: See `CollectiveFingerprint`.
        """
        key = tuple(ranks), is_ordered
        if key not in self._fingerprints:
            index = ranks.index(self._rank)
            self._fingerprints[key] = CollectiveFingerprint(ranks=key[0], index=index, is_ordered=is_ordered)
        self._fingerprints[key].update(label)

    @property
    def fingerprints(self) -> dict[str, CollectiveFingerprint]:
        """Fingerprints of what was recorded since the last model was made, by name."""
        return {
            f"{'operations' if is_ordered else 'writes and steps'} of ranks {_short(ranks)}": fingerprint
            for (ranks, is_ordered), fingerprint in self._fingerprints.items()
        }

    def begin_model(self) -> None:
        """Forget what ranks recorded for other models: after an error they may differ, and make a new one."""
        self._fingerprints.clear()
        self._common_values = None
        self.moment = 0

    def compare(self, value: torch.Tensor) -> None:
        """Let the next step of a model compare a digest, an int64 scalar. The order of such calls does not matter."""
        known = self._common_values
        self._common_values = value if known is None else known.to(value.device) + value

    def take_common(self) -> torch.Tensor | None:
        """The sum of the digests since the last reduction of gradients of any model, for a new one."""
        self.moment += 1
        common, self._common_values = self._common_values, None
        return common


def _short(ranks: Sequence[int]) -> str:
    """Ranks as text, another one for others."""
    text = ", ".join(map(str, ranks))
    return text if len(ranks) <= 8 else f"{ranks[0]} to {ranks[-1]} ({zlib.crc32(text.encode()):08x})"
