"""The planner's memory of a rank: against the engine's estimate, against real ranks, against torch's own account."""

import dataclasses
import functools
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.checkpoint import checkpoint

from mics_strategy import Codec, ConfigError, ShardConfig, Topology, shard
from mics_strategy.estimate import MemoryEstimate, estimate_memory
from mics_strategy.planner.catalog import describe_model, model_shape
from mics_strategy.planner.engine_memory import engine_memory
from mics_strategy.planner.memory import MicroBatch, StateFormat, activation_bytes, rank_memory
from mics_strategy.planner.model import ModelDescription
from mics_strategy.planner.model_formulas import TransformerShape, describe
from mics_strategy.planner.model_trace import TraceInput, token_loss, trace_model
from mics_strategy.planner.recompute import ATTENTION, Recompute
from mics_strategy.scopes import resolve_scopes
from recipes.models.build import build_model
from recipes.models.config import ModelConfig
from tests.engine import meta_engine
from tests.planner.test_model import TOKENS, build, shape, traced
from tests.ranks import RankContext, RankPool, simulate

BF16 = {"param_dtype": "bfloat16"}
CONFIGS = [
    ShardConfig.preset("mics", **BF16),
    ShardConfig.preset("zero3", **BF16),
    ShardConfig.preset("zeropp", **BF16),  # secondary copy and both codecs, on all links
    ShardConfig.preset("mics", params=4, grads=4, optimizer=8, reduce_dtype="bfloat16", **BF16),
    ShardConfig.preset("mics", params=16, grads=16, optimizer=32, secondary_params=4, prefetch=2, **BF16),
    ShardConfig.preset("ddp"),
    ShardConfig.preset("mics", partition_size=16, grad_codec="int4", reduce_dtype="bfloat16", **BF16),
    ShardConfig.preset("zero3", coalesce=True, reduce_dtype="bfloat16", **BF16),
    ShardConfig.preset("zeropp", topology={"nodes_per_switch": 2}, **BF16),  # three stages
    ShardConfig.preset("zero3", grad_codec=Codec(bits=4, block_size=128, feedback=True), codec_links="all", **BF16),
    ShardConfig.preset("paro-iig", weight_codec=Codec(bits=8, differences=True), **BF16),
    ShardConfig.preset("zeropp-hpz"),
    ShardConfig.preset("zero1", reduce_dtype="bfloat16"),
    ShardConfig.preset("zero2", reduce_dtype="bfloat16", **BF16),
    ShardConfig.preset("paro-nig", prefetch=2, **BF16),
    ShardConfig.preset("ddp", **BF16),
    ShardConfig.preset("mics", params=2, grads=8, optimizer=32, prefetch=3, **BF16),
    ShardConfig.preset("mics", params=1, grads=1, optimizer=8, **BF16),
    ShardConfig.preset("zero3", weight_codec="int8", grad_codec="int8", hierarchical=False, **BF16),
    ShardConfig.preset("mics", grad_codec="int8"),
    ShardConfig.preset("zero3", coalesce=True, **BF16),
    ShardConfig.preset("zero3", hierarchical=1_000_000, overlap="none", **BF16),
    ShardConfig.preset("paro-ngg", grad_codec="int4", codec_links="all"),
    ShardConfig.preset("paro-gig", weight_codec="int4", param_dtype="float16", reduce_dtype="float16"),
]
FAST = CONFIGS[:11]
OUTER = ShardConfig.preset("mics", outer_every=30)
MODELS = {
    "llama": shape("llama", hidden_size=512, intermediate_size=1376, vocab_size=16000, num_kv_heads=2),
    "gpt2": shape("gpt2", hidden_size=384, intermediate_size=1536, vocab_size=5003),
}


def check_agreement(
    model: ModelDescription, config: ShardConfig, expected: MemoryEstimate, states: StateFormat | None = None
) -> None:
    """A described model has the bytes of the module, purpose by purpose; nothing is left out."""
    states = states or StateFormat(optimizer_bytes=8)
    found = dict(rank_memory(model, config, expected.scopes, MicroBatch(), states).by_kind)
    rest = ("activations of layers", "activations outside layers", "temporary activations", "fragmentation", "context")
    assert all(found.pop(kind) >= 0 for kind in rest)
    engine = {
        **expected.bytes_by_purpose,
        "gradients of autograd": expected.pending_grad_bytes,
        "optimizer states": states.optimizer_bytes * expected.num_trained,
        "communicators": expected.communicator_bytes,
    }
    assert {k: v for k, v in found.items() if v} == {k: v for k, v in engine.items() if v}


def describe_config(config: ShardConfig) -> str:
    changed = [f.name for f in dataclasses.fields(config) if getattr(config, f.name) != f.default]
    return "-".join(
        f"{name}={getattr(config, name)}" for name in changed if name not in ("param_dtype", "overlap", "topology")
    )


@pytest.mark.wide(every=3)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "config",
    [*FAST, *(pytest.param(config, marks=pytest.mark.slow) for config in CONFIGS[len(FAST) :])],
    ids=describe_config,
)
def test_memory_is_that_of_the_real_engine(name: str, config: ShardConfig) -> None:
    expected = estimate_memory(build(MODELS[name], torch.float32), config, num_nodes=4, ranks_per_node=8)
    check_agreement(describe(MODELS[name], TOKENS), config, expected)
    check_engine(build(MODELS[name], torch.float32), config, expected)


def check_engine(model: nn.Module, config: ShardConfig, expected: MemoryEstimate) -> None:
    """The engine, built on the meta device, allocates what was estimated, and its step has the same plan."""
    allocated, num_communicators, unit_plans = meta_engine.allocate(model, config, num_nodes=4, ranks_per_node=8)
    estimated = {purpose: num_bytes for purpose, num_bytes in expected.bytes_by_purpose.items() if num_bytes}
    assert {purpose: num_bytes for purpose, num_bytes in allocated.items() if num_bytes} == estimated
    assert (num_communicators, unit_plans) == (expected.num_communicators, expected.unit_plans)


@pytest.mark.wide(every=3)
@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS, ids=describe_config)
def test_memory_of_llama_7b_is_that_of_the_real_engine(config: ShardConfig) -> None:
    expected = estimate_memory(large_model("llama-7b", 4096), config, num_nodes=4, ranks_per_node=8)
    check_agreement(describe_model("llama-7b", 4096), config, expected)
    check_engine(large_model("llama-7b", 4096), config, expected)


@pytest.mark.parametrize("config", FAST[:4], ids=describe_config)
def test_frozen_parameters_have_no_gradients_and_no_states(config: ShardConfig) -> None:
    model = build(MODELS["gpt2"], torch.float32)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("ln" in name)
    example = {"input_ids": torch.zeros(1, TOKENS, dtype=torch.int64)}
    description = trace_model(model, TraceInput(name="x", example=example, tokens_per_sample=TOKENS))
    expected = estimate_memory(model, config, num_nodes=4, ranks_per_node=8)
    assert 0 < expected.num_trained < description.numel / 100
    check_agreement(description, config, expected)
    check_engine(model, config, expected)


@pytest.mark.parametrize(
    ("dtype", "delay", "num_bytes"),
    [(torch.float32, 0, 8), (torch.float32, 5, 12), (torch.bfloat16, 0, 2 + 4 + 4), (torch.bfloat16, 5, 2 + 4 + 4)],
)
@pytest.mark.parametrize("changes", [{}, {"optimizer": 4, "params": 4, "grads": 4}, {"params": "replicate"}])
def test_outer_state_is_counted(dtype: torch.dtype, delay: int, num_bytes: int, changes: dict[str, Any]) -> None:
    config = OUTER.replace(outer_delay=delay, **changes)
    expected = estimate_memory(build(MODELS["gpt2"], dtype), config, num_nodes=4, ranks_per_node=8)
    outer = {name: count for name, count in expected.bytes_by_purpose.items() if name.startswith("outer")}
    assert abs(sum(outer.values()) - num_bytes * expected.num_trained) < 10_000  # arenas begin at whole lines
    states = StateFormat(parameter_dtype=dtype, optimizer_bytes=8)
    check_agreement(describe(MODELS["gpt2"], TOKENS), config, expected, states)
    check_engine(build(MODELS["gpt2"], dtype), config, expected)


def test_parameters_in_bf16_have_cast_gradients() -> None:
    config = ShardConfig.preset("mics", optimizer="world")
    expected = estimate_memory(build(MODELS["gpt2"], torch.bfloat16), config, num_nodes=4, ranks_per_node=8)
    states = StateFormat(parameter_dtype=torch.bfloat16, optimizer_bytes=4)
    assert expected.bytes_by_purpose["cast gradients"] > 0
    check_agreement(describe(MODELS["gpt2"], TOKENS), config, expected, states)


def large_model(name: str, tokens: int) -> nn.Module:
    """A named model of transformers, or the recipes' residual network, on the meta device."""
    numbers = model_shape(name)
    with torch.device("meta"):
        if not isinstance(numbers, TransformerShape):
            fields = {f.name: getattr(numbers, f.name) for f in dataclasses.fields(numbers) if f.name != "name"}
            return build_model(ModelConfig(family="wide_resnet", **fields), tokens)
        names = ("family", "num_layers", "hidden_size", "intermediate_size", "num_heads", "vocab_size")
        fields = {field: getattr(numbers, field) for field in (*names, "tie_embeddings")}
        return build_model(ModelConfig(**fields), tokens)


REAL = [
    ShardConfig.preset("mics", partition_size=2, topology=Topology(ranks_per_node=2)),
    ShardConfig.preset("zero3", topology=Topology(ranks_per_node=2), **BF16),
    ShardConfig.preset("zeropp-hpz", topology=Topology(ranks_per_node=2)),
    ShardConfig.preset("mics", params=1, grads=2, optimizer=4, topology=Topology(ranks_per_node=2), prefetch=2),
]
# Threads of gloo have flat buffers for several first hops, and other workspaces.
STAGING = ("workspaces", "all-gather staging buffers", "gradient staging buffers")
SMALL = shape("gpt2", dropout=False)


def allocated(ctx: RankContext, config: ShardConfig) -> dict[str, int]:
    """What a rank holds behind a step."""
    torch.manual_seed(0)
    model = real_model(SMALL)
    sharded = shard(model, config)
    optimizer = torch.optim.AdamW(model.parameters())
    token_loss(model(input_ids=torch.zeros(1, TOKENS, dtype=torch.int64))).backward()
    optimizer.step()
    return sharded.memory.bytes_by_purpose


def real_model(numbers: TransformerShape, *, recomputes: Recompute = False) -> nn.Module:
    """The recipes' module with values."""
    options: dict[str, Any] = {"activation_checkpointing": recomputes is True}
    options |= {} if numbers.family == "llama" else {"dropout": 0.0}
    names = ("family", "num_layers", "hidden_size", "intermediate_size", "num_heads", "vocab_size", "tie_embeddings")
    model = build_model(ModelConfig(**{name: getattr(numbers, name) for name in names}, **options), TOKENS).train()
    if not isinstance(recomputes, bool):
        pattern = r"(self_attn|h\.\d+\.attn|attention\.self)$" if recomputes == ATTENTION else r"(layers?|h)\.[13]$"
        for name, module in model.named_modules():
            if re.search(pattern, name):
                module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)
    return model


def planned(config: ShardConfig) -> dict[str, int]:
    scopes = resolve_scopes(config, Topology(ranks_per_node=2), 4)
    return engine_memory(describe(SMALL, TOKENS), config, scopes, torch.float32).bytes_by_purpose()


@pytest.mark.wide(every=2)
@pytest.mark.parametrize("config", REAL, ids=describe_config)
def test_ranks_of_gloo_allocate_what_is_planned(ranks: RankPool, config: ShardConfig) -> None:
    expected = sum(v for k, v in planned(config).items() if k not in STAGING)
    for found in ranks(4, allocated, config, ranks_per_node=2):
        assert sum(v for k, v in found.items() if k not in STAGING) == pytest.approx(expected, rel=0.001)


@pytest.mark.wide(every=2)
@pytest.mark.parametrize("config", REAL, ids=describe_config)
def test_ranks_of_a_backend_with_streams_allocate_what_is_planned(config: ShardConfig) -> None:
    """The sum of all buffers but workspaces: on a CPU sums are not the backend's own."""
    expected = sum(v for k, v in planned(config).items() if k != "workspaces")
    for found in simulate(4, allocated, config, ranks_per_node=2):
        assert sum(v for k, v in found.items() if k != "workspaces") == pytest.approx(expected, rel=0.001)


def peak_bytes(model: nn.Module, num_samples: int) -> int:
    """Bytes of activations and temporary tensors at the peak of a real forward and backward, by torch's own account.

    With many samples gradients of parameters, which grow until the backward ends, do not decide where the peak is.
    """
    tracker = MemTracker()
    tracker.track_external(model)
    tokens = torch.zeros(num_samples, TOKENS, dtype=torch.int64)
    with tracker:
        output = model(input_ids=tokens)
        token_loss(output).backward()
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    sizes = {getattr(kind, "value", kind): num_bytes for kind, num_bytes in peak.items()}
    return sizes["Activation"] + sizes["Temp"]


@pytest.mark.wide
@pytest.mark.parametrize("recomputes", [False, True, 0.5, ATTENTION], ids=["kept", "recomputed", "half", "attention"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_activations_are_those_of_a_real_backward(family: str, recomputes: Recompute) -> None:
    numbers = shape(family, num_layers=4, intermediate_size=512, dropout=False)
    expected = peak_bytes(real_model(numbers, recomputes=recomputes), num_samples=64)
    sizes = activation_bytes(describe(numbers, TOKENS, 4).units, MicroBatch(samples=64, recomputes=recomputes))
    assert sum(sizes.values()) == pytest.approx(expected, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tokens"), [("llama-7b", 4096), ("bert-10b", 512), ("wide_resnet-3b", 224)])
def test_activations_of_large_models_are_those_of_a_trace(name: str, tokens: int) -> None:
    numbers = model_shape(name)
    is_text = isinstance(numbers, TransformerShape)
    model = large_model(name, tokens).to(torch.bfloat16 if is_text else torch.float32).train()
    example = (
        {"input_ids": torch.zeros(1, tokens, dtype=torch.int64)} if is_text else {"images": torch.zeros(1, 3, 224, 224)}
    )
    trace = trace_model(model, TraceInput(name=name, example=example, tokens_per_sample=tokens))
    formula = describe_model(name, tokens, 2 if is_text else 4)
    for recomputes in (False, True):
        batch = MicroBatch(samples=8, recomputes=recomputes)
        found, expected = (sum(activation_bytes(model.units, batch).values()) for model in (formula, trace))
        assert found == pytest.approx(expected, rel=0.01)
    assert formula.model_flop_per_sample == pytest.approx(trace.model_flop_per_sample, rel=0.001)


def test_activations_grow_with_the_batch_and_shrink_with_recomputation() -> None:
    model = describe_model("llama-7b", 4096)
    config = ShardConfig.preset("mics", **BF16)
    scopes = resolve_scopes(config, Topology(ranks_per_node=8), 8)
    one, two = (rank_memory(model, config, scopes, MicroBatch(samples=n)).by_kind for n in (1, 2))
    changed = {kind for kind in one if one[kind] != two[kind]}
    assert changed == {
        "activations of layers",
        "activations outside layers",
        "temporary activations",
        "fragmentation",
    }
    assert two["activations of layers"] == 2 * one["activations of layers"]
    recomputed = rank_memory(model, config, scopes, MicroBatch(recomputes=True)).by_kind
    assert recomputed["activations of layers"] == 32 * 4096 * 4096 * 2  # the inputs of 32 layers
    with pytest.raises(ConfigError, match="`samples=0`"):
        MicroBatch(samples=0)


def test_a_trace_of_a_module_without_values_is_required() -> None:
    example = {"input_ids": torch.zeros(1, TOKENS, dtype=torch.int64)}
    with pytest.raises(ConfigError, match="Build it under"):
        trace_model(real_model(SMALL), TraceInput(name="x", example=example))
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    with pytest.raises(ConfigError, match=r"\[1, ...\]"):
        trace_model(model, TraceInput(name="x", example={"input": torch.zeros(2, 4)}))
    with pytest.raises(ConfigError, match="does not take the example"):
        trace_model(model, TraceInput(name="x", example={"input": torch.zeros(1, 5)}))


def test_a_trace_follows_the_linear_growth_of_activations() -> None:
    trace = traced(SMALL)
    assert trace.units[1].input_bytes == TOKENS * SMALL.hidden_size * 2
    assert trace.units[1].saved_bytes > 10 * trace.units[1].input_bytes
