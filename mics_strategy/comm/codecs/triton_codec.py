"""Triton kernels for encoding and decoding on CUDA.

They write the same bits as `torch_codec`, each in one pass over the memory. A program holds whole blocks in registers,
so that values are read once for the scale and the codes. The bits are equal because:

- Kernels are launched without fused multiply-add (`LAUNCH`), and 1 / scale is rounded exactly.
- Rounding half to even adds and subtracts 1.5 * 2**23, since Triton has no such rounding that its interpreter runs.
- bf16 is rounded in integers, since the interpreter truncates it.
- The largest magnitude is taken over finite values, with a separate flag for others, since a maximum may drop NaN.

Whole blocks and the shorter block at the end have separate launches, so that the former are known to be aligned.
Importing this module requires Triton; `quantizer` does so for its first CUDA device.

Dims: R blocks, C bytes of a block. Names in capitals are compile-time constants.

Source:
    ZeRO++ (arXiv:2306.10209), section 4.2: values stay in registers while the scale is found; dequantize, reduce and
    quantize are one kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from mics_strategy.comm.codecs.format import Codec

LAUNCH = {"enable_fp_fusion": False, "num_warps": 4}

_PROGRAM_BYTES = 2048  # codes that one program writes
_INT32_NUMEL = 2**31 - 2**20
_NAN_BITS = tl.constexpr(0x7FC00000)
_EVEN = tl.constexpr(12582912.0)  # 1.5 * 2**23: added to a small number, it leaves no bits for a fraction
_SMALLEST = tl.constexpr(Codec.SMALLEST_SCALE)


@triton.jit
def _load_fp32(values: tl.tensor, index: tl.tensor, is_value: tl.tensor) -> tl.tensor:
    return tl.load(values + index, mask=is_value, other=0.0).to(tl.float32)


@triton.jit
def _store_rounded(out: tl.tensor, index: tl.tensor, value: tl.tensor, is_value: tl.tensor) -> None:
    """Write fp32 in the dtype of `out`, rounded half to even."""
    if out.dtype.element_ty == tl.bfloat16:
        bits = value.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(value == value, rounded, 0x7FC0)  # a GPU's NaN has all bits set, and would round to -0
        tl.store(out + index, rounded.to(tl.int16).to(tl.bfloat16, bitcast=True), mask=is_value)
    else:
        tl.store(out + index, value.to(out.dtype.element_ty), mask=is_value)


@triton.jit
def _number(byte: tl.tensor, HALF: tl.constexpr, BITS: tl.constexpr) -> tl.tensor:
    """The code in one half of each byte, in fp32."""
    if BITS == 8:
        number = byte.to(tl.int8, bitcast=True).to(tl.float32)
    else:
        number = (((byte.to(tl.int32) >> (4 * HALF)) & 15) - 8).to(tl.float32)
    return number


@triton.jit
def _decoded_at(
    codes: tl.tensor,
    scales: tl.tensor,
    index: tl.tensor,
    is_value: tl.tensor,
    numel: tl.tensor,
    BITS: tl.constexpr,
    SIZE: tl.constexpr,
) -> tl.tensor:
    """The values at `index` of one piece.

    Its blocks may differ from those of the caller.
    """
    block = index // SIZE
    scale = tl.load(scales + block, mask=is_value, other=0.0)
    if BITS == 8:
        number = _number(tl.load(codes + index, mask=is_value, other=0), 0, 8)
    else:
        offset = index - block * SIZE
        lane = (tl.minimum(numel - block * SIZE, SIZE) + 1) // 2
        is_high = offset >= lane
        byte = tl.load(codes + block * (SIZE // 2) + tl.where(is_high, offset - lane, offset), mask=is_value, other=0)
        number = tl.where(is_high, _number(byte, 1, 4), _number(byte, 0, 4))
    return number * scale


@triton.jit
def _source_at(
    values: tl.tensor,
    pieces: tl.tensor,
    scales: tl.tensor,
    index: tl.tensor,
    is_value: tl.tensor,
    numel: tl.tensor,
    piece_bytes: tl.tensor,
    PIECES: tl.constexpr,
    BITS: tl.constexpr,
    SIZE: tl.constexpr,
) -> tl.tensor:
    """The values to encode.

    These are `values`, or with PIECES the sum of `values`, if given, and the pieces in their order.
    """
    if PIECES == 0:
        total = _load_fp32(values, index, is_value)
    else:
        first: tl.constexpr = 1 if values is None else 0
        if values is None:
            total = _decoded_at(pieces, scales, index, is_value, numel, BITS, SIZE)
        else:
            total = _load_fp32(values, index, is_value)
        for piece in range(first, PIECES):
            start = tl.cast(piece, tl.int64) * piece_bytes
            total += _decoded_at(pieces + start, scales + start // 4, index, is_value, numel, BITS, SIZE)
    return total


@triton.jit
def _magnitude(value: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The magnitude of each finite value and a flag of nonfinite ones.

    The magnitude is 0 and the flag 1 where a value is not finite.
    """
    magnitude = tl.abs(value)
    is_number = magnitude < float("inf")
    return tl.where(is_number, magnitude, 0.0), tl.where(is_number, 0, 1)


@triton.jit
def _code(
    value: tl.tensor,
    inverse_R: tl.tensor,
    index: tl.tensor,
    seed: tl.tensor,
    LARGEST: tl.constexpr,
    IS_STOCHASTIC: tl.constexpr,
) -> tl.tensor:
    scaled = value * inverse_R[:, None]
    scaled = tl.where(inverse_R[:, None] == 0.0, 0.0, scaled)  # not NaN * 0
    if IS_STOCHASTIC:
        rounded = tl.floor(scaled + tl.rand(seed, index))
        rounded = tl.minimum(tl.maximum(rounded, -LARGEST), LARGEST)
    else:
        rounded = (scaled + _EVEN) - _EVEN
    return rounded.to(tl.int32)


@triton.jit(do_not_specialize=["seed"])
def encode_blocks(
    values: tl.tensor,
    pieces: tl.tensor,
    piece_scales: tl.tensor,
    codes: tl.tensor,
    scale_bits: tl.tensor,
    begin: tl.tensor,
    numel: tl.tensor,
    rows: tl.tensor,
    lane: tl.tensor,
    piece_bytes: tl.tensor,
    seed: tl.tensor,
    BITS: tl.constexpr,
    IS_STOCHASTIC: tl.constexpr,
    PIECES: tl.constexpr,
    SOURCE_BITS: tl.constexpr,
    SOURCE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    LANE: tl.constexpr,
    IS_WIDE: tl.constexpr,
) -> None:
    """Encode `rows` blocks of `lane` bytes, the first at value `begin`.

    Outputs start at the first block.
    """
    HALVES: tl.constexpr = 8 // BITS
    LARGEST: tl.constexpr = 2.0 ** (BITS - 1) - 1
    program = tl.program_id(0).to(tl.int64) if IS_WIDE else tl.program_id(0)
    row_R = program * ROWS + tl.arange(0, ROWS)
    column_C = tl.arange(0, LANE)
    is_byte = (row_R[:, None] < rows) & (column_C[None, :] < lane)
    low_index = begin + row_R[:, None] * (HALVES * lane) + column_C[None, :]
    low = _source_at(
        *(values, pieces, piece_scales, low_index, is_byte & (low_index < numel), numel),
        *(piece_bytes, PIECES, SOURCE_BITS, SOURCE_SIZE),
    )
    magnitude, is_nonfinite = _magnitude(low)
    if HALVES == 2:
        high_index = low_index + lane
        high = _source_at(
            *(values, pieces, piece_scales, high_index, is_byte & (high_index < numel), numel),
            *(piece_bytes, PIECES, SOURCE_BITS, SOURCE_SIZE),
        )
        high_magnitude, high_is_nonfinite = _magnitude(high)
        magnitude = tl.maximum(magnitude, high_magnitude)
        is_nonfinite = is_nonfinite | high_is_nonfinite
    is_nonfinite_R = tl.max(is_nonfinite, 1) == 1
    scale_R = tl.max(magnitude, 1) * (1.0 / LARGEST)
    is_small_R = scale_R < _SMALLEST
    inverse_R = tl.math.div_rn(1.0, tl.where(is_small_R, 1.0, scale_R))
    inverse_R = tl.where(is_small_R | is_nonfinite_R, 0.0, inverse_R)
    byte = _code(low, inverse_R, low_index, seed, LARGEST, IS_STOCHASTIC)
    if HALVES == 2:
        byte = (byte + 8) | ((_code(high, inverse_R, high_index, seed, LARGEST, IS_STOCHASTIC) + 8) << 4)
    tl.store(codes + row_R[:, None] * lane + column_C[None, :], (byte & 255).to(tl.uint8), mask=is_byte)
    bits_R = tl.where(is_small_R, 0.0, scale_R).to(tl.int32, bitcast=True)
    tl.store(scale_bits + row_R, tl.where(is_nonfinite_R, _NAN_BITS, bits_R), mask=row_R < rows)


@triton.jit
def decode_blocks(
    codes: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    numel: tl.tensor,
    rows: tl.tensor,
    lane: tl.tensor,
    BITS: tl.constexpr,
    IS_ADDING: tl.constexpr,
    ROWS: tl.constexpr,
    LANE: tl.constexpr,
    IS_WIDE: tl.constexpr,
) -> None:
    """Decode `rows` blocks of `lane` bytes.

    All tensors start at the first block, and hold `numel` values.
    """
    HALVES: tl.constexpr = 8 // BITS
    program = tl.program_id(0).to(tl.int64) if IS_WIDE else tl.program_id(0)
    row_R = program * ROWS + tl.arange(0, ROWS)
    column_C = tl.arange(0, LANE)
    is_byte = (row_R[:, None] < rows) & (column_C[None, :] < lane)
    byte = tl.load(codes + row_R[:, None] * lane + column_C[None, :], mask=is_byte, other=0)
    scale_R = tl.load(scales + row_R, mask=row_R < rows, other=0.0)
    for half in tl.static_range(HALVES):
        index = row_R[:, None] * (HALVES * lane) + half * lane + column_C[None, :]
        is_value = is_byte & (index < numel)
        value = _number(byte, half, BITS) * scale_R[:, None]
        if IS_ADDING:
            value = tl.load(out + index, mask=is_value, other=0.0) + value
        _store_rounded(out, index, value, is_value)


class TritonCodec:
    """Encodes and decodes with one or two launches.

    It has no scratch memory; with nearest rounding it is thread-safe.

    Args:
        codec: Codec of the encoded buffers, with blocks of at most 8192 values.
        generator: Generator on the CPU, for the seed of each encoding with stochastic rounding.
    """

    def __init__(self, codec: Codec, generator: torch.Generator | None) -> None:
        self._codec = codec
        self._generator = generator

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """See `Quantizer.encode`."""
        self._encode(values, values.numel(), out, _Pieces())

    def encode_sum(
        self, source: Codec, pieces: torch.Tensor, addend: torch.Tensor | None, numel: int, out: torch.Tensor
    ) -> None:
        """See `Quantizer.encode_sum`."""
        scales = source.scales(pieces, numel)
        self._encode(addend, numel, out, _Pieces(pieces, scales, source.bits, source.block_size))

    def decode(self, encoded: torch.Tensor, out: torch.Tensor, accumulate: bool) -> None:
        """See `Quantizer.decode` and, with `accumulate`, `Quantizer.decode_add`."""
        codec = self._codec
        scales = codec.scales(encoded, out.numel())
        for run in _runs(codec, out.numel()):
            decode_blocks[run.grid](
                *(encoded[run.first_byte :], scales[run.first :], out[run.begin :]),
                *(out.numel() - run.begin, run.rows, run.lane, codec.bits, accumulate),
                **run.constants,
            )

    def _encode(self, values: torch.Tensor | None, numel: int, out: torch.Tensor, pieces: _Pieces) -> None:
        codec = self._codec
        scale_bits = codec.scales(out, numel).view(torch.int32)
        padding = out[codec.payload_bytes(numel) : out.numel() - 4 * scale_bits.numel()]
        if padding.numel():
            padding.zero_()
        is_stochastic = codec.rounding == "stochastic"
        seed = int(torch.randint(2**31, (), generator=self._generator)) if is_stochastic else 0
        for run in _runs(codec, numel):
            encode_blocks[run.grid](
                *(values, pieces.encoded, pieces.scales, out[run.first_byte :], scale_bits[run.first :]),
                *(run.begin, numel, run.rows, run.lane, pieces.row_bytes, seed),
                *(codec.bits, is_stochastic, pieces.ranks, pieces.bits, pieces.block_size),
                **run.constants,
            )


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Encoded summands of a sum, or none."""

    encoded: torch.Tensor | None = None
    scales: torch.Tensor | None = None  # of the first row; those of the others follow with its stride
    bits: int = 8
    block_size: int = 2

    @property
    def ranks(self) -> int:
        return 0 if self.encoded is None else self.encoded.shape[0]

    @property
    def row_bytes(self) -> int:
        return 0 if self.encoded is None else self.encoded.shape[1]


@dataclass(frozen=True, slots=True)
class _Run:
    """Blocks of one width, treated by one launch."""

    first: int
    rows: int
    begin: int
    first_byte: int
    lane: int
    is_wide: bool

    @property
    def constants(self) -> dict[str, Any]:
        """Constants of a launch: blocks of a program, bytes of each, and launch options."""
        lane = triton.next_power_of_2(self.lane)
        return {"ROWS": max(1, _PROGRAM_BYTES // lane), "LANE": lane, "IS_WIDE": self.is_wide, **LAUNCH}

    @property
    def grid(self) -> tuple[int]:
        return (triton.cdiv(self.rows, self.constants["ROWS"]),)


def _runs(codec: Codec, numel: int) -> Iterator[_Run]:
    """Whole blocks, then the shorter block at the end."""
    whole, rest = divmod(numel, codec.block_size)
    is_wide = numel > _INT32_NUMEL
    if whole:
        yield _Run(0, whole, 0, 0, codec.block_bytes, is_wide)
    if rest:
        yield _Run(whole, 1, numel - rest, whole * codec.block_bytes, codec.bytes_per_lane(rest), is_wide)
