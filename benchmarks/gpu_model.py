"""A model like LLaMA in plain torch, in several sizes, and what one step of each reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.workload import Batch
from recipes.flops import decoder_model_flop, llama_matmul_params

_ROTARY_BASE = 10_000.0
_SEED = 0
_STRIDE = 7  # the token after t is t + 7, modulo the vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model, and what one step reads.

    Attributes:
        width: Width of the residual stream, a multiple of twice `heads`.
        layers: Blocks.
        heads: Heads of the attention.
        feed_forward: Width of the gated layer.
        vocabulary: Tokens.
        sequence: Tokens of one sequence.
        micro_batch: Sequences of one step.
    """

    width: int
    layers: int
    heads: int
    feed_forward: int
    vocabulary: int
    sequence: int
    micro_batch: int

    @property
    def numel(self) -> int:
        """Parameters of the model."""
        block = 4 * self.width**2 + 3 * self.width * self.feed_forward + 2 * self.width
        return 2 * self.vocabulary * self.width + self.layers * block + self.width

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.sequence * self.micro_batch

    @property
    def flop_per_token(self) -> float:
        """FLOP of a token, forward and backward: 6 N + 12 L s h; nothing is recomputed.

        N are the weights that multiply every token: the output projection is one of them, the embedding table, which
        is looked up, and the norms are not. L layers of width h read sequences of s tokens. The whole matrix of
        attention scores counts, also the half that a causal mask drops.

        Source:
            PaLM (arXiv:2204.02311), appendix B.
        """
        return self._flop_per_token(is_causal=False)

    @property
    def causal_flop_per_token(self) -> float:
        """The same with half of the attention scores: 6 N + 6 L s h, as `mics plan` and the runs' `mfu` count."""
        return self._flop_per_token(is_causal=True)

    def _flop_per_token(self, *, is_causal: bool) -> float:
        layers, width, sequence = self.layers, self.width, self.sequence
        weights = llama_matmul_params(L=layers, h=width, ffn=self.feed_forward, V=self.vocabulary)
        flop = decoder_model_flop(matmul_params=weights, s=sequence, L=layers, h=width, is_causal=is_causal)
        return flop / sequence

    def model(self, device: torch.device | str) -> Llama:
        """The model in fp32, with the same values at every call."""
        torch.manual_seed(_SEED)
        with torch.device(device):
            return Llama(self)

    def batch(self, step: int, device: torch.device) -> Batch:
        """What a step reads."""
        generator = torch.Generator().manual_seed(step)
        first = torch.randint(0, self.vocabulary, (self.micro_batch, 1), generator=generator)
        tokens = ((first + _STRIDE * torch.arange(self.sequence + 1)) % self.vocabulary).to(device)
        return Batch(inputs=tokens[:, :-1].contiguous(), targets=tokens[:, 1:].contiguous())


SIZES = {
    "tiny": Shape(width=32, layers=4, heads=2, feed_forward=64, vocabulary=128, sequence=16, micro_batch=2),
    "30m": Shape(width=512, layers=8, heads=8, feed_forward=1408, vocabulary=8192, sequence=512, micro_batch=4),
    "300m": Shape(width=1024, layers=20, heads=8, feed_forward=2816, vocabulary=32000, sequence=2048, micro_batch=8),
    "1b": Shape(width=2048, layers=18, heads=16, feed_forward=5504, vocabulary=32000, sequence=2048, micro_batch=8),
}


class Block(nn.Module):
    """Attention with rotary positions and a gated layer, each behind its norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, hidden = shape.width, shape.feed_forward
        self.heads = shape.heads
        self.attention_norm = nn.RMSNorm(width, eps=1e-5)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.forward_norm = nn.RMSNorm(width, eps=1e-5)
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        """Map ``[batch, sequence, width]`` to the same; angles are ``[sequence, width of a head]``."""
        batch, sequence, width = x.shape
        joint = self.query_key_value(self.attention_norm(x))
        query, key, value = joint.view(batch, sequence, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key = (_rotated(each, cosine.to(each.dtype), sine.to(each.dtype)) for each in (query, key))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, sequence, width))
        gate, up = self.gate_up(self.forward_norm(x)).chunk(2, dim=-1)
        out: torch.Tensor = x + self.down(F.silu(gate) * up)
        return out


def _rotated(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-high, low), dim=-1) * sine


class Llama(nn.Module):
    """Returns the loss. It keeps no buffers, so that it can be built on the meta device."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_width = shape.width // shape.heads
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of the next tokens."""
        x = self.tokens(inputs)
        places = torch.arange(0, self.head_width, 2, device=inputs.device) / self.head_width
        angles = torch.outer(torch.arange(inputs.shape[1], device=inputs.device), _ROTARY_BASE**-places).repeat(1, 2)
        cosine, sine = angles.cos(), angles.sin()
        for block in self.blocks:
            x = block(x, cosine, sine)
        loss: torch.Tensor = F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())
        return loss
