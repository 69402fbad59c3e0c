"""Do kernels write the bits of the reference? On a GPU, or interpreted on a CPU.

As a program, ``python -m tests.comm.kernel_checks encode-8 stochastic-4`` prints what these checks found with so many
bits, as JSON; the caller sets TRITON_INTERPRET, which Triton reads when kernels are defined.
"""

import itertools
import json
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from mics_strategy import Codec
from mics_strategy.comm.codecs.format import Summands
from mics_strategy.comm.codecs.torch_codec import TorchCodec
from mics_strategy.comm.codecs.triton_codec import TritonCodec
from tests.seeds import seed_generators

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
CASES = [(256, 1), (256, 3), (256, 256), (256, 5001), (2, 99), (64, 1000), (96, 1001), (8192, 8193), (4096, 40_001)]


def _values(numel: int, dtype: torch.dtype) -> Tensor:
    values = torch.randn(numel, dtype=torch.float64)
    if numel > 900:
        values[:64], values[70], values[-1] = 0, torch.nan, -torch.inf
        values[256:320] *= 1e-39
        values[400:464] = torch.arange(64) - 31.5
        values[400] = 127
        values[600] = 3e38
    return values.to(dtype)


def _codecs(bits: int) -> list[tuple[Codec, int]]:
    return [(Codec(bits=bits, block_size=block_size), numel) for block_size, numel in CASES]


def _buffer(codec: Codec, numel: int, device: torch.device) -> Tensor:
    return torch.full((codec.encoded_bytes(numel),), 0xAB, dtype=torch.uint8, device=device)


def _encoded(codec: Codec, values: Tensor) -> Tensor:
    out = _buffer(codec, values.numel(), values.device)
    TorchCodec(codec, values.device, None).encode(values, out)
    return out


def _is_same(left: Tensor, right: Tensor) -> bool:
    """Equal bits, or both NaN."""
    return bool(((left == right) & (left.signbit() == right.signbit()) | left.isnan() & right.isnan()).all())


def encode(bits: int, device: torch.device) -> list[str]:
    """Cases in which the bytes differ."""
    wrong = []
    for (codec, numel), dtype in itertools.product(_codecs(bits), DTYPES):
        values = _values(numel, dtype).to(device)
        out = _buffer(codec, numel, device)
        TritonCodec(codec, None).encode(values, out)
        if not torch.equal(out, _encoded(codec, values)):
            wrong.append(f"{codec} {numel} {dtype}")
    return wrong


def decode(bits: int, device: torch.device) -> list[str]:
    """Cases in which decoded or added values differ."""
    wrong = []
    for (codec, numel), dtype in itertools.product(_codecs(bits), DTYPES):
        encoded = _encoded(codec, _values(numel, dtype).to(device))
        scales = codec.scales(encoded, numel)
        scales.view(torch.int32)[-1] = 0x7FFFFFFF  # the NaN that a GPU makes
        scales[0] = 1 + 2**-8  # many values half way between two bf16 numbers
        outs = torch.full((2, numel), 7.0, dtype=dtype, device=device)
        totals = torch.randn(numel).to(device).repeat(2, 1)
        for worker, out, total in zip(
            (TorchCodec(codec, device, None), TritonCodec(codec, None)), outs, totals, strict=True
        ):
            worker.decode(encoded, out, accumulate=False)
            worker.decode(encoded, total, accumulate=True)
        if not (_is_same(*outs) and _is_same(*totals)):
            wrong.append(f"{codec} {numel} {dtype}")
    return wrong


def _summands(codec: Codec, rows: int, numel: int, device: torch.device) -> Summands:
    """Encoded rows, and an exact one in bf16."""
    encoded = torch.stack([_encoded(codec, _values(numel, torch.float32).to(device)) for _ in range(rows)])
    return Summands(rows=encoded, exact=torch.randn(numel).bfloat16().to(device), exact_index=1)


def decode_sum(bits: int, device: torch.device) -> list[str]:
    """Cases in which sums of rows differ."""
    wrong = []
    for (codec, numel), dtype, accumulate in itertools.product(_codecs(bits), DTYPES[2:], (False, True)):
        summands = _summands(codec, 3, numel, device)
        outs = torch.randn(numel, dtype=dtype).to(device).repeat(2, 1)
        for worker, out in zip((TorchCodec(codec, device, None), TritonCodec(codec, None)), outs, strict=True):
            worker.decode_sum(summands, out, accumulate)
        if not _is_same(*outs):
            wrong.append(f"{codec} {numel} {dtype} {accumulate}")
    return wrong


def tables(bits: int, device: torch.device) -> list[str]:
    """Cases in which the rows of a table differ from rows that are treated one after the other."""
    wrong = []
    for codec, numel in _codecs(bits)[: -1 if device.type == "cpu" else None]:  # the largest takes long interpreted
        kernels, values = TritonCodec(codec, None), torch.stack([_values(numel, torch.bfloat16) for _ in range(3)])
        values = values.to(device)
        at_once, by_row = (torch.stack([_buffer(codec, numel, device)] * 3) for _ in range(2))
        kernels.encode(values, at_once)
        outs, totals = torch.full((2, 3, numel), 7.0, device=device), torch.ones(2, 3, numel, device=device)
        kernels.decode(at_once, outs[0], accumulate=False)
        kernels.decode(at_once, totals[0], accumulate=True)
        for row in range(3):
            kernels.encode(values[row], by_row[row])
            kernels.decode(by_row[row], outs[1, row], accumulate=False)
            kernels.decode(by_row[row], totals[1, row], accumulate=True)
        if not (torch.equal(at_once, by_row) and _is_same(*outs) and _is_same(*totals)):
            wrong.append(f"{codec} {numel}")
    return wrong


def stochastic(bits: int, device: torch.device) -> list[str]:
    """What is wrong with the noise: its mean, its range, or what it depends on."""
    codec, repeats = Codec(bits=bits, block_size=64, rounding="stochastic"), 500
    values = torch.linspace(-1, 1, 64).repeat(repeats).to(device)
    outs = []
    for seed in (1, 1, 2):
        outs.append(_buffer(codec, values.numel(), device))
        TritonCodec(codec, torch.Generator().manual_seed(seed)).encode(values, outs[-1])
    restored = torch.empty_like(values)
    TorchCodec(Codec(bits=bits, block_size=64), device, None).decode(outs[0], restored, accumulate=False)
    rows = torch.stack([_buffer(codec, 64, device)] * 2)
    TritonCodec(codec, torch.Generator().manual_seed(1)).encode(values[:64].repeat(2, 1), rows)
    scale, wanted = 1 / codec.largest_code, values[:64].double()
    share = wanted / scale - (wanted / scale).floor()
    bound = 6 * scale * (share * (1 - share) / repeats).sqrt() + 1e-5 * scale
    found = {
        "mean": ((restored.double().view(repeats, 64).mean(0) - wanted).abs() <= bound).all(),
        "range": ((restored - values).abs() <= scale * 1.0001).all(),
        "same seed": torch.equal(outs[0], outs[1]),
        "other seed": not torch.equal(outs[0], outs[2]),
        "rows": torch.equal(rows[0, :32], outs[0][:32]) and not torch.equal(*rows),
    }
    return [name for name, is_right in found.items() if not is_right]


CHECKS: dict[str, Callable[[int, torch.device], list[str]]] = {
    check.__name__: check for check in (encode, decode, tables, decode_sum, stochastic)
}

if __name__ == "__main__":
    seed_generators()
    cases = {case: case.split("-") for case in sys.argv[1:]}
    found = {case: CHECKS[name](int(bits), torch.device("cpu")) for case, (name, bits) in cases.items()}
    json.dump(found, sys.stdout)
