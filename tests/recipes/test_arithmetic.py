"""Batches, schedules and FLOP: numbers that need no model and no ranks."""

import math
from itertools import pairwise

import pytest

from recipes import flops
from recipes.batch import BatchPlan
from recipes.errors import RecipeError
from recipes.flops import megatron_model_flop, megatron_recomputed_flop
from recipes.schedule import lr_share


def plan(global_size: int, micro_size: int, world_size: int) -> BatchPlan:
    return BatchPlan(global_size=global_size, micro_size=micro_size, world_size=world_size, sequence_length=128)


def test_accumulation_follows_from_the_global_batch():
    found = plan(64, 4, 8)
    assert (found.accumulation, found.round_size, found.tokens_per_step) == (2, 32, 8192)
    assert "4 micro batch x 2 accumulation x 8 ranks = 64 sequences" in str(found)


def test_images_are_counted_as_images():
    images = BatchPlan(global_size=64, micro_size=4, world_size=8, sequence_length=1)
    assert str(images) == "4 micro batch x 2 accumulation x 8 ranks = 64 images per optimizer step"
    assert (images.unit, images.tokens_per_step, plan(64, 4, 8).unit) == ("images", 64, "tok")


@pytest.mark.parametrize(("global_size", "suggestion"), [(20, 16), (5, 8)])
def test_a_global_batch_that_cannot_be_shared_is_refused_with_a_repair(global_size: int, suggestion: int):
    with pytest.raises(RecipeError, match=rf"{global_size}.*4 ranks.*micro_size=2.*global_size={suggestion}"):
        plan(global_size, 2, 4)


def shares(name: str, total: int = 100, warmup: int = 10, decay: int = 20, floor: float = 0.1) -> list[float]:
    return [lr_share(name, step, total=total, warmup=warmup, decay=decay, floor=floor) for step in range(total + 5)]


@pytest.mark.parametrize("name", ["linear", "cosine", "wsd", "constant"])
def test_warm_up_grows_linearly_from_a_first_step_that_learns(name: str):
    assert shares(name)[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])


@pytest.mark.parametrize("name", ["linear", "cosine", "wsd"])
def test_schedules_end_at_the_floor_and_stay_there(name: str):
    assert shares(name)[100:] == pytest.approx([0.1] * 5)


def test_linear_is_halfway_down_in_the_middle():
    assert shares("linear")[55] == pytest.approx(0.55)


def test_cosine_follows_the_cosine():
    assert shares("cosine")[10 + 30] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 3)))


def test_wsd_is_stable_until_its_decay():
    values = shares("wsd")
    assert values[10:81] == [1.0] * 71
    assert values[90] == pytest.approx(0.55)


def test_constant_never_falls():
    assert shares("constant")[10:] == [1.0] * 95


def test_no_schedule_rises_after_the_warm_up():
    for name in ("linear", "cosine", "wsd", "constant"):
        values = shares(name)[10:]
        assert all(later <= earlier for earlier, later in pairwise(values))


def test_llama_7b_costs_what_a_profiler_counts():
    weights = flops.llama_matmul_params(L=32, h=4096, ffn=11008, V=32000)
    all_scores = flops.decoder_model_flop(matmul_params=weights, s=2048, L=32, h=4096, is_causal=False)
    causal = flops.decoder_model_flop(matmul_params=weights, s=2048, L=32, h=4096, is_causal=True)
    assert all_scores / 1e12 == pytest.approx(87.78, abs=0.01)
    assert causal / 1e12 == pytest.approx(84.48, abs=0.01)


def test_bert_10b_costs_what_the_paper_and_a_profiler_count():
    shape = {"s": 512, "L": 127, "h": 2560, "V": 32008}
    assert megatron_model_flop(**shape) / 1e12 == pytest.approx(31.957, abs=0.001)
    assert megatron_recomputed_flop(**shape) / 1e12 == pytest.approx(42.525, abs=0.001)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-40GB", 312.0),
        ("NVIDIA A800-SXM4-80GB", 312.0),
        ("NVIDIA H800", 989.0),
        ("Tesla V100-SXM2-32GB", 125.0),
        ("Tesla V100-PCIE-16GB", 112.0),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA B200", 2250.0),
        ("Tesla T4", 65.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40S", 0.0),
        ("something new", 0.0),
    ],
)
def test_peaks_are_found_by_device_name(name: str, peak: float):
    assert flops.peak_tflop_per_s(name) == peak
