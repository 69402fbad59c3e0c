"""The order in which the samples of an epoch are read, without a list of them.

A Feistel network scrambles the numbers 0 .. 4**k - 1 one to one whatever its round function; numbers beyond
the size are sent through it again until they fall inside (cycle walking), which keeps the map one to one. So
the sample at any position is found in constant memory, on every rank, and training resumes anywhere.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .hashing import mix

Int64Array = npt.NDArray[np.int64]
_ROUNDS = 6
_MASK64 = 2**64 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Permutation:
    """A fixed random order of the numbers below `size`.

    Args:
        size: how many numbers, at least 1.
        seed: equal seeds and epochs give the same order on every machine.
        epoch: each epoch has an order of its own.

    Cost:
        No tables. Fewer than four evaluations per number on average, vectorised.

    Source:
        Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002 (cycle walking).
    """

    size: int
    seed: int
    epoch: int

    def __call__(self, positions: Int64Array) -> Int64Array:
        """Return the number at each position.

        Args:
            positions: int64, all in 0 .. size - 1.
        """
        values = self._scramble(positions.astype(np.uint64))
        while (outside := values >= self.size).any():
            values[outside] = self._scramble(values[outside])
        return values.astype(np.int64)

    def _scramble(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        half = np.uint64(max(1, ((self.size - 1).bit_length() + 1) // 2))
        mask = np.uint64((1 << int(half)) - 1)
        left, right = values >> half, values & mask
        for key in self._keys():
            left, right = right, left ^ (mix(right ^ key) & mask)
        return (left << half) | right

    def _keys(self) -> list[np.uint64]:
        """One key per round, by splitmix64 from the seed and the epoch."""
        state = (self.seed * 0x9E3779B97F4A7C15 + self.epoch * 0xD1B54A32D192ED03) & _MASK64
        keys = []
        for _ in range(_ROUNDS):
            state = (state + 0x9E3779B97F4A7C15) & _MASK64
            mixed = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
            mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK64
            keys.append(np.uint64(mixed ^ (mixed >> 31)))
        return keys
