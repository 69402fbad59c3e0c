"""A recipe's network and update rule as a LightningModule that does not know that it is sharded."""

import math
from contextlib import nullcontext
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import nn
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

from .config import Recipe
from .data.masking import IGNORED_LABEL
from .data.samples import Batch
from .models.build import build_model


class Pretraining(LightningModule):
    """Prediction of tokens or classes with AdamW.

    Args:
        recipe: the resolved recipe.

    Attributes:
        grad_norm: norm of the whole gradient before clipping, scalar tensor; of the last optimizer step.
        lr: learning rate of the last optimizer step.
        validation_loss: mean loss per held-out token over all ranks; valid after a validation pass.
    """

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.model: nn.Module
        self.grad_norm = torch.tensor(math.nan)
        self.lr = math.nan
        self.validation_loss = math.nan
        self.held_out = HeldOutLoss()

    def configure_model(self) -> None:
        """Build the model once ranks exist; equal seeds give every rank the same weights."""
        if not hasattr(self, "model"):
            torch.manual_seed(self.recipe.trainer.seed)
            with torch.device("meta") if self.recipe.model.meta_start else nullcontext():
                self.model = build_model(self.recipe.model, self.recipe.sample_size)

    def on_train_start(self) -> None:
        """Give every rank its own dropout, after all have drawn the same first weights."""
        torch.manual_seed(hash((self.recipe.trainer.seed, self.global_step, self.global_rank)))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return logits [B, S, V] for tokens [B, S], or [B, C] for images [B, 3, H, W]."""
        logits: torch.Tensor
        logits = self.model(inputs) if self.recipe.model.reads_images else self.model(input_ids=inputs).logits
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """Return the mean loss per token; every micro-batch has equally many, so means of means are means."""
        return _cross_entropy(self(self._inputs(batch)), batch["labels"], reduction="mean")

    def _inputs(self, batch: Any) -> torch.Tensor:
        inputs: torch.Tensor = batch["images" if self.recipe.model.reads_images else "input_ids"]
        return inputs

    def on_validation_epoch_start(self) -> None:
        """Forget the previous pass."""
        self.held_out.to(self.device).reset()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Add up loss and tokens."""
        self.held_out.update(self(self._inputs(batch)), batch["labels"])

    def on_validation_epoch_end(self) -> None:
        """Sum over ranks."""
        self.validation_loss = float(self.held_out.compute())

    @property
    def validation_perplexity(self) -> float:
        """Exponential of the mean loss per held-out token; infinite where it has no float."""
        return math.exp(self.validation_loss) if self.validation_loss < 700 else math.inf

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip by the norm over all parameters and keep it for the log (Lightning's own hook drops it)."""
        self.record_gradient(nn.utils.clip_grad_norm_(self.parameters(), self.recipe.optimizer.clip_norm), optimizer)

    def record_gradient(self, norm: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        """Keep the norm of the gradient and the learning rate of this step for the log."""
        self.grad_norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        self.lr = optimizer.param_groups[0]["lr"]

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Build AdamW and its learning rate over the parameters as they are now, sharded or not."""
        config = self.recipe.optimizer
        optimizer = torch.optim.AdamW(
            parameter_groups(self, config.weight_decay), lr=config.lr, betas=config.betas, eps=config.eps
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self._lr_share)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step", "frequency": 1},
        }

    def _lr_share(self, step: int) -> float:
        return self.recipe.schedule.share(step, self.recipe.trainer.max_steps)


class HeldOutLoss(Metric):
    """Mean loss per token over all batches and ranks, however unevenly tokens are spread over them.

    Rows that only fill up a batch have ignored labels and do not count. torchmetrics' own `Perplexity` computes a
    softmax of all logits and takes logarithms of its rounded values; its `MeanMetric` drops the weights where it is
    told not to look for NaN, and otherwise waits for the device at every update.
    """

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        for name in ("nats", "tokens"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Add a batch: logits [..., V] and labels [...]."""
        self.nats += _cross_entropy(logits, labels, reduction="sum")
        self.tokens += (labels != IGNORED_LABEL).sum()

    def compute(self) -> torch.Tensor:
        """Return the mean, a scalar; torchmetrics has added up all ranks."""
        return self.nats / self.tokens


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Split parameters into those that decay and those that do not.

    Weight decay is for matrices and kernels that multiply activations: not for norms and biases (one dim) nor for
    embedding tables, whose rare rows would shrink without ever being used.

    Returns:
        Two parameter groups for a torch optimizer, in the order of `module.named_parameters()`.
    """
    tables = {id(table.weight) for table in module.modules() if isinstance(table, nn.Embedding)}
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in module.parameters():
        if parameter.requires_grad:
            groups[parameter.ndim >= 2 and id(parameter) not in tables].append(parameter)
    return [
        {"params": groups[True], "weight_decay": weight_decay},
        {"params": groups[False], "weight_decay": 0.0},
    ]


def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor, *, reduction: str) -> torch.Tensor:
    """Compare logits [..., V] with labels [...], in fp32."""
    flat = logits.float().flatten(0, -2)
    return nn.functional.cross_entropy(flat, labels.flatten(), ignore_index=IGNORED_LABEL, reduction=reduction)
