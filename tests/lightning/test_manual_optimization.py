"""Does manual optimization work: several optimizers, accumulation, closures, toggling?"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.lightning.modules import WIDTH, Layer, Regression, loader
from tests.lightning.runs import assert_same, fitted, full, run
from tests.ranks import RankContext, RankPool


class Gan(Regression):
    """Two networks, two optimizers, each frozen while the other trains; children are called directly."""

    def __init__(self, toggle: str) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.toggle = toggle
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(11)
            self.generator = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), Layer8(), nn.Linear(8, WIDTH))
            self.critic = nn.Sequential(Layer(), nn.Linear(WIDTH, 1))
        del self.layers, self.norm, self.head, self.offset

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        generator_optimizer, critic_optimizer = self.optimizers()
        x = batch[0]
        with self._only(generator_optimizer):
            loss = -self.critic(self.generator(x)).mean()
            self._step(generator_optimizer, loss)
        with self._only(critic_optimizer):
            loss = self.critic(self.generator(x).detach()).mean() - self.critic(x).mean()
            self._step(critic_optimizer, loss)
        self.losses.append(loss.item())

    def _only(self, optimizer: Any) -> Any:
        return optimizer.toggle_model() if self.toggle == "toggle_model" else _Toggled(self, optimizer)

    def _step(self, optimizer: Any, loss: Tensor) -> None:
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.generator.parameters(), lr=0.1), torch.optim.AdamW(
            self.critic.parameters(), lr=0.01
        )


class Layer8(nn.Module):
    """Something between two linear layers that no rule would make a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + x @ self.weight


class _Toggled:
    def __init__(self, module: Any, optimizer: Any) -> None:
        self.module, self.optimizer = module, optimizer

    def __enter__(self) -> None:
        self.module.toggle_optimizer(self.optimizer)

    def __exit__(self, *_: Any) -> None:
        self.module.untoggle_optimizer(self.optimizer)


def _trained(ctx: RankContext, strategy: str, toggle: str) -> dict[str, Tensor]:
    return fitted(ctx, strategy, Gan(toggle), loader())


@pytest.mark.parametrize("toggle", ["toggle_model", "toggle_optimizer"])
def test_two_optimizers_with_toggling_equal_ddp(ranks: RankPool, toggle: str) -> None:
    expected = run(ranks, 2, _trained, "ddp_find_unused_parameters_true", toggle)
    for found, reference in zip(run(ranks, 2, _trained, "mics", toggle), expected, strict=True):
        assert_same(found, reference, tolerance=1e-5)


class Accumulating(Regression):
    """Steps every third batch and says nothing about it, or says it by `toggle_model(sync_grad=...)`."""

    def __init__(self, announce: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.announce = announce
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.offset

    def loss(self, batch: list[Tensor]) -> Tensor:
        return F.mse_loss(self(batch[0]), batch[1])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        is_last = batch_idx % 3 == 2
        if self.announce:
            with optimizer.toggle_model(sync_grad=is_last):
                self.manual_backward(self.loss(batch) / 3)
        else:
            self.manual_backward(self.loss(batch) / 3)
        if is_last:
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            self.seen.append(full(self.head.weight.grad))
            optimizer.step()
            optimizer.zero_grad()


def _accumulated(ctx: RankContext, strategy: str, announce: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
    module = Accumulating(announce)
    return module.seen, fitted(ctx, strategy, module, loader())


@pytest.mark.parametrize("announce", [True, False], ids=["announced", "silent"])
def test_manual_accumulation_equals_ddp(ranks: RankPool, announce: bool) -> None:
    expected = run(ranks, 4, _accumulated, "ddp", False, ranks_per_node=2)
    for found, reference in zip(run(ranks, 4, _accumulated, "mics", announce, ranks_per_node=2), expected, strict=True):
        torch.testing.assert_close(torch.stack(found[0]), torch.stack(reference[0]))
        assert_same(found[1], reference[1])


class WithClosure(Accumulating):
    """Gives the optimizer a closure."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)


def _closed(ctx: RankContext, strategy: str) -> dict[str, Tensor]:
    return fitted(ctx, strategy, WithClosure(False), loader())


def test_a_manual_closure_equals_ddp(ranks: RankPool) -> None:
    expected = run(ranks, 2, _closed, "ddp")
    for found, reference in zip(run(ranks, 2, _closed, "mics"), expected, strict=True):
        assert_same(found, reference)


class OwnParameter(Accumulating):
    """Uses a parameter of the LightningModule outside `forward`, where it is sharded."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.manual_backward((self(batch[0]) * self.offset).sum())


def _own_parameter(ctx: RankContext, strategy: str) -> dict[str, Tensor]:
    return fitted(ctx, strategy, OwnParameter(False), loader())


def test_a_parameter_used_outside_forward_equals_ddp(ranks: RankPool) -> None:
    expected = run(ranks, 2, _own_parameter, "ddp")
    for found, reference in zip(run(ranks, 2, _own_parameter, "mics"), expected, strict=True):
        assert_same(found, reference)
