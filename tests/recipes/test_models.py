"""The networks: packed attention is the usual one, options change no number, shapes have the published sizes."""

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mics_strategy.engine.setup.materialize import check_initialized, find_initializer, initialized_values
from mics_strategy.engine.units import find_units
from recipes.config import OptimizerConfig, Recipe
from recipes.errors import RecipeError
from recipes.lightning_module import Pretraining, parameter_groups
from recipes.models.build import build_model, num_parameters
from recipes.models.config import DEFAULTS, CompileBackend, ModelConfig
from recipes.models.cost import activation_bytes, model_flop_per_sample, sample_cost
from recipes.models.transformer import PACKED_ATTENTION, build_transformer, layers_of
from recipes.models.wide_resnet import WideResNet
from tests.recipes.host_reads import HostReads

SMALL = ModelConfig(vocab_size=300, hidden_size=32, intermediate_size=88, num_layers=2, num_heads=4, num_kv_heads=2)
TEXT = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 88, "num_layers": 3, "num_heads": 4}
FAMILIES: Mapping[str, ModelConfig] = {
    "llama": ModelConfig(**TEXT, num_kv_heads=2),
    "gpt2": ModelConfig(family="gpt2", **TEXT, dropout=0.0),
    "bert": ModelConfig(family="bert", **TEXT, dropout=0.0),
    "roberta": ModelConfig(family="roberta", **TEXT, dropout=0.0),
    "pre": ModelConfig(family="bert", **TEXT, dropout=0.0, norm_position="pre"),
}
IMAGES = ModelConfig(family="wide_resnet", stage_blocks=(1, 2, 1, 1), width_factor=2, base_width=4, num_classes=7)
ALL = {**FAMILIES, "wide_resnet": IMAGES}
TRACING = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch's own, while it traces
TOKENS = torch.arange(24).reshape(2, 12) * 7 % 300
PIXELS = torch.linspace(-1, 1, 2 * 3 * 64 * 64).reshape(2, 3, 64, 64)


def seeded(config: ModelConfig, length: int = 12) -> Any:
    torch.manual_seed(0)
    return build_model(config, length)


def loss_of(model: nn.Module) -> torch.Tensor:
    logits = model(PIXELS) if isinstance(model, WideResNet) else model(input_ids=TOKENS).logits
    return logits.float().logsumexp(-1).mean()


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    loss_of(model.train()).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_for_packed_sequences_is_the_usual_one(family: str):
    model = seeded(FAMILIES[family])
    packed = loss_of(model)
    model.set_attn_implementation("sdpa")
    assert torch.equal(packed, loss_of(model))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_micro_step_reads_no_scalar(family: str):
    model = seeded(FAMILIES[family]).train()
    assert model.config._attn_implementation == PACKED_ATTENTION
    with HostReads() as reads:
        loss_of(model).backward()
    assert reads.count == 0


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_usual_attention_would_read_one(family: str):
    model = seeded(FAMILIES[family])
    model.set_attn_implementation("sdpa")
    with HostReads() as reads:
        loss_of(model)
    assert reads.count == 1


def test_a_mask_is_refused():
    with pytest.raises(RecipeError, match=r"attention_mask.*Pack"):
        seeded(SMALL)(input_ids=TOKENS, attention_mask=torch.ones_like(TOKENS))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_token_does_not_see_later_ones(family: str):
    model = seeded(FAMILIES[family])
    changed = TOKENS.clone()
    changed[:, 6:] = 0
    assert torch.equal(model(input_ids=TOKENS).logits[:, :6], model(input_ids=changed).logits[:, :6])


@pytest.mark.parametrize("family", ["bert", "roberta", "pre"])
def test_a_masked_model_sees_later_tokens(family: str):
    model = seeded(FAMILIES[family]).eval()
    changed = TOKENS.clone()
    changed[:, 6:] = 0
    assert not torch.equal(model(input_ids=TOKENS).logits[:, :6], model(input_ids=changed).logits[:, :6])


@pytest.mark.parametrize("family", ["bert", "roberta", "pre"])
def test_no_token_is_taken_for_padding(family: str):
    """Tokens 0 and 1 are padding for transformers: their rows would not learn, and RoBERTa would not count them."""
    model = seeded(FAMILIES[family]).eval()
    assert [m for m in model.modules() if isinstance(m, nn.Embedding) and m.padding_idx is not None] == []
    tokens, numbered = torch.tensor([[5, 1, 0, 1, 6]]), torch.arange(5)[None]
    first = 0 if family == "bert" else 2
    embeddings = model.base_model.embeddings
    expected = embeddings(input_ids=tokens, position_ids=numbered + first)
    read: list[torch.Tensor] = []
    embeddings.register_forward_hook(lambda module, args, output: read.append(output))
    model(input_ids=tokens)
    assert torch.equal(read[0], expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_activation_checkpointing_changes_no_gradient(family: str):
    config = FAMILIES[family]
    assert_equal(gradients_of(seeded(config)), gradients_of(seeded(replace(config, activation_checkpointing=True))))


def compiled_and_plain(config: ModelConfig, backend: CompileBackend) -> tuple[dict[str, torch.Tensor], ...]:
    torch._dynamo.reset()
    return gradients_of(seeded(replace(config, compile=backend))), gradients_of(seeded(config))


def assert_equal(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


@TRACING
def test_compiled_layers_change_no_gradient_and_no_name():
    assert_equal(*compiled_and_plain(FAMILIES["llama"], "eager"))


@pytest.mark.wide(every=2)
@pytest.mark.slow
@TRACING
@pytest.mark.parametrize("is_checkpointed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_layers_of_every_family_change_no_gradient(family: str, is_checkpointed: bool):
    config = replace(ALL[family], activation_checkpointing=is_checkpointed)
    assert_equal(*compiled_and_plain(config, "aot_eager"))


@pytest.mark.weekly
@TRACING
def test_compiled_blocks_of_images_change_no_gradient():
    assert_equal(*compiled_and_plain(IMAGES, "aot_eager"))


@TRACING
def test_equal_layers_share_one_graph():
    torch._dynamo.reset()
    graphs: list[Any] = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = seeded(FAMILIES["gpt2"])
    for layer in layers_of(model):
        layer.forward = torch.compile(layer.forward, backend=count)
    loss_of(model).backward()
    assert len(graphs) == 1


@pytest.mark.parametrize("family", ALL)
def test_a_start_on_meta_restores_ties_and_buffers(family: str):
    """The engine's steps for the whole model as one unit: memory, the modules' own initialization, then weights."""
    config = ALL[family]
    usual = seeded(config).eval()
    with torch.device("meta"):
        model: Any = build_model(config, 12)
    (unit,) = find_units(model, lambda module: False)
    initialized_values(unit, find_initializer(model), torch.device("cpu"))
    check_initialized(list(model.modules()))
    assert len(list(model.parameters())) == len(list(usual.parameters()))  # tied ones are listed once
    for name, buffer in usual.named_buffers():
        assert torch.equal(dict(model.named_buffers())[name], buffer), name
    model.load_state_dict(usual.state_dict())
    assert torch.equal(loss_of(model.eval()), loss_of(usual))


@pytest.mark.parametrize("family", ["gpt2", "bert", "roberta", "pre"])
def test_dropout_is_the_recipes(family: str):
    model = seeded(replace(FAMILIES[family], dropout=0.25)).train()
    assert {module.p for module in model.modules() if isinstance(module, nn.Dropout)} == {0.25}
    assert not torch.equal(loss_of(model), loss_of(model))
    assert torch.equal(loss_of(seeded(FAMILIES[family]).train()), loss_of(seeded(FAMILIES[family]).eval()))


def test_ranks_draw_their_own_dropout_and_every_run_the_same():
    def drawn(rank: int) -> float:
        module = Pretraining(Recipe(name="any", model=SMALL))
        module.trainer = SimpleNamespace(global_step=3, global_rank=rank)
        module.on_train_start()
        return torch.rand(()).item()

    assert drawn(0) == drawn(0) != drawn(1)


def test_no_model_keeps_keys_and_values():
    assert {seeded(config).config.use_cache for config in FAMILIES.values()} == {False}


@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_parameters_are_counted_as_the_formula_says(tie_embeddings: bool):
    h, ffn, vocab = 32, 88, 300
    layer = 2 * h * h + 2 * h * h // 2 + 3 * h * ffn + 2 * h
    expected = 2 * layer + h + vocab * h * (1 if tie_embeddings else 2)
    assert num_parameters(replace(SMALL, tie_embeddings=tie_embeddings), 12) == expected


@pytest.mark.parametrize("family", ["gpt2", "bert", "roberta", "pre"])
def test_untied_models_have_one_more_table(family: str):
    tied = FAMILIES[family]
    untied = replace(tied, tie_embeddings=False)
    assert num_parameters(untied, 12) - num_parameters(tied, 12) == 300 * 32 + (300 if tied.is_masked else 0)  # bias


@pytest.mark.parametrize("family", ["gpt2", "bert", "roberta", "pre"])
def test_the_table_of_positions_may_be_longer_than_sequences_but_not_shorter(family: str):
    assert num_parameters(replace(FAMILIES[family], max_positions=20), 12) == num_parameters(FAMILIES[family], 20)
    with pytest.raises(RecipeError, match=r"max_positions=8.*at least.*sequence_length=12"):
        build_transformer(replace(FAMILIES[family], max_positions=8), 12)


@pytest.mark.parametrize("family", ALL)
def test_flop_are_those_that_a_profiler_counts(family: str):
    """The profiler counts all attention scores; the causal convention counts half of them."""
    config, size = ALL[family], 64 if family == "wide_resnet" else 12
    inputs = PIXELS[:1] if config.reads_images else TOKENS[:1]
    model, counter = seeded(config).eval(), FlopCounterMode(display=False)
    with sdpa_kernel(SDPBackend.MATH), counter:  # it does not know the fused kernel of CPUs
        model(inputs) if config.reads_images else model(input_ids=inputs)
    causal = 6 * 3 * 32 * 12**2 if family in ("llama", "gpt2") else 0
    assert model_flop_per_sample(config, size) + causal == 3 * counter.get_total_flops()


@pytest.mark.parametrize("family", ALL)
def test_each_way_of_counting_applies_where_its_formula_does(family: str):
    config, size = ALL[family], 64 if family == "wide_resnet" else 12
    cost = sample_cost(config, size)
    assert cost.model_flop == model_flop_per_sample(config, size)
    assert (cost.megatron_flop > 0, cost.recomputed_flop) == (family != "wide_resnet", 0.0)
    if family != "wide_resnet":
        recomputing = sample_cost(replace(config, activation_checkpointing=True), size)
        assert recomputing.megatron_flop == cost.megatron_flop
        assert recomputing.recomputed_flop == pytest.approx(4 / 3 * cost.megatron_flop, rel=0.2)


def test_recomputation_keeps_the_inputs_of_layers_and_one_layer():
    kept = replace(FAMILIES["llama"], num_layers=10)
    recomputed = replace(kept, activation_checkpointing=True)
    bytes_of = {c.activation_checkpointing: activation_bytes(c, 2, 12, torch.float32) for c in (kept, recomputed)}
    deeper = replace(recomputed, num_layers=20)
    assert bytes_of[True] < bytes_of[False] / 3
    assert activation_bytes(deeper, 2, 12, torch.float32) - bytes_of[True] == 10 * 2 * 12 * 32 * 4


@pytest.mark.parametrize("family", [name for name in ALL if name != "pre"])
def test_only_matrices_and_kernels_decay(family: str):
    model = seeded(ALL[family])
    decaying, others = parameter_groups(model, OptimizerConfig().weight_decay)
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    assert all(parameter.ndim >= 2 and id(parameter) not in tables for parameter in decaying["params"])
    assert all(parameter.ndim < 2 or id(parameter) in tables for parameter in others["params"])
    assert len(decaying["params"]) + len(others["params"]) == len(list(model.parameters()))


def test_defaults_are_those_of_the_family():
    assert ModelConfig().num_heads == 4
    assert [ModelConfig(family=family).dropout for family in DEFAULTS] == ["auto", 0.1, 0.1, 0.1, "auto"]
    assert ModelConfig(family="wide_resnet").vocab_size == "auto"


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("llama", {"dropout": 0.1}, r"dropout=0\.1.*family=llama.*no such option.*num_kv_heads"),
        ("llama", {"max_positions": 128}, "max_positions=128.*family=llama"),
        ("bert", {"num_kv_heads": 2}, "num_kv_heads=2.*family=bert"),
        ("gpt2", {"norm_position": "pre"}, "norm_position=pre.*family=gpt2"),
        ("wide_resnet", {"hidden_size": 64}, "hidden_size=64.*stage_blocks"),
        ("roberta", {"width_factor": 2}, "width_factor=2.*family=roberta"),
        ("wide_resnet", {"activation_checkpointing": True}, "false for wide_resnet.*BatchNorm"),
        ("wide_resnet", {"stage_blocks": (1, 0, 1, 1)}, "stage_blocks.*at least 1"),
        ("bert", {"hidden_size": 8192, "num_heads": 40}, "num_heads=40.*divisor of `model.hidden_size=8192`"),
        ("llama", {"num_heads": 3}, "num_heads=3.*even size"),
        ("gpt2", {"dropout": 1.0}, "dropout=1.0.*below 1"),
        ("bert", {"num_layers": 0}, "num_layers=0.*at least 1"),
    ],
)
def test_options_that_a_family_does_not_have_are_refused(family: Any, options: dict[str, Any], message: str):
    with pytest.raises(RecipeError, match=message):
        ModelConfig(family=family, **options)
