"""How does Fabric run on a rank of the pool, and what does it train there?"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning.fabric.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from torch import Tensor, nn

from mics_strategy.lightning import MiCSFabricStrategy
from tests.lightning.modules import loader
from tests.lightning.runs import _refuse_to_run_pytest_again, full
from tests.ranks import RankContext

_SubprocessScriptLauncher._call_children_scripts = _refuse_to_run_pytest_again


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
