"""Scratch memory and random generators of running collectives.

The collectives of one queue (or stream) run one after the other, so they share one buffer as large as the largest
needs. It is allocated once, when the model is sharded. The generators of stochastic rounding are listed here, because
their states are saved, and restored when a training is resumed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mics_strategy.errors import LifecycleError

if TYPE_CHECKING:
    from mics_strategy.comm.codecs.format import Codec

ALIGN_BYTES = 64


def aligned_bytes(*sizes: tuple[int, torch.dtype]) -> int:
    """Bytes of consecutive pieces, each aligned to 64 bytes.

    A piece is given by its number of elements and its dtype.
    """
    return sum(-(-numel * dtype.itemsize // ALIGN_BYTES) * ALIGN_BYTES for numel, dtype in sizes)


class Workspace:
    """A buffer from which one collective at a time allocates scratch memory.

    Attributes:
        needed_bytes: Bytes of the largest reserved collective.
        generators: Generators of stochastic rounding, in the order in which they were created.
    """

    def __init__(self) -> None:
        self.needed_bytes = 0
        self.generators: list[torch.Generator] = []
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def generator_for(self, codec: Codec, seed: int) -> torch.Generator | None:
        """A new generator for the rounding of a codec; None where it rounds without one."""
        if codec.rounding != "stochastic":
            return None
        self.generators.append(torch.Generator().manual_seed(seed))
        return self.generators[-1]

    def reserve(self, num_bytes: int) -> None:
        """Announce a collective that needs `num_bytes` of scratch memory."""
        self.needed_bytes = max(self.needed_bytes, num_bytes)

    def bind(self, buffer: torch.Tensor) -> None:
        """Allocate from `buffer`, [needed_bytes] uint8, from now on."""
        self._buffer = buffer

    def reset(self) -> None:
        """Free all pieces: a collective starts, and the previous one has ended."""
        self._used = 0

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A piece of scratch memory for the running collective, [numel], values undefined.

        Raises:
            LifecycleError: The collective needs more than was reserved.
        """
        start, num_bytes = self._used, numel * dtype.itemsize
        self._used += aligned_bytes((numel, dtype))
        if start + num_bytes > self._buffer.numel():
            raise LifecycleError(
                f"A collective needs {start + num_bytes} bytes of scratch memory, but {self._buffer.numel()} are "
                "reserved. This is a defect of the schedule; please report it."
            )
        return self._buffer[start : start + num_bytes].view(dtype)
