"""How fast are the codecs beside a plain copy, and is what they write right?

Every operation reads memory, writes memory and does little else, so it is measured in bytes by time, as a share of what
the same device reaches when it copies. Bytes are counted by formula: each operand once, as if no cache helped.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from mics_strategy import Codec
from mics_strategy.comm.codecs.format import Summands
from mics_strategy.comm.codecs.quantizer import Quantizer, load_kernels
from mics_strategy.comm.codecs.torch_codec import TorchCodec

Row = dict[str, Any]  # a line of a table by column; what is under "problem" makes the command fail
Stamp = Any  # a torch.cuda.Event, or seconds

COPY_SHARE = 0.8  # of the copy bandwidth: what is asked of every kernel
CODECS = tuple(Codec(bits=bits, block_size=size) for bits, size in product((8, 4), (64, 256, 2048)))
_DTYPES = (torch.float32, torch.bfloat16)
_FP32_BYTES = 4
_CHECKED_NUMEL = 40_001


class Meter:
    """Time and memory of a device: events on the current stream of a GPU, elsewhere the host's clock and no memory.

    Args:
        device: Which.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_cuda = device.type == "cuda"

    def mark(self) -> Stamp:
        """Now, in the order of the current stream."""
        if not self.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: Stamp, end: Stamp) -> float:
        """From one mark to another; waits for both."""
        if not self.is_cuda:
            return float(end - begin)
        begin.synchronize()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def release(self) -> None:
        """Free memory without references."""
        gc.collect()
        if self.is_cuda:
            torch.cuda.empty_cache()

    def forget_peak(self) -> None:
        """Begin a new measurement of the peak. What the allocator keeps stays, so that the next step is like others."""
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats(self.device)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of live tensors; 0 where there is no GPU."""
        return torch.cuda.memory_allocated(self.device) if self.is_cuda else 0

    @property
    def peak_bytes(self) -> int:
        """The most that `allocated_bytes` was since the last `forget_peak`; 0 where there is no GPU."""
        return torch.cuda.max_memory_allocated(self.device) if self.is_cuda else 0

    @property
    def reserved_bytes(self) -> int:
        """Bytes that the allocator holds, in pools of which each stream has its own; 0 where there is no GPU."""
        return torch.cuda.memory_reserved(self.device) if self.is_cuda else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What the codecs are measured with.

    Attributes:
        numel: Values of a tensor; several times what the caches hold.
        pieces: Encoded tensors of which sums are made.
        rounds: Measurements, of which the median is shown.
        calls: Of each operation in a measurement, one behind the other, so that launching them is hidden.
    """

    numel: int = 2**28
    pieces: int = 8
    rounds: int = 5
    calls: int = 10


def moved_bytes(operation: str, codec: Codec, numel: int, value_bytes: int, pieces: int) -> int:
    """Bytes that an operation must read and write.

    Args:
        operation: ``"encode"``, ``"decode"``, ``"decode_add"`` or ``"decode_sum"``.
        codec: Of all encoded tensors.
        numel: Values of each tensor.
        value_bytes: Of one value that is not encoded.
        pieces: Summands; one is exact, in fp32, and the others are encoded.
    """
    encoded, values, sums = codec.encoded_bytes(numel), numel * value_bytes, numel * _FP32_BYTES
    by_operation = {
        "encode": values + encoded,
        "decode": encoded + values,
        "decode_add": encoded + 2 * sums,
        "decode_sum": (pieces - 1) * encoded + 2 * sums,
    }
    return by_operation[operation]


def measure_codecs(device: torch.device, sizes: Sizes) -> Iterator[Row]:
    """The copy, then every operation of every codec; on a GPU also whether the bits are the reference's."""
    if device.type == "cuda" and load_kernels() is None:
        yield {"operation": "kernels", "problem": "Triton is missing: what follows is plain torch"}
    copy_bytes_per_s = _copy_bytes_per_s(device, sizes)
    yield {"operation": "copy", "GB/s": copy_bytes_per_s / 1e9}
    for codec in CODECS:
        for dtype in _DTYPES:
            yield from _measure_conversions(codec, dtype, device, sizes, copy_bytes_per_s)
        yield _measure_sum(codec, device, sizes, copy_bytes_per_s)
        wrong = wrong_operations(codec, device)
        bits = "differ" if wrong else "equal"
        yield {"operation": "bits", "codec": _name(codec), "bits": bits, "problem": ", ".join(wrong)}


def median_s(meter: Meter, call: Callable[[], object], sizes: Sizes) -> float:
    """Time of one call, the median of several measurements. What the first call compiles is left out."""
    call()
    times_s = []
    for _ in range(sizes.rounds):
        call()  # keeps the device busy until the host is ahead of it
        begin = meter.mark()
        for _ in range(sizes.calls):
            call()
        times_s.append(meter.seconds(begin, meter.mark()) / sizes.calls)
    return statistics.median(times_s)


def _copy_bytes_per_s(device: torch.device, sizes: Sizes) -> float:
    source = torch.randn(sizes.numel, device=device)
    target = torch.empty_like(source)
    taken_s = median_s(Meter(device), lambda: target.copy_(source), sizes)
    return 2 * source.numel() * source.itemsize / taken_s


def _measure_conversions(
    codec: Codec, dtype: torch.dtype, device: torch.device, sizes: Sizes, copy_bytes_per_s: float
) -> Iterator[Row]:
    coder, numel = Quantizer(codec, device), sizes.numel
    values = torch.randn(numel, dtype=dtype, device=device)
    encoded = torch.empty(codec.encoded_bytes(numel), dtype=torch.uint8, device=device)
    calls: dict[str, Callable[[], object]] = {
        "encode": lambda: coder.encode(values, encoded),
        "decode": lambda: coder.decode(encoded, values),
    }
    if dtype is torch.float32:
        calls["decode_add"] = lambda: coder.decode_add(encoded, values)
    for operation, call in calls.items():
        taken_s = median_s(Meter(device), call, sizes)
        num_bytes = moved_bytes(operation, codec, numel, dtype.itemsize, sizes.pieces)
        row = {"operation": operation, "codec": _name(codec), "dtype": str(dtype).removeprefix("torch.")}
        yield {**row, **_rates(num_bytes, taken_s, copy_bytes_per_s)}


def _measure_sum(codec: Codec, device: torch.device, sizes: Sizes, copy_bytes_per_s: float) -> Row:
    coder, numel = Quantizer(codec, device), sizes.numel
    rows = torch.empty(sizes.pieces, codec.encoded_bytes(numel), dtype=torch.uint8, device=device)
    for piece in rows:
        coder.encode(torch.randn(numel, device=device), piece)
    summands = Summands(rows=rows, exact=torch.randn(numel, device=device), exact_index=0)
    total = torch.empty(numel, device=device)
    taken_s = median_s(Meter(device), lambda: coder.decode_sum(summands, total, accumulate=False), sizes)
    num_bytes = moved_bytes("decode_sum", codec, numel, _FP32_BYTES, sizes.pieces)
    row = {"operation": "decode_sum", "codec": _name(codec), "dtype": "float32"}
    return {**row, **_rates(num_bytes, taken_s, copy_bytes_per_s)}


def _rates(num_bytes: int, taken_s: float, copy_bytes_per_s: float) -> Row:
    share = num_bytes / taken_s / copy_bytes_per_s
    rates = {"MB": num_bytes / 1e6, "ms": taken_s * 1e3, "GB/s": num_bytes / taken_s / 1e9}
    return {**rates, "of copy": share, "target": "met" if share >= COPY_SHARE else "missed"}


def wrong_operations(codec: Codec, device: torch.device) -> list[str]:
    """Operations of `Quantizer` on `device` whose results are not, bit by bit, those of plain torch on the CPU.

    Without a GPU, both are the same code.
    """
    cpu, numel = torch.device("cpu"), _CHECKED_NUMEL
    coder, reference = Quantizer(codec, device), TorchCodec(codec, cpu, None)
    values, total = _awkward_values(numel), torch.randn(numel)
    num_bytes = codec.encoded_bytes(numel)
    pieces = torch.empty(3, num_bytes, dtype=torch.uint8)
    wrong = []
    for row, dtype in enumerate(_DTYPES):
        reference.encode(values.to(dtype), pieces[row])
        out = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        coder.encode(values.to(dtype).to(device), out)
        wrong += [] if torch.equal(out.cpu(), pieces[row]) else [f"encode {dtype}"]
        decoded, expected = torch.empty(numel, dtype=dtype, device=device), torch.empty(numel, dtype=dtype)
        coder.decode(pieces[row].to(device), decoded)
        reference.decode(pieces[row], expected, accumulate=False)
        wrong += [] if _is_same(decoded.cpu(), expected) else [f"decode {dtype}"]
    reference.encode(total, pieces[2])
    on_device = total.to(device, copy=True)
    coder.decode_add(pieces[0].to(device), on_device)
    reference.decode(pieces[0], total, accumulate=True)
    wrong += [] if _is_same(on_device.cpu(), total) else ["decode_add"]
    exact = torch.randn(numel)
    summands = Summands(rows=pieces, exact=exact, exact_index=1)
    moved = Summands(rows=pieces.to(device), exact=exact.to(device), exact_index=1)
    coder.decode_sum(moved, on_device, accumulate=True)
    reference.decode_sum(summands, total, accumulate=True)
    wrong += [] if _is_same(on_device.cpu(), total) else ["decode_sum"]
    return wrong


def _awkward_values(numel: int) -> torch.Tensor:
    """Numbers with zeros, ties, tiny and huge ones, NaN and infinity among them."""
    values = torch.randn(numel)
    values[:4096] = 0
    values[4096:8192] *= 1e-39
    values[8192:8256] = torch.arange(64) - 31.5
    values[8192] = 127
    values[12_000], values[20_000], values[-1] = 3e38, torch.nan, -torch.inf
    return values


def _is_same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal with equal signs, or both NaN."""
    is_equal = (left == right) & (left.signbit() == right.signbit())
    return bool((is_equal | left.isnan() & right.isnan()).all())


def _name(codec: Codec) -> str:
    return f"int{codec.bits}/{codec.block_size}"
