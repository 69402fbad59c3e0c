"""Scratch memory and random generators of running collectives.

The collectives of one queue (or stream) run one after the other, so they share one buffer as large as the largest
needs, twice where one is encoded while another is on the wire. It is allocated once, when the model is sharded. The
generators of stochastic rounding are listed here, because their states are saved, and restored when a training is
resumed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from mics_strategy.comm.codecs.format import Codec
from mics_strategy.errors import LifecycleError

ALIGN_BYTES = 64
Made = TypeVar("Made")


def aligned_bytes(*sizes: tuple[int, torch.dtype]) -> int:
    """Bytes of consecutive pieces, each aligned to 64 bytes.

    A piece is given by its number of elements and its dtype.
    """
    return sum(-(-numel * dtype.itemsize // ALIGN_BYTES) * ALIGN_BYTES for numel, dtype in sizes)


def once_per_buffer(make: Callable[[torch.Tensor], Made]) -> Callable[[torch.Tensor], Made]:
    """A function that makes something of a buffer, such as views, once.

    It is kept by address: buffers are few and permanent.
    """
    made: dict[int, Made] = {}

    def of(buffer: torch.Tensor) -> Made:
        address = buffer.data_ptr()
        if address not in made:
            made[address] = make(buffer)
        return made[address]

    return of


@dataclass(slots=True, eq=False)
class _Part:
    """Scratch memory of one collective.

    Attributes:
        index: Position in the buffer.
        used_bytes: Bytes allocated so far.
        is_taken: Whether a collective uses the part.
        done: Event behind everything on the device that used the part; None on a CPU.
    """

    index: int
    used_bytes: int = 0
    is_taken: bool = False
    done: torch.cuda.Event | None = None


class Workspace:
    """A buffer from which the collectives of one queue allocate scratch memory.

    It has one part, which the collectives use one after the other, or two: while one is on the wire, the next one is
    encoded in the other part.

    Attributes:
        part_bytes: Bytes of the largest reserved collective.
        generators: Generators of stochastic rounding, in the order in which they were created.
    """

    def __init__(self) -> None:
        self.part_bytes = 0
        self.generators: list[torch.Generator] = []
        self._parts = [_Part(0)]
        self._current = self._parts[0]
        self._next = 0
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def encode_ahead(self) -> None:
        """Have two parts from now on."""
        if len(self._parts) == 1:
            self._parts.append(_Part(1))

    @property
    def encodes_ahead(self) -> bool:
        """Whether a collective may start while the one before it uses the workspace."""
        return len(self._parts) > 1

    @property
    def needed_bytes(self) -> int:
        """Bytes of all parts."""
        return len(self._parts) * self.part_bytes

    def generator_for(self, codec: Codec, seed: int) -> torch.Generator | None:
        """A new generator for the rounding of a codec; None where it rounds without one."""
        if codec.rounding != "stochastic":
            return None
        self.generators.append(torch.Generator().manual_seed(seed))
        return self.generators[-1]

    def reserve(self, num_bytes: int) -> None:
        """Announce a collective that needs `num_bytes` of scratch memory."""
        self.part_bytes = max(self.part_bytes, aligned_bytes((num_bytes, torch.uint8)))

    def bind(self, buffer: torch.Tensor) -> None:
        """Allocate from `buffer`, [needed_bytes] uint8, from now on."""
        self._buffer = buffer

    def take(self) -> int:
        """Take the next part for a collective that starts.

        On CUDA the current stream waits for what the device still does there.

        Raises:
            LifecycleError: A collective uses it.
        """
        part = self._parts[self._next]
        if part.is_taken:
            raise LifecycleError(
                "A collective starts while an earlier one uses its scratch memory. This is a defect of the schedule; "
                "please report it."
            )
        part.is_taken, part.used_bytes = True, 0
        if part.done is not None:
            torch.cuda.current_stream(self._buffer.device).wait_event(part.done)
        self._current, self._next = part, (part.index + 1) % len(self._parts)
        return part.index

    def use(self, index: int) -> None:
        """Allocate from a taken part from now on."""
        self._current = self._parts[index]

    def release(self, index: int) -> None:
        """Free a part, behind the present work of the current stream."""
        part = self._parts[index]
        part.is_taken = False
        if self.encodes_ahead and self._buffer.device.type == "cuda":
            part.done = torch.cuda.Event()
            part.done.record(torch.cuda.current_stream(self._buffer.device))

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A piece of scratch memory for the running collective, [numel], values undefined.

        Raises:
            LifecycleError: The collective needs more than was reserved.
        """
        part, num_bytes = self._current, numel * dtype.itemsize
        bound_bytes = self._buffer.numel() // len(self._parts) // ALIGN_BYTES * ALIGN_BYTES
        end = part.used_bytes + num_bytes
        if end > bound_bytes:
            raise LifecycleError(
                f"A collective needs {end} bytes of scratch memory, but {bound_bytes} are reserved. This is a defect "
                "of the schedule; please report it."
            )
        start = part.index * bound_bytes + part.used_bytes
        part.used_bytes += aligned_bytes((numel, dtype))
        return self._buffer[start : start + num_bytes].view(dtype)

    def allocate_payloads(self, codec: Codec, count: int, numel: int) -> torch.Tensor:
        """Scratch memory for encoded payloads of `numel` elements each: [count, bytes], uint8."""
        num_bytes = codec.encoded_bytes(numel)
        return self.allocate(count * num_bytes, torch.uint8).view(count, num_bytes)
