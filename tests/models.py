"""Which models are small and awkward?

Each function returns a `Case`: a model with the same weights every time, batches that are a pure
function of (step, micro-step, rank), a loss, and the block classes one would wrap as units.
The functions are module-level, so `ranks(4, job, models.tied)` sends the case itself.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = dict[str, Any]
BATCH_SIZE = 2
VOCABULARY = 29
LENGTH = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model with everything needed to train it.

    Attributes:
        build: Returns the model, the same weights in every call; honours `torch.device("meta")`.
        batch: (step, micro-step, rank) to batch.
        loss: (model, batch) to the mean loss.
        units: Block classes, repeated in the model.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int, int, int], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    units: tuple[type[nn.Module], ...]

    def batches(self, steps: int, accumulation: int, world_size: int) -> list[list[list[Batch]]]:
        """[step][micro-step][rank], as `train_reference` wants them."""
        return [[[self.batch(s, m, r) for r in range(world_size)] for m in range(accumulation)] for s in range(steps)]


def _seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(7)  # `torch.manual_seed` formats the stack: see `tests.seeds`
            return make()

    return build


def _generator(step: int, micro: int, rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(1_000_003 * step + 1_009 * micro + rank)


def _vectors(num_in: int, num_out: int) -> Callable[[int, int, int], Batch]:
    def batch(step: int, micro: int, rank: int) -> Batch:
        generator = _generator(step, micro, rank)
        x = torch.randn(BATCH_SIZE, num_in, generator=generator)
        return {"x": x, "y": torch.randn(BATCH_SIZE, num_out, generator=generator)}

    return batch


def _tokens(step: int, micro: int, rank: int) -> Batch:
    shape = (BATCH_SIZE, LENGTH + 1)
    tokens = torch.randint(VOCABULARY, shape, generator=_generator(step, micro, rank))
    return {"x": tokens[:, :-1], "y": tokens[:, 1:]}


def _images(step: int, micro: int, rank: int) -> Batch:
    generator = _generator(step, micro, rank)
    x = torch.randn(BATCH_SIZE, 3, 6, 6, generator=generator)
    return {"x": x, "y": torch.randint(5, (BATCH_SIZE,), generator=generator)}


def _squared_error(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch["x"]).to(batch["y"].dtype), batch["y"])


def _cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["x"])
    return F.cross_entropy(logits.flatten(0, -2), batch["y"].flatten())


class Residual(nn.Module):
    """x + two layers, with a hidden width that divides by nothing."""

    def __init__(self, width: int, hidden: int) -> None:
        """Make the two layers."""
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] to [..., width]."""
        return x + self.down(torch.tanh(self.up(x)))


class Block(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        """Make attention and feed-forward."""
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, width] to the same."""
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Embedding, blocks, head; positions are a buffer that is not saved."""

    positions: Tensor

    def __init__(self, *, num_blocks: int = 3, width: int = 12, tie: bool = False) -> None:
        """Make it; `tie` shares the embedding with the head."""
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        angle = torch.arange(LENGTH)[:, None] / 10.0 ** (torch.arange(width) / width)
        self.register_buffer("positions", torch.sin(angle), persistent=False)
        self.blocks = nn.ModuleList(Block(width, 3, 20) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tie:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """[batch, length] to logits [batch, length, vocabulary]."""
        x = self.embedding(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class ConvBlock(nn.Module):
    """Convolution, batch norm, relu."""

    def __init__(self, num_in: int, num_out: int) -> None:
        """Make the layers."""
        super().__init__()
        self.conv = nn.Conv2d(num_in, num_out, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(num_out)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, num_in, h, w] to [batch, num_out, h, w]."""
        return F.relu(self.norm(self.conv(x)))


class ConvNet(nn.Module):
    """Three convolution blocks and a head."""

    def __init__(self) -> None:
        """Make the layers."""
        super().__init__()
        self.blocks = nn.Sequential(ConvBlock(3, 7), ConvBlock(7, 6), ConvBlock(6, 4))
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 3, h, w] to logits [batch, 5]."""
        return self.head(self.blocks(x).mean(dim=(2, 3)))


class Gated(nn.Module):
    """A 0-dim gate, and parameters with fewer rows than most worlds have ranks."""

    def __init__(self) -> None:
        """Make the parameters."""
        super().__init__()
        self.gate = nn.Parameter(torch.tensor(0.5))
        self.row = nn.Parameter(torch.randn(1, 7))
        self.pair = nn.Parameter(torch.ones(2))
        self.inner = Residual(7, 3)
        self.head = nn.Linear(7, 2)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 7] to [batch, 2]."""
        return self.head(self.gate * self.inner(x * self.row)) * self.pair


class WithBranch(nn.Module):
    """A branch of two blocks that only some batches use."""

    def __init__(self) -> None:
        """Make trunk, branch and head."""
        super().__init__()
        self.trunk = Residual(5, 9)
        self.branch = nn.Sequential(Residual(5, 7), Residual(5, 7))
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor, use_branch: bool) -> Tensor:
        """[batch, 5] to [batch, 3]."""
        x = self.trunk(x)
        return self.head(self.branch(x) if use_branch else x)


class CalledTwice(nn.Module):
    """The same block at two places of the forward pass."""

    def __init__(self) -> None:
        """Make one shared and one ordinary block."""
        super().__init__()
        self.block = Residual(5, 9)
        self.between = Residual(5, 4)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 5] to [batch, 3]."""
        return self.head(self.block(self.between(self.block(x))))


def mlp() -> Case:
    """Uneven widths."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), Residual(16, 9), Residual(16, 9), nn.Linear(16, 3))

    return Case(build=_seeded(make), batch=_vectors(5, 3), loss=_squared_error, units=(Residual,))


def transformer() -> Case:
    """Three repeated blocks, a buffer that is not saved."""
    return Case(build=_seeded(Transformer), batch=_tokens, loss=_cross_entropy, units=(Block,))


def conv_bn() -> Case:
    """Batch norm: buffers that training changes, differently on every rank."""
    return Case(build=_seeded(ConvNet), batch=_images, loss=_cross_entropy, units=(ConvBlock,))


def tied() -> Case:
    """A transformer whose head is its embedding."""

    def make() -> nn.Module:
        return Transformer(num_blocks=2, tie=True)

    return Case(build=_seeded(make), batch=_tokens, loss=_cross_entropy, units=(Block,))


def frozen() -> Case:
    """A transformer: embedding and first block frozen, of the second only biases and norms train."""

    def make() -> nn.Module:
        model = Transformer()
        model.embedding.requires_grad_(False)
        model.blocks[0].requires_grad_(False)
        for parameter in model.blocks[1].parameters():
            parameter.requires_grad_(parameter.dim() == 1)
        return model

    return Case(build=_seeded(make), batch=_tokens, loss=_cross_entropy, units=(Block,))


def scalar() -> Case:
    """A 0-dim parameter and first dimensions below 4."""
    return Case(build=_seeded(Gated), batch=_vectors(7, 2), loss=_squared_error, units=(Residual,))


def unused() -> Case:
    """A branch that batches use when (step + micro + rank) % 3 is 0, and in steps 2, 6, ... nowhere."""
    vectors = _vectors(5, 3)

    def batch(step: int, micro: int, rank: int) -> Batch:
        use_branch = step % 4 != 2 and (step + micro + rank) % 3 == 0
        return vectors(step, micro, rank) | {"use_branch": use_branch}

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.mse_loss(model(batch["x"], batch["use_branch"]), batch["y"])

    return Case(build=_seeded(WithBranch), batch=batch, loss=loss, units=(Residual,))


def shared() -> Case:
    """The same block called twice in one forward."""
    return Case(build=_seeded(CalledTwice), batch=_vectors(5, 3), loss=_squared_error, units=(Residual,))


ALL = (mlp, transformer, conv_bn, tied, frozen, scalar, unused, shared)
