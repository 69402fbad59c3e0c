"""Rates by each way of counting, against the numbers of the papers."""

import pytest

from recipes.batch import BatchPlan
from recipes.config import load_recipe
from recipes.files import find_recipe
from recipes.models.config import ModelConfig
from recipes.models.cost import SampleCost, sample_cost
from recipes.rates import Throughput


def throughput(name: str, world_size: int, peak: float = 0.0) -> Throughput:
    recipe = load_recipe([f"--config={find_recipe(name)}"], has_cuda=False)
    size = recipe.batch.global_size
    plan = BatchPlan(
        global_size=size, micro_size=size // world_size, world_size=world_size, sequence_length=recipe.sample_size
    )
    cost = sample_cost(recipe.model, recipe.sample_size)
    return Throughput(plan=plan, cost=cost, peak_tflop_per_s=peak)


@pytest.mark.parametrize(
    ("name", "tokens_per_s_per_rank", "mfu"),
    [("llama-7b", 4416, 0.65), ("llama-13b", 1918, 0.53), ("llama-13b", 2183, 0.61)],
)
def test_mfu_by_megatrons_formula_is_that_of_amsp(name: str, tokens_per_s_per_rank: int, mfu: float):
    """Table V of AMSP: tokens per GPU and second, and MFU on A800."""
    run = throughput(name, world_size=64, peak=312.0)
    seconds = run.plan.tokens_per_step / (64 * tokens_per_s_per_rank)
    rates = run.rates(1, seconds)
    assert rates["tokens_per_s_per_rank"] == pytest.approx(tokens_per_s_per_rank)
    assert rates["mfu_megatron"] == pytest.approx(mfu, abs=0.005)
    assert rates["mfu"] < rates["mfu_megatron"]  # causal attention halved


def test_the_papers_tflops_count_the_recomputed_forward():
    run = throughput("bert-10b", world_size=128, peak=125.0)
    rates = run.rates(2, 2 * 8192 / 150)  # at 150 sequences per second
    assert rates["samples_per_s"] == pytest.approx(150)
    assert rates["paper_tflop_per_s_per_rank"] == pytest.approx(42.525 * 150 / 128, rel=1e-4)
    assert rates["mfu_megatron"] == pytest.approx(31.957 * 150 / 128 / 125, rel=1e-4)


def test_rates_of_tokens_follow_from_steps_and_seconds():
    plan = BatchPlan(global_size=8, micro_size=2, world_size=4, sequence_length=16)
    run = Throughput(plan=plan, cost=SampleCost(model_flop=1e12, megatron_flop=2e12), peak_tflop_per_s=10.0)
    assert run.rates(4, 2.0) == {
        "step_s": 0.5,
        "samples_per_s": 16.0,
        "tokens_per_s": 256.0,
        "tokens_per_s_per_rank": 64.0,
        "model_tflop_per_s_per_rank": 4.0,
        "mfu": 0.4,
        "mfu_megatron": 0.8,
    }
    assert run.progress(3) == {"samples": 24, "tokens": 384}


def test_images_have_no_tokens_and_no_formula_of_transformers():
    model = ModelConfig(family="wide_resnet")
    plan = BatchPlan(global_size=1024, micro_size=8, world_size=128, sequence_length=1)
    run = Throughput(plan=plan, cost=sample_cost(model, 32), peak_tflop_per_s=15.7)
    rates = run.rates(1, 1.0)
    assert {*rates} == {"step_s", "samples_per_s", "model_tflop_per_s_per_rank", "mfu"}
    assert run.progress(2) == {"samples": 2048}
    assert run.main_rate == "samples_per_s"


def test_without_a_peak_there_is_no_share_of_it():
    assert not any(name.startswith("mfu") for name in throughput("llama-1b", world_size=16).rates(1, 1.0))
