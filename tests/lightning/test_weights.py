"""Do weights from elsewhere get into a module under a Trainer?"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from mics_strategy import load_weights
from tests.lightning.modules import Regression, loader
from tests.lightning.runs import assert_same, mics, run, trainer, whole
from tests.ranks import RankContext, RankPool


class Pretrained(Regression):
    """Begins with the weights in a file, as the README says."""

    path = ""
    loaded: dict[str, Tensor]

    def on_fit_start(self) -> None:
        fitting: Any = self.trainer
        load_weights(self.path, fitting.strategy.sharded)
        self.loaded = whole(fitting)


def fit_ddp(ctx: RankContext, path: str) -> dict[str, Tensor]:
    fitting = trainer(ctx, "ddp", max_steps=2)
    fitting.fit(Regression("adam_scheduler"), loader())
    fitting.save_checkpoint(path)
    return whole(fitting)


def load(ctx: RankContext, path: str) -> dict[str, Tensor]:
    module = Pretrained("adam_scheduler")
    module.path = path
    trainer(ctx, mics("mics"), max_steps=1).fit(module, loader())
    return module.loaded


def test_a_module_begins_with_weights_from_elsewhere(ranks: RankPool, tmp_path: Path) -> None:
    """Of a checkpoint that DDP has written, optimizer states and all; and of a file of the tensors."""
    checkpoint, weights = tmp_path / "ddp.ckpt", tmp_path / "x.safetensors"
    expected = run(ranks, 2, fit_ddp, str(checkpoint))[0]
    save_file(torch.load(checkpoint, weights_only=True)["state_dict"], weights)
    for path in (checkpoint, weights):
        for found in run(ranks, 2, load, str(path)):
            assert_same(found, expected, tolerance=0)
