"""Does the engine allocate what its plan says, for random models and configurations? And are the numbers right?

On two nodes of four ranks, on the meta device, where nothing is sent.
"""

import random
from typing import Any

import pytest
import torch
from torch import nn

from mics_strategy import ConfigError, ShardConfig
from mics_strategy.estimate import estimate_memory
from tests.engine import meta_engine

DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float64)


class Block(nn.Module):
    """Parameters of odd shapes and dtypes, some of them frozen; a unit, perhaps with others inside."""

    def __init__(self, draw: random.Random, depth: int) -> None:
        super().__init__()
        for index in range(draw.randint(1, 4)):
            shape = [draw.choice((1, 3, 8, 16, 33, 64)) for _ in range(draw.choice((0, 1, 2, 2, 2, 3)))]
            parameter = nn.Parameter(torch.empty(shape, dtype=draw.choice(DTYPES)), requires_grad=draw.random() < 0.8)
            self.register_parameter(f"p{index}", parameter)
        inner = draw.randint(0, 2) if depth < 2 else 0
        self.blocks = nn.ModuleList(Block(draw, depth + 1) for _ in range(inner))


def build(seed: int) -> nn.Module:
    draw = random.Random(seed)
    with torch.device("meta"):
        model = nn.Module()
        model.blocks = nn.ModuleList(Block(draw, 0) for _ in range(draw.randint(1, 4)))
        model.head = nn.Parameter(torch.empty(draw.choice((5, 16)), 24))
    return model


def configuration(draw: random.Random) -> ShardConfig:
    """One that the engine accepts."""
    while True:
        fields: dict[str, Any] = {
            "prefetch": draw.randint(1, 3),
            "param_dtype": draw.choice(("auto", "bfloat16")),
            "reduce_dtype": draw.choice(("auto", "bfloat16", "float16")),
            "grad_accum_dtype": draw.choice(("auto", "bfloat16")),
            "overlap": draw.choice(("all", "none")),
            "coalesce": draw.choice((True, False)),
            "check": draw.choice(("none", "none", "poison")),
            "hierarchical": draw.choice((True, False, 10_000)),
            "weight_codec": draw.choice(("none", "none", "int8")),
            "grad_codec": draw.choice(("none", "none", "int8", {"bits": 4, "feedback": True})),
            "codec_links": draw.choice(("slow", "all")),
            "grad_codec_hops": draw.choice(("all", "second")),
            "partition_size": draw.choice((2, 4, 8)),
            "outer_every": (outer := draw.choice((0, 0, 5))),
            "outer_codec": draw.choice(("none", "int8")) if outer else "none",
            "outer_delay": draw.choice((0, 2)) if outer else 0,
            "outer_fragments": draw.choice((1, 2)) if outer else 1,
        }
        preset = draw.choice(ShardConfig.PRESETS)
        try:
            config = ShardConfig.preset(preset, **fields)
            if not config.is_auto:
                estimate_memory(build(0), config.replace(coalesce=False), num_nodes=2, ranks_per_node=4)
                return config
        except ConfigError:  # fields that do not go together
            continue


@pytest.mark.parametrize("seed", range(60))
def test_the_engine_allocates_what_is_planned(seed: int) -> None:
    config = configuration(random.Random(1000 + seed))
    expected, found = (
        outcome(function, build(seed), config, num_nodes=2, ranks_per_node=4, units=[Block])
        for function in (planned, meta_engine.allocate)
    )
    assert found == expected


def planned(model: nn.Module, config: ShardConfig, **job: Any) -> tuple[Any, ...]:
    estimate = estimate_memory(model, config, **job)
    return dict(estimate.bytes_by_purpose), estimate.num_communicators, estimate.unit_plans


def outcome(function: Any, model: nn.Module, config: ShardConfig, **job: Any) -> tuple[Any, ...]:
    """Bytes by purpose without zeros, communicators and plans of units; or why there are none."""
    try:
        by_purpose, *others = function(model, config, **job)
    except ConfigError as error:
        return (str(error),)
    return {purpose: num_bytes for purpose, num_bytes in by_purpose.items() if num_bytes}, *others


PURPOSES = (
    *("slots", "all-gather staging buffers", "cast staging buffers", "gradient staging buffers"),
    *("second-hop staging buffers", "workspaces", "error feedback"),
)
# What the engine allocated for `build(7)` when it had rules of its own, beside those of the planner.
ALLOCATED_BEFORE: list[tuple[str, dict[str, Any], tuple[int, ...]]] = [
    ("mics", {"param_dtype": "bfloat16"}, (51008, 2432, 21632, 135168, 0, 33792, 0)),
    ("zero3", {"param_dtype": "bfloat16", "prefetch": 2}, (51392, 2688, 16320, 135168, 0, 84480, 0)),
    (
        "zero3",
        {"coalesce": True, "reduce_dtype": "bfloat16", "param_dtype": "bfloat16"},
        (51008, 2688, 10880, 33792, 0, 25344, 0),
    ),
    ("zeropp", {"param_dtype": "bfloat16"}, (51008, 36864, 13312, 466944, 0, 221952, 0)),
    (
        "paro-iig",
        {"reduce_dtype": "bfloat16", "grad_codec": {"bits": 4, "feedback": True}, "codec_links": "all"},
        (166080, 147456, 0, 151552, 18432, 47872, 327680),
    ),
    ("zero1", {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16"}, (0, 2688, 5248, 0, 67584, 21120, 0)),
    ("zeropp-hpz", {"hierarchical": 10000}, (166080, 135168, 0, 135168, 0, 84480, 0)),
    (
        "mics",
        {"partition_size": 2, "overlap": "none", "grad_codec": "int8", "codec_links": "all"},
        (166080, 8192, 0, 180224, 0, 459264, 0),
    ),
]


@pytest.mark.parametrize(("preset", "fields", "expected"), ALLOCATED_BEFORE)
def test_the_plan_has_the_bytes_of_an_engine_without_it(
    preset: str, fields: dict[str, Any], expected: tuple[int, ...]
) -> None:
    config = ShardConfig.preset(preset, **fields)
    found = estimate_memory(build(7), config, num_nodes=2, ranks_per_node=4, units=[Block]).bytes_by_purpose
    assert tuple(found.get(purpose, 0) for purpose in PURPOSES) == expected
