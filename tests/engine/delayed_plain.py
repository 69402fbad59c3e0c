"""`second_hop="delayed"` in one process, with plain torch: what all ranks together must compute."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Muon, Optimizer

from tests.outer.plain import Net, batch, loss_of

Grads = dict[str, Tensor]
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": partial(SGD, lr=0.01, momentum=0.9, weight_decay=0.01),
    "adamw": partial(AdamW, lr=0.01, weight_decay=0.1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """What is trained.

    Attributes:
        accumulation: Micro-steps of each step, in turn.
        skipped: Steps whose optimizer is not called, behind final gradients.
        dropped: Steps whose gradients are cleared before they are final.
        leaves_out: Steps that leave out a layer.
        by_rank: Whether only ranks with an odd number leave it out.
        finishes: Whether the gradients that are left make a last step.
    """

    steps: int = 20
    optimizer: str = "adamw"
    accumulation: tuple[int, ...] = (1,)
    clip: float | None = None
    decay: float = 1.0
    skipped: tuple[int, ...] = ()
    dropped: tuple[int, ...] = ()
    leaves_out: tuple[int, ...] = ()
    by_rank: bool = False
    finishes: bool = False

    def micro_steps(self, step: int) -> int:
        return self.accumulation[step % len(self.accumulation)]

    def layer_left_out(self, step: int, rank: int) -> int:
        """The number of a layer; -1 for none."""
        return 1 if step in self.leaves_out and (rank % 2 or not self.by_rank) else -1

    def optimizer_of(self, model: nn.Module) -> Optimizer:
        if self.optimizer == "muon":
            for parameter in model.parameters():
                parameter.requires_grad_(parameter.dim() == 2)
            return Muon([p for p in model.parameters() if p.requires_grad], lr=0.02)
        return OPTIMIZERS[self.optimizer]([p for p in model.parameters() if p.requires_grad])

    def schedule_of(self, optimizer: Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, self.decay)


def window(model: Net, loop: Loop, step: int, *, adds_in_node_first: bool, nodes: int = 2, per_node: int = 2) -> Grads:
    """Mean gradient of all ranks in one step, added in the order in which ranks add.

    With `adds_in_node_first` a node adds the gradients of its ranks in every micro-step.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def grads_of(rank: int, micro: int) -> list[Tensor | None]:
        model.left_out = loop.layer_left_out(step, rank)
        loss = loss_of(model, batch(step, micro, rank), loop.micro_steps(step))
        return [*torch.autograd.grad(loss, [*trained.values()], allow_unused=True)]

    def total(grads: list[list[Tensor | None]]) -> list[Tensor | None]:
        added, *others = grads
        for other in others:
            added = [a if b is None else b if a is None else a + b for a, b in zip(added, other, strict=True)]
        return added

    micros, by_node = range(loop.micro_steps(step)), []
    for node in range(nodes):
        ranks = range(node * per_node, (node + 1) * per_node)
        if adds_in_node_first:
            by_node.append(total([grads_of(rank, micro) for micro in micros for rank in ranks]))
        else:
            by_node.append(total([total([grads_of(rank, micro) for micro in micros]) for rank in ranks]))
    mean = {name: grad for name, grad in zip(trained, total(by_node), strict=True) if grad is not None}
    return {name: grad / (nodes * per_node) for name, grad in mean.items()}


def mean_of(first: Grads, second: Grads) -> Grads:
    zero = torch.zeros((), dtype=torch.float64)
    return {name: (first.get(name, zero) + second.get(name, zero)) / 2 for name in {**first, **second}}


class PlainDelayed:
    """The algorithm, with whole tensors.

    Attributes:
        model: Committed parameters.
    """

    def __init__(self, loop: Loop, *, adds_in_node_first: bool) -> None:
        self.model, self.loop = Net(), loop
        self._optimizer = loop.optimizer_of(self.model)
        self._ahead = deepcopy(self.model)  # tentative parameters
        self._schedule = loop.schedule_of(self._optimizer)
        self._window = partial(window, loop=loop, adds_in_node_first=adds_in_node_first)
        self._pending: Grads | None = None
        self._kept: Grads = {}
        self._is_tentative = False

    def step(self, step: int) -> None:
        """One step of the user's loop."""
        grads = self._window(self._ahead if self._is_tentative else self.model, step=step)
        if step in (*self.loop.dropped, *self.loop.skipped):
            self._pending, self._is_tentative = None, False
            return
        before = grads if self._pending is None else self._pending
        commits, self._is_tentative = self._is_tentative, False
        self._kept = mean_of(self._kept, before) if commits else before
        self._pending = grads
        self._apply(commits=commits)
        self._schedule.step()

    def finish(self) -> None:
        """The last step."""
        assert self._pending is not None
        self._kept = mean_of(self._kept, self._pending) if self._is_tentative else self._pending
        self._apply(commits=True)

    def _apply(self, *, commits: bool) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.grad = self._kept[name].clone() if name in self._kept else None
        if self.loop.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.loop.clip)
        before, states = deepcopy(self.model.state_dict()), deepcopy(self._optimizer.state_dict())
        self._optimizer.step()
        if not commits:
            self._ahead.load_state_dict(self.model.state_dict())
            self.model.load_state_dict(before)
            self._optimizer.load_state_dict(states)
            self._is_tentative = True

    def values(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}


def train_plain(loop: Loop, *, adds_in_node_first: bool) -> list[dict[str, Tensor]]:
    """Committed parameters after each step."""
    plain, found = PlainDelayed(loop, adds_in_node_first=adds_in_node_first), []
    for step in range(loop.steps):
        plain.step(step)
        found.append(plain.values())
    if loop.finishes:
        plain.finish()
        found.append(plain.values())
    return found
