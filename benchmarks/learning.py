"""How does one rank learn a recipe, so that only the encoding differs?

The plain loop, with the recipe's own model, data, optimizer and learning rates. Equal seeds give every configuration
the same initial weights and the same batches in the same order; the validation sequences are always the same.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mics_strategy import ShardConfig, shard
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
        sent_bytes: What this rank planned to send in the first optimizer step.
        elapsed_s: Of the whole training.
    """

    variant: str
    seed: int
    steps: tuple[int, ...]
    losses: tuple[float, ...]
    train_losses: tuple[float, ...]
    sent_bytes: int
    elapsed_s: float


def learn(recipe: Recipe, variant: str, config: ShardConfig, *, every: int) -> Curve:
    """Train a recipe from new weights, with the default process group.

    Args:
        recipe: Its trainer gives steps and seed.
        variant: The name of `config`.
        config: Sharding of the model states.
        every: Optimizer steps between evaluations; the last step is always followed by one.
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
    torch.manual_seed(seed)
    model = build_model(recipe.model, recipe.data.sequence_length)
    sharded = shard(model, config)
    optimizer = torch.optim.AdamW(
        parameter_groups(model, recipe.optimizer.weight_decay), betas=recipe.optimizer.betas, eps=recipe.optimizer.eps
    )
    steps, losses, train_losses, sent_bytes = [0], [_evaluate(model, held_out)], [], 0
    sums = torch.zeros(2, dtype=torch.float64)
    for step in range(num_steps):
        for index in range(batch.accumulation):
            with sharded.micro_step(index, of=batch.accumulation):
                loss = _loss_sum(model, micro := next(batches)) / micro["labels"].numel()
                (loss / batch.accumulation).backward()
            sums += torch.tensor([loss.item(), 1.0])
        sharded.clip_grad_norm_(recipe.optimizer.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = _learning_rate(recipe, step)
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            sent_bytes = sum(item.sent_bytes for item in sharded.plan.collectives)
        if (step + 1) % every == 0 or step + 1 == num_steps:
            steps.append(step + 1)
            losses.append(_evaluate(model, held_out))
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


def _learning_rate(recipe: Recipe, step: int) -> float:
    schedule = recipe.schedule
    total = recipe.trainer.max_steps if schedule.total_steps == "auto" else schedule.total_steps
    share = lr_share(
        schedule.name,
        step,
        total=total,
        warmup=schedule.warmup_steps,
        decay=schedule.decay_steps,
        floor=schedule.floor,
    )
    return recipe.optimizer.lr * share


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
