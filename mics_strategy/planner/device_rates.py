"""Rates of one device: matrix products, copies in its memory, and codecs."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

import torch

from mics_strategy.comm.codecs.format import Codec
from mics_strategy.comm.codecs.quantizer import Quantizer

RUNS = 7  # of each measurement; the median counts
_LONGEST_S = 0.05  # of runs in a row


def matmul_rate(dtype: torch.dtype, device: torch.device, start_together: Callable[[], None]) -> float:
    """FLOP per second of large matrix products, while every rank computes."""
    return 2 * _edge(device) ** 3 / median_seconds(matrix_product(dtype, device), device, start_together)


def memory_rate(device: torch.device, start_together: Callable[[], None]) -> float:
    """Bytes per second that a large copy reads and writes, while every rank copies."""
    numel = (256 if device.type == "cuda" else 16) * 2**20
    source, target = (torch.zeros(numel, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * numel / median_seconds(lambda: target.copy_(source), device, start_together)


def codec_rates(codec: Codec, device: torch.device, start_together: Callable[[], None]) -> tuple[float, float]:
    """Values per second that are encoded, and that are decoded and added.

    Every rank does so, in pieces as large as messages of gradients.
    """
    numel = (16 * 2**20) if device.type == "cuda" else 2**18
    quantizer = Quantizer(codec, device)
    values = torch.randn(numel, device=device)
    encoded = torch.empty(codec.encoded_bytes(numel), dtype=torch.uint8, device=device)
    encode_s = median_seconds(lambda: quantizer.encode(values, encoded), device, start_together)
    return numel / encode_s, numel / median_seconds(
        lambda: quantizer.decode_add(encoded, values), device, start_together
    )


def median_seconds(
    run: Callable[[], object], device: torch.device, start_together: Callable[[], None], in_a_row: int | None = None
) -> float:
    """Median seconds of one of several runs in a row, of fewer where they take long."""
    run()
    synchronize(device)
    begin_s = time.perf_counter()
    run()
    synchronize(device)
    in_a_row = max(1, min(in_a_row or RUNS, int(_LONGEST_S / (time.perf_counter() - begin_s))))
    times = []
    for _ in range(RUNS):
        start_together()
        begin_s = time.perf_counter()
        repeat(run, in_a_row)
        synchronize(device)
        times.append((time.perf_counter() - begin_s) / in_a_row)
    return statistics.median(times)


def _edge(device: torch.device, *, small: bool = False) -> int:
    """Rows and columns of the matrices."""
    if device.type == "cuda":
        return 1024 if small else 8192
    return 128 if small else 512


def matrix_product(dtype: torch.dtype, device: torch.device, *, small: bool = False) -> Callable[[], object]:
    """A function that multiplies matrices; small ones take under a millisecond."""
    edge = _edge(device, small=small)
    # Zeros switch fewer transistors: with them an H200 runs at a higher clock, 894 TFLOP/s against 788.
    left, right, out = (torch.randn(edge, edge, dtype=dtype, device=device) for _ in range(3))
    return lambda: torch.mm(left, right, out=out)


def repeat(run: Callable[[], object], count: int) -> None:
    """Run something `count` times."""
    for _ in range(count):
        run()


def synchronize(device: torch.device) -> None:
    """Wait for everything on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_name(device: torch.device) -> str:
    """Name of the device in a calibration."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{os.cpu_count()} CPU cores a node"


def memory_bytes(device: torch.device, ranks_per_node: int) -> int:
    """Memory of one rank: its GPU's, or its share of the machine's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks_per_node
