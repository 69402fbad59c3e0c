"""Which rank writes which piece, when several ranks hold the same?

The name of a piece says it, so nobody has to ask: every rank that holds a copy computes the same writer. Pieces of
different names go to different copies, so replicas share the work.

Pure.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Copy:
    """Which of several equal copies a rank holds: number `index` of `count`."""

    index: int
    count: int

    def writes(self, name: str) -> bool:
        """Whether this copy is the one that is written.

        Args:
            name: Of the tensor or object, the same on all ranks.
        """
        return zlib.crc32(name.encode()) % self.count == self.index


ONLY = Copy(0, 1)
