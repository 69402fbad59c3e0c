"""Which network does a recipe train?

Models come from transformers, built from numbers with random weights; nothing is downloaded. A new family is
one builder below and one name in `ModelConfig.family`.
"""

from typing import assert_never

import torch
from torch import nn
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from . import flops
from .config import ModelConfig

PACKED_ATTENTION = "mics_sdpa"


def build_model(config: ModelConfig, sequence_length: int) -> PreTrainedModel:
    """Build a model on torch's current default device.

    Args:
        config: the numbers.
        sequence_length: longest sequence the model will see.

    Returns:
        A model whose forward takes `input_ids` [B, S] and returns an object with `logits` [B, S, V].
    """
    # Transformers asks the device whether the mask is trivial, once per forward, which waits for the GPU. An
    # attention of another name has no mask function and is not asked. Right only without padding: our
    # sequences are packed.
    AttentionInterface.register(PACKED_ATTENTION, sdpa_attention_forward)
    match config.family:
        case "llama":
            model: PreTrainedModel = LlamaForCausalLM(_llama_config(config, sequence_length))
        case _:
            assert_never(config.family)
    if config.activation_checkpointing:
        _checkpoint_activations(model)
    return model


def num_parameters(config: ModelConfig, sequence_length: int) -> int:
    """Count parameters without allocating any; tied ones count once."""
    with torch.device("meta"):
        model: nn.Module = build_model(config, sequence_length)
    return sum(parameter.numel() for parameter in model.parameters())


def model_flop_per_sequence(config: ModelConfig, sequence_length: int) -> float:
    """Return forward and backward FLOP of one sequence, causal attention counted once, nothing recomputed."""
    match config.family:
        case "llama":
            matmul_params = flops.llama_matmul_params(
                L=config.num_layers,
                h=config.hidden_size,
                ffn=config.intermediate_size,
                V=config.vocab_size,
                kv_share=config.num_kv_heads / config.num_heads,
            )
            return flops.decoder_model_flop(
                matmul_params=matmul_params,
                s=sequence_length,
                L=config.num_layers,
                h=config.hidden_size,
                is_causal=True,
            )
        case _:
            assert_never(config.family)


def _checkpoint_activations(model: PreTrainedModel) -> None:
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable({"use_reentrant": False})
    else:  # the name in older releases of transformers 5
        model.gradient_checkpointing_enable({"use_reentrant": False})


def _llama_config(config: ModelConfig, sequence_length: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        max_position_embeddings=sequence_length,
        tie_word_embeddings=config.tie_embeddings,
        attn_implementation=PACKED_ATTENTION,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=0,
    )
