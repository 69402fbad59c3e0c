"""What does the Trainer train in these tests?

Module-level classes, so that jobs and spawned processes can name them. All weights come from one seed.
"""

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

WIDTH = 6


class Layer(nn.Module):
    """A residual layer with a width that divides by nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 9)
        self.down = nn.Linear(9, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Layers, a head, and a parameter of the module itself; all weights come from one seed."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            self.layers = nn.Sequential(Layer(), Layer(), Layer())
            self.norm = nn.LayerNorm(WIDTH)
            self.head = nn.Linear(WIDTH, 2)
            self.offset = nn.Parameter(torch.randn(2))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.offset)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.layers(x))) + self.offset

    def features(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self(x) + self.offset, y)


class Critic(nn.Module):
    """Judges what `Net` gives."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(8)
            self.layers = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Regression(LightningModule):
    """Layers, a head, and a parameter of the LightningModule itself that the loss uses outside `forward`.

    Args:
        optimizer: "sgd", "adafactor", "adamw" or "adam_scheduler".
    """

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__()
        self.optimizer_name = optimizer
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            self.layers = nn.Sequential(Layer(), Layer(), Layer())
            self.norm = nn.LayerNorm(WIDTH)
            self.head = nn.Linear(WIDTH, 2)
            self.offset = nn.Parameter(torch.randn(2))
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.layers(x)))

    def loss(self, batch: list[Tensor]) -> Tensor:
        x, y = batch
        return F.mse_loss(self(x) + self.offset, y)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0]) + self.offset

    def configure_optimizers(self) -> Any:
        if self.optimizer_name == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.05)
        if self.optimizer_name == "adafactor":
            return torch.optim.Adafactor(self.parameters(), lr=0.05, eps=(1e-3, 1e-3))
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)
        if self.optimizer_name == "adamw":
            return optimizer
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Plain(LightningModule):
    """One linear layer, for what needs no numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 2)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.layer(batch[0]).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def samples(num: int = 32, width: int = WIDTH) -> Dataset[Any]:
    """Random regression pairs, the same in every process."""
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(num, width, generator=generator), torch.randn(num, 2, generator=generator))


def loader(num: int = 32, batch_size: int = 2) -> DataLoader[Any]:
    """Batches of `samples`, in order."""
    return DataLoader(samples(num), batch_size=batch_size)


class Stream(IterableDataset[Tensor]):
    """The same items on every rank, as an iterable."""

    def __iter__(self) -> Any:
        return iter(torch.arange(24.0).view(4, WIDTH))
