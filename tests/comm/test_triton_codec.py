"""Do kernels write the bits of the reference?

On a CPU they are interpreted, and compiled for a GPU without running there. What a GPU does is only claimed on a GPU.
"""

import importlib
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mics_strategy import Codec
from mics_strategy.comm.codecs.format import Summands
from mics_strategy.comm.codecs.quantizer import LARGEST_KERNEL_BLOCK, Quantizer, load_kernels
from mics_strategy.comm.codecs.torch_codec import TorchCodec

ROOT = Path(__file__).parents[2]
NAMES = ("encode", "decode", "tables", "decode_sum", "stochastic")

checks = pytest.mark.parametrize("name", NAMES)
bits = pytest.mark.parametrize("bits", [8, 4])
on_gpu = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),  # hundreds of kernels are compiled
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]


def _python(args: list[str], **environment: str) -> str:
    """What a child prints. It has Triton's variables to itself: they are read when kernels are defined."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    child = subprocess.run(
        [sys.executable, *args], cwd=ROOT, env=inherited | environment, capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stderr
    return child.stdout


@pytest.fixture(scope="module")
def interpreted(request: pytest.FixtureRequest) -> dict[str, list[str]]:
    """What the selected checks find, by name and number of bits."""
    cases = [item.callspec.params for item in request.session.items if "interpreted" in item.fixturenames]
    selected = [f"{case['name']}-{case['bits']}" for case in cases]
    return json.loads(_python(["-m", "tests.comm.kernel_checks", *selected], TRITON_INTERPRET="1"))


@pytest.mark.interpreter
@pytest.mark.wide
@checks
@bits
def test_interpreted_kernels_write_the_bits_of_the_reference(
    interpreted: dict[str, list[str]], name: str, bits: int
) -> None:
    assert interpreted[f"{name}-{bits}"] == []


COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from mics_strategy.comm.codecs import triton_codec as kernels

def index_of(is_wide):
    return kernels.tl.int64 if is_wide else kernels.tl.int32


BLOCK = {"ROWS": 8, "LANE": 256}
NUMBERS = ("begin", "numel", "row_bytes", "rows", "lane", "padding_bytes", "piece_bytes", "exact_piece", "seed")
ALIGNED = ("begin", "numel", "row_bytes", "lane", "piece_bytes")


def ptx(kernel, pointers, constants, fusion):
    signature = pointers | {name: "i32" for name in kernel.arg_names if name in NUMBERS} | dict.fromkeys(constants)
    signature = {name: signature[name] or "constexpr" for name in kernel.arg_names}
    aligned = [name for name in kernel.arg_names if name in pointers or name in ALIGNED]
    attrs = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants | BLOCK, attrs=attrs)
    options = kernels.LAUNCH | ({"enable_fp_fusion": True} if fusion else {})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]


def encode(bits, fusion=False, values="*bf16", is_wide=False):
    constants = {"BITS": bits, "IS_STOCHASTIC": is_wide, "INDEX": index_of(is_wide), **dict.fromkeys(BLOCK)}
    return ptx(kernels.encode_blocks, {"codes": "*u8", "scale_bits": "*i32", "values": values}, constants, fusion)


def decode(bits, fusion=False, out="*bf16", is_wide=False):
    constants = {"BITS": bits, "IS_ADDING": out == "*fp32", "INDEX": index_of(is_wide), **dict.fromkeys(BLOCK)}
    return ptx(kernels.decode_blocks, {"codes": "*u8", "scales": "*fp32", "out": out}, constants, fusion)


def add(bits, fusion=False, out="*fp32", exact="*bf16", is_wide=False):
    constants = {"BITS": bits, "IS_ADDING": is_wide, "INDEX": index_of(is_wide), "PIECES": 8, **dict.fromkeys(BLOCK)}
    pointers = {"codes": "*u8", "scales": "*fp32", "out": out, "exact": exact}
    return ptx(kernels.sum_blocks, pointers, constants, fusion)


for bits in (8, 4):
    for text in (
        encode(bits), encode(bits, is_wide=True), encode(bits, values="*fp32"), encode(bits, values="*fp64"),
        add(bits), add(bits, out="*fp64", exact="*fp32"), add(bits, exact="*fp32", is_wide=True),
        decode(bits), decode(bits, out="*fp32"), decode(bits, out="*fp16", is_wide=True),
    ):
        assert "fma." not in text, text
        assert "div.full" not in text and "rcp.approx" not in text, text
    assert "ld.global.v4" in encode(bits) and "st.global.v4" in encode(bits)
    assert "ld.global.v4" in decode(bits) and "st.global.v4" in decode(bits)
    assert "ld.global.v4" in add(bits, exact="*fp32") and "st.global.v4" in add(bits)
    assert "fma." in encode(bits, fusion=True) and "fma." in decode(bits, fusion=True, out="*fp32")
"""


@pytest.mark.slow
def test_compiled_kernels_fuse_no_rounding_and_move_16_bytes_at_once(tmp_path: Path) -> None:
    _python(["-c", COMPILE], TRITON_CACHE_DIR=str(tmp_path))


def test_without_triton_the_reference_stands_in_and_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    package = importlib.import_module("mics_strategy.comm.codecs")
    monkeypatch.delattr(package, "triton_codec", raising=False)
    monkeypatch.delitem(sys.modules, "mics_strategy.comm.codecs.triton_codec", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    load_kernels.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert [load_kernels(), load_kernels()] == [None, None]
    load_kernels.cache_clear()
    assert [("Triton is not installed" in record.message) for record in caplog.records] == [True]


@pytest.mark.parametrize("name", [pytest.param(name, marks=on_gpu) for name in NAMES])
@bits
def test_kernels_on_a_gpu_write_the_bits_of_the_reference(name: str, bits: int) -> None:
    from tests.comm.kernel_checks import CHECKS

    assert CHECKS[name](bits, torch.device("cuda")) == []


@pytest.mark.parametrize(
    "block_size", [pytest.param(size, marks=on_gpu) for size in (256, LARGEST_KERNEL_BLOCK, LARGEST_KERNEL_BLOCK + 2)]
)
@bits
def test_a_coder_on_a_gpu_writes_the_bits_of_one_on_a_cpu(bits: int, block_size: int) -> None:
    codec, values = Codec(bits=bits, block_size=block_size), torch.randn(100_001).bfloat16()
    outs, totals = [], []
    for device in map(torch.device, ("cpu", "cuda")):
        outs.append(torch.empty(codec.encoded_bytes(values.numel()), dtype=torch.uint8, device=device))
        totals.append(torch.empty(values.numel(), device=device))
        Quantizer(codec, device).encode(values.to(device), outs[-1])
        summands = Summands(rows=outs[-1].repeat(3, 1), exact=values.to(device), exact_index=1)
        Quantizer(codec, device).decode_sum(summands, totals[-1], accumulate=False)
    assert torch.equal(outs[0], outs[1].cpu())
    assert torch.equal(totals[0], totals[1].cpu())
    restored = torch.empty(values.numel(), device="cuda")
    expected = torch.empty(values.numel())
    Quantizer(codec, torch.device("cuda")).decode(outs[1], restored)
    TorchCodec(codec, torch.device("cpu"), None).decode(outs[0], expected, accumulate=False)
    assert torch.equal(restored.cpu(), expected)
