"""Choice of the replica that writes each item of a checkpoint.

The choice depends only on names and sizes, so it needs no communication: all ranks that hold the same items compute the
same writers, and each writes about the same number of bytes.

Pure.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReplicaId:
    """Position of a rank among the ranks with equal copies: number `index` of `count`."""

    index: int
    count: int


SOLE = ReplicaId(0, 1)


@dataclass(frozen=True, slots=True)
class SaveItem:
    """One tensor shard or object of a checkpoint, which exactly one rank writes.

    Attributes:
        name: Name of the item, unique on a rank and equal on all ranks that hold the item.
        num_bytes: Size of the data in bytes; 0 if unknown.
        replica: Index of this rank's copy among the equal ones.
    """

    name: str
    num_bytes: int
    replica: ReplicaId


def items_to_write(items: Iterable[SaveItem]) -> set[str]:
    """Return the names of the items that this rank writes.

    Items are assigned largest first, each to the copy with the fewest bytes so far. Among copies with equally few bytes
    the checksum of the name decides, which also spreads items of unknown size. No copy writes more than an equal share
    plus one item.

    Args:
        items: All items that this rank holds. Ranks with other copies of an item hold the same items with the same
            number of copies.
    """
    names: set[str] = set()
    loads: dict[int, list[int]] = {}  # by the number of copies
    for item in sorted(items, key=lambda item: (-item.num_bytes, item.name)):
        load = loads.setdefault(item.replica.count, [0] * item.replica.count)
        first = zlib.crc32(item.name.encode()) % item.replica.count
        writer = min(range(len(load)), key=lambda copy: (load[copy], (copy - first) % len(load)))
        load[writer] += item.num_bytes
        if writer == item.replica.index:
            names.add(item.name)
    return names
