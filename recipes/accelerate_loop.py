"""The training loop of Accelerate: the same model, data, optimizer, log and report as Lightning's, without a Trainer.

1. Construct an Accelerator with this project's plugin (or plain DDP), prepare model and optimizer.
2. Validate, then take the optimizer steps: micro-steps under `accumulate`, clipping, update, learning rate.
3. Validate again, and report.

The log and the report are Lightning callbacks that read a few attributes of a Trainer; `_Trainer` has those.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from mics_strategy.accelerate import MiCSPlugin

from .batch import BatchPlan
from .config import Recipe
from .data.loaders import TrainLoader, ValidationLoader
from .data.prepare import PreparedData
from .errors import RecipeError
from .lightning_module import Pretraining
from .metrics import MetricsLog
from .report import ClosingReport
from .strategy import is_ours, shard_config

_MIXED_PRECISION = {"32-true": "no", "bf16-mixed": "bf16", "16-mixed": "fp16"}


def check_recipe(recipe: Recipe) -> None:
    """Refuse what this loop does not do, before ranks are started.

    Raises:
        RecipeError: A precision, strategy or checkpoint that only Lightning's loop has.
    """
    trainer, strategy, saves = recipe.trainer, recipe.strategy, recipe.trainer.checkpoint_every_steps
    unsupported = {
        "trainer.precision": (trainer.precision, trainer.precision not in _MIXED_PRECISION, "bf16-mixed"),
        "strategy.name": (strategy.name, not is_ours(strategy) and strategy.name != "ddp", "ddp"),
        "trainer.checkpoint_every_steps": (saves, saves != "never", "never"),
    }
    for name, (value, is_unsupported, repair) in unsupported.items():
        if is_unsupported:
            raise RecipeError(
                f"`{name}={value}` with `trainer.framework=accelerate`: this loop does not support it. Use "
                f"`--{name}={repair}`, or `--trainer.framework=lightning`."
            )


def needs_ranks(plan: BatchPlan, num_nodes: int) -> bool:
    """Return whether this process was started without a launcher, for a run of several ranks.

    Raises:
        RecipeError: They are on several machines.
    """
    if "RANK" in os.environ or plan.world_size == 1:
        return False
    if num_nodes > 1:
        raise RecipeError(
            f"`trainer.num_nodes={num_nodes}` with `trainer.framework=accelerate`: this process was started without "
            "a launcher. Start it with torchrun on every node, or use `--trainer.num_nodes=1`."
        )
    return True


def start_ranks(plan: BatchPlan, arguments: Sequence[str]) -> int:
    """Run this program on the ranks of this machine under torchrun; return its exit code.

    Args:
        plan: Batch with the number of ranks.
        arguments: Arguments of the program.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={plan.world_size}"]
    return subprocess.run([*torchrun, "-m", f"{__package__}.pretrain", *arguments], check=False).returncode


def train(recipe: Recipe, plan: BatchPlan, data: PreparedData, metrics: MetricsLog, report: ClosingReport) -> None:
    """Train a recipe on every rank that a launcher started.

    Args:
        recipe: The resolved recipe, which `check_recipe` accepts.
        plan: Batch of every step.
        data: Prepared data.
        metrics: Log, as in Lightning's loop.
        report: Report at the end, as in Lightning's loop.
    """
    accelerator = Accelerator(
        gradient_accumulation_steps=plan.accumulation,
        mixed_precision=_MIXED_PRECISION[recipe.trainer.precision],
        cpu=recipe.trainer.accelerator == "cpu",
        fsdp_plugin=MiCSPlugin(shard_config(recipe.strategy)) if is_ours(recipe.strategy) else None,
    )
    module = Pretraining(recipe)
    module.configure_model()
    optimizers: Any = module.configure_optimizers()
    module.model, optimizer = accelerator.prepare(module.model, optimizers["optimizer"])
    sharded = accelerator.sharded_of(module.model) if is_ours(recipe.strategy) else None
    ranks = _Ranks(accelerator, sharded)
    trainer: Any = _Trainer(ranks)
    module.trainer = trainer
    module._device = accelerator.device
    held_out = ValidationLoader(data.validation, plan, trainer.global_rank, recipe.data.validation_sequences)
    _validate(module, held_out, metrics)
    metrics.on_train_start(trainer, module)
    module.on_train_start()
    for batch in TrainLoader(data.train, plan, trainer.global_rank, recipe.trainer.max_steps, recipe.trainer.seed):
        with accelerator.accumulate(module.model):
            loss = module.training_step(ranks.to_device(batch), 0)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(module.parameters(), recipe.optimizer.clip_norm)
                module.record_gradient(norm, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            optimizers["lr_scheduler"]["scheduler"].step()  # once per step; a prepared one steps once per rank
            trainer.global_step += 1
        metrics.on_train_batch_end(trainer, module, {"loss": loss.detach() / plan.accumulation}, batch, 0)
    _validate(module, held_out, metrics)
    metrics.on_train_end(trainer, module)
    report.on_train_end(trainer, module)
    accelerator.wait_for_everyone()  # gloo hangs if a rank leaves while another one still receives
    accelerator.end_training()


@torch.no_grad()
def _validate(module: Pretraining, held_out: ValidationLoader[Any], metrics: MetricsLog) -> None:
    if not len(held_out):
        return
    trainer: Any = module.trainer
    module.eval()
    module.on_validation_epoch_start()
    for index, batch in enumerate(held_out):
        module.validation_step(trainer.strategy.to_device(batch), index)
    module.on_validation_epoch_end()
    metrics.on_validation_end(trainer, module)
    module.train()


class _Ranks:
    """Communication of the log and the report, under the names of a Lightning strategy.

    Args:
        accelerator: Accelerator of the run.
        sharded: Handle of the model, or None under DDP.
    """

    def __init__(self, accelerator: Accelerator, sharded: Any) -> None:
        self.accelerator = accelerator
        self.sharded = sharded
        self.root_device = accelerator.device

    def reduce(self, tensor: torch.Tensor, reduce_op: str) -> torch.Tensor:
        """Return the sum or the mean over all ranks."""
        reduced: torch.Tensor = self.accelerator.reduce(tensor, reduction=reduce_op)
        return reduced

    def broadcast(self, value: Any) -> Any:
        """Return the first rank's value."""
        return broadcast_object_list([value])[0]

    def to_device(self, batch: Any) -> Any:
        """Return a batch on this rank's device."""
        return {name: tensor.to(self.root_device, non_blocking=True) for name, tensor in batch.items()}

    def forward_context(self) -> AbstractContextManager[None]:
        """Return a context without effect: the prepared forward has its own autocast."""
        return nullcontext()


class _Trainer:
    """The attributes of a Lightning Trainer that the log, the report and the module read.

    Args:
        ranks: Communication.
    """

    def __init__(self, ranks: _Ranks) -> None:
        self.strategy = self.precision_plugin = ranks
        self.global_step = 0
        self.global_rank = ranks.accelerator.process_index
        self.is_global_zero = ranks.accelerator.is_main_process
