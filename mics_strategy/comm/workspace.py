"""What do transfers use while they are under way: which memory, and which noise?

The transfers of one lane (or stream) run one after the other, so they share one buffer as large as the largest needs.
It is allocated once, when the model is sharded. The noise of stochastic rounding is listed here, because it goes on
where it was when a training is resumed.
"""

from __future__ import annotations

import torch

from mics_strategy.comm.codecs.format import Codec
from mics_strategy.errors import LifecycleError

ALIGN_BYTES = 64


def aligned_bytes(*sizes: tuple[int, torch.dtype]) -> int:
    """Bytes of pieces side by side, each aligned: numbers of elements and their dtypes."""
    return sum(-(-numel * dtype.itemsize // ALIGN_BYTES) * ALIGN_BYTES for numel, dtype in sizes)


class Workspace:
    """A buffer of which one transfer at a time takes pieces.

    Attributes:
        needed_bytes: Of the largest transfer that was announced.
        generators: Of stochastic rounding, in the order in which they were asked for.
    """

    def __init__(self) -> None:
        self.needed_bytes = 0
        self.generators: list[torch.Generator] = []
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def generator_for(self, codec: Codec, seed: int) -> torch.Generator | None:
        """What the rounding of a codec draws from; None where it draws nothing."""
        if codec.rounding != "stochastic":
            return None
        self.generators.append(torch.Generator().manual_seed(seed))
        return self.generators[-1]

    def reserve(self, num_bytes: int) -> None:
        """Announce a transfer."""
        self.needed_bytes = max(self.needed_bytes, num_bytes)

    def bind(self, buffer: torch.Tensor) -> None:
        """Take pieces of `buffer`, [needed_bytes] uint8, from now on."""
        self._buffer = buffer

    def reset(self) -> None:
        """A transfer starts; the one before has ended."""
        self._used = 0

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A piece for the transfer that runs, [numel], its values undefined.

        Raises:
            LifecycleError: More is taken than was announced.
        """
        start, num_bytes = self._used, numel * dtype.itemsize
        self._used += aligned_bytes((numel, dtype))
        if start + num_bytes > self._buffer.numel():
            raise LifecycleError(
                f"A transfer needs {start + num_bytes} bytes where {self._buffer.numel()} were announced. This is a "
                "defect of the schedule; please report it."
            )
        return self._buffer[start : start + num_bytes].view(dtype)
