"""The training loop of Accelerate: the same model, data, optimizer, log and report as Lightning's, without a Trainer.

1. Construct an Accelerator with this project's plugin (or plain DDP), prepare model and optimizer.
2. Restore a checkpoint, or validate the untrained model.
3. Take the optimizer steps: micro-steps under `accumulate`, clipping, update, learning rate; save what is due.
4. Validate again, and report.

The log and the report are Lightning callbacks that read a few attributes of a Trainer; `_Trainer` has those.
"""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from mics_strategy import finish_delayed
from mics_strategy.accelerate import MiCSPlugin

from .accelerate_checkpoint import AccelerateCheckpoints, TrainingState
from .batch import BatchPlan
from .config import Recipe
from .data.loaders import TrainLoader, ValidationLoader
from .errors import RecipeError
from .lightning_module import Pretraining
from .metrics import MetricsLog
from .resume import is_validated
from .run_inputs import RunInputs
from .signals import Request
from .strategy import is_ours, shard_config

_MIXED_PRECISION = {"32-true": "no", "bf16-mixed": "bf16", "16-mixed": "fp16"}


def check_recipe(recipe: Recipe) -> None:
    """Refuse what this loop does not do, before ranks are started.

    Raises:
        RecipeError: A precision or strategy that only Lightning's loop has.
    """
    trainer, strategy = recipe.trainer, recipe.strategy
    unsupported = {
        "trainer.precision": (trainer.precision, trainer.precision not in _MIXED_PRECISION, "bf16-mixed"),
        "strategy.name": (strategy.name, not is_ours(strategy) and strategy.name != "ddp", "ddp"),
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


def train(recipe: Recipe, inputs: RunInputs) -> None:
    """Train a recipe on every rank that a launcher started.

    Args:
        recipe: The resolved recipe, which `check_recipe` accepts.
        inputs: Data, log and checkpoint.
    """
    loop = AccelerateLoop(recipe, inputs)
    try:
        if not loop.restore():
            loop.validate()
        loop.train()
        if not loop.trainer.should_stop:
            loop.validate()
    except BaseException as error:
        inputs.metrics.on_exception(loop.trainer, loop.module, error)
        raise
    inputs.metrics.on_train_end(loop.trainer, loop.module)
    if not loop.trainer.should_stop:
        inputs.report.on_train_end(loop.trainer, loop.module)
    loop.checkpoints.finish()
    loop.accelerator.wait_for_everyone()  # gloo hangs if a rank leaves while another one still receives
    group = torch.distributed.group.WORLD
    loop.accelerator.end_training()
    del loop  # Before the group. As its last owner, DDP's reducer would end it while it holds the interpreter's lock,
    del group  # for which gloo's thread may wait to free the barrier.


class AccelerateLoop:
    """Model, optimizer and data of one run, prepared by Accelerate.

    Args:
        recipe: The resolved recipe.
        inputs: Data, log and checkpoint.
    """

    def __init__(self, recipe: Recipe, inputs: RunInputs) -> None:
        self.recipe, self.inputs = recipe, inputs
        plugin = MiCSPlugin(shard_config(recipe.strategy)) if is_ours(recipe.strategy) else None
        self.accelerator = Accelerator(
            gradient_accumulation_steps=inputs.plan.accumulation,
            mixed_precision=_MIXED_PRECISION[recipe.trainer.precision],
            cpu=recipe.trainer.accelerator == "cpu",
            fsdp_plugin=plugin,
        )
        self.module = Pretraining(recipe)
        self.module.configure_model()
        network, optimizers = self.module.model, self.module.configure_optimizers()
        raw_optimizer: Any = optimizers["optimizer"]
        self.scheduler: Any = optimizers["lr_scheduler"]["scheduler"]
        self.module.model, self.optimizer = self.accelerator.prepare(network, raw_optimizer)
        sharded = self.accelerator.sharded_of(network) if plugin is not None else None
        self.ranks = _Ranks(self.accelerator, sharded)
        self.trainer: Any = _Trainer(self.ranks)
        self.module.trainer = self.trainer
        self.module._device = self.accelerator.device
        plan, data, rank = inputs.plan, inputs.data, self.trainer.global_rank
        self.loader = TrainLoader(data.train, plan, rank, recipe.trainer.max_steps, recipe.trainer.seed)
        self.held_out = ValidationLoader(data.validation, plan, rank, recipe.data.validation_sequences)
        state = TrainingState(
            model=network,
            optimizer=raw_optimizer,
            scheduler=self.scheduler,
            loader=self.loader,
            sharded=sharded,
            scaler=self.accelerator.scaler,
        )
        self.checkpoints = AccelerateCheckpoints(recipe.trainer, state, is_first=self.trainer.is_global_zero)

    def restore(self) -> bool:
        """Continue from the checkpoint that rank 0 has found; return whether there is one."""
        checkpoint = self.ranks.broadcast(self.inputs.checkpoint)
        if checkpoint is not None:
            self.trainer.global_step = self.checkpoints.restore(checkpoint)
        return checkpoint is not None

    def train(self) -> None:
        """Take the optimizer steps that are left, until a signal ends the run."""
        self.inputs.metrics.on_train_start(self.trainer, self.module)
        self.module.on_train_start()
        for batch in self._batches():
            self._micro_step(batch)
            if self.accelerator.sync_gradients:
                self._end_step()
        if self.trainer.global_step >= self.recipe.trainer.max_steps:
            self._finish_delayed()

    def _finish_delayed(self) -> None:
        """Finish outer steps; let the gradients that delayed second hops have left make a last step."""
        if self.ranks.sharded is not None and finish_delayed(self.ranks.sharded):
            self.ranks.sharded.clip_grad_norm_(self.recipe.optimizer.clip_norm)
            self.optimizer.optimizer.step()  # past the loss scale of the Accelerator's
            self.optimizer.zero_grad()

    def _batches(self) -> Iterator[Any]:
        while self.trainer.global_step < self.recipe.trainer.max_steps:
            for batch in self.loader:
                yield batch
                if self.trainer.should_stop or self.trainer.global_step >= self.recipe.trainer.max_steps:
                    return

    def _micro_step(self, batch: Any) -> None:
        module, accelerator = self.module, self.accelerator
        with accelerator.accumulate(module.model):
            loss = module.training_step(self.ranks.to_device(batch), 0)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(module.parameters(), self.recipe.optimizer.clip_norm)
                module.record_gradient(norm, self.optimizer)
            self.optimizer.step()
            self.optimizer.zero_grad()
        if accelerator.sync_gradients:
            self.scheduler.step()  # once per step; a prepared one steps once per rank
            self.trainer.global_step += 1
        outputs = {"loss": loss.detach() / self.inputs.plan.accumulation}
        self.inputs.metrics.on_train_batch_end(self.trainer, module, outputs, batch, 0)

    def _end_step(self) -> None:
        """Save and validate what is due, and save what a signal requests."""
        step, requests = self.trainer.global_step, self.inputs.requests
        request = requests.agree(step)
        if self.checkpoints.is_due(step) or (request and requests.saves):
            self.checkpoints.save(step)
        self.trainer.should_stop = request >= Request.STOP
        if request is Request.SAVE and self.trainer.is_global_zero:
            print(requests.describe(request, step), flush=True)
        config = self.recipe.trainer
        if not self.trainer.should_stop and step < config.max_steps and is_validated(config, step):
            self.validate()

    def validate(self) -> None:
        """Compute and log the loss of held-out samples."""
        _validate(self.module, self.held_out, self.inputs.metrics)


@torch.no_grad()
def _validate(module: Pretraining, held_out: ValidationLoader[Any], metrics: MetricsLog) -> None:
    if not len(held_out):
        return
    trainer: Any = module.trainer
    module.eval()
    metrics.on_validation_start(trainer, module)
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
        self.should_stop = False
        self.global_rank = ranks.accelerator.process_index
        self.is_global_zero = ranks.accelerator.is_main_process
