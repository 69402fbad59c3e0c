"""Share of a device's best speed that a transformer layer sustains.

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

from mics_strategy.planner.cluster import Device
from mics_strategy.planner.device_rates import median_seconds
from mics_strategy.planner.model_trace import TraceInput, trace_model
from mics_strategy.planner.simulator import compute_times


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
