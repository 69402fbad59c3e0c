"""Trainings in which streams have much to do, and little is computed."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.gpu_pretended import pretended_ranks
from mics_strategy import ShardConfig, Sharded, Topology, shard
from tests.cuda_harness.machine import Machine
from tests.cuda_harness.pretence import equal_replicas, pretended_cuda

WIDTH, DEPTH = 16, 4  # a multiple of 8 ranks, so that every unit can travel without a flat form
PRESETS = ("ddp", "zero1", "zero2", "zero3", "zeropp", "zeropp-hpz", "mics", "paro-iig", "paro-nii")


class Layer(nn.Module):
    """x + two layers; one unit."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Tower(nn.Module):
    """Layers between an inlet and an outlet.

    Args:
        recomputes: Whether layers are recomputed: not at all, or in one of torch's two ways.
        width: Of what goes from layer to layer.
        buffers: Number of values of each buffer.
    """

    def __init__(self, recomputes: str = "", width: int = WIDTH, buffers: Sequence[int] = ()) -> None:
        super().__init__()
        for index, numel in enumerate(buffers):
            self.register_buffer(f"buffer{index}", torch.zeros(numel))
        self.inlet = nn.Linear(width, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(DEPTH))
        self.outlet = nn.Linear(width, width)
        self.recomputes = recomputes

    def forward(self, x: Tensor, left_out: tuple[int, ...] = (), unused: tuple[int, ...] = ()) -> Tensor:
        """Without the layers that are left out; those that are unused run, and nothing looks at what they give."""
        x = self.inlet(x)
        for index, layer in enumerate(self.layers):
            if index in left_out:
                continue
            run = self._recomputed(layer) if self.recomputes else layer
            out = run(x)
            x = x if index in unused else out
        return self.outlet(x)

    def _recomputed(self, layer: nn.Module) -> Callable[[Tensor], Tensor]:
        return lambda x: checkpoint(layer, x, use_reentrant=self.recomputes == "reentrant")


@dataclass(slots=True)
class Training:
    """A sharded model on a pretended GPU: most often a tower."""

    model: Any
    sharded: Sharded
    optimizers: list[torch.optim.Optimizer]
    machine: Machine
    batch: Tensor
    micro_steps: int = 2
    options: dict[str, Any] = field(default_factory=dict)  # of the model's forward

    def loss(self) -> Tensor:
        return self.model(self.batch, **self.options).square().mean()

    def backward(self) -> None:
        for micro in range(self.micro_steps):
            with self.sharded.micro_step(micro, of=self.micro_steps):
                self.loss().backward()

    def update(self) -> None:
        self.sharded.clip_grad_norm_(1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def step(self) -> None:
        with self.machine.step():
            self.backward()
            self.update()


Loop = Callable[[Training], None]


def start(
    machine: Machine,
    config: ShardConfig,
    *,
    recomputes: str = "",
    rank: int = 0,
    width: int = WIDTH,
    buffers: Sequence[int] = (),
) -> Training:
    """Shard a tower over the ranks that there are."""
    torch.manual_seed(3)
    model = Tower(recomputes, width, buffers)
    sharded = shard(model, config, units=[Layer], device=machine.device)
    generator = torch.Generator().manual_seed(rank)
    batch = torch.randn(4, width, generator=generator).to(machine.device)
    return Training(model, sharded, [torch.optim.AdamW(model.parameters(), lr=0.01)], machine, batch)


@contextmanager
def one_of_many(world_size: int = 8, index: int = 0) -> Iterator[Machine]:
    """Rank 0 of so many, with a pretended GPU of that index; the others say what it says."""
    with pretended_ranks(world_size), pretended_cuda(), equal_replicas(), Machine(index) as machine:
        yield machine


def config_of(preset: str, *, ranks_per_node: int = 4, **options: Any) -> ShardConfig:
    """A preset in nodes of so many ranks."""
    topology = Topology(ranks_per_node=ranks_per_node)
    return ShardConfig.preset(preset, **{"topology": topology, "partition_size": "node", **options})


def run(config: ShardConfig, loop: Loop, *, recomputes: str = "") -> Machine:
    """Train rank 0 of 8 in 2 nodes."""
    with one_of_many() as machine:
        loop(start(machine, config, recomputes=recomputes))
    return machine


# -- loops --------------------------------------------------------------------------------------------------


def declared(training: Training) -> None:
    """Three steps of two micro-steps, the last of which is declared to the engine."""
    for _ in range(3):
        training.step()


def undeclared(training: Training) -> None:
    """The last micro-step is not declared."""
    for _ in range(3):
        with training.machine.step():
            for _ in range(training.micro_steps):
                training.loss().backward()
            training.update()


def evaluating(training: Training) -> None:
    """Evaluation between steps, and between a forward and its backward."""
    for _ in range(2):
        training.step()
        training.model.eval()
        with torch.no_grad():
            training.loss()
        training.model.train()
        with training.machine.step():
            loss = training.loss()
            with torch.no_grad():
                training.loss()
            loss.backward()
            training.update()


def raising(training: Training) -> None:
    """An exception ends a backward; the loop goes on."""

    def fail(_: Tensor) -> None:
        raise InterruptedError

    training.step()
    for layer in (training.model.layers[1], training.model.inlet):
        handle = layer.register_forward_hook(lambda module, args, out: out.register_hook(fail) and None)
        try:
            training.loss().backward()
        except InterruptedError:
            handle.remove()
        for optimizer in training.optimizers:
            optimizer.zero_grad()
        training.step()


def interrupted(training: Training) -> None:
    """A forward ends while units are gathered ahead, and the optimizer uses gradients that were final before."""
    training.step()
    with training.machine.step():
        training.backward()
        training.sharded.clip_grad_norm_(1.0)
        interrupt(training)
        for optimizer in training.optimizers:
            optimizer.step()
            optimizer.zero_grad()
    training.step()


def interrupt(training: Training) -> None:
    """Begin a forward that an exception ends."""

    def fail(*_: object) -> None:
        raise InterruptedError

    handle = training.model.layers[1].register_forward_hook(fail)
    with suppress(InterruptedError):
        training.loss()
    handle.remove()


def two_optimizers(training: Training) -> None:
    """Each has half of the parameters; the second steps every second time."""
    parameters = list(training.model.parameters())
    first, second = (torch.optim.AdamW(part, lr=0.01) for part in (parameters[::2], parameters[1::2]))
    for step in range(4):
        training.optimizers = [first, second] if step % 2 else [first]
        training.step()


def reading(training: Training) -> None:
    """Gradients are read, scaled and cleared between micro-steps."""
    for _ in range(2):
        with training.machine.step():
            training.loss().backward()
            for parameter in training.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)
            training.loss().backward()
            for parameter in list(training.model.parameters())[::2]:
                parameter.grad = None
            training.loss().backward()
            training.update()


def unused(training: Training) -> None:
    """Layers that run and that the loss does not see, others in every step."""
    for left_out in ((1, 2), (), (3,), (0, 1, 2, 3)):
        training.options = {"unused": left_out}
        training.step()


def left_out(training: Training) -> None:
    """Layers that do not run on this rank, where others may run them; others in every step. All weights decay."""
    for layers in ((0, 1, 2, 3), (1, 2), (3,), ()):
        training.options = {"left_out" if training.sharded.scopes.params == 1 else "unused": layers}
        training.step()
        with torch.no_grad():
            for parameter in training.model.parameters():
                parameter.mul_(0.99)


def two_forwards(training: Training) -> None:
    """Two graphs at once, and one graph twice."""
    for _ in range(2):
        with training.machine.step():
            losses = [training.loss(), training.loss()]
            losses[1].backward()
            losses[0].backward(retain_graph=True)
            losses[0].backward()
            training.update()


LOOPS: tuple[Loop, ...] = (
    declared,
    undeclared,
    evaluating,
    raising,
    two_optimizers,
    reading,
    unused,
    left_out,
    two_forwards,
)
