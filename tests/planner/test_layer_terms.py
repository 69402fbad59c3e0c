"""Does a layer cost what its attention, its width, its recomputation and its slowest node cost?"""

import dataclasses

import pytest

from mics_strategy.config import ShardConfig
from mics_strategy.planner.cluster import Device
from mics_strategy.planner.model import UnitModel, attention_speed
from mics_strategy.planner.model_formulas import TransformerShape, describe
from mics_strategy.planner.recompute import ATTENTION, recomputed_units
from mics_strategy.planner.simulator import compute_times, recompute_seconds, straggler_factor, unit_times
from tests.planner.jobs import job, tiny_cluster

MPT = TransformerShape(
    name="mpt",
    family="gpt2",
    num_layers=2,
    hidden_size=1024,
    intermediate_size=4096,
    num_heads=8,
    vocab_size=1000,
    dropout=False,
)


def layer(tokens: int, **changes: object) -> UnitModel:
    return next(unit for unit in describe(dataclasses.replace(MPT, **changes), tokens).units if unit.is_layer)


def device(attention_share: float) -> Device:
    return dataclasses.replace(tiny_cluster().device, memory_bytes_per_s=1e30, attention_share=attention_share)


def test_attention_takes_its_own_speed_and_five_products_in_the_backward() -> None:
    unit = layer(4096)
    fast, slow = (compute_times(unit, 1, device(share)) for share in (1.0, 0.5))
    attention_s = unit.attention_flop / (5e10 * unit.attention.speed)
    assert unit.attention_flop == 4096 * 4 * 4096 * 1024 / 2
    assert slow[0] - fast[0] == pytest.approx(attention_s)
    assert slow[1] - fast[1] == pytest.approx(2.5 * attention_s)


def test_attention_is_slower_for_short_sequences_and_small_heads() -> None:
    """Within 5 % of FlashAttention-2's figure 4: 102, 165 and 189 of 189 TFLOP/s, and 171 for heads of 64."""
    for tokens, published in ((512, 102 / 189), (2048, 165 / 189), (16384, 1.0)):
        assert attention_speed(tokens, 128) == pytest.approx(published, rel=0.1)
    assert attention_speed(16384, 64) / attention_speed(16384, 128) == pytest.approx(171 / 189, rel=0.02)


def test_recomputation_ends_before_the_last_product() -> None:
    unit = layer(128)
    forward_s, _ = compute_times(unit, 2, device(1.0))
    assert forward_s - recompute_seconds(unit, 2, device(1.0)) == pytest.approx(
        2 * unit.tail_flop / 5e10 * (1024 + 80) / 1024
    )
    assert unit.tail_flop == 2 * 128 * 1024 * 4096


def test_attention_alone_is_recomputed_with_the_products_in_front_of_it() -> None:
    unit = layer(4096)
    device_ = dataclasses.replace(device(0.5), memory_bytes_per_s=1e9)
    products_s = 2 * 4096 * 1024 * 3 * 1024 / 5e10 * (1024 + 80) / 1024
    attention_s = unit.attention_flop / (5e10 * 0.5 * unit.attention.speed)
    passes_s = 2 * 4096 * (4 * 1024 * 2 + 8 * 4) / device_.sustained_bytes_per_s
    assert recompute_seconds(unit, 3, device_, ATTENTION) == pytest.approx(3 * (products_s + attention_s + passes_s))


@pytest.mark.parametrize(
    ("share", "found"), [(0.5, "0101"), (1 / 4, "0001"), (3 / 4, "0111"), (True, "1111"), (0, "0000")]
)
def test_a_share_of_the_layers_is_spread_over_them(share: float, found: str) -> None:
    units = [dataclasses.replace(layer(64), is_layer=False), *[layer(64)] * 4]
    assert "".join(str(int(again)) for again in recomputed_units(units, share)) == "0" + found
    assert sum(recomputed_units([layer(64)] * 48, 1 / 3)) == 16


def test_products_of_small_widths_are_slower() -> None:
    def flop_per_s(hidden: int) -> float:
        unit = dataclasses.replace(layer(64, hidden_size=hidden, intermediate_size=4 * hidden), saved_bytes=0)
        return unit.forward_flop / compute_times(unit, 1, device(unit.attention.speed))[0]

    assert flop_per_s(256) < flop_per_s(1024) < flop_per_s(4096) < 5e10


def test_more_nodes_have_a_slower_slowest_one_unless_it_was_measured() -> None:
    assert straggler_factor(1) == 1
    assert 1 < straggler_factor(2) < straggler_factor(128) < 1.04
    one, many = (unit_times(job(ShardConfig.preset("mics"), tiny_cluster(nodes=n)))[1] for n in (1, 4))
    measured = unit_times(job(ShardConfig.preset("mics"), tiny_cluster(nodes=4, slowest_node_factor=1.5)))[1]
    assert many.forward_s / one.forward_s == pytest.approx(straggler_factor(4))
    assert measured.forward_s / one.forward_s == pytest.approx(1.5)


def test_fused_kernels_keep_less() -> None:
    plain, fused = (describe(dataclasses.replace(MPT, is_fused=is_fused), 512) for is_fused in (False, True))
    for before, after in zip(plain.units, fused.units, strict=True):
        assert after.saved_bytes <= before.saved_bytes
        assert after.working_bytes <= before.working_bytes
        assert after.forward_flop == before.forward_flop
    for index in (0, -1):
        assert fused.units[index].saved_bytes < 0.75 * plain.units[index].saved_bytes
