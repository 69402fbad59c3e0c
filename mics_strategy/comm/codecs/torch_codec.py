"""Encoding and decoding of tensors in plain torch.

It works tile by tile: the data of a tile stays in the cache of a core, and nothing as long as the tensor is allocated.
This is the reference for `triton_codec`, which writes the same bits. For that, both multiply by fp32(1 / largest_code)
and by the exactly rounded 1 / scale, round half to even, and never fuse a multiplication and an addition into one
rounding.

A block larger than a tile is read twice: once for its largest value, once for its codes.

The Hadamard matrix of a rotation is applied by butterflies, log2(block) additions for each value, in a fixed order, so
that all ranks decode the same bits.

Dims: G rows of a table that a tile holds together, N values, R blocks, H values of a byte (1, 2 or 4), C bytes of a
block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from mics_strategy.comm.codecs.format import Codec, Summands

# A tile takes half a megabyte of fp32. Smaller ones are slower, as they need more calls: INT8 encodes 1.2 GB/s with
# 2**16, 1.7 with 2**17, 2.5 with 2**18 (one core of an AMD EPYC with 1 MB of L2, bf16, 21 November 2026), but two cores
# share the cache beyond. On a GPU, where this replaces missing kernels, only the number of launches matters.
TILE_NUMEL = {"cpu": 2**17, "cuda": 2**22}


@dataclass(frozen=True, slots=True)
class _Run:
    """Consecutive blocks of one width. The first has value `begin` and block index `first`."""

    first: int
    rows: int
    width: int
    begin: int

    @property
    def end(self) -> int:
        return self.begin + self.rows * self.width


@dataclass(frozen=True, slots=True)
class _EncodedPayload:
    """Encoded rows, split into codes and scales."""

    numel: int  # of one row
    codes: torch.Tensor  # [G, payload_bytes] uint8
    scales: torch.Tensor  # [G, num_blocks] fp32


class TorchCodec:
    """Encodes and decodes with scratch tiles that it holds.

    One thread at a time may use it.

    Args:
        codec: Codec of the encoded buffers.
        device: Device of the tensors.
        generator: Generator on the CPU for stochastic rounding.

    Cost:
        Three tiles: 1.2 MB on a CPU, 38 MB on a GPU. With `rotation` one more from the first call on.
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
        self._mixed = self._work[:0]

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """See `Quantizer.encode`."""
        for values_GN, out_GB in self._groups(torch.atleast_2d(values), torch.atleast_2d(out)):
            self._encode(values_GN, out_GB)

    def decode(self, encoded: torch.Tensor, out: torch.Tensor, accumulate: bool) -> None:
        """See `Quantizer.decode` and, with `accumulate`, `Quantizer.decode_add`."""
        for out_GN, encoded_GB in self._groups(torch.atleast_2d(out), torch.atleast_2d(encoded)):
            payload = _split_payload(self._codec, encoded_GB, out_GN.shape[1])
            for begin, end in self._steps(payload.numel):
                tile = self._work[: len(out_GN) * (end - begin)].view(len(out_GN), -1)
                self._decode_range(payload, begin, end, tile)
                out_GN[:, begin:end].add_(tile) if accumulate else out_GN[:, begin:end].copy_(tile)

    def decode_sum(self, summands: Summands, out: torch.Tensor, accumulate: bool) -> None:
        """See `Quantizer.decode_sum`."""
        for begin, end in self._steps(out.numel()):
            total = out[begin:end] if accumulate else out[begin:end].zero_()
            for index, row in enumerate(summands.rows):
                if index == summands.exact_index:
                    total.add_(summands.exact[begin:end])
                else:
                    decoded = self._spare[: end - begin]
                    payload = _split_payload(self._codec, row[None], out.numel())
                    self._decode_range(payload, begin, end, decoded[None])
                    total.add_(decoded)

    def _groups(self, values: torch.Tensor, encoded: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """As many rows at a time as a tile holds, or one where it holds none.

        Stochastic rounding draws the numbers of one row after the other, so that rows with a shorter block at their
        end go alone.
        """
        numel = values.shape[1]
        draws_in_order = self._codec.rounding == "nearest" or numel % self._codec.block_size == 0
        count = max(1, self.tile_numel // (numel + 1)) if draws_in_order else 1
        for first in range(0, len(values), count):
            yield values[first : first + count], encoded[first : first + count]

    def _steps(self, numel: int) -> Iterator[tuple[int, int]]:
        """Ranges of values that are decoded at once."""
        block_size = self._codec.block_size
        step = max(1, self.tile_numel // block_size) * block_size if block_size <= self.tile_numel else self.tile_numel
        for begin in range(0, numel, step):
            yield begin, min(begin + step, numel)

    def _encode(self, values_GN: torch.Tensor, out_GB: torch.Tensor) -> None:
        rows, numel = values_GN.shape
        payload = _split_payload(self._codec, out_GB, numel)
        out_GB[:, payload.codes.shape[1] : out_GB.shape[1] - 4 * payload.scales.shape[1]].zero_()
        offset = 0
        for run in _runs(self._codec, numel, self.tile_numel // rows):
            lane = self._codec.bytes_per_lane(run.width)
            codes_GRC = payload.codes[:, offset : offset + run.rows * lane].unflatten(1, (run.rows, lane))
            self._encode_run(values_GN, run, codes_GRC, payload.scales[:, run.first : run.first + run.rows, None])
            offset += run.rows * lane

    def _encode_run(
        self, values_GN: torch.Tensor, run: _Run, codes_GRC: torch.Tensor, scales_GR1: torch.Tensor
    ) -> None:
        lane = codes_GRC.shape[2]
        columns = min(lane, self.tile_numel // self._codec.values_per_byte)
        starts = range(0, lane, columns)
        scales_GR1.zero_()
        for start in starts:
            tile_GRHC = self._fill_tile(values_GN, run, start, min(columns, lane - start))
            if self._codec.rotates(run.width):
                self._mix(tile_GRHC.mul_(1 / run.width).flatten(2))
            magnitudes = torch.abs(tile_GRHC, out=self._spare[: tile_GRHC.numel()].view_as(tile_GRHC))
            torch.maximum(scales_GR1, magnitudes.flatten(2).amax(2, keepdim=True), out=scales_GR1)
        inverses_GR1, nonfinite_GR1 = self._finish_scales(scales_GR1)
        for start in starts:
            if len(starts) > 1:
                tile_GRHC = self._fill_tile(values_GN, run, start, min(columns, lane - start))
            self._round(tile_GRHC.mul_(inverses_GR1[..., None]))
            if nonfinite_GR1 is not None:
                tile_GRHC.masked_fill_(nonfinite_GR1[..., None], 0.0)
            self._pack(tile_GRHC, codes_GRC[..., start : start + columns])

    def _fill_tile(self, values_GN: torch.Tensor, run: _Run, start: int, columns: int) -> torch.Tensor:
        """The values of `columns` bytes of every block of the run, from byte `start`.

        In each row, zeros follow the last value.
        """
        per_byte = self._codec.values_per_byte
        lane = self._codec.bytes_per_lane(run.width)
        rows, numel = len(values_GN), run.rows * per_byte * columns
        if columns == lane:
            spans = [(run.begin, numel)]
        else:
            spans = [(run.begin + half * lane + start, columns) for half in range(per_byte)]
        tile_GN = self._work[: rows * numel].view(rows, numel)
        offset = 0
        for begin, count in spans:
            end = max(begin, min(begin + count, run.end))
            tile_GN[:, offset : offset + end - begin].copy_(values_GN[:, begin:end])
            if end < begin + count:
                tile_GN[:, offset + end - begin : offset + count].zero_()
            offset += count
        return tile_GN.view(rows, run.rows, per_byte, columns)

    def _finish_scales(self, scales_GR1: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Turn the largest magnitudes into scales, in place.

        Returns:
            The inverse scales, by which values are multiplied, and a mask of nonfinite blocks (None where none is).
        """
        lowest, highest = scales_GR1.mul_(1 / self._codec.largest_code).aminmax()
        if lowest >= self._codec.SMALLEST_SCALE and highest < torch.inf:  # the usual case; a NaN fails both comparisons
            return scales_GR1.reciprocal(), None
        small = scales_GR1 < self._codec.SMALLEST_SCALE
        nonfinite = ~(scales_GR1 < torch.inf)
        scales_GR1.masked_fill_(small, 0.0).masked_fill_(nonfinite, torch.nan)  # always the same bits of NaN
        return scales_GR1.reciprocal().masked_fill_(small, 0.0), nonfinite

    def _round(self, tile_GRHC: torch.Tensor) -> None:
        if self._codec.rounding == "nearest":
            tile_GRHC.round_()
            return
        noise = self._noise[: tile_GRHC.numel()].uniform_(generator=self._generator)
        largest = self._codec.largest_code
        tile_GRHC.add_(noise.view_as(tile_GRHC).to(tile_GRHC.device)).floor_().clamp_(-largest, largest)

    def _pack(self, tile_GRHC: torch.Tensor, codes_GRC: torch.Tensor) -> None:
        if self._codec.bits == 8:
            codes_GRC.view(torch.int8).copy_(tile_GRHC[:, :, 0])
        else:  # in INT4 (low + 8) + 16 * (high + 8), exact in fp32
            radix = 1 << self._codec.bits
            byte_GRC, *others_GRC = tile_GRHC.unbind(2)
            for half, codes in enumerate(others_GRC, 1):
                byte_GRC.add_(codes, alpha=radix**half)
            codes_GRC.copy_(byte_GRC.add_(radix // 2 * (255 // (radix - 1))))

    def _decode_range(self, payload: _EncodedPayload, begin: int, end: int, out: torch.Tensor) -> None:
        """Write the values from `begin` to `end` of all rows to `out`, [G, end - begin].

        Whole blocks are decoded at once, the ends by half blocks. Tiles cut no rotated block.
        """
        codec, start = self._codec, begin
        while begin < end:
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
            codes_GRC = payload.codes[:, first_byte : first_byte + rows * columns].unflatten(1, (rows, columns))
            tile_GRHC = out[:, begin - start : begin - start + count].unflatten(1, (rows, len(halves), columns))
            for position, half in enumerate(halves):
                self._unpack(codes_GRC, half, tile_GRHC[:, :, position])
            tile_GRHC.mul_(payload.scales[:, block : block + rows, None, None])
            if codec.rotates(width):
                self._mix(tile_GRHC.flatten(2))
            begin += count

    def _unpack(self, codes_GRC: torch.Tensor, half: int, out_GRC: torch.Tensor) -> None:
        """Write the codes of one half of the bytes as numbers into `out_GRC`."""
        codec = self._codec
        if codec.bits == 8:
            out_GRC.copy_(codes_GRC.view(torch.int8))
            return
        radix = 1 << codec.bits
        codes = self._bytes[: codes_GRC.numel()].view_as(codes_GRC)
        if half:
            torch.bitwise_right_shift(codes_GRC, codec.bits * half, out=codes)
            if half + 1 < codec.values_per_byte:
                codes.bitwise_and_(radix - 1)
        else:
            torch.bitwise_and(codes_GRC, radix - 1, out=codes)
        out_GRC.copy_(codes.view(torch.int8).sub_(radix // 2))

    def _mix(self, values_GRN: torch.Tensor) -> None:
        """Multiply every block by the Hadamard matrix, in place."""
        if self._mixed.numel() < values_GRN.numel():
            self._mixed = values_GRN.new_empty(max(self.tile_numel, values_GRN.numel()))
        size, stride = values_GRN.shape[-1], 1
        source, target = values_GRN, self._mixed[: values_GRN.numel()].view(values_GRN.shape)
        while stride < size:
            pairs = source.unflatten(-1, (size // (2 * stride), 2, stride))
            sums, differences = target.unflatten(-1, (size // (2 * stride), 2, stride)).unbind(-2)
            torch.add(pairs[..., 0, :], pairs[..., 1, :], out=sums)
            torch.sub(pairs[..., 0, :], pairs[..., 1, :], out=differences)
            source, target, stride = target, source, 2 * stride
        if source is not values_GRN:
            values_GRN.copy_(source)


def _split_payload(codec: Codec, encoded: torch.Tensor, numel: int) -> _EncodedPayload:
    return _EncodedPayload(numel, encoded[:, : codec.payload_bytes(numel)], codec.scales(encoded, numel))


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
