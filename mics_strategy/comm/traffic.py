"""Closed formulas for the bytes that one rank sends in a collective.

Plans are priced with these numbers. The executor counts the tensors that it really passes to the transport, and tests
compare the two.

Pure.
"""

from __future__ import annotations

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
