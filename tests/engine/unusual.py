"""Training loops for which the engine was not designed.

Each `Loop` builds a small model in fp64 and runs the part of a step before the optimizer. `train` runs the loops on a
sharded model, `reference` on plain models, one for each rank, whose gradients are averaged before every step.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import backward  # before any model is sharded, as scripts do
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from mics_strategy import ConfigError, ShardConfig, shard
from tests.engine.training import wholes
from tests.rank_report import RankContext

WIDTH = 6
NUM_STEPS = 4
Parameters = dict[str, Tensor]


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Out:
    """What no tree of torch knows."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class ObjectBlock(Block):
    """Takes and returns an object."""

    def forward(self, out: Out) -> Out:
        return Out(super().forward(out.hidden))


class AuxiliaryBlock(Block):
    """Keeps a loss of its own as an attribute."""

    auxiliary: Tensor

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(x))
        self.auxiliary = hidden.square().mean()
        return x + self.down(hidden)


class ClampedBlock(Block):
    """Writes into a parameter in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((4,), 3.0))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale.clamp_(max=1.0)
        return x + self.scale.mean() * super().forward(x)


class DataBlock(ClampedBlock):
    """Does so past autograd's eyes, and in a forward of the block inside it."""

    def forward(self, x: Tensor) -> Tensor:
        self.scale.data.clamp_(max=1.0).mul_(0.9)
        self.up.bias.data = self.up.bias.data * 0.5
        return x + self.scale.mean() * Block.forward(self, x)


class Stack(nn.Module):
    """Blocks in an order that may change, between two linear layers."""

    def __init__(self, block: type[Block] = Block, count: int = 4) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(count))
        self.head = nn.Linear(WIDTH, 2)
        self.order = list(range(count))
        self.checkpointed: dict[int, bool] = {}  # whether reentrant, by block

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x)
        for index in self.order:
            block = self.blocks[index]
            if index in self.checkpointed:
                hidden = checkpoint(block, hidden, use_reentrant=self.checkpointed[index])
            else:
                hidden = block(hidden)
        return self.head(hidden)


class ObjectStack(Stack):
    """Passes an object from block to block."""

    def forward(self, x: Tensor) -> Tensor:
        out = Out(self.inner(x))
        for block in self.blocks:
            out = block(out)
        return self.head(out.hidden)


class Forces(Stack):
    """An energy and its negative gradient by the positions.

    Models of molecules return them.
    """

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        energy = super().forward(x)[:, 0]
        (gradient,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return torch.cat([energy[:, None], -gradient], 1)


Body = Callable[[nn.Module, Tensor, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """A model, and what is done with it in one step before the optimizer's.

    Attributes:
        build: Returns the model.
        body: (model, batch, step): all forwards and backwards of a step.
        units: Units, as `shard` takes them.
        parts: Names of the modules that are sharded, each by itself; "" is the whole model.
    """

    build: Callable[[], nn.Module]
    body: Body
    units: Any = (Block,)
    parts: tuple[str, ...] = ("",)


def frozen(model: Any, *names: str) -> Any:
    """The model with some of its modules frozen."""
    for name in names:
        model.get_submodule(name).requires_grad_(False)
    return model


def gradient_norm(model: nn.Module, x: Tensor) -> Tensor:
    """A penalty on the gradient of the outputs by the inputs."""
    x = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (gradient.norm(dim=1) - 1).square().mean()


def wasserstein(model: nn.Module, x: Tensor, step: int) -> None:
    loss = model(x + 1).mean() - model(x).mean()
    (loss + gradient_norm(model, x / 2)).backward()


def penalty_alone(model: nn.Module, x: Tensor, step: int) -> None:
    gradient_norm(model, x).backward()


def penalty_in_a_backward_of_its_own(model: nn.Module, x: Tensor, step: int) -> None:
    model(x).square().mean().backward()
    gradient_norm(model, x).backward()


def squares(model: nn.Module, x: Tensor, step: int) -> None:
    model(x).square().mean().backward()


def two_micro_steps(model: nn.Module, x: Tensor, step: int) -> None:
    squares(model, x, step)
    squares(model, -x / 2, step)


def features(model: Any, x: Tensor, step: int) -> None:
    taken: list[Tensor] = []
    handles = [block.up.register_forward_hook(lambda _, __, out: taken.append(out)) for block in model.blocks[1:3]]
    model(x)
    for handle in handles:
        handle.remove()
    sum(each.square().mean() for each in taken).backward()


def auxiliary_loss(model: Any, x: Tensor, step: int) -> None:
    (model(x).square().mean() + sum(block.auxiliary for block in model.blocks)).backward()


def auxiliary_loss_alone(model: Any, x: Tensor, step: int) -> None:
    model(x)
    model.blocks[1].auxiliary.backward()


def lent(model: nn.Module, value: float) -> dict[str, Tensor]:
    """Plain weights of a teacher."""
    generator = torch.Generator().manual_seed(3)
    return {
        name: value * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        for name, parameter in model.named_parameters()
    }


def student_and_teacher(model: nn.Module, x: Tensor, step: int) -> None:
    student = model(x)
    with torch.no_grad():
        teacher = torch.func.functional_call(model, lent(model, 0.3), (x,))
    (student - teacher).square().mean().backward()


def teacher_first(model: nn.Module, x: Tensor, step: int) -> None:
    with torch.no_grad():
        teacher = torch.func.functional_call(model, lent(model, 0.3), (x,))
    (model(x) - teacher).square().mean().backward()


def some_weights_lent(model: nn.Module, x: Tensor, step: int) -> None:
    weights = {name: value for name, value in lent(model, 0.3).items() if "blocks.1" in name}
    (model(x) - torch.func.functional_call(model, weights, (x,))).square().mean().backward()


def inputs_named(model: nn.Module, x: Tensor, step: int) -> None:
    model(x).square().mean().backward(inputs=list(model.parameters()))


def inputs_named_of_an_imported_backward(model: nn.Module, x: Tensor, step: int) -> None:
    named = dict(model.named_parameters())
    backward(model(x).square().mean(), inputs=named if torch.__version__ >= "2.13" else list(named.values()))


def some_inputs_named(model: Any, x: Tensor, step: int) -> None:
    chosen = [*model.blocks[1].parameters(), get_gradient_edge(model.head.bias)]
    model(x).square().mean().backward(inputs=chosen)


def order_turned(model: Any, x: Tensor, step: int) -> None:
    model.order = [0, 1, 2, 3] if step < 2 else [3, 2, 1, 0]
    two_micro_steps(model, x, step)


def order_of_every_kind(model: Any, x: Tensor, step: int) -> None:
    for micro, order in enumerate(
        ([0, 1, 2, 3], [3, 1], [2, 2, 0], [1], [0, 3, 1, 2], [3, 2, 1, 0, 3])[step : step + 3]
    ):
        model.order = order
        squares(model, x + micro, step)


def per_sample(model: nn.Module, x: Tensor, step: int) -> None:
    with torch.no_grad():
        target = torch.func.vmap(model)(x + 1)
    (model(x) - target).square().mean().backward()


def per_sample_with_gradients(model: nn.Module, x: Tensor, step: int) -> None:
    torch.func.vmap(model)(x).square().mean().backward()


def input_gradients(model: nn.Module, x: Tensor, step: int) -> None:
    gradient = torch.func.grad(lambda each: model(each).square().sum())(x)
    squares(model, x + gradient.detach(), step)


def checkpoints(**kinds: bool) -> Callable[[], nn.Module]:
    """A stack some blocks of which are recomputed; the value says whether reentrant."""

    def build() -> nn.Module:
        model = Stack()
        model.checkpointed = {int(name[1:]): kind for name, kind in kinds.items()}
        return model

    return build


LOOPS: dict[str, Loop] = {
    "wasserstein": Loop(build=Stack, body=wasserstein),
    "wasserstein, recomputed": Loop(build=checkpoints(b0=False, b2=False), body=wasserstein),
    "penalty alone": Loop(build=Stack, body=penalty_alone),
    "penalty in a backward of its own": Loop(build=Stack, body=penalty_in_a_backward_of_its_own),
    "penalty, frozen blocks": Loop(build=lambda: frozen(Stack(), "blocks.1", "blocks.2"), body=wasserstein),
    "forces": Loop(build=Forces, body=squares),
    "forces in micro-steps": Loop(build=Forces, body=two_micro_steps),
    "objects": Loop(build=lambda: ObjectStack(ObjectBlock), body=squares, units=(ObjectBlock,)),
    "frozen objects": Loop(
        build=lambda: frozen(ObjectStack(ObjectBlock), "blocks"), body=squares, units=(ObjectBlock,)
    ),
    "frozen features": Loop(build=lambda: frozen(Stack(), "blocks", "head"), body=features),
    "auxiliary loss": Loop(build=lambda: Stack(AuxiliaryBlock), body=auxiliary_loss, units=(AuxiliaryBlock,)),
    "auxiliary loss alone": Loop(
        build=lambda: Stack(AuxiliaryBlock, count=2), body=auxiliary_loss_alone, units=(AuxiliaryBlock,)
    ),
    "features of the last blocks": Loop(build=lambda: Stack(count=3), body=features),
    "frozen auxiliary loss": Loop(
        build=lambda: frozen(Stack(AuxiliaryBlock), "blocks"), body=auxiliary_loss, units=(AuxiliaryBlock,)
    ),
    "frozen auxiliary loss alone": Loop(
        build=lambda: frozen(Stack(AuxiliaryBlock), "blocks"), body=auxiliary_loss_alone, units=(AuxiliaryBlock,)
    ),
    "student and teacher": Loop(build=Stack, body=student_and_teacher),
    "teacher first": Loop(build=Stack, body=teacher_first),
    "some weights lent": Loop(build=Stack, body=some_weights_lent),
    "inputs named": Loop(build=Stack, body=inputs_named),
    "inputs named, backward imported": Loop(build=Stack, body=inputs_named_of_an_imported_backward),
    "some inputs named": Loop(build=Stack, body=some_inputs_named),
    "writes in forward": Loop(build=lambda: Stack(ClampedBlock), body=squares, units=(ClampedBlock,)),
    "writes in micro-steps": Loop(build=lambda: Stack(ClampedBlock), body=two_micro_steps, units=(ClampedBlock,)),
    "writes through data": Loop(build=lambda: Stack(DataBlock), body=squares, units=(DataBlock,)),
    "order turned": Loop(build=Stack, body=order_turned),
    "order of every kind": Loop(build=Stack, body=order_of_every_kind),
    "per sample": Loop(build=Stack, body=per_sample),
    "per sample, with gradients": Loop(build=Stack, body=per_sample_with_gradients),
    "input gradients": Loop(build=Stack, body=input_gradients),
    "reentrant beside plain": Loop(build=checkpoints(b0=True, b1=True, b3=True), body=squares),
    "reentrant after plain": Loop(build=checkpoints(b1=True, b2=True, b3=True), body=two_micro_steps),
    "both kinds of checkpoints": Loop(build=checkpoints(b0=True, b1=False, b2=True), body=two_micro_steps),
}


@dataclass(slots=True)
class Trained:
    """Parameters at the end, or the error that a loop ended with."""

    parameters: Parameters = field(default_factory=dict)
    error: str = ""


def built(loop: Loop) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return loop.build().double()


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)


def trained(loop: Loop, rank: int, config: ShardConfig) -> Trained:
    """What this rank ends with."""
    model = built(loop)
    try:
        for part in loop.parts:
            shard(model.get_submodule(part), config, units=loop.units)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.02)
        for step in range(NUM_STEPS):
            loop.body(model, batch(step, rank), step)
            optimizer.step()
            optimizer.zero_grad()
        return Trained(wholes(dict(model.named_parameters())))
    except (RuntimeError, ConfigError) as error:  # on all ranks alike: the next loop has a model of its own
        return Trained(error=f"{type(error).__name__}: {error}")


def train(ctx: RankContext, names: list[str], config: ShardConfig) -> dict[str, Trained]:
    """Job: every loop on a sharded model of its own."""
    return {name: trained(LOOPS[name], ctx.rank, config) for name in names}


def reference(loop: Loop, world_size: int) -> Parameters:
    """Plain models, one for each rank, with the mean of their gradients."""
    models = [built(loop) for _ in range(world_size)]
    optimizers = [torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.02) for model in models]
    for step in range(NUM_STEPS):
        for rank, model in enumerate(models):
            loop.body(model, batch(step, rank), step)
        for copies in zip(*(model.parameters() for model in models), strict=True):
            grads = [each.grad for each in copies if each.grad is not None]
            for each in copies if grads else ():
                each.grad = sum(grads) / world_size
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {key: each.detach().clone() for key, each in models[0].named_parameters()}


def difference(one: Parameters, other: Parameters) -> float:
    """The largest of any two numbers; infinite where one is not finite."""
    assert one.keys() == other.keys()
    largest = max((one[key] - other[key]).abs().max().item() for key in one)
    return largest if math.isfinite(largest) else math.inf
