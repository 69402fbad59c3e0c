"""Do callbacks that unfreeze layers while a model trains work as in one process?

Lightning's DDP is no measure here: it does not reduce gradients of what was frozen when it was built.
"""

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from tests.lightning.modules import Layer, Regression, loader, samples
from tests.lightning.runs import assert_same, fitted, mics, run, trainer, whole
from tests.ranks import RankContext, RankPool


class WithBackbone(Regression):
    """Trains its head at first."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(8)
            self.backbone = nn.Sequential(Layer(), Layer())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.backbone(x))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


class LayerByLayer(BaseFinetuning):
    """One more layer of the backbone in every epoch."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch:
            self.unfreeze_and_add_param_group(pl_module.backbone[-epoch], optimizer)


def _callbacks(name: str) -> list[Any]:
    if name == "backbone":
        return [BackboneFinetuning(unfreeze_backbone_at_epoch=1, lambda_func=lambda epoch: 1.5, verbose=False)]
    return [LayerByLayer()]


def _fit(ctx: RankContext, strategy: str, name: str) -> dict[str, Tensor]:
    """Each rank reads every fourth sample, so that the batches of a step are one batch of one process."""
    options = {"max_epochs": 3, "accumulate_grad_batches": 2, "callbacks": _callbacks(name)}
    mine = Subset(samples(32), range(ctx.rank, 32, ctx.world_size))
    batches = DataLoader(mine, batch_size=8 // ctx.world_size)
    return fitted(ctx, strategy, WithBackbone(), batches, use_distributed_sampler=False, **options)


@pytest.mark.skipif(
    torch.__version__ < "2.12", reason="torch.equal, which the callbacks use, fails on DTensors of other shapes there"
)
@pytest.mark.parametrize("strategy", ["mics", "mics_zero1", "mics_zero3", "mics_paro_iig"])
@pytest.mark.parametrize("name", ["backbone", "layer by layer"])
def test_unfreezing_equals_one_process(ranks: RankPool, name: str, strategy: str) -> None:
    [expected] = run(ranks, 1, _fit, "auto", name)
    for found in run(ranks, 4, _fit, strategy, name, ranks_per_node=2):
        assert_same(found, expected)


def _resumed(ctx: RankContext, strategy: str, state_dict_type: str) -> tuple[dict[str, Tensor], list[int]]:
    """Stopped after the backbone was unfrozen, and begun again from the checkpoint."""
    options = {"state_dict_type": state_dict_type} if strategy == "mics" else {}
    parts = []
    for max_epochs, path in ((2, None), (4, "unfrozen")):
        mine = Subset(samples(32), range(ctx.rank, 32, ctx.world_size))
        fitting = trainer(
            ctx,
            mics(**options) if strategy == "mics" else strategy,
            max_epochs=max_epochs,
            callbacks=_callbacks("backbone"),
            use_distributed_sampler=False,
        )
        fitting.fit(WithBackbone(), DataLoader(mine, batch_size=8 // ctx.world_size), ckpt_path=path)
        fitting.save_checkpoint("unfrozen")
        parts.append(len(fitting.optimizers[0].param_groups))
    return whole(fitting), parts


@pytest.mark.skipif(torch.__version__ < "2.12", reason="as above")
@pytest.mark.parametrize("state_dict_type", ["full", "sharded"])
def test_training_resumes_after_unfreezing(ranks: RankPool, state_dict_type: str) -> None:
    [(expected, groups)] = run(ranks, 1, _resumed, "auto", "full")
    assert groups == [2, 2]
    for found, groups in run(ranks, 2, _resumed, "mics", state_dict_type):
        assert groups == [2, 2]
        assert_same(found, expected)


def _memory(ctx: RankContext, callbacks: bool) -> tuple[int, int]:
    """Bytes of gradients, and elements of the model that are frozen when it is sharded."""
    module = WithBackbone()
    module.backbone.requires_grad_(False)
    fitting = trainer(ctx, "mics", max_steps=1, callbacks=[LayerByLayer()] if callbacks else [])
    fitting.fit(module, loader())
    purposes = fitting.strategy.sharded.memory.bytes_by_purpose
    assert not any(p.requires_grad for p in module.backbone.parameters())
    return purposes["gradients"], sum(p.numel() for p in module.backbone.parameters())


def test_frozen_parameters_have_gradient_memory_only_where_a_callback_may_unfreeze_them(ranks: RankPool) -> None:
    with_callback, numel = run(ranks, 1, _memory, True)[0]
    without, _ = run(ranks, 1, _memory, False)[0]
    assert 4 * numel <= with_callback - without <= 4 * (numel + 8 * 6)
