"""How does a Trainer run on a rank of the pool?

The ranks and their process group exist already, as under torchrun in a program that has made the group itself.
`test_launchers.py` starts ranks, and lets Lightning make the group.
"""

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning_utilities.core.rank_zero import rank_zero_only as utilities_rank_zero_only
from torch import Tensor
from torch.distributed.tensor import DTensor

from mics_strategy.comm.placement import full_tensor
from mics_strategy.lightning import MiCSStrategy
from tests.ranks import RankContext, RankPool


def _refuse_to_run_pytest_again(*_: Any) -> NoReturn:
    """Lightning starts ranks by running the program again, which is pytest here, and that for ever."""
    raise RuntimeError(
        "This Trainer would start its ranks by running pytest again. Use `run` and `trainer` of this file."
    )


_SubprocessScriptLauncher._call_children_scripts = _refuse_to_run_pytest_again
for _name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric"):
    logging.getLogger(_name).setLevel(logging.ERROR)


def run(ranks: RankPool, world_size: int, fn: Callable[..., Any], *args: object, **options: Any) -> list[Any]:
    """`ranks(world_size, fn, *args)` for a job that runs Trainers."""
    return ranks(world_size, in_lightning, fn, *args, **options)


def in_lightning(ctx: RankContext, fn: Callable[..., Any], *args: object) -> Any:
    """Run a job, without what Lightning has to say, and take its trace away."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return fn(ctx, *args)
    finally:
        utilities_rank_zero_only.rank = 0


def trainer(ctx: RankContext, strategy: Any = "mics", **options: Any) -> Trainer:
    """A quiet Trainer on the CPU ranks of this job."""
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    defaults = {"max_epochs": 1, "default_root_dir": ctx.tmp_path, "num_sanity_val_steps": 0}
    place = {"accelerator": "cpu", "devices": ctx.ranks_per_node, "num_nodes": ctx.num_nodes}
    return Trainer(strategy=strategy, **{**quiet, **defaults, **place, **options})


def mics(config: str = "mics", **options: Any) -> Any:
    """A strategy object."""
    return MiCSStrategy(config, **options)


def whole(trainer: Trainer) -> dict[str, Tensor]:
    """The plain parameters, on every rank. Collective."""
    module = trainer.lightning_module
    return {name: full(parameter) for name, parameter in module.named_parameters()}


def full(tensor: Tensor) -> Tensor:
    """The whole of a DTensor, or a copy of a plain tensor."""
    return full_tensor(tensor) if isinstance(tensor, DTensor) else tensor.detach().clone()


def fitted(ctx: RankContext, strategy: Any, module: LightningModule, loader: Any, **options: Any) -> dict[str, Tensor]:
    """Fit and return the whole parameters."""
    fitting = trainer(ctx, strategy, **options)
    fitting.fit(module, loader)
    return whole(fitting)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-6) -> None:
    """Equal names, order and values."""
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def shared_dir(ctx: RankContext, name: str = "checkpoints") -> Path:
    """A directory that all ranks of the job see."""
    path = ctx.tmp_path / name
    path.mkdir(exist_ok=True)
    return path
