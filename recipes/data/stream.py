"""Tokens of several files, read as one stream."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .permutation import Int64Array


class TokenStream:
    """Arrays joined end to end, without a copy.

    Args:
        arrays: [num_tokens] each, of one dtype; usually read-only memory maps.
    """

    def __init__(self, arrays: Sequence[npt.NDArray[np.generic]]) -> None:
        self.arrays = [array for array in arrays if len(array)]
        self._ends = np.cumsum([len(array) for array in self.arrays], dtype=np.int64)

    def __len__(self) -> int:
        """Tokens of all arrays."""
        return int(self._ends[-1]) if self.arrays else 0

    def read(self, starts: Int64Array, length: int) -> Int64Array:
        """Read windows.

        Args:
            starts: [B] positions of their first tokens, in 0 .. len(self) - length.
            length: W, tokens in a window.

        Returns:
            [B, W] int64.
        """
        windows = np.empty((len(starts), length), dtype=np.int64)
        firsts = np.searchsorted(self._ends, starts, side="right")
        for window, start, first in zip(windows, starts.tolist(), firsts.tolist(), strict=True):
            self._copy(window, start, first)
        return windows

    def _copy(self, window: Int64Array, start: int, index: int) -> None:
        """Fill one window from the array at `index` and those after it."""
        filled = 0
        while filled < len(window):
            array = self.arrays[index]
            offset = start + filled - (int(self._ends[index]) - len(array))
            piece = array[offset : offset + len(window) - filled]
            window[filled : filled + len(piece)] = piece
            filled += len(piece)
            index += 1


def map_tokens(file: Path, dtype: str) -> npt.NDArray[np.generic]:
    """Map a file of tokens into memory, read-only; an empty file cannot be mapped and becomes an empty array."""
    return np.memmap(file, dtype=dtype, mode="r") if file.stat().st_size else np.empty(0, dtype)
