"""Small optimizers whose updates are not elementwise."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class Simple(Optimizer):
    """An optimizer that subtracts `change` from every tensor with a gradient."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, group)

    def update(self, p: Tensor, group: dict[str, Any]) -> None:
        p.sub_(group["lr"] * self.change(p, group))

    def change(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        return p.grad


class Lamb(Simple):
    """Scaled by a ratio of the tensor's norms."""

    def change(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        return p.grad * p.norm() / p.grad.norm()


class Clipping(Simple):
    """Scaled by the norm of everything."""

    def change(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        grads = [q.grad for other in self.param_groups for q in other["params"] if q.grad is not None]
        return p.grad / nn.utils.get_total_norm(grads)
