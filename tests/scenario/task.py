"""What is trained in every adapter, and what does a rank return of it?

Two epochs of three optimizer steps of two micro-steps, clipped; an evaluation and a checkpoint after each epoch. The
batch of a micro-step is the same eight samples in order, on however many ranks.
"""

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from tests.lightning.modules import WIDTH, Net
from tests.ranks import RankContext

EPOCHS, STEPS, MICRO_STEPS, SAMPLES = 2, 3, 2, 8
CLIP = 0.3
DIES_AT = STEPS * MICRO_STEPS + 1  # in the second epoch, after its first micro-step


class Samples(Dataset[dict[str, Tensor]]):
    """Regression pairs, the same in every process."""

    def __init__(self, num: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._x = torch.randn(num, WIDTH, generator=generator)
        self._labels = torch.randn(num, 2, generator=generator)

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self._x[index], "labels": self._labels[index]}


def train_set() -> Samples:
    return Samples(STEPS * MICRO_STEPS * SAMPLES, seed=3)


def eval_set() -> Samples:
    return Samples(2 * SAMPLES, seed=4)


def loader(data: Dataset[Any], world_size: int) -> DataLoader[Any]:
    """Batches of one rank's part of a micro-step, in order."""
    return DataLoader(data, batch_size=SAMPLES // world_size)


def sampled_loader(data: Dataset[Any], ctx: RankContext) -> DataLoader[Any]:
    """This rank's batches, by a sampler."""
    sampler = DistributedSampler(data, ctx.world_size, ctx.rank, shuffle=False)
    return DataLoader(data, batch_size=SAMPLES // ctx.world_size, sampler=sampler)


def batches_of(data: Samples, ctx: RankContext) -> Iterator[dict[str, Tensor]]:
    """This rank's batches, for loops without a sampler."""
    for index, batch in enumerate(loader(data, ctx.world_size)):
        if index % ctx.world_size == ctx.rank:
            yield batch


class Task(nn.Module):
    """A model that computes its loss, remembers it, and can end its process.

    Args:
        dies_at: After so many forwards in training, the process is killed; None for never.
    """

    def __init__(self, dies_at: int | None = None) -> None:
        super().__init__()
        self.net = Net()
        self.losses: list[float] = []
        self.dies_at = dies_at

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        if self.training and self.dies_at == len(self.losses):
            os.kill(os.getpid(), signal.SIGKILL)
        logits = self.net(x)
        loss = F.mse_loss(logits, labels)
        if self.training:
            self.losses.append(loss.item())
        return {"loss": loss, "logits": logits}


def adamw(model: nn.Module) -> AdamW:
    return AdamW(model.parameters(), lr=0.02, weight_decay=0.1, eps=1e-4)


@dataclass(slots=True)
class RankResult:
    """Result of one rank.

    Attributes:
        losses: Losses of its micro-steps.
        evaluations: [epoch], losses of the whole evaluation set.
        norms: [step], before clipping; empty where the adapter does not return them.
        values: Plain parameters at the end.
    """

    losses: list[float] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    values: dict[str, Tensor] = field(default_factory=dict)

    def write(self, folder: Path, rank: int) -> None:
        """Write the result to a file, which outlives the process."""
        torch.save([self.losses, self.evaluations, self.norms], folder / f"result_{rank}.pt")

    @classmethod
    def read(cls, folder: Path, rank: int) -> "RankResult":
        losses, evaluations, norms = torch.load(folder / f"result_{rank}.pt")
        return cls(losses, evaluations, norms)


def reference() -> RankResult:
    """One process, whole batches, plain torch; `losses` has one for each micro-step."""
    task, result = Task(), RankResult()
    optimizer = adamw(task)
    evaluation = next(iter(DataLoader(eval_set(), batch_size=2 * SAMPLES)))
    for _ in range(EPOCHS):
        for index, batch in enumerate(DataLoader(train_set(), batch_size=SAMPLES)):
            (task(**batch)["loss"] / MICRO_STEPS).backward()
            if index % MICRO_STEPS == MICRO_STEPS - 1:
                result.norms.append(nn.utils.clip_grad_norm_(task.parameters(), CLIP).item())
                optimizer.step()
                optimizer.zero_grad()
        task.eval()
        result.evaluations.append(task(**evaluation)["loss"].item())
        task.train()
    result.losses = task.losses
    result.values = {name: parameter.detach() for name, parameter in task.named_parameters()}
    return result
