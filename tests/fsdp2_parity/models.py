"""Models of the scenarios."""

import dataclasses
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.utils.checkpoint import checkpoint

from tests.models import VOCABULARY, Block, Transformer

Pair = namedtuple("Pair", "x y")


@dataclasses.dataclass
class Record:
    """Two tensors."""

    x: Tensor
    y: Tensor


@dataclasses.dataclass
class Nested:
    """A record in a record."""

    inner: Record
    z: Tensor


class MLP(nn.Module):
    """Two projections around a relu."""

    def __init__(self, width: int, multiplier: int = 2, *, bias: bool = True) -> None:
        super().__init__()
        self.in_proj = nn.Linear(width, multiplier * width, bias=bias)
        self.out_proj = nn.Linear(multiplier * width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.out_proj(F.relu(self.in_proj(x))))


def mlps(width: int = 6, count: int = 3) -> nn.Module:
    return nn.Sequential(*(MLP(width) for _ in range(count)))


def two_linears(first: tuple[int, int], second: tuple[int, int]) -> nn.Module:
    return nn.Sequential(nn.Linear(*first), nn.ReLU(), nn.Linear(*second))


def linears(count: int = 4, width: int = 6) -> nn.Module:
    return nn.Sequential(*(layer for _ in range(count) for layer in (nn.Linear(width, width), nn.ReLU())))


class CheckpointedTransformer(Transformer):
    """Recomputes every block with `torch.utils.checkpoint`."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))


def _is_block(module: nn.Module) -> bool:
    return isinstance(module, Block)


def transformer(checkpointed: str = "none", *, tie: bool = False, num_blocks: int = 3) -> nn.Module:
    """A transformer whose blocks are recomputed by one of torch's three interfaces."""
    if checkpointed == "utils":
        return CheckpointedTransformer(tie=tie, num_blocks=num_blocks)
    model = Transformer(tie=tie, num_blocks=num_blocks)
    if checkpointed == "wrapper":
        apply_activation_checkpointing(model, check_fn=_is_block)
    elif checkpointed == "composable":
        for block in model.blocks:
            composable_checkpoint(block)
    return model


def composable_mlps(width: int = 6) -> nn.Module:
    """MLPs recomputed by the composable interface."""
    model = mlps(width)
    for mlp in model:
        composable_checkpoint(mlp)
    return model


class CalledTwice(nn.Module):
    """Calls one layer twice in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.outer = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x) + self.inner(x))


class ChunkedHead(nn.Module):
    """A language model whose head can be left out, to be called on chunks."""

    def __init__(self, *, tie: bool = False, recompute: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.body = nn.Linear(8, 8, bias=False)
        self.norm = nn.RMSNorm(8)
        self.head = nn.Linear(8, VOCABULARY, bias=False)
        self.recompute = recompute
        if tie:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, *, skip_head: bool = False) -> Tensor:
        hidden = self.embed(tokens)
        hidden = checkpoint(self.body, hidden, use_reentrant=False) if self.recompute else self.body(hidden)
        hidden = self.norm(hidden)
        return hidden if skip_head else self.head(hidden)


class Tied(nn.Module):
    """An embedding and a head with one weight, of rows that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, 6)
        self.output = nn.Linear(6, 17, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.embedding(tokens))


class Raiser(nn.Module):
    """Raises while it is armed."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.armed = False

    def forward(self, x: Tensor) -> Tensor:
        if self.armed:
            raise ArithmeticError("armed")
        return self.inner(x)


def raising() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), Raiser(nn.Linear(6, 6)), nn.Linear(6, 6))


class NoInputs(nn.Module):
    """A parameter, and a forward without arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 5))

    def forward(self) -> Tensor:
        return self.weight @ self.weight


class NoParameters(nn.Module):
    """A forward of tensors in a tuple, and nothing to train."""

    def forward(self, x: Tensor, ys: tuple[Tensor, ...]) -> Tensor:
        return x + ys[0] + ys[1]


class TwoOutputs(nn.Module):
    """Two layers on one input, with both outputs or only the first one's."""

    def __init__(self, *, both: bool) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.both = both

    def forward(self, x: Tensor) -> Any:
        first, second = F.relu(self.first(x)), F.relu(self.second(x))
        return (first, second) if self.both else first


def both_outputs() -> nn.Module:
    return TwoOutputs(both=True)


def one_output() -> nn.Module:
    return TwoOutputs(both=False)


Container = Callable[[Tensor], Any]


def in_list(x: Tensor) -> Any:
    return [x]


def in_tuple(x: Tensor) -> Any:
    return (x,)


def in_dict(x: Tensor) -> Any:
    return {"x": x}


def in_pair(x: Tensor) -> Any:
    return Pair(x, x.clone())


def in_record(x: Tensor) -> Any:
    return Record(x, x.clone())


def in_nested(x: Tensor) -> Any:
    return Nested(Record(x, x.clone()), x.clone())


class Put(nn.Module):
    """Puts a tensor into a container."""

    def __init__(self, container: Container) -> None:
        super().__init__()
        self.container = container

    def forward(self, x: Tensor) -> Any:
        return self.container(x)


class Take(nn.Module):
    """Adds the tensors of a container."""

    def forward(self, container: Any) -> Tensor:
        return sum(_tensors(container))


class ContainerLayer(nn.Module):
    """Applies a layer to every tensor of a container, and returns the same kind of container."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, container: Any) -> Any:
        return _mapped(lambda x: F.relu(self.layer(x)), container)


def _tensors(container: Any) -> list[Tensor]:
    found: list[Tensor] = []
    _mapped(lambda x: found.append(x) or x, container)
    return found


def _mapped(function: Callable[[Tensor], Tensor], container: Any) -> Any:
    if isinstance(container, Tensor):
        return function(container)
    if isinstance(container, dict):
        return {key: _mapped(function, value) for key, value in container.items()}
    if dataclasses.is_dataclass(container):
        values = (_mapped(function, getattr(container, each.name)) for each in dataclasses.fields(container))
        return type(container)(*values)
    mapped = [_mapped(function, value) for value in container]
    return type(container)(*mapped) if isinstance(container, Pair) else type(container)(mapped)


def contained(container: Container) -> nn.Module:
    return nn.Sequential(Put(container), ContainerLayer(), ContainerLayer(), Take())


class NoGradBetween(nn.Module):
    """Trained and frozen layers, each called several times, also without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.trained = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(3):
            x = self.frozen(F.relu(self.trained(x)))
            with torch.no_grad():
                x += F.relu(self.trained(x))
        return x


class WideBetween(nn.Module):
    """Two layers, and the full precision between them."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6, bias=False)
        self.b = nn.Linear(6, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).float())


class Recomputed(nn.Module):
    """Recomputes the module inside."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


def recomputed_mlps(width: int = 6) -> nn.Module:
    return nn.Sequential(*(Recomputed(mlp) for mlp in mlps(width)))


class WrittenOutputs(nn.Module):
    """Adds in place to outputs of layers that are views, as those of `nn.Linear` on three dimensions are."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.third = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        hidden += x
        other = self.second(hidden)
        other *= 2
        return self.third(other.relu_())


def normed_mlps(width: int) -> nn.Module:
    """A norm without bias, and MLPs of two widths."""
    return nn.Sequential(nn.LayerNorm(width, bias=False), MLP(width, 3), MLP(width), MLP(width, 3))


def compiled_mlps() -> nn.Module:
    """MLPs whose forwards torch compiles."""
    model = mlps()
    for mlp in model:
        mlp.compile(backend="aot_eager")
    return model


class Patches(nn.Module):
    """Projects images to features; its forward adds them up."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Conv2d(3, 8, kernel_size=2, stride=2)

    def features(self, images: Tensor) -> Tensor:
        return self.projection(images).flatten(2).transpose(1, 2)

    def forward(self, images: Tensor) -> Tensor:
        return self.features(images).sum(dim=1)


class Captioner(nn.Module):
    """Calls a method of its encoder that is not the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Patches()
        self.head = nn.Linear(8, 5)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.encoder.features(images))
