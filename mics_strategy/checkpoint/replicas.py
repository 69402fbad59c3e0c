"""Which rank writes which piece, when several ranks hold the same?

Names and sizes of the pieces say it, so nobody has to ask: all ranks that hold the same pieces compute the same
writers, each of whom gets about the same number of bytes.

Pure.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReplicaId:
    """Which of several equal copies a rank holds: number `index` of `count`."""

    index: int
    count: int


SOLE = ReplicaId(0, 1)


@dataclass(frozen=True, slots=True)
class SaveItem:
    """Something that is written once.

    Attributes:
        name: The same on all ranks that hold it, and that of no other piece they hold.
        num_bytes: Of its data; 0 where that is not known.
        replica: Which of the equal copies this rank holds.
    """

    name: str
    num_bytes: int
    replica: ReplicaId


def items_to_write(pieces: Iterable[SaveItem]) -> set[str]:
    """The names of the pieces that this rank writes.

    The largest go first, each to the copy that has least so far; of those with equally little, the name's checksum
    chooses, so that pieces of unknown size are spread as well. No copy gets more than an equal share and one piece.

    Args:
        pieces: All that this rank holds. Ranks with other copies of a piece hold the same ones of as many copies.
    """
    mine: set[str] = set()
    loads: dict[int, list[int]] = {}  # by the number of copies
    for piece in sorted(pieces, key=lambda piece: (-piece.num_bytes, piece.name)):
        load = loads.setdefault(piece.replica.count, [0] * piece.replica.count)
        first = zlib.crc32(piece.name.encode()) % piece.replica.count
        writer = min(range(len(load)), key=lambda copy: (load[copy], (copy - first) % len(load)))
        load[writer] += piece.num_bytes
        if writer == piece.replica.index:
            mine.add(piece.name)
    return mine
