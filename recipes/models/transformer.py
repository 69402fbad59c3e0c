"""Transformers' models of the text families, for packed sequences without padding.

Nothing is downloaded: a configuration is filled with the recipe's numbers, and weights are random.
"""

from typing import Any

import torch
from torch import nn
from transformers import (
    AttentionInterface,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaPreLayerNormConfig,
    RobertaPreLayerNormForMaskedLM,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..errors import RecipeError
from .config import ModelConfig

PACKED_ATTENTION = "mics_sdpa"
_PAD = 1  # RoBERTa's: positions of its table begin after it


def build_transformer(config: ModelConfig, sequence_length: int) -> PreTrainedModel:
    """Build a model of a text family on torch's current default device.

    Transformers asks the device whether a mask is trivial, once per forward, and waits for the answer. An attention
    under another name has no mask function, so nothing is asked. This is right only without padding: never pass an
    `attention_mask`.

    Args:
        config: Numbers of the model.
        sequence_length: Longest sequence of the run.

    Returns:
        A model whose forward takes `input_ids` [B, S] and returns an object with `logits` [B, S, V].

    Raises:
        RecipeError: The table of positions is shorter than the sequences.
    """
    AttentionInterface.register(PACKED_ATTENTION, sdpa_attention_forward)
    builders = {"llama": _build_llama, "gpt2": _build_gpt2, "bert": _build_bert, "roberta": _build_roberta}
    model: PreTrainedModel = builders[config.family](config, sequence_length)
    model.register_forward_pre_hook(_refuse_mask, with_kwargs=True)
    return model


def layers_of(model: PreTrainedModel) -> nn.ModuleList:
    """Return the transformer layers of a model."""
    backbone: Any = model.base_model
    layers: nn.ModuleList
    if hasattr(backbone, "encoder"):
        layers = backbone.encoder.layer
    else:
        layers = backbone.h if hasattr(backbone, "h") else backbone.layers
    return layers


def _refuse_mask(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if kwargs.get("attention_mask") is not None:
        raise RecipeError(
            "`attention_mask` was passed to a model for packed sequences, which ignores masks. Pack the sequences "
            "without padding and pass `input_ids` alone."
        )


def _common(config: ModelConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "tie_word_embeddings": config.tie_embeddings,
        "attn_implementation": PACKED_ATTENTION,
        "use_cache": False,
        "bos_token_id": None,
        "eos_token_id": 0,
    }


def _build_llama(config: ModelConfig, sequence_length: int) -> PreTrainedModel:
    return LlamaForCausalLM(
        LlamaConfig(
            **_common(config),
            intermediate_size=config.intermediate_size,
            num_key_value_heads=config.kv_heads,
            max_position_embeddings=sequence_length,
        )
    )


def _build_gpt2(config: ModelConfig, sequence_length: int) -> PreTrainedModel:
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), config.dropout)
    positions = config.positions(sequence_length)
    return GPT2LMHeadModel(
        GPT2Config(**_common(config), n_inner=config.intermediate_size, n_positions=positions, **dropout)
    )


def _masked(config: ModelConfig) -> dict[str, Any]:
    """Return options of a masked language model; no token counts as padding, so that every row of the table learns."""
    return {
        **_common(config),
        "intermediate_size": config.intermediate_size,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.dropout,
        "pad_token_id": None,
    }


def _build_bert(config: ModelConfig, sequence_length: int) -> PreTrainedModel:
    if config.norm_position == "pre":
        return _build_roberta(config, sequence_length, num_types=2)
    return BertForMaskedLM(BertConfig(**_masked(config), max_position_embeddings=config.positions(sequence_length)))


def _build_roberta(config: ModelConfig, sequence_length: int, num_types: int = 1) -> PreTrainedModel:
    is_post = config.norm_position == "post"
    config_class, model_class = (
        (RobertaConfig, RobertaForMaskedLM) if is_post else (RobertaPreLayerNormConfig, RobertaPreLayerNormForMaskedLM)
    )
    rows = config.positions(sequence_length) + _PAD + 1  # the first two are never read, as in the published model
    model: PreTrainedModel = model_class(
        config_class(**_masked(config), max_position_embeddings=rows, type_vocab_size=num_types)
    )
    model.config.pad_token_id = _PAD  # what an exported model needs
    model.register_forward_pre_hook(_number_positions, with_kwargs=True)
    return model


def _number_positions(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Number all positions; RoBERTa would leave out every token whose number is that of its padding."""
    tokens: torch.Tensor = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
    first = _PAD + 1
    positions = torch.arange(first, first + tokens.shape[-1], device=tokens.device)[None]
    return args, {**kwargs, "position_ids": positions}
