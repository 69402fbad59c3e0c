"""Do rotated blocks and codes of two bits hold what the naive codec says, in tables and in sums?"""

import pytest
import torch

from mics_strategy import Codec, ConfigError
from tests.comm import naive_codec
from tests.comm.test_codecs import TILE, awkward, coder, decoded, encoded, round_trip, row_by_row, summands_of

CODECS = [
    *(Codec(bits=2, block_size=size) for size in (4, 60, 128)),
    *(Codec(bits=width, block_size=size, rotation=True) for width in (8, 4, 2) for size in (4, 64)),
]
codecs = pytest.mark.parametrize("codec", CODECS, ids=str)


@codecs
@pytest.mark.parametrize("numel", [0, 1, 3, 5, 63, 64, 65, 257, 769])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_bytes_and_values_are_those_of_the_naive_codec(codec: Codec, numel: int, dtype: torch.dtype) -> None:
    values = awkward(numel, dtype)
    encoding = naive_codec.encode(codec, values)
    assert torch.equal(encoded(codec, values), encoding)
    expected = naive_codec.decode(codec, encoding, numel)
    torch.testing.assert_close(decoded(codec, encoding, numel), expected, rtol=0, atol=0, equal_nan=True)


@codecs
def test_a_table_has_the_bits_of_its_rows(codec: Codec) -> None:
    values = torch.randn(5, 256)
    at_once = torch.full((5, codec.encoded_bytes(256)), 0xAB, dtype=torch.uint8)
    coder(codec).encode(values, at_once)
    assert torch.equal(at_once, torch.stack([encoded(codec, row) for row in values]))
    outs = torch.empty(5, 256)
    coder(codec).decode(at_once, outs)
    assert torch.equal(outs, torch.stack([decoded(codec, row, 256) for row in at_once]))


@codecs
@pytest.mark.parametrize("numel", [150, 192, TILE + 96])
def test_a_sum_has_the_bits_of_its_rows_added_in_order(codec: Codec, numel: int) -> None:
    summands, out = summands_of(codec, numel), torch.empty(numel)
    coder(codec).decode_sum(summands, out, accumulate=False)
    assert torch.equal(out, row_by_row(codec, summands, torch.zeros(numel)))


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_the_error_of_a_rotated_block_is_bounded_by_its_scale(bits: int) -> None:
    codec, values = Codec(bits=bits, block_size=64, rotation=True), torch.randn(64 * 50)
    values[::64] = 40.0  # one large value in each block
    errors = (round_trip(codec, values) - values).view(50, 64)
    scales = codec.scales(encoded(codec, values), values.numel())
    assert (errors.square().mean(1).sqrt() <= 64**0.5 * scales / 2 * 1.001).all()


def test_a_rotation_keeps_small_values_next_to_a_large_one() -> None:
    values = torch.randn(128)
    values[7] = 60.0
    plain, rotated = (Codec(bits=4, block_size=128, rotation=rotation) for rotation in (False, True))
    others = torch.arange(128) != 7
    lost = [(round_trip(codec, values) - values)[others].norm() / values[others].norm() for codec in (plain, rotated)]
    assert lost[0] > 0.99
    assert lost[1] < 0.8


@pytest.mark.parametrize("magnitude", [3.4e38, 1e-30])
def test_rotated_extremes_stay_finite(magnitude: float) -> None:
    codec = Codec(bits=8, block_size=64, rotation=True)
    values = torch.full((64,), magnitude)
    assert torch.allclose(round_trip(codec, values), values, rtol=0.01)
    assert not codec.has_nonfinite(encoded(codec, values), 64)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_value_poisons_its_rotated_block_alone(bad: float) -> None:
    codec, values = Codec(bits=4, block_size=64, rotation=True), torch.randn(192)
    values[70] = bad
    poisoned = round_trip(codec, values).isnan()
    assert poisoned[64:128].all()
    assert not poisoned[:64].any()
    assert not poisoned[128:].any()


def test_blocks_that_do_not_fill_bytes_of_two_bits_are_refused() -> None:
    assert Codec.of("int2") == Codec(bits=2, block_size=128)
    with pytest.raises(ConfigError, match="`block_size=6` is no multiple of the 4 values"):
        Codec(bits=2, block_size=6)
