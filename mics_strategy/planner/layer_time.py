"""Speed of fused attention, and the share of a device's best speed that a transformer layer sustains.

Large matrix products and copies show the best speed of a device. A layer also has smaller products, attention, norms
and launches between them. The planner's own time of the layer's forward and backward at the best speed, by the time
that they take, is the share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from mics_strategy.planner.cluster import Device
from mics_strategy.planner.device_rates import median_seconds
from mics_strategy.planner.model import attention_speed
from mics_strategy.planner.model_trace import TraceInput, trace_model
from mics_strategy.planner.simulator import ATTENTION_BACKWARD, compute_times


@dataclass(frozen=True, slots=True)
class LayerSize:
    """A layer and its batch.

    Attributes:
        width: Elements of a token.
        num_heads: Heads of the attention.
        num_tokens: Tokens of a sequence.
        num_sequences: Sequences of the batch.
    """

    width: int
    num_heads: int
    num_tokens: int
    num_sequences: int

    def layer(self, dtype: torch.dtype, device: torch.device) -> nn.Module:
        """The layer, with attention in a fused kernel and without dropout."""
        return nn.TransformerEncoderLayer(
            self.width,
            self.num_heads,
            4 * self.width,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
            dtype=dtype,
            device=device,
        )


_SIZES = {
    "cuda": LayerSize(width=4096, num_heads=32, num_tokens=2048, num_sequences=1),
    "cpu": LayerSize(width=256, num_heads=4, num_tokens=128, num_sequences=2),
}


# Long enough to fill the device; heads of 128 elements, with which `attention_speed` is 1 for endless sequences.
_ATTENTION_SIZES = {
    "cuda": LayerSize(width=2048, num_heads=16, num_tokens=8192, num_sequences=2),
    "cpu": LayerSize(width=256, num_heads=2, num_tokens=512, num_sequences=1),
}


def attention_rate(dtype: torch.dtype, device: torch.device, start_together: Callable[[], None]) -> float:
    """FLOP per second of fused causal attention with long sequences, while every rank computes.

    Of forward and backward together. Half of the scores count.
    """
    size = _ATTENTION_SIZES[device.type]
    head_size = size.width // size.num_heads
    shape = (4, size.num_sequences, size.num_heads, size.num_tokens, head_size)
    gradient, *inputs = torch.randn(shape, dtype=dtype, device=device).unbind()
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    flop = 2 * size.num_sequences * size.num_heads * size.num_tokens**2 * head_size * (1 + ATTENTION_BACKWARD)
    seconds = median_seconds(partial(_attend, leaves, gradient), device, start_together)
    return flop / seconds / attention_speed(size.num_tokens, head_size)


def _attend(leaves: list[torch.Tensor], gradient: torch.Tensor) -> None:
    query, key, value = leaves
    torch.autograd.grad(scaled_dot_product_attention(query, key, value, is_causal=True), leaves, gradient)


def layer_seconds(dtype: torch.dtype, device: torch.device, start_together: Callable[[], None]) -> float:
    """Seconds of a forward and backward of the layer, while every rank computes."""
    size = _SIZES[device.type]
    layer = size.layer(dtype, device)
    batch = torch.randn(size.num_sequences, size.num_tokens, size.width, dtype=dtype, device=device, requires_grad=True)
    return median_seconds(partial(_train, layer, batch), device, start_together, in_a_row=2)


def _train(layer: nn.Module, batch: torch.Tensor) -> None:
    layer(batch).sum().backward()


def sustained_share(device: Device, dtype: torch.dtype, device_type: str, measured_s: float) -> float:
    """Share of the best speed, at most 1.

    Args:
        device: Device with its best speeds.
        dtype: Dtype of the layer.
        device_type: "cuda" or "cpu".
        measured_s: Seconds of `layer_seconds`.
    """
    size = _SIZES[device_type]
    layer = size.layer(dtype, torch.device("meta"))
    example = {"src": torch.zeros(1, size.num_tokens, size.width, dtype=dtype, device="meta")}
    traced = TraceInput(name="layer", example=example, units=[nn.TransformerEncoderLayer], loss=lambda out: out.sum())
    units = trace_model(layer, traced).units
    best_s = sum(sum(compute_times(unit, size.num_sequences, device.with_best_kernels())) for unit in units)
    return min(1.0, best_s / measured_s)
