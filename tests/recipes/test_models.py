"""The networks: attention without a mask is the usual one, and parameters decay as they should."""

import pytest
import torch
from transformers import PreTrainedModel

from recipes.config import ModelConfig, OptimizerConfig
from recipes.lightning_module import parameter_groups
from recipes.models import build_model, model_flop_per_sequence, num_parameters

SMALL = ModelConfig(vocab_size=300, hidden_size=32, intermediate_size=88, num_layers=2, num_heads=4, num_kv_heads=2)


def loss_of(model: PreTrainedModel) -> torch.Tensor:
    tokens = torch.arange(24).reshape(2, 12) * 7 % 300
    return model(input_ids=tokens).logits.float().logsumexp(-1).mean()


def test_attention_for_packed_sequences_is_the_usual_causal_attention():
    model = build_model(SMALL, 12)
    packed = loss_of(model)
    model.set_attn_implementation("sdpa")
    assert torch.equal(packed, loss_of(model))


def test_a_token_does_not_see_later_ones():
    model = build_model(SMALL, 12)
    tokens = torch.randint(300, (1, 12))
    changed = tokens.clone()
    changed[0, 6:] = 0
    assert torch.equal(model(input_ids=tokens).logits[0, :6], model(input_ids=changed).logits[0, :6])


def test_activation_checkpointing_changes_no_gradient():
    gradients = []
    for is_on in (False, True):
        torch.manual_seed(0)
        config = ModelConfig(**{**vars(SMALL), "activation_checkpointing": is_on})
        model = build_model(config, 12).train()
        loss_of(model).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(plain, again) for plain, again in zip(*gradients, strict=True))


@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_parameters_are_counted_as_the_formula_says(tie_embeddings: bool):
    config = ModelConfig(**{**vars(SMALL), "tie_embeddings": tie_embeddings})
    h, ffn, vocab = 32, 88, 300
    layer = 2 * h * h + 2 * h * h // 2 + 3 * h * ffn + 2 * h
    assert num_parameters(config, 12) == 2 * layer + h + vocab * h * (1 if tie_embeddings else 2)


def test_a_llama_7b_is_one():
    config = ModelConfig(
        vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_layers=32, num_heads=32, num_kv_heads=32
    )
    assert num_parameters(config, 2048) == 6_738_415_616
    assert model_flop_per_sequence(config, 2048) / 1e12 == pytest.approx(84.48, abs=0.01)


def test_only_matrices_decay():
    model = build_model(SMALL, 12)
    decaying, others = parameter_groups(model, OptimizerConfig().weight_decay)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert sorted(names[id(parameter)] for parameter in others["params"]) == [
        "model.embed_tokens.weight",
        *(f"model.layers.{i}.{kind}_layernorm.weight" for i in (0, 1) for kind in ("input", "post_attention")),
        "model.norm.weight",
    ]
    assert len(decaying["params"]) + len(others["params"]) == len(names)
