"""Arithmetic and memory that a network costs, without running it on a device."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AttentionInterface

from .. import flops
from .build import build_model
from .config import ModelConfig

_MEASURED_ATTENTION = "mics_measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleCost:
    """Arithmetic of one sample by each way of counting; 0.0 where a way does not apply.

    Attributes:
        model_flop: Exact FLOP of the model, forward and backward, causal attention halved.
        megatron_flop: FLOP by Megatron's formula, attention not halved; 0.0 for images.
        recomputed_flop: FLOP by Megatron's formula with the recomputed forward; 0.0 for images, and where the model
            recomputes nothing.
    """

    model_flop: float
    megatron_flop: float = 0.0
    recomputed_flop: float = 0.0


def sample_cost(config: ModelConfig, size: int) -> SampleCost:
    """Return the arithmetic of one sample.

    Args:
        config: Numbers of the model.
        size: Tokens of the sequence, or pixels along the edge of the image.
    """
    model_flop = model_flop_per_sample(config, size)
    if config.reads_images:
        return SampleCost(model_flop=model_flop)
    shape = {"s": size, "L": config.num_layers, "h": config.hidden_size, "V": config.vocab_size}
    return SampleCost(
        model_flop=model_flop,
        megatron_flop=flops.megatron_model_flop(**shape),
        recomputed_flop=flops.megatron_recomputed_flop(**shape) if config.activation_checkpointing else 0.0,
    )


def model_flop_per_sample(config: ModelConfig, size: int) -> float:
    """Return forward and backward FLOP of one sample: causal attention halved, nothing recomputed.

    Args:
        config: Numbers of the model.
        size: Tokens of the sequence, or pixels along the edge of the image.
    """
    if config.reads_images:
        counter = FlopCounterMode(display=False)
        with torch.device("meta"), counter:
            build_model(_plain(config), size).eval()(torch.empty(1, 3, size, size))
        return 3.0 * counter.get_total_flops()
    shape = {"L": config.num_layers, "h": config.hidden_size, "ffn": config.intermediate_size, "V": config.vocab_size}
    if config.family == "llama":
        weights = flops.llama_matmul_params(**shape, kv_share=config.kv_heads / config.num_heads)
    else:
        weights = flops.transformer_matmul_params(**shape, has_masked_head=config.is_masked)
    return flops.decoder_model_flop(
        matmul_params=weights, s=size, L=config.num_layers, h=config.hidden_size, is_causal=not config.is_masked
    )


def activation_bytes(config: ModelConfig, micro_size: int, size: int, dtype: torch.dtype) -> int:
    """Estimate the bytes that one micro-step keeps for its backward, and those of the loss's gradient.

    The forward of the real modules runs on the meta device in `dtype` and the tensors that autograd saves are added up,
    each memory once, without the parameters. Attention counts as a fused kernel: its inputs and its output. For text,
    one and two layers are measured, the rest follows.

    Args:
        config: Numbers of the model.
        micro_size: Samples in the micro-batch.
        size: Tokens of a sequence, or pixels along the edge of an image.
        dtype: Dtype of the computation.

    Cost:
        No memory; the time of a forward without arithmetic.
    """
    if config.reads_images:
        return _saved_bytes(config, micro_size, size, dtype)
    one, two = (_saved_bytes(replace(config, num_layers=layers), micro_size, size, dtype) for layers in (1, 2))
    per_layer, tokens = two - one, micro_size * size
    logits_grad_bytes = tokens * config.vocab_size * (torch.float32.itemsize + dtype.itemsize)
    rest = one - per_layer + logits_grad_bytes
    if config.activation_checkpointing:  # the input of every layer, and one layer that is recomputed
        return rest + config.num_layers * tokens * config.hidden_size * dtype.itemsize + per_layer
    return rest + config.num_layers * per_layer


def _plain(config: ModelConfig) -> ModelConfig:
    return replace(config, compile="none", activation_checkpointing=False)


def _saved_bytes(config: ModelConfig, micro_size: int, size: int, dtype: torch.dtype) -> int:
    """Return the bytes that autograd saves in one forward with its loss."""
    with torch.device("meta"):
        model: Any = build_model(_plain(config), size).to(dtype).train()
        if config.reads_images:
            logits = _Saved(model).run(torch.empty(micro_size, 3, size, size, dtype=dtype))
            return logits
        AttentionInterface.register(_MEASURED_ATTENTION, _measured_attention)
        model.set_attn_implementation(_MEASURED_ATTENTION)
        return _Saved(model).run(torch.empty(micro_size, size, dtype=torch.int64))


class _Saved:
    """Adds up the memory that autograd saves, without that of parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.parameters = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        self.saved: dict[int, torch.Tensor] = {}  # tensors stay alive, so that no two share an address

    def run(self, inputs: torch.Tensor) -> int:
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
            output = self.model(inputs) if inputs.is_floating_point() else self.model(input_ids=inputs).logits
            logits = output.float().flatten(0, -2)
            labels = torch.empty(logits.shape[0], dtype=torch.int64, device="meta")
            nn.functional.cross_entropy(logits, labels)
        return sum(tensor.untyped_storage().nbytes() for tensor in self.saved.values())

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if (storage := tensor.untyped_storage()._cdata) not in self.parameters:
            self.saved[storage] = tensor
        return tensor


class _FusedAttention(torch.autograd.Function):
    """An attention without arithmetic that saves what a fused kernel saves."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        output = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, output)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        raise NotImplementedError


def _measured_attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """Return [B, S, heads, head size], as transformers' attentions do."""
    return _FusedAttention.apply(query, key, value).transpose(1, 2).contiguous(), None
