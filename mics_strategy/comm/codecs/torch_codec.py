"""Encoding and decoding of tensors in plain torch.

It works tile by tile: the data of a tile stays in the cache of a core, and nothing as long as the tensor is allocated.
This is the reference for `triton_codec`, which writes the same bits. For that, both multiply by fp32(1 / largest_code)
and by the exactly rounded 1 / scale, round half to even, and never fuse a multiplication and an addition into one
rounding.

A block larger than a tile is read twice: once for its largest value, once for its codes.

Dims: R blocks, H values of a byte (1 or 2), C bytes of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from mics_strategy.comm.codecs.format import Codec

Fill = Callable[[int, int, torch.Tensor], None]  # writes the values from start to end into a flat fp32 tensor

# A tile takes half a megabyte of fp32. Smaller ones are slower, as they need more calls: INT8 encodes 1.2 GB/s with
# 2**16, 1.7 with 2**17, 2.5 with 2**18 (one core of an AMD EPYC with 1 MB of L2, bf16, 21 November 2026), but two cores
# share the cache beyond. On a GPU, where this replaces missing kernels, only the number of launches matters.
TILE_NUMEL = {"cpu": 2**17, "cuda": 2**22}


@dataclass(frozen=True, slots=True)
class _Run:
    """Consecutive blocks of one width.

    The first has value `begin` and block index `first`.
    """

    first: int
    rows: int
    width: int
    begin: int

    @property
    def end(self) -> int:
        return self.begin + self.rows * self.width


@dataclass(frozen=True, slots=True)
class _EncodedPayload:
    """One encoded tensor, split into codes and scales."""

    codec: Codec
    numel: int
    codes: torch.Tensor  # [payload_bytes] uint8
    scales: torch.Tensor  # [num_blocks] fp32


class TorchCodec:
    """Encodes and decodes with scratch tiles that it holds.

    One thread at a time may use it.

    Args:
        codec: Codec of the encoded buffers.
        device: Device of the tensors.
        generator: Generator on the CPU for stochastic rounding.

    Cost:
        Three tiles: 1.2 MB on a CPU, 38 MB on a GPU.
    """

    def __init__(self, codec: Codec, device: torch.device, generator: torch.Generator | None) -> None:
        self._codec = codec
        self._generator = generator
        self.tile_numel = TILE_NUMEL.get(device.type, TILE_NUMEL["cpu"])
        self._work = torch.empty(self.tile_numel, device=device)
        self._spare = torch.empty(self.tile_numel, device=device)
        self._bytes = torch.empty(self.tile_numel, dtype=torch.uint8, device=device)
        is_shared = device.type == "cpu" or codec.rounding == "nearest"
        self._noise = self._spare if is_shared else torch.empty(self.tile_numel)

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """See `Quantizer.encode`."""

        def copy(begin: int, end: int, tile: torch.Tensor) -> None:
            tile.copy_(values[begin:end])

        self._encode(copy, values.numel(), out)

    def decode(self, encoded: torch.Tensor, out: torch.Tensor, accumulate: bool) -> None:
        """See `Quantizer.decode` and, with `accumulate`, `Quantizer.decode_add`."""
        payload = _split_payload(self._codec, encoded, out.numel())
        block_size = self._codec.block_size
        step = max(1, self.tile_numel // block_size) * block_size if block_size <= self.tile_numel else self.tile_numel
        for begin in range(0, out.numel(), step):
            target = out[begin : begin + step]
            tile = self._work[: target.numel()]
            self._decode_range(payload, begin, begin + target.numel(), tile)
            target.add_(tile) if accumulate else target.copy_(tile)

    def encode_sum(
        self, source: Codec, pieces: torch.Tensor, addend: torch.Tensor | None, numel: int, out: torch.Tensor
    ) -> None:
        """See `Quantizer.encode_sum`."""
        rows = [_split_payload(source, piece, numel) for piece in pieces]

        def add_in_order(begin: int, end: int, tile: torch.Tensor) -> None:
            if addend is not None:
                tile.copy_(addend[begin:end])
            else:
                self._decode_range(rows[0], begin, end, tile)
            for row in rows if addend is not None else rows[1:]:
                decoded = self._spare[: end - begin]
                self._decode_range(row, begin, end, decoded)
                tile.add_(decoded)

        self._encode(add_in_order, numel, out)

    def _encode(self, fill: Fill, numel: int, out: torch.Tensor) -> None:
        payload = _split_payload(self._codec, out, numel)
        out[payload.codes.numel() : out.numel() - 4 * payload.scales.numel()].zero_()
        offset = 0
        for run in _runs(self._codec, numel, self.tile_numel):
            lane = self._codec.bytes_per_lane(run.width)
            codes_RC = payload.codes[offset : offset + run.rows * lane].view(run.rows, lane)
            self._encode_run(fill, run, codes_RC, payload.scales[run.first : run.first + run.rows, None])
            offset += run.rows * lane

    def _encode_run(self, fill: Fill, run: _Run, codes_RC: torch.Tensor, scales_R1: torch.Tensor) -> None:
        lane = codes_RC.shape[1]
        columns = min(lane, self.tile_numel // self._codec.values_per_byte)
        starts = range(0, lane, columns)
        scales_R1.zero_()
        for start in starts:
            tile_RHC = self._fill_tile(fill, run, start, min(columns, lane - start))
            magnitudes = torch.abs(tile_RHC, out=self._spare[: tile_RHC.numel()].view_as(tile_RHC))
            torch.maximum(scales_R1, magnitudes.flatten(1).amax(1, keepdim=True), out=scales_R1)
        inverses_R1, nonfinite_R1 = self._finish_scales(scales_R1)
        for start in starts:
            if len(starts) > 1:
                tile_RHC = self._fill_tile(fill, run, start, min(columns, lane - start))
            self._round(tile_RHC.mul_(inverses_R1[..., None]))
            if nonfinite_R1 is not None:
                tile_RHC.masked_fill_(nonfinite_R1[..., None], 0.0)
            self._pack(tile_RHC, codes_RC[:, start : start + columns])

    def _fill_tile(self, fill: Fill, run: _Run, start: int, columns: int) -> torch.Tensor:
        """The values of `columns` bytes of every block of the run, from byte `start`.

        Zeros follow the last value.
        """
        per_byte = self._codec.values_per_byte
        lane = self._codec.bytes_per_lane(run.width)
        numel = run.rows * per_byte * columns
        if columns == lane:
            spans = [(run.begin, numel)]
        else:
            spans = [(run.begin + half * lane + start, columns) for half in range(per_byte)]
        offset = 0
        for begin, count in spans:
            end = min(begin + count, run.end)
            fill(begin, end, self._work[offset : offset + end - begin])
            if end < begin + count:
                self._work[offset + end - begin : offset + count].zero_()
            offset += count
        return self._work[:numel].view(run.rows, per_byte, columns)

    def _finish_scales(self, scales_R1: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Turn the largest magnitudes into scales, in place.

        Returns:
            The inverse scales, by which values are multiplied, and a mask of nonfinite blocks (None where none is).
        """
        lowest, highest = scales_R1.mul_(1 / self._codec.largest_code).aminmax()
        if lowest >= self._codec.SMALLEST_SCALE and highest < torch.inf:  # the usual case; a NaN fails both comparisons
            return scales_R1.reciprocal(), None
        small = scales_R1 < self._codec.SMALLEST_SCALE
        nonfinite = ~(scales_R1 < torch.inf)
        scales_R1.masked_fill_(small, 0.0).masked_fill_(nonfinite, torch.nan)  # always the same bits of NaN
        return scales_R1.reciprocal().masked_fill_(small, 0.0), nonfinite

    def _round(self, tile_RHC: torch.Tensor) -> None:
        if self._codec.rounding == "nearest":
            tile_RHC.round_()
            return
        noise = self._noise[: tile_RHC.numel()].uniform_(generator=self._generator)
        largest = self._codec.largest_code
        tile_RHC.add_(noise.view_as(tile_RHC).to(tile_RHC.device)).floor_().clamp_(-largest, largest)

    def _pack(self, tile_RHC: torch.Tensor, codes_RC: torch.Tensor) -> None:
        if self._codec.bits == 8:
            codes_RC.view(torch.int8).copy_(tile_RHC[:, 0])
        else:  # (low + 8) + 16 * (high + 8), exact in fp32
            low_RC, high_RC = tile_RHC.unbind(1)
            codes_RC.copy_(low_RC.add_(high_RC, alpha=16).add_(8 * 17))

    def _decode_range(self, payload: _EncodedPayload, begin: int, end: int, out: torch.Tensor) -> None:
        """Write the values from `begin` to `end` into the flat `out`.

        Whole blocks are decoded at once, the ends by half blocks.
        """
        codec, start = payload.codec, begin
        while begin < end:
            target = out[begin - start :]
            block, offset = divmod(begin, codec.block_size)
            rows = 0 if offset else end // codec.block_size - block
            if rows:
                width, lane = codec.block_size, codec.block_bytes
                column, halves, count = 0, range(codec.values_per_byte), rows * codec.block_size
            else:
                width = min(codec.block_size, payload.numel - block * codec.block_size)
                lane = codec.bytes_per_lane(width)
                half, column = divmod(offset, lane)
                rows, halves, count = 1, range(half, half + 1), min(lane - column, end - begin)
            columns = count // (rows * len(halves))
            first_byte = block * codec.block_bytes + column
            codes_RC = payload.codes[first_byte : first_byte + (rows - 1) * lane + columns].view(rows, columns)
            tile_RHC = target[:count].view(rows, len(halves), columns)
            for position, half in enumerate(halves):
                self._unpack(codec, codes_RC, half, tile_RHC[:, position])
            tile_RHC.mul_(payload.scales[block : block + rows, None, None])
            begin += count

    def _unpack(self, codec: Codec, codes_RC: torch.Tensor, half: int, out_RC: torch.Tensor) -> None:
        """Write the codes of one half of the bytes as numbers into `out_RC`."""
        if codec.bits == 8:
            out_RC.copy_(codes_RC.view(torch.int8))
            return
        codes = self._bytes[: codes_RC.numel()].view_as(codes_RC)
        if half:
            torch.bitwise_right_shift(codes_RC, 4, out=codes)
        else:
            torch.bitwise_and(codes_RC, 15, out=codes)
        out_RC.copy_(codes.view(torch.int8).sub_(8))


def _split_payload(codec: Codec, encoded: torch.Tensor, numel: int) -> _EncodedPayload:
    return _EncodedPayload(codec, numel, encoded[: codec.payload_bytes(numel)], codec.scales(encoded, numel))


def _runs(codec: Codec, numel: int, tile_numel: int) -> Iterator[_Run]:
    """Runs of whole blocks, then the shorter block at the end.

    A run has as many blocks as a tile holds, or one where it holds none.
    """
    whole, rest = divmod(numel, codec.block_size)
    step = max(1, tile_numel // codec.block_size)
    for first in range(0, whole, step):
        yield _Run(first, min(step, whole - first), codec.block_size, first * codec.block_size)
    if rest:
        yield _Run(whole, 1, rest, whole * codec.block_size)
