"""A model on the meta device is initialized shard by shard, with buffers and ties."""

import resource

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from mics_strategy import ConfigError, ShardConfig, Topology, shard
from mics_strategy.engine.setup.materialize import describe_initializer
from tests import models
from tests.engine.training import whole, wholes
from tests.ranks import RankContext, RankPool, raises_on_every_rank

NODES = Topology(ranks_per_node=2)
SIZES = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def llama(tie: bool) -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            tie_word_embeddings=tie,
            use_cache=False,
            **SIZES,
        )
    )


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=3, n_head=4, n_positions=32, use_cache=False, **SIZES))


def bert() -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    return BertForMaskedLM(BertConfig(**sizes, **SIZES))


FAMILIES = {"llama": lambda: llama(tie=False), "llama_tied": lambda: llama(tie=True), "gpt2": gpt2, "bert": bert}


def materialised(ctx: RankContext, family: str) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor], bool]:
    """Parameters, buffers, buffers of a real model, and whether embeddings are tied."""
    torch.manual_seed(ctx.rank)  # ranks need not agree on a seed
    with torch.device("meta"):
        model = FAMILIES[family]()
    real = FAMILIES[family]()
    shard(model, ShardConfig.preset("mics", topology=NODES))
    ids = torch.arange(8).view(1, 8) + ctx.rank
    model(input_ids=ids, labels=ids).loss.backward()
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    parameters = wholes(dict(model.named_parameters()))
    return parameters, dict(model.named_buffers()), dict(real.named_buffers()), tied


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_transformers_model_gets_its_own_initialisation(ranks: RankPool, family: str) -> None:
    results = ranks(4, materialised, family)
    expected = dict(FAMILIES[family]().named_parameters())
    for parameters, buffers, real_buffers, tied in results:
        assert list(parameters) == list(expected)
        for name, value in parameters.items():
            assert torch.equal(value, results[0][0][name]), f"ranks disagree on {name}"
            assert abs(value.mean() - expected[name].mean()) < 0.02, name
            assert abs(value.std() - expected[name].std()) <= 0.3 * expected[name].std() + 1e-6, name
        assert list(buffers) == list(real_buffers)
        assert all(torch.equal(buffers[name], value) for name, value in real_buffers.items())
        assert tied == (family != "llama")


Tensors = dict[str, Tensor]
LAYER = 512


class Deep(nn.Module):
    """Many equal layers: a whole is much more than a shard and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(LAYER, LAYER) for _ in range(96))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def growth_of_memory(ctx: RankContext) -> tuple[int, int, int]:
    """Growth of the peak memory while sharding, engine bytes, bytes of the model."""
    with torch.device("meta"):
        model, small = Deep(), nn.Linear(8, 8)
    shard(small, "zero3")  # loads what any first call loads
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sharded = shard(model, "zero3")
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    return grown, sharded.memory.total_bytes, sum(4 * parameter.numel() for parameter in model.parameters())


def test_no_rank_ever_holds_the_whole_model(ranks: RankPool) -> None:
    for grown, engine_bytes, model_bytes in ranks(4, growth_of_memory):
        assert engine_bytes < 0.75 * model_bytes
        assert grown < engine_bytes + 0.2 * model_bytes, "more than a few layers beside the engine's own memory"


class Unknown(nn.Module):
    """Says nothing about the values of its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4))


def shard_unknown(ctx: RankContext) -> None:
    with torch.device("meta"):
        model = Unknown()
    shard(model, "mics")


def test_a_module_without_initialization_is_refused(ranks: RankPool) -> None:
    raises_on_every_rank(lambda: ranks(2, shard_unknown), ConfigError, "reset_parameters")


class Scaled(nn.Module):
    """Knows the value of its parameter, and of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(3))
        self.register_buffer("places", torch.arange(3))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.scale.fill_(0.5)
            self.places.copy_(torch.arange(3))


class AroundTransformers(nn.Module):
    """A model of transformers next to other modules, as in a LightningModule."""

    def __init__(self, *others: nn.Module) -> None:
        super().__init__()
        config = LlamaConfig(
            hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2, vocab_size=16
        )
        self.model = LlamaForCausalLM(config)
        self.others = nn.ModuleList([Scaled(), nn.PReLU(), nn.Linear(64, 64), *others])


def shard_around_transformers(ctx: RankContext) -> dict[str, Tensor]:
    with torch.device("meta"):
        model = AroundTransformers()
    shard(model, "mics")
    return {**wholes(dict(model.named_parameters())), **dict(model.named_buffers())}


def test_modules_unknown_to_transformers_initialize_themselves(ranks: RankPool) -> None:
    for found in ranks(2, shard_around_transformers):
        assert torch.equal(found["others.0.scale"], torch.full((3,), 0.5))
        assert torch.equal(found["others.0.places"], torch.arange(3))
        assert torch.equal(found["others.1.weight"], torch.full((1,), 0.25))
        assert torch.equal(found["model.model.norm.weight"], torch.ones(8))
        assert 0.06 < found["others.2.weight"].std() < 0.085, "uniform in 1/8, and not of transformers"
        assert 0.01 < found["model.lm_head.weight"].std() < 0.04


def shard_unknown_around_transformers(ctx: RankContext) -> None:
    with torch.device("meta"):
        model = AroundTransformers(Unknown())
    shard(model, "mics")


def test_uninitialized_tensors_are_refused_next_to_transformers(ranks: RankPool) -> None:
    raises_on_every_rank(
        lambda: ranks(2, shard_unknown_around_transformers),
        ConfigError,
        "Unknown.*neither its own.*_init_weights.*initializes",
    )


class Author(nn.Module):
    """A model whose constructor does not call its `_init_weights`.

    Those of litgpt and timm are such models.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)
        self.unknown = Unknown()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | Unknown):
            nn.init.normal_(module.weight, std=0.02)


def shard_author(ctx: RankContext, by_the_author: bool) -> tuple[float, float]:
    with torch.device("meta"):
        model = nn.ModuleList([Author()])
    shard(model, "mics", initializer=model[0]._init_weights if by_the_author else "auto")
    return whole(model[0].inner.weight).std().item(), whole(model[0].unknown.weight).std().item()


def test_a_method_that_the_constructor_does_not_call_initializes_only_the_rest(ranks: RankPool) -> None:
    for inner, unknown in ranks(2, shard_author, False):
        assert 0.06 < inner < 0.085, "uniform in 1/8, as on a real device"
        assert 0.005 < unknown < 0.05
    for inner, _ in ranks(2, shard_author, True):
        assert 0.018 < inner < 0.022


def test_the_source_of_the_first_values_is_printed() -> None:
    assert describe_initializer(Author()).endswith(
        "each module's `reset_parameters()`. Author is not a model of transformers, so `Author._init_weights()` is "
        "called only for modules that have no `reset_parameters()`. To call it for all modules, pass "
        "`initializer=model._init_weights` to `shard()`, the strategy or the plugin."
    )
    assert describe_initializer(bert()).endswith("on the meta device: `_init_weights()` of transformers.")
    assert describe_initializer(AroundTransformers()).endswith(
        "`_init_weights()` of transformers, each module's `reset_parameters()`."
    )


class Forgetful(nn.Module):
    """Has a buffer of whole numbers that its own method leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4))
        self.register_buffer("places", torch.arange(3))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


def shard_forgetful(ctx: RankContext) -> None:
    with torch.device("meta"):
        model = Forgetful()
    shard(model, "mics")


def test_a_buffer_that_is_left_out_is_refused(ranks: RankPool) -> None:
    raises_on_every_rank(lambda: ranks(2, shard_forgetful), ConfigError, "Forgetful.*nothing gives its tensors values")


def fill(module: nn.Module) -> None:
    if isinstance(module, Unknown):
        module.weight.fill_(3.0)


def shard_with_initializer(ctx: RankContext) -> Tensor:
    with torch.device("meta"):
        model = Unknown()
    shard(model, "mics", initializer=fill)
    return whole(model.weight)


def test_an_initializer_of_the_user_is_called(ranks: RankPool) -> None:
    assert all(torch.equal(weight, torch.full((4, 4), 3.0)) for weight in ranks(2, shard_with_initializer))


def shard_with_a_word(ctx: RankContext) -> None:
    shard(nn.Linear(2, 2), "mics", initializer="model")


def test_an_unknown_initializer_is_refused(ranks: RankPool) -> None:
    raises_on_every_rank(lambda: ranks(2, shard_with_a_word), ConfigError, "initializer='model'.*neither 'auto'")


def half_meta(ctx: RankContext) -> bool:
    case = models.mlp()
    model = case.build()
    kept = next(model.parameters()).detach().clone()
    name, last = list(model.named_modules())[-1]
    parent = model.get_submodule(name.rpartition(".")[0])
    with torch.device("meta"):
        replacement = type(last)(last.in_features, last.out_features)
    setattr(parent, name.rpartition(".")[2], replacement)
    shard(model, "mics", units=case.units)
    return torch.equal(whole(next(model.parameters())), kept)


def test_values_next_to_meta_modules_are_kept(ranks: RankPool) -> None:
    assert all(ranks(2, half_meta))


def sharded_values_and_those_of_this_rank(ctx: RankContext, is_partly_meta: bool) -> tuple[Tensors, Tensors]:
    """Values after `shard`, and before it, where one layer of this rank differs from other ranks'."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 4), nn.Linear(4, 2))
    with torch.no_grad():
        model[1].weight.add_(ctx.rank)
    if is_partly_meta:
        model[2] = nn.Linear(4, 2, device="meta")
    before = {name: p.detach().clone() for name, p in model.named_parameters() if not p.is_meta}
    shard(model, "zero3", units=[nn.Linear])
    return wholes(dict(model.named_parameters())), before


@pytest.mark.parametrize("is_partly_meta", [False, True])
def test_where_values_differ_all_ranks_have_those_of_rank_0(ranks: RankPool, is_partly_meta: bool) -> None:
    results = ranks(4, sharded_values_and_those_of_this_rank, is_partly_meta)
    (found, expected), *others = results
    assert not torch.equal(others[0][1]["1.weight"], expected["1.weight"])
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    for other, _ in others:
        assert all(torch.equal(other[name], value) for name, value in found.items())
