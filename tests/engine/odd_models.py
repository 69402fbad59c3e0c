"""Models for which the engine was not designed.

Mixtures of experts, layers that are shared, recurrent layers, parametrized weights, two models that train each other.
Each is a `Loop` of `unusual.py`, trained in fp64 and compared with plain models.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from mics_strategy import ShardConfig
from tests import models
from tests.engine.unusual import WIDTH, Block, Loop, Stack, Trained, squares, trained, two_micro_steps
from tests.rank_report import RankContext

VOCABULARY = 32
Case = tuple[str, ShardConfig]

# -- mixtures of experts ------------------------------------------------------------------------------------


class Expert(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 5)
        self.down = nn.Linear(5, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Experts(nn.Module):
    """Calls only those experts that some row chooses: other ranks call others."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(Expert() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(4 * x).softmax(-1).topk(1)
        out = x
        for index in sorted(set(chosen.flatten().tolist())):
            rows = (chosen == index).any(-1)
            out = out.index_add(0, rows.nonzero()[:, 0], weights[rows] * self.experts[index](x[rows]))
        return out


def one_row(model: nn.Module, x: Tensor, step: int) -> None:
    """With one row, a rank uses one expert of each layer."""
    squares(model, x[:1], step)


def small_moe(config: type, model: type, **changes: Any) -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "moe_intermediate_size": 12}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 12}
    experts = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1}
    made = config(**sizes, **heads, **experts, output_router_logits=True, router_aux_loss_coef=0.1, **changes)
    made._experts_implementation = "eager"  # the only one for fp64 on CPUs
    return model(made)


def mixtral() -> nn.Module:
    return small_moe(MixtralConfig, MixtralForCausalLM)


def tied_mixtral() -> nn.Module:
    return small_moe(MixtralConfig, MixtralForCausalLM, tie_word_embeddings=True)


def qwen2_moe() -> nn.Module:
    return small_moe(Qwen2MoeConfig, Qwen2MoeForCausalLM, shared_expert_intermediate_size=12)


def qwen3_moe() -> nn.Module:
    return small_moe(Qwen3MoeConfig, Qwen3MoeForCausalLM)


def words(x: Tensor) -> Tensor:
    return (8 * x).long() % VOCABULARY


def one_word(model: nn.Module, x: Tensor, step: int) -> None:
    """Batches of one repeated word.

    A rank then uses two of the four experts of a layer.
    """
    model(input_ids=words(x)[:1, :1].expand(x.shape), labels=words(x)).loss.backward()


def one_word_in_micro_steps(model: nn.Module, x: Tensor, step: int) -> None:
    one_word(model, x, step)
    model(input_ids=words(-x), labels=words(x)).loss.backward()


def balance_alone(model: nn.Module, x: Tensor, step: int) -> None:
    """The loss of the routers alone, which skips the last layer's experts."""
    model(input_ids=words(x)[:1, :1].expand(x.shape), labels=words(x)).aux_loss.backward()


def balance_beside_nothing(model: nn.Module, x: Tensor, step: int) -> None:
    out = model(input_ids=words(x)[:1, :1].expand(x.shape), labels=words(x))
    (out.aux_loss + 0 * out.logits.sum()).backward()


# -- sharing ------------------------------------------------------------------------------------------------


class Repeated(nn.Module):
    """The same block, several times."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.block = Block()
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for _ in range(4):
            x = self.block(x)
        return self.head(x)


class InTwoPlaces(nn.Module):
    """A block and a layer that two units hold."""

    def __init__(self) -> None:
        super().__init__()
        shared = Block()
        self.stages = nn.ModuleList(nn.Sequential(Block(), shared, Block()) for _ in range(2))
        self.stages[1][2].up = self.stages[0][0].up
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return self.head(x)


def albert() -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "embedding_size": 8, "hidden_size": 16, "num_hidden_layers": 3}
    config = AlbertConfig(**sizes, num_attention_heads=2, intermediate_size=12, max_position_embeddings=16)
    return AlbertForMaskedLM(config).eval()  # no dropout


def masked_words(model: nn.Module, x: Tensor, step: int) -> None:
    model(input_ids=words(x), labels=words(-x)).loss.backward()


def next_words(model: nn.Module, x: Tensor, step: int) -> None:
    tokens = words(x) % models.VOCABULARY
    tokens = torch.cat([tokens, tokens], 1)[:, : models.LENGTH]
    F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten()).backward()


def contrastive(model: nn.Module, x: Tensor, step: int) -> None:
    one, other = model(x), model(x + x.flip(0) / 4)
    F.cross_entropy(one @ other.T, torch.arange(len(x))).backward()


def triplet(model: nn.Module, x: Tensor, step: int) -> None:
    anchor, far = model(x), model(x.flip(0))
    with torch.no_grad():
        near = model(x / 2)
    F.triplet_margin_loss(anchor, near, far, margin=3.0).backward()
    squares(model, x, step)


# -- two models ---------------------------------------------------------------------------------------------


def generator_and_critic() -> nn.Module:
    return nn.ModuleDict({"generator": Stack(count=2), "critic": nn.Sequential(nn.Linear(2, WIDTH), Stack(count=2))})


def adversaries(model: Any, x: Tensor, step: int) -> None:
    """The critic and the generator, by turns.

    What the other has gathered meanwhile is dropped.
    """
    fake = model["generator"](x)
    if step % 2 == 0:
        (F.softplus(model["critic"](fake.detach())).mean() + F.softplus(-model["critic"](x[:, :2])).mean()).backward()
    else:
        F.softplus(-model["critic"](fake)).mean().backward()
        for parameter in model["critic"].parameters():
            parameter.grad = None


def adversaries_with_inputs_named(model: Any, x: Tensor, step: int) -> None:
    turn = ("critic", "generator")[step % 2]
    loss = F.softplus(-model["critic"](model["generator"](x))).mean() * (-1) ** step
    loss.backward(inputs=list(model[turn].parameters()))


def adversaries_frozen_by_turns(model: Any, x: Tensor, step: int) -> None:
    model["critic"].requires_grad_(False)
    F.softplus(-model["critic"](model["generator"](x))).mean().backward()
    model["critic"].requires_grad_(True)
    F.softplus(model["critic"](model["generator"](x).detach())).mean().backward()


# -- recurrent layers, attention, parametrized weights -------------------------------------------------------


class Recurrent(nn.Module):
    """A recurrent layer of torch's over the rows of a batch."""

    def __init__(self, layer: Callable[..., nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, 7)
        self.layer = layer(7, 5, batch_first=True, **options)
        directions = 2 if self.layer.bidirectional else 1
        self.head = nn.Linear(directions * (self.layer.proj_size or 5), 2)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.layer(self.embed(torch.stack([x, x.flip(0), -x], 1)))
        return self.head(out[:, -1])


class Unrolled(nn.Module):
    """A cell called once for every time step."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList([nn.LSTMCell(WIDTH, 5), nn.LSTMCell(5, 5)])
        self.head = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        states: list[Any] = [None, None]
        for time in range(4):
            hidden = x * (time + 1) / 4
            for index, cell in enumerate(self.cells):
                states[index] = cell(hidden, states[index])
                hidden = states[index][0]
        return self.head(hidden)


class Attending(nn.Module):
    """Torch's attention, which reads the weight of its inner layer without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.MultiheadAttention(WIDTH, 2, batch_first=True) for _ in range(2))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x[None]
        for layer in self.layers:
            x = x + layer(x, x, x)[0]
        return self.head(x[0])


class Encoder(nn.Module):
    """Torch's transformer, which takes another path in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 7, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x[None])[0])


def parametrized(kind: Callable[[nn.Module], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = Stack()
        for module in list(model.modules()):
            if isinstance(module, nn.Linear):
                kind(module)
        return model

    return build


class Uneven(nn.Module):
    """Numbers of rows that neither 2 nor 3 divides."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 7)
        self.layers = nn.ModuleList(models.Residual(7, hidden) for hidden in (5, 1, 4))
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.head = nn.Linear(7, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.scale * x)


# -- loops --------------------------------------------------------------------------------------------------


def more_forwards_each_time(model: nn.Module, x: Tensor, step: int) -> None:
    for micro in range(3):
        sum(model(x + shift).square().mean() for shift in range((micro + step) % 3 + 1)).backward()


def evaluated_in_between(model: nn.Module, x: Tensor, step: int) -> None:
    for micro in range(3):
        squares(model, x - micro, step)
        model.eval()
        with torch.no_grad():
            weight = model(x).square().mean().item()
        model.train()
    squares(model, weight * x, step)


def evaluated_inside(model: nn.Module, x: Tensor, step: int) -> None:
    """Between a forward and its backward, and without a mark that a micro-step ends."""
    out = model(x)
    model.eval()
    with torch.inference_mode():
        target = model(2 * x)
    model.train()
    (out - target.clone()).square().mean().backward()


MIXTURES: dict[str, Loop] = {
    "mixtral": Loop(build=mixtral, body=one_word, units="MixtralDecoderLayer"),
    "mixtral, auto": Loop(build=mixtral, body=one_word, units="auto"),
    "mixtral, tied, micro-steps": Loop(build=tied_mixtral, body=one_word_in_micro_steps, units="auto"),
    "mixtral, balance": Loop(build=mixtral, body=balance_beside_nothing, units="MixtralDecoderLayer"),
    "mixtral, balance alone": Loop(build=mixtral, body=balance_alone, units="MixtralDecoderLayer"),
    "qwen2 moe": Loop(build=qwen2_moe, body=one_word, units="Qwen2MoeDecoderLayer"),
    "qwen2 moe, auto": Loop(build=qwen2_moe, body=one_word, units="auto"),
    "qwen3 moe": Loop(build=qwen3_moe, body=one_word, units="Qwen3MoeDecoderLayer"),
    "qwen3 moe, micro-steps": Loop(build=qwen3_moe, body=one_word_in_micro_steps, units="auto"),
    "experts in layers": Loop(build=lambda: Stack(Experts, 3), body=one_row, units=(Experts,)),
}
UNSHARDED_ONLY: dict[str, Loop] = {  # right where parameters are not sharded, refused elsewhere
    "lone experts": Loop(build=lambda: Stack(Experts, 3), body=one_row, units=(Expert,)),
    "lone experts, nested": Loop(build=lambda: Stack(Experts, 3), body=one_row, units=(Experts, Expert)),
}
OTHERS: dict[str, Loop] = {
    "repeated": Loop(build=Repeated, body=squares),
    "repeated, micro-steps": Loop(build=Repeated, body=two_micro_steps),
    "albert": Loop(build=albert, body=masked_words, units="AlbertLayer"),
    "albert, root only": Loop(build=albert, body=masked_words, units="auto"),
    "in two places": Loop(build=InTwoPlaces, body=two_micro_steps),
    "in two places, stages": Loop(build=InTwoPlaces, body=squares, units=(nn.Sequential,)),
    "in two places, nested": Loop(build=InTwoPlaces, body=squares, units=(nn.Sequential, Block)),
    "siamese": Loop(build=Stack, body=contrastive),
    "triplet": Loop(build=Stack, body=triplet),
    "gan": Loop(build=generator_and_critic, body=adversaries, parts=("generator", "critic")),
    "gan, inputs named": Loop(
        build=generator_and_critic, body=adversaries_with_inputs_named, parts=("generator", "critic")
    ),
    "gan, frozen by turns": Loop(
        build=generator_and_critic, body=adversaries_frozen_by_turns, parts=("critic", "generator")
    ),
    "lstm": Loop(build=lambda: Recurrent(nn.LSTM, num_layers=2), body=squares, units=(nn.LSTM,)),
    "lstm, projected": Loop(build=lambda: Recurrent(nn.LSTM, proj_size=3), body=squares, units="auto"),
    "gru, both ways": Loop(
        build=lambda: Recurrent(nn.GRU, num_layers=2, bidirectional=True), body=two_micro_steps, units=(nn.GRU,)
    ),
    "lstm cells": Loop(build=Unrolled, body=squares, units=(nn.LSTMCell,)),
    "lstm cells, micro-steps": Loop(build=Unrolled, body=two_micro_steps, units="auto"),
    "weight norm": Loop(build=parametrized(weight_norm), body=two_micro_steps),
    "weight norm, layers": Loop(build=parametrized(weight_norm), body=squares, units=(nn.Linear,)),
    "spectral norm": Loop(build=parametrized(spectral_norm), body=squares),
    "spectral norm, micro-steps": Loop(build=parametrized(spectral_norm), body=two_micro_steps),
    "spectral norm, layers": Loop(build=parametrized(spectral_norm), body=evaluated_in_between, units=(nn.Linear,)),
    "orthogonal": Loop(build=parametrized(orthogonal), body=squares),
    "tied": Loop(build=lambda: models.Transformer(num_blocks=2, tie=True), body=next_words, units=(models.Block,)),
    "attention": Loop(build=Attending, body=squares, units=(nn.MultiheadAttention,)),
    "encoder": Loop(build=Encoder, body=squares, units="auto"),
    "encoder, evaluated": Loop(build=Encoder, body=evaluated_in_between, units="auto"),
    "more forwards each time": Loop(build=Stack, body=more_forwards_each_time),
    "evaluated in between": Loop(build=Stack, body=evaluated_in_between),
    "evaluated inside": Loop(build=Stack, body=evaluated_inside),
    "uneven": Loop(build=Uneven, body=two_micro_steps, units=(models.Residual,)),
}
MODELS = MIXTURES | UNSHARDED_ONLY | OTHERS


def train(ctx: RankContext, cases: list[Case]) -> list[Trained]:
    """Job: every case on a model of its own, up to the first error."""
    return [trained(MODELS[name], ctx.rank, config) for name, config in cases]
