"""Do bytes hold what a codec promises, whatever the values, sizes and dtypes?"""

import math
import subprocess
import sys
import threading

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mics_strategy import Codec, ConfigError, ShapeError
from mics_strategy.comm.codecs.format import Summands
from mics_strategy.comm.codecs.quantizer import Quantizer
from mics_strategy.comm.codecs.torch_codec import TILE_NUMEL
from tests.comm import naive_codec

CPU = torch.device("cpu")
TILE = TILE_NUMEL["cpu"]
HUGE = 2**40  # one block, whatever the tensor
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
bits = pytest.mark.parametrize("bits", [8, 4])
sizes = pytest.mark.parametrize("block_size", [2, 6, 64, 256, HUGE])
numels = pytest.mark.parametrize("numel", [0, 1, 2, 3, 63, 64, 65, 256, 769])


def coder(codec: Codec, seed: int = 0) -> Quantizer:
    return Quantizer(codec, CPU, torch.Generator().manual_seed(seed))


def encoded(codec: Codec, values: Tensor) -> Tensor:
    out = torch.full((codec.encoded_bytes(values.numel()),), 0xAB, dtype=torch.uint8)
    coder(codec).encode(values, out)
    return out


def decoded(codec: Codec, encoding: Tensor, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    out = torch.full((numel,), 7.0, dtype=dtype)
    coder(codec).decode(encoding, out)
    return out


def round_trip(codec: Codec, values: Tensor) -> Tensor:
    return decoded(codec, encoded(codec, values), values.numel())


def awkward(numel: int, dtype: torch.dtype) -> Tensor:
    """Ordinary numbers, and for blocks of 256 or less also zeros, NaN, infinity, tiny and large ones."""
    values = torch.randn(numel, dtype=torch.float64)
    if numel > 256:
        values[:64] = 0
        values[70], values[130], values[200], values[-1] = torch.nan, torch.inf, 6e4, 1e-39
        values[256:320] *= 1e-38
    return values.to(dtype)


@bits
@sizes
@numels
@dtypes
def test_bytes_are_those_of_the_naive_codec(bits: int, block_size: int, numel: int, dtype: torch.dtype) -> None:
    codec = Codec(bits=bits, block_size=block_size)
    values = awkward(numel, dtype)
    expected = naive_codec.encode(codec, values)
    assert expected.numel() == codec.encoded_bytes(numel)
    assert torch.equal(encoded(codec, values), expected)


@bits
@sizes
@numels
@dtypes
def test_decoded_values_are_those_of_the_naive_codec(
    bits: int, block_size: int, numel: int, dtype: torch.dtype
) -> None:
    codec = Codec(bits=bits, block_size=block_size)
    encoding = encoded(codec, awkward(numel, dtype))
    expected = naive_codec.decode(codec, encoding, numel)
    torch.testing.assert_close(
        decoded(codec, encoding, numel, dtype), expected.to(dtype), rtol=0, atol=0, equal_nan=True
    )
    total = torch.randn(numel)
    summed = total + expected
    coder(codec).decode_add(encoding, total)
    torch.testing.assert_close(total, summed, rtol=0, atol=0, equal_nan=True)


@bits
@pytest.mark.parametrize("block_size", [256, 1000, TILE, 2 * TILE + 6, HUGE])
@pytest.mark.parametrize("numel", [TILE + 255, 2 * TILE, 5 * TILE + 77])
def test_tensors_larger_than_a_tile(bits: int, block_size: int, numel: int) -> None:
    codec = Codec(bits=bits, block_size=block_size)
    values = torch.randn(numel)
    encoding = encoded(codec, values)
    pieces = list(values.split(block_size)) if block_size < HUGE else [values]
    scales = torch.stack([piece.abs().max() for piece in pieces]) * torch.tensor(1 / codec.largest_code)
    assert torch.equal(codec.scales(encoding, numel), scales)
    codes = [(piece * (1 / scale)).round() * scale for piece, scale in zip(pieces, scales, strict=True)]
    assert torch.equal(decoded(codec, encoding, numel), torch.cat(codes))


def summands_of(codec: Codec, numel: int, exact_index: int = 1, dtype: torch.dtype = torch.float32) -> Summands:
    """Three contributions, of which one is exact."""
    rows = torch.stack([encoded(codec, torch.randn(numel)) for _ in range(3)])
    rows[exact_index] = 0xAB  # never read
    return Summands(rows=rows, exact=torch.randn(numel).to(dtype), exact_index=exact_index)


def row_by_row(codec: Codec, summands: Summands, start: Tensor) -> Tensor:
    """The sum of contributions, one after the other."""
    total = start.clone()
    for index, row in enumerate(summands.rows):
        if index == summands.exact_index:
            total.add_(summands.exact)
        else:
            total.add_(decoded(codec, row, total.numel()))
    return total


@bits
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("block_size", [2, 256, HUGE])
@pytest.mark.parametrize("numel", [0, 1, 5, 256, 999, 1024, TILE + 301])
def test_a_table_has_the_bits_of_its_rows(bits: int, rounding: str, block_size: int, numel: int) -> None:
    codec = Codec(bits=bits, block_size=block_size, rounding=rounding)
    values = torch.stack([awkward(numel, torch.float32) if numel else torch.empty(0) for _ in range(5)])
    at_once = torch.full((5, codec.encoded_bytes(numel)), 0xAB, dtype=torch.uint8)
    one_by_one = at_once.clone()
    coder(codec, seed=3).encode(values, at_once)
    own = coder(codec, seed=3)
    for row, out in zip(values, one_by_one, strict=True):
        own.encode(row, out)
    assert torch.equal(at_once, one_by_one)
    outs, totals = torch.full((5, numel), 7.0), torch.randn(5, numel)
    expected = torch.stack([decoded(codec, row, numel) for row in at_once])
    summed = totals + expected
    own.decode(at_once, outs)
    own.decode_add(at_once, totals)
    torch.testing.assert_close(outs, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(totals, summed, rtol=0, atol=0, equal_nan=True)


@bits
@pytest.mark.parametrize("block_size", [96, HUGE])
@pytest.mark.parametrize("exact_index", [0, 1, 2])
@pytest.mark.parametrize("numel", [1, 999, TILE + 301])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_sum_has_the_bits_of_its_rows_added_in_order(
    bits: int, block_size: int, exact_index: int, numel: int, dtype: torch.dtype
) -> None:
    codec = Codec(bits=bits, block_size=block_size)
    summands = summands_of(codec, numel, exact_index, torch.bfloat16)
    start = torch.randn(numel, dtype=dtype)
    for accumulate in (False, True):
        out = start.clone()
        coder(codec).decode_sum(summands, out, accumulate=accumulate)
        assert torch.equal(out, row_by_row(codec, summands, start if accumulate else torch.zeros_like(start)))


@bits
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("block_size", [2, 64, 256, HUGE])
@dtypes
def test_error_is_bounded_by_the_scale(bits: int, rounding: str, block_size: int, dtype: torch.dtype) -> None:
    codec = Codec(bits=bits, block_size=block_size, rounding=rounding)
    values = (torch.randn(3000) * torch.logspace(-3, 3, 3000)).to(dtype)
    encoding = encoded(codec, values)
    scales = codec.scales(encoding, 3000).double().repeat_interleave(min(block_size, 3000))[:3000]
    error = (decoded(codec, encoding, 3000).double() - values.float().double()).abs()
    share = 0.5 if rounding == "nearest" else 1.0
    assert (error <= scales * (share + 1e-4)).all()
    assert (error > 0).any()


def test_half_rounds_to_even() -> None:
    values = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 3.5])
    codes = encoded(Codec(bits=8), values)[:8].view(torch.int8).tolist()
    assert codes == [127, 0, 2, 2, 0, -2, -2, 4]


@bits
def test_zeros_stay_zeros(bits: int) -> None:
    codec = Codec(bits=bits, block_size=4)
    values = torch.tensor([0.0, 0, 0, 0, 0, 3, 0, -3])
    assert torch.equal(round_trip(codec, values) == 0, values == 0)


@bits
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 4, 7, 8])
@dtypes
def test_one_bad_value_poisons_its_block_and_no_other(bits: int, bad: float, place: int, dtype: torch.dtype) -> None:
    codec = Codec(bits=bits, block_size=4)
    values = torch.ones(9, dtype=dtype)
    values[place] = bad
    encoding = encoded(codec, values)
    assert decoded(codec, encoding, 9).isnan().tolist() == [i // 4 == place // 4 for i in range(9)]
    rows = torch.stack([encoding, encoded(codec, torch.ones(9))])
    assert codec.has_nonfinite(rows, 9).tolist() == [True, False]
    assert codec.has_nonfinite(encoding, 9).item() is True


@bits
def test_what_does_not_fit_into_fp32_poisons(bits: int) -> None:
    assert round_trip(Codec(bits=bits), torch.tensor([1.0, 1e39], dtype=torch.float64)).isnan().all()


@bits
@pytest.mark.parametrize("size", [1e-45, 1e-39, 2.0**-126, 1e-37])
def test_tiny_blocks_are_zero(bits: int, size: float) -> None:
    codec = Codec(bits=bits, block_size=4)
    values = torch.tensor([size, -size, 0, size, 1, size, -1, 0])
    assert torch.equal(round_trip(codec, values)[:4], torch.zeros(4))
    assert round_trip(codec, values)[4:].isfinite().all()


@bits
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_the_largest_numbers_stay_finite(bits: int, dtype: torch.dtype) -> None:
    codec = Codec(bits=bits)
    values = torch.tensor([1.0, -1.0, 0.5]).to(dtype) * torch.finfo(dtype).max
    restored = decoded(codec, encoded(codec, values), 3, dtype)
    assert restored.isfinite().all()
    torch.testing.assert_close(restored[:2], values[:2], rtol=1e-6, atol=0)


@bits
@sizes
def test_coding_what_was_decoded_changes_it_by_rounding_of_fp32_alone(bits: int, block_size: int) -> None:
    codec = Codec(bits=bits, block_size=block_size)
    once = round_trip(codec, torch.randn(1001))
    torch.testing.assert_close(round_trip(codec, once), once, rtol=1e-6, atol=0)


@bits
def test_codes_with_a_scale_of_a_power_of_two_are_kept_to_the_bit(bits: int) -> None:
    codec = Codec(bits=bits)
    largest = codec.largest_code
    values = torch.arange(-largest, largest + 1) * 0.125
    assert torch.equal(round_trip(codec, values), values)


@bits
def test_stochastic_rounding_has_the_right_mean(bits: int) -> None:
    codec = Codec(bits=bits, block_size=64, rounding="stochastic")
    repeats = 4000
    values = torch.linspace(-1, 1, 64)
    means = round_trip(codec, values.repeat(repeats)).double().view(repeats, 64).mean(0)
    scale = 1 / codec.largest_code
    share = (values.double() / scale) - (values.double() / scale).floor()
    # A value is one of two neighbours: variance share * (1 - share) * scale**2. Six deviations: 1e-7 for all 128.
    bound = 6 * scale * (share * (1 - share) / repeats).sqrt() + 1e-5 * scale
    assert ((means - values.double()).abs() <= bound).all()


def test_stochastic_rounding_follows_its_generator() -> None:
    codec = Codec(bits=8, rounding="stochastic")
    values = torch.randn(1000)
    outs = []
    for seed in (1, 1, 2):
        own = coder(codec, seed)
        outs.append(torch.empty(2, codec.encoded_bytes(1000), dtype=torch.uint8))
        for out in outs[-1]:
            own.encode(values, out)
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])
    assert not torch.equal(outs[0][0], outs[0][1])


@bits
def test_noise_never_passes_the_largest_code(bits: int) -> None:
    codec = Codec(bits=bits, block_size=2, rounding="stochastic")
    values = torch.ones(2**24)  # so many that 7 + noise is rounded to 8 a few times
    restored = round_trip(codec, values)
    assert restored.min() > 0.5  # a code too large would wrap around
    assert restored.max() <= 1 + 1e-6


@pytest.mark.parametrize("num_threads", [2, 5])
def test_threads_with_a_coder_each_do_not_disturb_one_another(num_threads: int) -> None:
    codec = Codec(bits=4, block_size=128)
    inputs = [torch.randn(3 * TILE + i) for i in range(num_threads)]
    expected = [encoded(codec, values) for values in inputs]
    outs = [torch.empty_like(out) for out in expected]

    def work(index: int) -> None:
        own = coder(codec)
        for _ in range(3):
            outs[index].zero_()
            own.encode(inputs[index], outs[index])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(out, right) for out, right in zip(outs, expected, strict=True))


class LargestAllocation(TorchDispatchMode):
    """Bytes of the largest storage that an operation returned and that was not known before."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in self.known:
                self.num_bytes = max(self.num_bytes, tensor.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("block_size", [256, HUGE])
def test_nothing_as_long_as_the_tensor_is_allocated(block_size: int) -> None:
    codec, numel = Codec(bits=4, block_size=block_size), 8 * TILE
    values, total = torch.randn(numel), torch.zeros(numel)
    pieces = torch.empty(3, codec.encoded_bytes(numel), dtype=torch.uint8)
    out = torch.empty_like(pieces[0])
    own = coder(codec)
    with LargestAllocation(values, total, pieces, out) as allocated:
        for piece in pieces:
            own.encode(values, piece)
        own.decode_sum(Summands(rows=pieces, exact=values, exact_index=0), total, accumulate=True)
        own.encode(total, out)
        own.decode(out, values)
        own.decode_add(out, total)
    assert 0 < allocated.num_bytes <= 4 * TILE


def test_encoded_pieces_side_by_side_are_aligned() -> None:
    for codec in (Codec(bits=8), Codec(bits=4, block_size=2), Codec(bits=4, block_size=HUGE)):
        assert codec.encoded_bytes(0) == 0
        for numel in (1, 7, 256, 1001):
            assert codec.encoded_bytes(numel) % 16 == 0
            assert 0 <= codec.encoded_bytes(numel) - codec.payload_bytes(numel) - 4 * codec.num_blocks(numel) < 16


def test_bytes_on_the_wire() -> None:
    numel = 256 * 1024
    assert Codec(bits=8).encoded_bytes(numel) == numel + 4 * 1024
    assert Codec(bits=4).encoded_bytes(numel) == numel // 2 + 4 * 1024
    assert Codec(bits=4, block_size=HUGE).encoded_bytes(numel) == numel // 2 + 16


def test_values_that_require_gradients_are_encoded_and_recorded_nowhere() -> None:
    codec = Codec(bits=8)
    values = torch.randn(300, requires_grad=True)
    own, out = coder(codec), torch.empty(codec.encoded_bytes(300), dtype=torch.uint8)
    own.encode(values, out)
    own.encode(torch.randn(300), out)
    restored = torch.empty(300)
    own.decode(out, restored)
    assert not restored.requires_grad


def test_words_name_codecs() -> None:
    assert Codec.of("int8") == Codec(bits=8, block_size=256, rounding="nearest")
    assert Codec.of("int4") == Codec(bits=4, block_size=128)
    own = Codec(bits=4, block_size=32)
    assert Codec.of(own) is own
    assert {own: 1}[Codec(bits=4, block_size=32)] == 1


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"bits": 16}, "bits=16.*8, 4 or 2"),
        ({"bits": True}, "bits=True"),
        ({"bits": 8.5}, "bits=8.5"),
        ({"bits": 8, "block_size": 0}, "block_size=0.*even"),
        ({"bits": 8, "block_size": 255}, "block_size=255.*even"),
        ({"bits": 8, "block_size": -2}, "block_size=-2"),
        ({"bits": 8, "block_size": 64.0}, "block_size=64.0"),
        ({"bits": 8, "block_size": True}, "block_size=True"),
        ({"bits": 8, "rounding": "up"}, "rounding='up'.*'stochastic'"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_wrong_options_are_refused(fields: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Codec(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("word", ["int3", "INT8", "none", 8, None])
def test_unknown_words_are_refused(word: object) -> None:
    with pytest.raises(ConfigError, match="'int8', 'int4', 'int2' or a Codec"):
        Codec.of(word)  # type: ignore[arg-type]


def test_stochastic_rounding_without_a_generator_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no generator.*torch.Generator\(\)"):
        Quantizer(Codec(bits=8, rounding="stochastic"), CPU)


def wrong_buffers() -> list[tuple[str, tuple[object, ...]]]:
    codec, right = Codec(bits=8), torch.empty(128, dtype=torch.uint8)
    assert codec.encoded_bytes(100) == 112
    out = right[:112]
    return [
        ("encode", (torch.zeros(100), right)),
        ("encode", (torch.zeros(100), out.view(torch.int8))),
        ("encode", (torch.zeros(100), right[1:113])),
        ("encode", (torch.zeros(10, 10), out)),
        ("encode", (torch.zeros(200)[::2], out)),
        ("encode", (torch.zeros(100, dtype=torch.int32), out)),
        ("encode", (torch.zeros(100, device="meta"), out)),
        ("decode", (out, torch.zeros(101 + 16))),
        ("decode", (out, torch.zeros(100, dtype=torch.int64))),
        ("decode_add", (out, torch.zeros(100, dtype=torch.bfloat16))),
        ("encode", (torch.zeros(2, 100), out)),
        ("encode", (torch.zeros(2, 100), right[None].repeat(2, 1))),
        ("encode", (torch.zeros(2, 2, 25), out)),
        ("decode", (out[None].repeat(3, 1), torch.zeros(2, 100))),
    ]


@pytest.mark.parametrize(("name", "args"), wrong_buffers(), ids=lambda value: value if isinstance(value, str) else "")
def test_buffers_that_do_not_fit_are_refused(name: str, args: tuple[object, ...]) -> None:
    with pytest.raises(ShapeError, match="Pass"):
        getattr(coder(Codec(bits=8)), name)(*args)


@pytest.mark.parametrize(
    ("numel", "exact_index", "dtype", "words"),
    [
        (90, 0, torch.float32, "`rows` is .* Pass"),
        (100, 2, torch.float32, "replace row 2 .* one of the 2 rows"),
        (100, 0, torch.float64, r"by torch.float64.* not wider than torch.float32"),
    ],
)
def test_summands_that_do_not_fit_are_refused(numel: int, exact_index: int, dtype: torch.dtype, words: str) -> None:
    rows = torch.empty(2, 112, dtype=torch.uint8)  # of 100 values each
    summands = Summands(rows=rows, exact=torch.zeros(numel, dtype=dtype), exact_index=exact_index)
    with pytest.raises(ShapeError, match=words):
        coder(Codec(bits=8)).decode_sum(summands, torch.zeros(numel), accumulate=False)
    with pytest.raises(ShapeError, match="`exact`"):
        coder(Codec(bits=8)).decode_sum(summands, torch.zeros(99), accumulate=False)


def test_scales_of_a_buffer_of_another_size_are_refused() -> None:
    with pytest.raises(ShapeError, match="does not hold 100 values"):
        Codec(bits=8).has_nonfinite(torch.zeros(128, dtype=torch.uint8), 100)


@pytest.mark.slow
def test_coding_loads_no_kernels_on_a_cpu() -> None:
    code = (
        "import sys, torch\nfrom mics_strategy import Codec\n"
        "from mics_strategy.comm.codecs.quantizer import Quantizer\n"
        "Quantizer(Codec(bits=8), torch.device('cpu')).encode(torch.ones(4), torch.empty(16, dtype=torch.uint8))\n"
        "print('triton' in sys.modules)"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout.strip() == "False"


def test_int8_is_finer_than_int4_and_small_blocks_finer_than_large_ones() -> None:
    values = torch.randn(2**14)
    errors = [
        (round_trip(Codec(bits=width, block_size=size), values) - values).norm() / values.norm()
        for width, size in [(8, 64), (8, 256), (8, HUGE), (4, 64), (4, 256), (4, HUGE)]
    ]
    assert errors == sorted(errors)
    assert math.isclose(errors[1], 7.1e-3, rel_tol=0.05)  # measured with the prototype: 7.1e-3 and 0.126
    assert math.isclose(errors[4], 0.126, rel_tol=0.05)
