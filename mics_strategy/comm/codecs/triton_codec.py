"""Triton kernels for encoding and decoding on CUDA.

They write the same bits as `torch_codec`, each in one pass over the memory. A program holds whole blocks in registers,
so that values are read once for the scale and the codes. The bits are equal because:

- Kernels are launched without fused multiply-add (`LAUNCH`), and 1 / scale is rounded exactly.
- Rounding half to even adds and subtracts 1.5 * 2**23, since Triton has no such rounding that its interpreter runs.
- bf16 is rounded in integers, since the interpreter truncates it.
- The largest magnitude is taken over finite values, with a separate flag for others, since a maximum may drop NaN.

Whole blocks and the shorter block at the end have separate launches, so that the former are known to be aligned. The
rows of a table are the second axis of the grid.
Importing this module requires Triton; `quantizer` does so for its first CUDA device.

Dims: R blocks, C bytes of a block. Names in capitals are compile-time constants.

Source:
    ZeRO++ (arXiv:2306.10209), section 4.2: values stay in registers while the scale is found.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from mics_strategy.comm.codecs.format import Codec, Summands

LAUNCH = {"enable_fp_fusion": False, "num_warps": 4}

_PROGRAM_BYTES = 2048  # codes that one program writes
_INT32_SIZE = 2**31 - 2**20
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
def _program(INDEX: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The index of this program among those of its table row, and the row."""
    return tl.program_id(0).to(INDEX), tl.program_id(1).to(INDEX)


@triton.jit
def _store_zeros(out: tl.tensor, count: tl.tensor) -> None:
    """Write up to 16 bytes of zeros."""
    place = tl.arange(0, 16)
    tl.store(out + place, tl.zeros([16], tl.uint8), mask=place < count)


@triton.jit
def _magnitude(value: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The magnitude of each finite value, else 0, and a flag of nonfinite ones."""
    magnitude = tl.abs(value)
    is_number = magnitude < float("inf")
    return tl.where(is_number, magnitude, 0.0), tl.where(is_number, 0, 1)


@triton.jit
def _scales(magnitude: tl.tensor, is_nonfinite: tl.tensor, BITS: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The inverse scales of blocks, and the bits of the scales."""
    is_nonfinite_R = tl.max(is_nonfinite, 1) == 1
    scale_R = tl.max(magnitude, 1) * (1.0 / (2.0 ** (BITS - 1) - 1))
    is_small_R = scale_R < _SMALLEST
    inverse_R = tl.math.div_rn(1.0, tl.where(is_small_R, 1.0, scale_R))
    inverse_R = tl.where(is_small_R | is_nonfinite_R, 0.0, inverse_R)
    bits_R = tl.where(is_small_R, 0.0, scale_R).to(tl.int32, bitcast=True)
    return inverse_R, tl.where(is_nonfinite_R, _NAN_BITS, bits_R)


@triton.jit
def _code(
    value: tl.tensor,
    inverse_R: tl.tensor,
    index: tl.tensor,
    seed: tl.tensor,
    BITS: tl.constexpr,
    IS_STOCHASTIC: tl.constexpr,
) -> tl.tensor:
    LARGEST: tl.constexpr = 2.0 ** (BITS - 1) - 1
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
    codes: tl.tensor,
    scale_bits: tl.tensor,
    begin: tl.tensor,
    numel: tl.tensor,
    row_bytes: tl.tensor,
    rows: tl.tensor,
    lane: tl.tensor,
    padding_bytes: tl.tensor,
    seed: tl.tensor,
    BITS: tl.constexpr,
    IS_STOCHASTIC: tl.constexpr,
    ROWS: tl.constexpr,
    LANE: tl.constexpr,
    INDEX: tl.constexpr,
) -> None:
    """Encode `rows` blocks of `lane` bytes in every row of a table, from `begin`.

    A row has `numel` values, and `row_bytes` when encoded. Outputs start at the first block of the first row.
    """
    HALVES: tl.constexpr = 8 // BITS
    program, table_row = _program(INDEX)
    row_R = program * ROWS + tl.arange(0, ROWS)
    column_C = tl.arange(0, LANE)
    is_byte = (row_R[:, None] < rows) & (column_C[None, :] < lane)
    low_offset = begin + row_R[:, None] * (HALVES * lane) + column_C[None, :]
    low_index = table_row * numel + low_offset
    low = _load_fp32(values, low_index, is_byte & (low_offset < numel))
    magnitude, is_nonfinite = _magnitude(low)
    if HALVES == 2:
        high_offset = low_offset + lane
        high_index = table_row * numel + high_offset
        high = _load_fp32(values, high_index, is_byte & (high_offset < numel))
        high_magnitude, high_is_nonfinite = _magnitude(high)
        magnitude = tl.maximum(magnitude, high_magnitude)
        is_nonfinite = is_nonfinite | high_is_nonfinite
    inverse_R, bits_R = _scales(magnitude, is_nonfinite, BITS)
    byte = _code(low, inverse_R, low_index, seed, BITS, IS_STOCHASTIC)
    if HALVES == 2:
        byte = (byte + 8) | ((_code(high, inverse_R, high_index, seed, BITS, IS_STOCHASTIC) + 8) << 4)
    codes += table_row * row_bytes
    scale_bits += table_row * (row_bytes // 4)
    tl.store(codes + row_R[:, None] * lane + column_C[None, :], (byte & 255).to(tl.uint8), mask=is_byte)
    tl.store(scale_bits + row_R, bits_R, mask=row_R < rows)
    _store_zeros(codes + rows * lane, tl.where(program == 0, padding_bytes, 0))


@triton.jit
def decode_blocks(
    codes: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    begin: tl.tensor,
    numel: tl.tensor,
    row_bytes: tl.tensor,
    rows: tl.tensor,
    lane: tl.tensor,
    BITS: tl.constexpr,
    IS_ADDING: tl.constexpr,
    ROWS: tl.constexpr,
    LANE: tl.constexpr,
    INDEX: tl.constexpr,
) -> None:
    """Decode `rows` blocks of `lane` bytes in every row of a table, from `begin`.

    A row has `numel` values in `row_bytes`. `codes` and `scales` start at the first block of the first row.
    """
    HALVES: tl.constexpr = 8 // BITS
    program, table_row = _program(INDEX)
    row_R = program * ROWS + tl.arange(0, ROWS)
    column_C = tl.arange(0, LANE)
    is_byte = (row_R[:, None] < rows) & (column_C[None, :] < lane)
    codes += table_row * row_bytes
    scales += table_row * (row_bytes // 4)
    byte = tl.load(codes + row_R[:, None] * lane + column_C[None, :], mask=is_byte, other=0)
    scale_R = tl.load(scales + row_R, mask=row_R < rows, other=0.0)
    for half in tl.static_range(HALVES):
        offset = begin + row_R[:, None] * (HALVES * lane) + half * lane + column_C[None, :]
        index = table_row * numel + offset
        is_value = is_byte & (offset < numel)
        value = _number(byte, half, BITS) * scale_R[:, None]
        if IS_ADDING:
            value = tl.load(out + index, mask=is_value, other=0.0) + value
        _store_rounded(out, index, value, is_value)


@triton.jit(do_not_specialize=["exact_piece"])
def sum_blocks(
    exact: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    begin: tl.tensor,
    numel: tl.tensor,
    piece_bytes: tl.tensor,
    exact_piece: tl.tensor,
    rows: tl.tensor,
    lane: tl.tensor,
    PIECES: tl.constexpr,
    BITS: tl.constexpr,
    IS_ADDING: tl.constexpr,
    ROWS: tl.constexpr,
    LANE: tl.constexpr,
    INDEX: tl.constexpr,
) -> None:
    """Add `rows` blocks of `lane` bytes of all pieces in order, from value `begin`.

    Each piece has `numel` values in `piece_bytes`; `exact` replaces one of them. `codes` and `scales` start at the
    first block of the first piece.
    """
    HALVES: tl.constexpr = 8 // BITS
    program, _ = _program(INDEX)
    row_R = program * ROWS + tl.arange(0, ROWS)
    column_C = tl.arange(0, LANE)
    is_byte = (row_R[:, None] < rows) & (column_C[None, :] < lane)
    for half in tl.static_range(HALVES):
        index = begin + row_R[:, None] * (HALVES * lane) + half * lane + column_C[None, :]
        is_value = is_byte & (index < numel)
        if IS_ADDING:
            total = tl.load(out + index, mask=is_value, other=0.0)
        else:
            total = tl.zeros(index.shape, out.dtype.element_ty)
        for piece in range(PIECES):
            if piece == exact_piece:
                total += tl.load(exact + index, mask=is_value, other=0.0).to(total.dtype)
            else:
                start = tl.cast(piece, tl.int64) * piece_bytes
                byte = tl.load(codes + start + row_R[:, None] * lane + column_C[None, :], mask=is_byte, other=0)
                scale_R = tl.load(scales + start // 4 + row_R, mask=row_R < rows, other=0.0)
                total += (_number(byte, half, BITS) * scale_R[:, None]).to(total.dtype)
        tl.store(out + index, total, mask=is_value)


class TritonCodec:
    """Encodes and decodes with one or two launches.

    It has no scratch memory; with nearest rounding it is thread-safe.

    Args:
        codec: Codec of the encoded buffers, with blocks of at most 8192 values.
        generator: Generator on the CPU, for the seed of each encoding with stochastic rounding. All rows of a table
            have one seed, since a seed for each would have to be copied to the device; their random numbers differ,
            as every value of the table has a number of its own.
    """

    def __init__(self, codec: Codec, generator: torch.Generator | None) -> None:
        self._codec = codec
        self._generator = generator

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """See `Quantizer.encode`."""
        codec, out, numel = self._codec, torch.atleast_2d(out), values.shape[-1]
        row_bytes, scale_bits = out.shape[1], codec.scales(out, numel).view(torch.int32)
        padding_bytes = row_bytes - codec.payload_bytes(numel) - 4 * scale_bits.shape[1]
        is_stochastic = codec.rounding == "stochastic"
        seed = int(torch.randint(2**31, (), generator=self._generator)) if is_stochastic else 0
        for run in _runs(codec, numel, out):
            encode_blocks[run.grid](
                *(values, out[:, run.first_byte :], scale_bits[:, run.first :], run.begin, numel),
                *(row_bytes, run.rows, run.lane, padding_bytes if run.is_last else 0, seed),
                *(codec.bits, is_stochastic),
                **run.constants,
            )

    def decode(self, encoded: torch.Tensor, out: torch.Tensor, accumulate: bool) -> None:
        """See `Quantizer.decode` and, with `accumulate`, `Quantizer.decode_add`."""
        codec, encoded, numel = self._codec, torch.atleast_2d(encoded), out.shape[-1]
        scales = codec.scales(encoded, numel)
        for run in _runs(codec, numel, encoded):
            decode_blocks[run.grid](
                *(encoded[:, run.first_byte :], scales[:, run.first :], out, run.begin, numel),
                *(encoded.shape[1], run.rows, run.lane, codec.bits, accumulate),
                **run.constants,
            )

    def decode_sum(self, summands: Summands, out: torch.Tensor, accumulate: bool) -> None:
        """See `Quantizer.decode_sum`."""
        codec, pieces, numel = self._codec, summands.rows, out.numel()
        scales = codec.scales(pieces, numel)
        for run in _runs(codec, numel, pieces[:1]):
            sum_blocks[run.grid](
                *(summands.exact, pieces[:, run.first_byte :], scales[:, run.first :], out, run.begin, numel),
                *(pieces.shape[1], summands.exact_index, run.rows, run.lane, len(pieces), codec.bits, accumulate),
                **run.constants,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Blocks of one width in every row of a table, treated by one launch."""

    first: int
    rows: int
    begin: int
    first_byte: int
    lane: int
    table_rows: int
    is_wide: bool
    is_last: bool

    @property
    def constants(self) -> dict[str, Any]:
        """Constants of a launch: blocks of a program, bytes of each, and launch options."""
        lane = triton.next_power_of_2(self.lane)
        return {
            "ROWS": max(1, _PROGRAM_BYTES // lane),
            "LANE": lane,
            "INDEX": tl.int64 if self.is_wide else tl.int32,
            **LAUNCH,
        }

    @property
    def grid(self) -> tuple[int, int]:
        return triton.cdiv(self.rows, self.constants["ROWS"]), self.table_rows


def _runs(codec: Codec, numel: int, table: torch.Tensor) -> Iterator[_Run]:
    """Whole blocks of the rows of `numel` values, then the shorter block at the end."""
    whole, rest = divmod(numel, codec.block_size)
    make = partial(_Run, table_rows=len(table), is_wide=len(table) * max(numel, table.shape[1]) > _INT32_SIZE)
    if whole:
        yield make(first=0, rows=whole, begin=0, first_byte=0, lane=codec.block_bytes, is_last=not rest)
    if rest:
        first_byte, lane = whole * codec.block_bytes, codec.bytes_per_lane(rest)
        yield make(first=whole, rows=1, begin=numel - rest, first_byte=first_byte, lane=lane, is_last=True)
