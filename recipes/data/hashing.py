"""Random numbers as a function of counters: the same in any order, on any rank, on any machine."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

UInt64Array = npt.NDArray[np.uint64]
_MASK64 = 2**64 - 1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio: consecutive counters fall far apart


def mix(values: UInt64Array) -> UInt64Array:
    """Spread every input bit over all output bits (MurmurHash3's 64-bit finaliser)."""
    values = (values ^ (values >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    values = (values ^ (values >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return values ^ (values >> np.uint64(33))


def keys_of(counters: Sequence[npt.NDArray[np.int64]]) -> UInt64Array:
    """Hash several counters into one key per row.

    Args:
        counters: [B] each; their order matters.

    Returns:
        [B] keys.
    """
    keys = np.zeros(len(counters[0]), np.uint64)
    for counter in counters:
        keys = mix((keys + _GOLDEN) ^ mix(counter.astype(np.uint64) + _GOLDEN))
    return keys


def draws(keys: UInt64Array, columns: int, purpose: int) -> UInt64Array:
    """Draw 64 random bits per row and column.

    Args:
        keys: [B] from `keys_of`.
        columns: C.
        purpose: Different numbers give independent draws from the same keys.

    Returns:
        [B, C].
    """
    first = purpose << 40  # more than any row is long
    counters = np.arange(first + 1, first + columns + 1, dtype=np.uint64) * _GOLDEN
    return mix(keys[:, None] + counters[None, :])


def uniform(bits: UInt64Array) -> npt.NDArray[np.float64]:
    """Turn random bits into numbers from 0 up to, not including, 1."""
    return (bits >> np.uint64(11)).astype(np.float64) / 2.0**53
