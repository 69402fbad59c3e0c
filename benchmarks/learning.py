"""How does one rank learn a recipe, so that only the encoding differs?

The plain loop, with the recipe's own model, data, optimizer and learning rates. Equal seeds give every configuration
the same initial weights and the same batches in the same order; the validation sequences are always the same.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mics_strategy import ShardConfig, Sharded, finish_delayed, load_checkpoint, save_checkpoint, shard
from recipes.batch import BatchPlan
from recipes.config import Recipe
from recipes.data.loaders import TrainLoader, ValidationLoader
from recipes.data.masking import IGNORED_LABEL
from recipes.data.prepare import prepare
from recipes.data.samples import Batch
from recipes.lightning_module import parameter_groups
from recipes.models.build import build_model
from recipes.schedule import lr_share


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """What one training gave, the same on all ranks.

    Attributes:
        variant: Which configuration, by its name.
        seed: Of the weights and of the order of the data.
        steps: Optimizer steps before each evaluation; the first is 0.
        losses: Mean loss of a held-out token at each.
        train_losses: Mean loss of a trained token since the last evaluation; none at the first.
        sent_bytes: Bytes that this rank planned to send in the first optimizer step of the last configuration.
        elapsed_s: Of the whole training.
    """

    variant: str
    seed: int
    steps: tuple[int, ...]
    losses: tuple[float, ...]
    train_losses: tuple[float, ...]
    sent_bytes: int
    elapsed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """What a script keeps over its steps."""

    model: nn.Module
    sharded: Sharded
    optimizers: list[torch.optim.Optimizer]

    def step(self, clip_norm: float) -> None:
        """Clip and step."""
        self.sharded.clip_grad_norm_(clip_norm)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()


def learn(
    recipe: Recipe, variant: str, configs: Mapping[int, ShardConfig], *, every: int, muon_lr: float | None = None
) -> Curve:
    """Train a recipe from new weights, with the default process group.

    Args:
        recipe: Its trainer gives steps and seed.
        variant: The name of `configs`.
        configs: Sharding of the model states, by the number of optimizer steps before it: the first is 0. Each later
            one resumes from a checkpoint of the one before.
        every: Optimizer steps between evaluations; the last step is always followed by one.
        muon_lr: Rate of torch's Muon, for the matrices of the layers; AdamW has the rest, or all without it.
    """
    start, num_steps, seed = time.perf_counter(), recipe.trainer.max_steps, recipe.trainer.seed
    data = prepare(recipe.data, recipe.model.vocab_rows)
    batch = BatchPlan(
        global_size=recipe.global_batch,
        micro_size=recipe.batch.micro_size,
        world_size=dist.get_world_size(),
        sequence_length=recipe.data.sequence_length,
    )
    batches = iter(TrainLoader(data.train, batch, dist.get_rank(), num_steps, seed))
    held_out = ValidationLoader(data.validation, batch, dist.get_rank(), recipe.data.validation_sequences)
    job = _start(recipe, configs[0], muon_lr)
    steps, losses, train_losses, sent_bytes = [0], [_evaluate(job.model, held_out)], [], 0
    sums = torch.zeros(2, dtype=torch.float64)
    for step in range(num_steps):
        if step and step in configs:
            job = _resume(recipe, configs[step], job, muon_lr)
        for index in range(batch.accumulation):
            with job.sharded.micro_step(index, of=batch.accumulation):
                loss = _loss_sum(job.model, micro := next(batches)) / micro["labels"].numel()
                (loss / batch.accumulation).backward()
            sums += torch.tensor([loss.item(), 1.0])
        for group in (group for optimizer in job.optimizers for group in optimizer.param_groups):
            group["lr"] = group["initial_lr"] * _share_of_lr(recipe, step)
        job.step(recipe.optimizer.clip_norm)
        if step + 1 == num_steps and finish_delayed(job.sharded):
            job.step(recipe.optimizer.clip_norm)
        if step in configs:
            sent_bytes = sum(item.sent_bytes for item in job.sharded.plan.collectives)
        if (step + 1) % every == 0 or step + 1 == num_steps:
            steps.append(step + 1)
            losses.append(_evaluate(job.model, held_out))
            train_losses.append(_mean(sums))
            sums.zero_()
    return Curve(
        variant=variant,
        seed=seed,
        steps=tuple(steps),
        losses=tuple(losses),
        train_losses=tuple(train_losses),
        sent_bytes=sent_bytes,
        elapsed_s=time.perf_counter() - start,
    )


def _start(recipe: Recipe, config: ShardConfig, muon_lr: float | None) -> _Job:
    torch.manual_seed(recipe.trainer.seed)
    model = build_model(recipe.model, recipe.data.sequence_length)
    sharded = shard(model, config if muon_lr is None else config.replace(optimizer_layout="tensors"))
    matrices = [p for name, p in model.named_parameters() if muon_lr is not None and p.ndim == 2 and ".layers." in name]
    options, taken = recipe.optimizer, set(matrices)
    groups: list[dict[str, Any]] = parameter_groups(model, options.weight_decay)
    for group in groups:
        group["params"] = [parameter for parameter in group["params"] if parameter not in taken]
        group["initial_lr"] = options.lr
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, betas=options.betas, eps=options.eps)]
    if matrices:
        group = {"params": matrices, "weight_decay": options.weight_decay, "initial_lr": muon_lr}
        optimizers.append(torch.optim.Muon([group]))
    return _Job(model=model, sharded=sharded, optimizers=optimizers)


def _resume(recipe: Recipe, config: ShardConfig, job: _Job, muon_lr: float | None) -> _Job:
    """Save a job and continue it with another configuration, as a script that is started again does."""
    resumed = _start(recipe, config, muon_lr)
    with tempfile.TemporaryDirectory(prefix="learning-") as folder:  # rank 0's; the others' stay empty
        path = Path(folder, "checkpoint")
        save_checkpoint(path, job.sharded, job.optimizers)
        load_checkpoint(path, resumed.sharded, resumed.optimizers)
        dist.barrier()  # then all ranks have read it
    return resumed


def _share_of_lr(recipe: Recipe, step: int) -> float:
    schedule = recipe.schedule
    total = recipe.trainer.max_steps if schedule.total_steps == "auto" else schedule.total_steps
    return lr_share(
        schedule.name,
        step,
        total=total,
        warmup=schedule.warmup_steps,
        decay=schedule.decay_steps,
        floor=schedule.floor,
    )


@torch.no_grad()
def _evaluate(model: nn.Module, held_out: ValidationLoader[Batch]) -> float:
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64)
    for batch in held_out:
        sums += torch.tensor([_loss_sum(model, batch).item(), (batch["labels"] != IGNORED_LABEL).sum().item()])
    model.train()
    return _mean(sums)


def _mean(sums: torch.Tensor) -> float:
    """Of a sum and a count that every rank has a part of."""
    total = sums.clone()
    dist.all_reduce(total)
    return float(total[0] / total[1])


def _loss_sum(model: nn.Module, batch: Batch) -> torch.Tensor:
    logits: Any = model(input_ids=batch["input_ids"]).logits
    return nn.functional.cross_entropy(
        logits.float().flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
    )
