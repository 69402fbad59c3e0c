"""Outer steps in one process, with plain torch: what islands of ranks must compute."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Muon, Optimizer

UNITS = ("scale", "first.", "middle.0.", "middle.1.", "middle.2.", "last.")  # parameters of each begin with its name
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": partial(SGD, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": partial(AdamW, lr=0.01, weight_decay=0.1),
}


def optimizers_of(name: str, model: nn.Module) -> list[Optimizer]:
    """One of `OPTIMIZERS`, or two that step behind each backward: for matrices, and for the rest."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if name in OPTIMIZERS:
        return [OPTIMIZERS[name](trained)]
    matrices = [parameter for parameter in trained if parameter.dim() == 2]
    rest = [parameter for parameter in trained if parameter.dim() != 2]
    first = Muon(matrices, lr=0.02) if name == "muon" else OPTIMIZERS["sgd"](matrices)
    return [first, OPTIMIZERS["adamw"](rest)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """What is trained: see `ShardConfig` for the outer fields."""

    every: int
    steps: int
    lr: float = 0.7
    momentum: float = 0.9
    optimizer: str = "adamw"
    accumulation: int = 1
    clip: float | None = None
    skipped: tuple[int, ...] = ()
    leaves_out: bool = False
    fragments: int = 1
    delay: int = 0
    alpha: float = 0.5
    finishes: bool = False

    def layer_left_out(self, step: int) -> int:
        """A layer that no rank runs in the last step of a round; -1 for none."""
        return 1 if self.leaves_out and (step + 1) % self.every == 0 else -1

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of a `ShardConfig`."""
        fields = {"outer_every": self.every, "outer_lr": self.lr, "outer_momentum": self.momentum}
        if self.delay:
            fields |= {"outer_delay": self.delay, "outer_alpha": self.alpha}
        return {**fields, "outer_fragments": self.fragments}


class Net(nn.Module):
    """Odd shapes, a tied parameter, a scalar and a frozen one, in fp64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(5, 7)
        self.middle = nn.Sequential(*(nn.Linear(7, 7) for _ in range(3)))
        self.last = nn.Linear(7, 5, bias=False)
        self.last.weight = nn.Parameter(torch.randn(5, 7))
        self.scale = nn.Parameter(torch.tensor(0.9))
        self.frozen = nn.Parameter(torch.randn(7), requires_grad=False)
        self.left_out = -1
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for index, layer in enumerate(self.middle):
            if index == self.left_out:
                continue
            hidden = torch.tanh(layer(hidden)) + hidden * self.frozen
        return self.last(hidden) * self.scale


def batch(step: int, micro: int, rank: int) -> Tensor:
    """The data of a rank, [3, 5]."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)
    return torch.randn(3, 5, generator=generator, dtype=torch.float64)


def loss_of(model: nn.Module, inputs: Tensor, accumulation: int) -> Tensor:
    return (model(inputs) - inputs.flip(-1)).pow(2).mean() / accumulation


class Fragment:
    """Every so many layers of all islands, with an outer optimizer of their own."""

    def __init__(self, rounds: Rounds, number: int, anchor: nn.Module, models: list[nn.Module]) -> None:
        self.rounds = rounds
        self.start = (number + 1) * rounds.every // rounds.fragments % rounds.every
        names = [
            name
            for index, unit in enumerate(UNITS)
            for name, parameter in anchor.named_parameters()
            if index % rounds.fragments == number and name.startswith(unit) and parameter.requires_grad
        ]
        self.anchor = [anchor.get_parameter(name) for name in names]
        self.copies = [[model.get_parameter(name) for model in models] for name in names]
        self.outer = SGD(self.anchor, lr=rounds.lr, momentum=rounds.momentum, nesterov=rounds.momentum > 0)
        self.started = 0
        self.sent: list[Tensor] = []

    def after_step(self, step: int) -> None:
        if self.sent and step - self.started == self.rounds.delay:
            self.receive(step)
        if step % self.rounds.every == self.start:
            self.send(step)
            if not self.rounds.delay:
                self.receive(step)

    def send(self, step: int) -> None:
        pairs = zip(self.anchor, self.copies, strict=True)
        self.sent = [sum(old - value for value in new).detach() / len(new) for old, new in pairs]
        self.started = step

    def receive(self, step: int) -> None:
        for old, mean in zip(self.anchor, self.sent, strict=True):
            old.grad = mean
        self.outer.step()
        kept = self.rounds.alpha if step > self.started else 0.0
        with torch.no_grad():
            for old, new in zip(self.anchor, self.copies, strict=True):
                for value in new:
                    value.copy_(kept * value + (1 - kept) * old)
        self.sent = []

    def finish(self, step: int) -> None:
        is_new = bool(self.sent) and self.started == step
        if self.sent:
            self.receive(step)
        if not is_new:
            self.send(step)
            self.receive(step)


def train_islands(rounds: Rounds, islands: list[range]) -> list[list[dict[str, Tensor]]]:
    """Parameters of each island, [step][island], after the outer step where there is one; at last those of the end."""
    anchor = Net()
    models = [deepcopy(anchor) for _ in islands]
    inner = [optimizers_of(rounds.optimizer, model) for model in models]
    fragments = [Fragment(rounds, number, anchor, models) for number in range(rounds.fragments)]
    history, num_steps = [], 0
    for step in range(rounds.steps):
        is_skipped = step in rounds.skipped
        for model, optimizers, ranks in zip(models, inner, islands, strict=True):
            model.left_out = rounds.layer_left_out(step)
            for micro in range(rounds.accumulation):
                for rank in ranks:
                    (loss_of(model, batch(step, micro, rank), rounds.accumulation) / len(ranks)).backward()
            if rounds.clip is not None:
                nn.utils.clip_grad_norm_(_trained(model), rounds.clip)
            for optimizer in optimizers if not is_skipped else ():
                optimizer.step()
            model.zero_grad()
        num_steps += not is_skipped
        for fragment in fragments if not is_skipped else ():
            fragment.after_step(num_steps)
        history.append([_values(model) for model in models])
    if rounds.finishes:
        for fragment in fragments:
            fragment.finish(num_steps)
        history.append([_values(model) for model in models])
    return history


def average_islands(rounds: Rounds, islands: list[range]) -> list[list[dict[str, Tensor]]]:
    """As `train_islands`, but parameters are simply averaged after every step."""
    models = [Net() for _ in islands]
    inner = [optimizers_of(rounds.optimizer, model) for model in models]
    history = []
    for step in range(rounds.steps):
        for model, optimizers, ranks in zip(models, inner, islands, strict=True):
            for rank in ranks:
                (loss_of(model, batch(step, 0, rank), 1) / len(ranks)).backward()
            for optimizer in optimizers:
                optimizer.step()
            model.zero_grad()
        with torch.no_grad():
            for parameters in zip(*map(_trained, models), strict=True):
                mean = torch.stack([*parameters]).mean(0)
                for parameter in parameters:
                    parameter.copy_(mean)
        history.append([_values(model) for model in models])
    return history


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _values(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
