"""Are buffers that a training step reads those that DDP has, with the Trainer and with Accelerate?"""

from typing import Any

import pytest
import torch
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.accelerate.runs import PLAIN, accelerator
from tests.accelerate.runs import run as run_accelerate
from tests.engine.test_module_buffers import Model, batch, contents, counting
from tests.lightning.modules import Regression, loader
from tests.lightning.runs import assert_same, mics, run, trainer, whole
from tests.ranks import RankContext, RankPool


class Coding(Regression):
    """Reads and writes a codebook."""

    def __init__(self, is_manual: bool) -> None:
        super().__init__()
        self.automatic_optimization = not is_manual
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(4)
            self.coded = nn.Sequential(nn.Linear(6, 4), Model(), nn.Linear(4, 6))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.coded(x))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = nn.functional.mse_loss(self(batch[0]), batch[1]) if not self.automatic_optimization else self.loss(batch)
        self.losses.append(loss.item())
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def configure_optimizers(self) -> Any:
        if self.automatic_optimization:
            return super().configure_optimizers()
        return torch.optim.SGD([p for name, p in self.named_parameters() if name != "offset"], lr=0.05)


def _fit(ctx: RankContext, strategy: Any, is_manual: bool) -> tuple[dict[str, Tensor], list[float], dict[str, Tensor]]:
    ddp = {"strategy": "ddp_find_unused_parameters_true"} if strategy == "ddp" else {"strategy": strategy}
    options = {} if is_manual else {"accumulate_grad_batches": 2}
    module = Coding(is_manual)
    fitting = trainer(ctx, **ddp, **options)
    fitting.fit(module, loader())
    return whole(fitting), module.losses, contents(module)


@pytest.mark.wide(every=3)
@pytest.mark.parametrize("strategy", ["mics", "mics_zero3", "mics_zero1"])
@pytest.mark.parametrize("is_manual", [False, True], ids=["automatic", "manual"])
def test_a_codebook_is_that_of_ddp(ranks: RankPool, strategy: str, is_manual: bool) -> None:
    wanted = run(ranks, 2, _fit, "ddp", is_manual)
    for (found, losses, buffers), (expected, wanted_losses, wanted_buffers) in zip(
        run(ranks, 2, _fit, strategy, is_manual), wanted, strict=True
    ):
        assert losses == pytest.approx(wanted_losses, abs=1e-6)
        assert_same(found, expected)
        if strategy != "mics_zero1":  # where ranks have agreed after the last step, too
            assert_same(buffers, wanted_buffers)


def _left_alone(ctx: RankContext) -> list[int]:
    with counting() as sizes:
        fitting = trainer(ctx, mics("zero3", broadcast_buffers=False))
        fitting.fit(Coding(False), loader())
    return [size for size in sizes if size > 300]


def test_an_option_of_the_strategy_leaves_buffers_to_each_rank(ranks: RankPool) -> None:
    assert run(ranks, 2, _left_alone) == [[], []]


def _accelerated(ctx: RankContext, config: str, leaves: bool) -> tuple[list[float], dict[str, Tensor]]:
    handlers = [DistributedDataParallelKwargs(broadcast_buffers=False)] if leaves else []
    options = {"accelerator_gradient_accumulation_steps": 2, "accelerator_kwargs_handlers": handlers}
    acc = accelerator(config, **options)
    torch.manual_seed(5)
    model = Model()
    data = DataLoader(torch.stack([batch(0, index)[0] for index in range(40)]), batch_size=5)
    model, optimizer, data = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
    losses = []
    for x in data:
        with acc.accumulate(model):
            loss = model(x).square().mean()
            losses.append(loss.item())
            acc.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    return losses, contents(model)


@pytest.mark.parametrize("leaves", [False, True], ids=["broadcast", "left alone"])
def test_accelerate_says_what_happens_to_buffers(ranks: RankPool, leaves: bool) -> None:
    wanted = run_accelerate(ranks, 2, _accelerated, PLAIN, leaves)
    found = run_accelerate(ranks, 2, _accelerated, "zero3", leaves)
    for (losses, buffers), (wanted_losses, wanted_buffers) in zip(found, wanted, strict=True):
        assert losses == pytest.approx(wanted_losses, abs=1e-4)
        assert_same(buffers, wanted_buffers, 1e-4)
