"""Format of a quantized tensor on the wire.

A flat tensor is cut into blocks of `block_size` values; the last block may be shorter. A block becomes one fp32 scale
and one small integer per value: ``code = round(value / scale)``, with ``scale = max|block| / largest_code``. Codes are
symmetric around zero. Payload and scales share one buffer of bytes, so that they are sent in one message:

``[payload | zeros up to a multiple of 16 bytes in all | fp32 scales]``

INT8 has one code per byte, in two's complement. INT4 has two: the byte at position i of a block holds value i in its
low half and value i + ceil(width / 2) in its high half, each as code + 8. Both halves of a block are then contiguous,
which packs and unpacks several times faster than adjacent values in one byte. INT2 has four in the same way: value
i + k * ceil(width / 4) in bits 2k and 2k + 1, as code + 2.

With `rotation`, a whole block x of n values is encoded as H x / n, and decoded as H of the decoded values: H is the
Hadamard matrix in Sylvester's order, of which H H = n. A shorter block at the end of a tensor is not rotated; sharded
models have none.

Consecutive rows of one size may be encoded together, as a table. Every row is then a tensor of its own in this format.

Pure: the meaning of the bytes. `quantizer` writes and reads them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from mics_strategy.errors import ConfigError, ShapeError

ALIGN_BYTES = 16  # so that consecutive rows start at the alignment of a GPU's widest loads
SCALE_BYTES = 4
LARGEST_BOUND_BLOCK = 8192  # values; up to this block size, a parameter is padded to whole blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """A block-wise quantization to small integers, with one scale per block.

    A decoded block, for both values of `rounding`, is:

    - All zeros where all values are zero, or so small that the scale would be below 2**-123 (about 1e-37).
    - NaN in every value, where any value is NaN or infinite after conversion to fp32: the block is *nonfinite*.
      An overflow spreads over its block and is never hidden; `has_nonfinite` finds it without decoding.
    - Otherwise finite, for all fp32 values up to the largest, with an error of at most scale / 2 (nearest) or scale
      (stochastic), plus the rounding of fp32. With `rotation` the bound holds for the root mean square of the errors of
      a block, with block_size ** 0.5 * scale for scale.

    Args:
        bits: Width of a code: 8 (codes from -127 to 127), 4 (from -7 to 7) or 2 (from -1 to 1).
        block_size: Values that share a scale: a positive multiple of the values in a byte, and even. A tensor that is
            not longer is one block. Up to 8192, a block of a sharded model never holds values of two parameters.
        rounding: Rounding of codes: ``"nearest"`` (half to even) or ``"stochastic"`` (up or down at random, with the
            right mean).
        rotation: Whether the values of a block are mixed by a Hadamard matrix before they are encoded, so that one
            large value does not round the others away. Blocks of a power of two, up to 8192.
        feedback: Whether what an encoding of a sum loses is added to the next payload for the same elements. Gradients
            only, and rounding to nearest.
        differences: Whether parameters are encoded as differences from what all ranks have received before, so that a
            step is rounded instead of the parameters. Param syncs only; all-gathers send their results unencoded.

    Raises:
        ConfigError: Another value.

    Source:
        ZeRO++ (arXiv:2306.10209), block-based symmetric quantization. SDP4Bit (arXiv:2410.15526), Hadamard rotation of
        gradients and differences of weights. Seide et al. (Interspeech 2014) and LoCo (arXiv:2407.04480), feedback.
    """

    bits: int
    block_size: int = 256
    rounding: str = "nearest"
    rotation: bool = False
    feedback: bool = False
    differences: bool = False

    NAMES: ClassVar[tuple[str, ...]] = ("int8", "int4", "int2")
    SMALLEST_SCALE: ClassVar[float] = 2.0**-123  # about 1e-37; 1 / scale is finite with a wide margin

    def __post_init__(self) -> None:
        if isinstance(self.bits, bool) or self.bits not in (2, 4, 8):
            raise ConfigError(f"`bits={self.bits!r}` is not a code width. Use 8, 4 or 2.")
        size = self.block_size
        if isinstance(size, bool) or not isinstance(size, int) or size < 2 or size % 2:
            raise ConfigError(f"`block_size={size!r}` is not an even, positive number of values. Use 256, for example.")
        if size % self.values_per_byte:
            raise ConfigError(f"`block_size={size!r}` is no multiple of the 4 values in a byte of 2 bits. Use 64.")
        if self.rounding not in ("nearest", "stochastic"):
            raise ConfigError(f"`rounding={self.rounding!r}` is not known. Use 'nearest' or 'stochastic'.")
        for name in ("rotation", "feedback", "differences"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"`{name}={getattr(self, name)!r}` is neither True nor False. Use one of them.")
        if self.rotation and (size & (size - 1) or size > LARGEST_BOUND_BLOCK):
            raise ConfigError(
                f"`rotation=True` with `block_size={size!r}`: a Hadamard matrix mixes 2, 4, 8, ... "
                f"{LARGEST_BOUND_BLOCK} values. Use block_size=128, for example."
            )
        if self.feedback and self.rounding != "nearest":
            raise ConfigError(
                f"`feedback=True` with `rounding={self.rounding!r}`: feedback already sends what rounding loses, and "
                "random rounding doubles what it has to keep. Use rounding='nearest'."
            )

    @classmethod
    def of(cls, codec: str | Codec | Mapping[str, Any]) -> Codec:
        """The codec of a name, or of a mapping of fields; a `Codec` is returned unchanged.

        ``"int8"`` has blocks of 256, ``"int4"`` and ``"int2"`` of 128: where gradients are large, a model does not
        learn with INT4 in blocks of 256 (docs/benchmarks.md).

        Raises:
            ConfigError: The argument is none of these, or a field is unknown.
        """
        if isinstance(codec, Codec):
            return codec
        if isinstance(codec, Mapping):
            return cls._of_fields(codec)
        if codec not in cls.NAMES:
            names = ", ".join(map(repr, cls.NAMES))
            raise ConfigError(f"`codec={codec!r}` is not known. Use {names} or a Codec such as Codec(bits=8).")
        return cls(bits=8) if codec == "int8" else cls(bits=int(codec.removeprefix("int")), block_size=128)

    @classmethod
    def _of_fields(cls, fields: Mapping[str, Any]) -> Codec:
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = [str(name) for name in fields if name not in known]
        if unknown or "bits" not in fields:
            problem = f"`{unknown[0]}` is not a field" if unknown else "`bits` is missing"
            raise ConfigError(f"`{dict(fields)}` is not a codec: {problem}. Use some of {', '.join(known)}.")
        return cls(**fields)

    @property
    def bound_numel(self) -> int:
        """The multiple of elements at which parameters start.

        So no two share a block. It is 1 where blocks are too long for that.
        """
        return self.block_size if self.block_size <= LARGEST_BOUND_BLOCK else 1

    @property
    def largest_code(self) -> int:
        """The largest code, 127, 7 or 1."""
        return (1 << (self.bits - 1)) - 1

    @property
    def values_per_byte(self) -> int:
        """Values in one byte, 1, 2 or 4."""
        return 8 // self.bits

    @property
    def block_bytes(self) -> int:
        """Payload bytes of one whole block."""
        return self.block_size // self.values_per_byte

    def bytes_per_lane(self, width: int) -> int:
        """Payload bytes of a block of `width` values.

        In INT4 and INT2, also the distance between the values of one byte.
        """
        return -(-width // self.values_per_byte)

    def rotates(self, width: int) -> bool:
        """Whether a block is rotated.

        Args:
            width: Values of the block, or from its first value to the end of its tensor.
        """
        return self.rotation and width >= self.block_size

    def num_blocks(self, numel: int) -> int:
        """The number of blocks of `numel` values."""
        return -(-numel // self.block_size)

    def payload_bytes(self, numel: int) -> int:
        """Bytes of the codes of `numel` values, without scales."""
        whole, rest = divmod(numel, self.block_size)
        return whole * self.block_bytes + self.bytes_per_lane(rest)

    def encoded_bytes(self, numel: int) -> int:
        """Bytes of the whole buffer for `numel` values: a multiple of 16, or 0."""
        used = self.payload_bytes(numel) + SCALE_BYTES * self.num_blocks(numel)
        return -(-used // ALIGN_BYTES) * ALIGN_BYTES

    def scales(self, encoded: torch.Tensor, numel: int) -> torch.Tensor:
        """The scales as a view: [..., num_blocks] fp32.

        Args:
            encoded: [..., encoded_bytes] uint8, one buffer or rows of them.
            numel: Values of each row.

        Raises:
            ShapeError: `encoded` does not have the size of `numel` values.
        """
        if encoded.dtype != torch.uint8 or encoded.shape[-1] != self.encoded_bytes(numel):
            raise ShapeError(
                f"A buffer {encoded.dtype} {list(encoded.shape)} does not hold {numel} values of {self}. Pass uint8 "
                f"with {self.encoded_bytes(numel)} bytes in the last dimension."
            )
        if not numel:
            return encoded.new_empty(encoded.shape, dtype=torch.float32)
        start = encoded.shape[-1] - SCALE_BYTES * self.num_blocks(numel)
        return encoded[..., start:].view(torch.float32)

    def has_nonfinite(self, encoded: torch.Tensor, numel: int) -> torch.Tensor:
        """Whether each row has a block that decodes to NaN: [...] bool, on the device.

        It does not synchronize with the host.

        Cost:
            Reads the scales only.
        """
        return self.scales(encoded, numel).isnan().any(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summands:
    """The contributions of all ranks to one sum, all but one of them encoded.

    They are added in the order of the rows, from zero.

    Attributes:
        rows: [ranks, encoded_bytes(n)] uint8, contiguous. Row `exact_index` is not read.
        exact: [n], floating, contiguous: the contribution that replaces row `exact_index`.
        exact_index: Index of that row.
    """

    rows: torch.Tensor
    exact: torch.Tensor
    exact_index: int
