"""How does Fabric run on a rank of the pool, and what does it train there?"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning.fabric.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from torch import Tensor, nn

from mics_strategy.lightning import MiCSFabricStrategy
from tests.lightning.modules import WIDTH, Layer, loader
from tests.lightning.runs import _refuse_to_run_pytest_again, full
from tests.ranks import RankContext

_SubprocessScriptLauncher._call_children_scripts = _refuse_to_run_pytest_again


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


def launched(ctx: RankContext, strategy: Any = "mics", **options: Any) -> Fabric:
    """Fabric on the CPU ranks of this job."""
    place = {"accelerator": "cpu", "devices": ctx.ranks_per_node, "num_nodes": ctx.num_nodes}
    fabric = Fabric(strategy=strategy, **{**place, **options})
    fabric.launch()
    return fabric


def mics(config: str = "mics", **options: Any) -> Any:
    """A strategy object."""
    return MiCSFabricStrategy(config, **options)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """With two groups."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.01)


def batches(fabric: Fabric, num: int = 32) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's part of the data."""
    yield from fabric.setup_dataloaders(loader(num))


def train(fabric: Fabric, model: Any, optimizer: Any, num: int = 32) -> list[float]:
    """Steps of one batch of two samples; the losses."""
    losses = []
    for x, y in batches(fabric, num):
        loss = F.mse_loss(model(x), y)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def values(*models: Any) -> dict[str, Tensor]:
    """The plain parameters, on every rank. Collective."""
    named = [(f"{i}.{name}", p) for i, model in enumerate(models) for name, p in model.module.named_parameters()]
    return {name: full(parameter).clone() for name, parameter in named}
