"""What is trained: a small GPT in plain torch, or layers that sleep in place of computing; and data to learn.

The model knows nothing of any engine, and every engine gets the same one, with the same values and the same data. It
imports torch alone, because a peer may live in an environment of its own.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

_HEAD_WIDTH = 64
_STRIDE = 7  # the token after t is t + 7, modulo the vocabulary
_SEED = 0
CORES, AWAY = "cores", "away"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model's shape and what one optimizer step reads.

    Attributes:
        width: Width of the residual stream; a multiple of 64, or less than 64.
        layers: Blocks.
        vocabulary: Tokens.
        sequence: Tokens of one sequence.
        micro_batch: Sequences of one micro-step on one rank.
        accumulation: Micro-steps of an optimizer step.
        dtype: ``"float32"``, or ``"bfloat16"`` for compute and payloads, with fp32 states.
        learning_rate: Of AdamW.
        compute: ``"cores"``: blocks of a GPT. ``"away"``: blocks whose compute is somewhere else, as on a GPU: each
            sleeps in its forward and in its backward and leaves the cores to what is sent.
        forward_s: Sleep of one block's forward, in seconds; for ``"away"`` only.
        backward_s: Sleep of one block's backward; likewise.
    """

    width: int = 256
    layers: int = 6
    vocabulary: int = 2048
    sequence: int = 64
    micro_batch: int = 2
    accumulation: int = 4
    dtype: str = "float32"
    learning_rate: float = 1e-3
    compute: str = CORES
    forward_s: float = 0.0
    backward_s: float = 0.0

    @property
    def numel(self) -> int:
        """Parameters of the model."""
        block = (8 * self.width + 5 if self.compute == AWAY else 12 * self.width + 13) * self.width
        return 2 * self.vocabulary * self.width + self.sequence * self.width + self.layers * block + 2 * self.width

    @property
    def tokens(self) -> int:
        """Tokens that one rank reads in an optimizer step."""
        return self.sequence * self.micro_batch * self.accumulation

    @property
    def sleep_s(self) -> float:
        """Seconds that one rank sleeps in an optimizer step."""
        return self.accumulation * self.layers * (self.forward_s + self.backward_s)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of compute."""
        return torch.bfloat16 if self.dtype == "bfloat16" else torch.float32

    def as_dict(self) -> dict[str, int | float | str]:
        """For JSON; the arguments that make it again."""
        return dataclasses.asdict(self)

    def model(self) -> GPT:
        """The model, with the same values on every rank and at every call."""
        torch.manual_seed(_SEED)
        return GPT(self)

    def batches(self, step: int, rank: int) -> list[Batch]:
        """What `rank` reads in an optimizer step, one batch for each micro-step."""
        return [self._batch(step * self.accumulation + micro_step, rank) for micro_step in range(self.accumulation)]

    def _batch(self, index: int, rank: int) -> Batch:
        generator = torch.Generator().manual_seed(1009 * index + rank)
        first = torch.randint(0, self.vocabulary, (self.micro_batch, 1), generator=generator)
        tokens = (first + _STRIDE * torch.arange(self.sequence + 1)) % self.vocabulary
        return Batch(inputs=tokens[:, :-1].contiguous(), targets=tokens[:, 1:].contiguous())


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Tokens and the ones that follow them, both ``[micro_batch, sequence]``."""

    inputs: torch.Tensor
    targets: torch.Tensor


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind its norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.num_heads = max(1, width // _HEAD_WIDTH)
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.forward_norm = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[batch, sequence, width]`` to the same."""
        batch, sequence, width = x.shape
        heads = self.query_key_value(self.attention_norm(x)).view(batch, sequence, 3, self.num_heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, sequence, width))
        x = x + self.narrow(F.gelu(self.widen(self.forward_norm(x))))
        return x


class SleepingBlock(nn.Module):
    """A feed-forward layer that is small beside its sleep.

    The forward reads the weights and then sleeps; the backward sleeps and then gives their gradients, which are those
    of the layer without a sleep. So an engine must have gathered before and can send after, as with a real layer.

    Args:
        width: Width of the residual stream.
        forward_s: Sleep of the forward, in seconds.
        backward_s: Sleep of the backward.
    """

    def __init__(self, width: int, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)
        self.sleep_s = (forward_s, backward_s)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[batch, sequence, width]`` to the same."""
        x = x + self.narrow(torch.tanh(self.widen(x)))
        slept: torch.Tensor = _Sleep.apply(x, *self.sleep_s)  # type: ignore[no-untyped-call]
        return slept


class _Sleep(torch.autograd.Function):
    """The identity; `time.sleep` holds neither a core nor the interpreter's lock."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()  # FSDP2 warns of a view

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return grad, None, None


class GPT(nn.Module):
    """Returns the loss: some engines convert what a forward takes and gives."""

    def __init__(self, shape: Workload) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.sequence, shape.width)
        self.blocks = nn.ModuleList(_block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of the next tokens."""
        x = self.tokens(inputs) + self.positions(torch.arange(inputs.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).flatten(0, 1).float()
        loss: torch.Tensor = F.cross_entropy(logits, targets.flatten())
        return loss


def _block(shape: Workload) -> nn.Module:
    if shape.compute == AWAY:
        return SleepingBlock(shape.width, shape.forward_s, shape.backward_s)
    return Block(shape.width)
