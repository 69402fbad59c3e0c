"""Descriptions of models: formulas against traces of the real modules, and traces against real runs."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from mics_strategy.config import ShardConfig
from mics_strategy.planner.model import ModelDescription
from mics_strategy.planner.model_formulas import TransformerShape, describe
from mics_strategy.planner.model_trace import TraceInput, trace_model
from mics_strategy.planner.recompute import recomputed_units
from mics_strategy.planner.resnet_formulas import ResnetShape, describe_resnet
from mics_strategy.planner.simulator import compute_times, unit_times
from recipes.models.build import build_model
from recipes.models.config import ModelConfig
from tests.planner.jobs import job, tiny_cluster

TOKENS = 64


def shape(family: str, **changes: Any) -> TransformerShape:
    sizes = {"num_layers": 3, "hidden_size": 128, "intermediate_size": 700, "num_heads": 4, "vocab_size": 1024}
    ties = family != "llama"
    return TransformerShape(**{"name": family, "family": family, "tie_embeddings": ties, **sizes, **changes})


def build(numbers: TransformerShape, dtype: torch.dtype) -> nn.Module:
    """The recipes' module of a shape, which is one of transformers."""
    options: dict[str, Any] = {"num_kv_heads": numbers.num_kv_heads or "auto"} if numbers.family == "llama" else {}
    if numbers.family != "llama":
        options |= {"dropout": 0.1 if numbers.dropout else 0.0, "max_positions": numbers.num_positions or "auto"}
    if numbers.family in ("bert", "roberta"):
        options["norm_position"] = "pre" if numbers.is_pre_norm else "post"
    names = ("family", "num_layers", "hidden_size", "intermediate_size", "num_heads", "vocab_size", "tie_embeddings")
    with torch.device("meta"):
        model = build_model(ModelConfig(**{name: getattr(numbers, name) for name in names}, **options), TOKENS)
    return model.to(dtype).train()


def traced(numbers: TransformerShape, dtype: torch.dtype = torch.bfloat16) -> ModelDescription:
    example = {"input_ids": torch.zeros(1, TOKENS, dtype=torch.int64)}
    return trace_model(build(numbers, dtype), TraceInput(name=numbers.name, example=example, tokens_per_sample=TOKENS))


SHAPES = [
    shape("llama", num_kv_heads=2),
    shape("llama", vocab_size=33000, hidden_size=256),  # embedding and head are units
    shape("llama", tie_embeddings=True),
    shape("gpt2"),
    shape("gpt2", dropout=False, tie_embeddings=False, num_positions=100),
    shape("gpt2", vocab_size=33000, tie_embeddings=False),  # as well
    shape("bert"),
    shape("bert", is_pre_norm=True, dropout=False),
    shape("bert", hidden_size=2048, vocab_size=512, num_positions=2048),  # positions and dense are units
    shape("roberta"),
    shape("roberta", is_pre_norm=True),
]


@pytest.mark.wide
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("numbers", SHAPES, ids=lambda numbers: f"{numbers.family}-{SHAPES.index(numbers)}")
def test_formulas_agree_with_the_trace_of_the_real_modules(numbers: TransformerShape, dtype: torch.dtype) -> None:
    check_agreement(describe(numbers, TOKENS, dtype.itemsize), traced(numbers, dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_formulas_of_a_residual_network_agree_with_its_trace(dtype: torch.dtype) -> None:
    sizes: dict[str, Any] = {"stage_blocks": (2, 2, 3, 2), "width_factor": 4, "base_width": 16, "num_classes": 10}
    with torch.device("meta"):
        model = build_model(ModelConfig(family="wide_resnet", **sizes), 64).to(dtype).train()
    trace = trace_model(model, TraceInput(name="x", example={"images": torch.zeros(1, 3, 64, 64, dtype=dtype)}))
    check_agreement(describe_resnet(ResnetShape(name="x", **sizes), 64, dtype.itemsize), trace)


def check_agreement(formula: ModelDescription, trace: ModelDescription) -> None:
    """Units, parameters and costs are the same; costs within 1 %."""
    assert [unit.name for unit in formula.units] == [unit.name for unit in trace.units]
    for mine, real in zip(formula.units, trace.units, strict=True):
        assert [(p.name, p.shape) for p in mine.parameters] == [(p.name, p.shape) for p in real.parameters], mine.name
        for name in (
            "forward_flop",
            "attention_flop",
            "saved_bytes",
            "input_bytes",
            "working_bytes",
            "freed_bytes",
        ):
            assert getattr(mine, name) == pytest.approx(getattr(real, name), rel=0.01), (mine.name, name)
        for found, expected in zip(*(dataclasses.astuple(unit.attention) for unit in (mine, real)), strict=True):
            assert found == pytest.approx(expected, rel=0.01), mine.name
    assert formula.numel == trace.numel
    assert formula.model_flop_per_sample == pytest.approx(trace.model_flop_per_sample, rel=0.001)
    assert [unit.is_layer for unit in formula.units] == [unit.is_layer for unit in trace.units]
    assert formula.activation_dtype_bytes == trace.activation_dtype_bytes


class Adapted(nn.Module):
    """A frozen layer with an adapter."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(64, 64), nn.Linear(64, rank), nn.Linear(rank, 64)
        self.base.requires_grad_(requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + self.up(self.down(x))
        return out


def test_no_backward_runs_in_front_of_the_first_trained_layer() -> None:
    """Of 8 layers the last four are trained: FLOP of a real backward, gathers and recomputation of these."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64)) for _ in range(8)))
        batch = torch.zeros(8, 64)
    model[:4].requires_grad_(requires_grad=False)
    example = TraceInput(name="x", example={"input": batch[:1]}, units=[nn.Sequential], loss=lambda out: out.sum())
    described = trace_model(model, example)
    assert [unit.has_backward for unit in described.units] == [True, *[False] * 4, *[True] * 4]
    with FlopCounterMode(display=False) as forward:
        out = model(batch)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    unneeded = forward.get_total_flops() // 8  # the gradient of the first trained layer's input counts all the same
    real = forward.get_total_flops() + backward.get_total_flops()
    assert 8 * described.model_flop_per_sample == real + unneeded
    assert recomputed_units(described.units, 1) == [False] * 5 + [True] * 4
    planned = job(ShardConfig.preset("zero3"), model=described)
    backwards = {c.unit for c in planned.plan(1).collectives if c.phase == "backward" and c.collective == "all_gather"}
    assert backwards == {"4", "5"}  # the last two are still there
    assert [unit.backward_s > 0 for unit in unit_times(planned)][1:] == [False] * 4 + [True] * 4


@pytest.mark.parametrize("rank", [1, 4, 64])
def test_frozen_weights_have_no_gradient(rank: int) -> None:
    """FLOP of real forwards and backwards; a backward of full training is two forwards."""
    with torch.device("meta"):
        model = nn.Sequential(*(Adapted(rank) for _ in range(3)))
        batch = torch.zeros(8, 64, requires_grad=True)
    example = TraceInput(name="adapted", example={"input": batch[:1].detach()}, tokens_per_sample=1, units=[Adapted])
    described = trace_model(model, example)
    with FlopCounterMode(display=False) as forward:
        out = model(batch)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    assert 8 * described.model_flop_per_sample == forward.get_total_flops() + backward.get_total_flops()
    layer = dataclasses.replace(described.units[1], saved_bytes=0)  # no time but that of products
    forward_s, backward_s = compute_times(layer, 8, tiny_cluster().device)
    assert backward_s / forward_s == pytest.approx(backward.get_total_flops() / forward.get_total_flops())
    model.requires_grad_(requires_grad=True)
    assert trace_model(model, example).model_flop_per_sample == 3 * sum(unit.forward_flop for unit in described.units)
