"""What does a run say about itself while it trains?

One line every N optimizer steps, and the same numbers in `metrics.jsonl`. Rates are taken from the difference
of two clock readings between which the device was waited for (reading the loss waits), so nothing
synchronises in between, and the first step, which allocates and compiles, is in no average.
"""

import json
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from .batch import BatchPlan
from .lightning_module import Pretraining


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What turns steps and seconds into rates.

    Args:
        plan: tokens per optimizer step.
        max_steps: optimizer steps in the run.
        log_every_steps: optimizer steps between two lines.
        model_flop_per_sequence: forward and backward.
        peak_tflop_per_s: of one device; 0.0 when unknown, then no utilisation is shown.
        bytes_per_token: mean length of a token's text in the corpus; 0.0 where a loss is no code length
            (images, masked models), then no bits per byte are shown.
        output_dir: where `metrics.jsonl` goes.
    """

    plan: BatchPlan
    max_steps: int
    log_every_steps: int
    model_flop_per_sequence: float
    peak_tflop_per_s: float
    bytes_per_token: float
    output_dir: Path


@dataclass(kw_only=True)
class History:
    """What the log has shown so far, for the report at the end."""

    losses: list[float] = field(default_factory=list)
    validation_losses: list[float] = field(default_factory=list)
    mean_tokens_per_s: float = 0.0
    unit: str = "tok"


@dataclass(frozen=True, kw_only=True)
class _Mark:
    """A moment at which the device had finished a step."""

    step: int
    at_s: float


class MetricsLog(Callback):
    """Measure on all ranks, write on the first.

    Args:
        facts: what turns steps into rates.

    Attributes:
        history: what was written so far.
    """

    def __init__(self, facts: RunFacts) -> None:
        self.facts = facts
        self.history = History(unit=facts.plan.unit)
        self._loss_sum: torch.Tensor | float = 0.0
        self._seen_step = self._logged_step = 0
        self._warm: _Mark | None = None  # after the first step of this process
        self._last: _Mark | None = None
        self._validation_s = self._validation_start_s = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to count at the present step, which is not 0 after a resume."""
        self._seen_step = self._logged_step = trainer.global_step

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Add up losses; at a logged step, agree on the mean over ranks and write a line."""
        self._loss_sum = self._loss_sum + outputs["loss"].detach()  # Lightning divided it by the accumulation
        step = trainer.global_step
        if step == self._seen_step:
            return
        self._seen_step = step
        if self._warm is None or step % self.facts.log_every_steps == 0 or step == self.facts.max_steps:
            self._log(trainer, cast(Pretraining, pl_module), step)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock of the training steps."""
        self._validation_start_s = _finished_s(pl_module.device)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the validation loss that the module computed, and start the clock again."""
        self._validation_s += _finished_s(pl_module.device) - self._validation_start_s
        loss = cast(Pretraining, pl_module).validation_loss
        self.history.validation_losses.append(loss)
        record = {"step": trainer.global_step, "validation_loss": loss}
        line = f"validation loss {loss:.3f}"
        if self.facts.plan.unit == "tok":
            record["perplexity"] = perplexity = cast(Pretraining, pl_module).validation_perplexity
            line += f" | perplexity {perplexity:,.2f}"
        if self.facts.bytes_per_token:
            record["bits_per_byte"] = loss / math.log(2) / self.facts.bytes_per_token
            line += f" | {record['bits_per_byte']:.2f} bits per byte"
        self._write(trainer, record, line)

    def _log(self, trainer: Trainer, module: Pretraining, step: int) -> None:
        mean = torch.as_tensor(self._loss_sum, device=module.device) / (step - self._logged_step)
        loss = float(trainer.strategy.reduce(mean, reduce_op="mean"))  # waits for the device
        now = _Mark(step=step, at_s=time.perf_counter() - self._validation_s)
        record: dict[str, float] = {
            "step": step,
            "loss": loss,
            "grad_norm": float(module.grad_norm),
            "lr": module.lr,
            "tokens": step * self.facts.plan.tokens_per_step,
        }
        if self._last is not None and self._warm is not None:
            record |= self._rates(self._last, now)
            self.history.mean_tokens_per_s = self._rates(self._warm, now)["tokens_per_s"]
        if module.device.type == "cuda":
            record["peak_memory_bytes"] = torch.cuda.max_memory_allocated(module.device)
        self.history.losses.append(loss)
        self._write(trainer, record, self._line(record))
        self._warm, self._last = self._warm or now, now
        self._loss_sum, self._logged_step = 0.0, step

    def _rates(self, begin: _Mark, end: _Mark) -> dict[str, float]:
        steps, seconds, facts = end.step - begin.step, end.at_s - begin.at_s, self.facts
        flop_per_s = steps * facts.plan.global_size * facts.model_flop_per_sequence / seconds
        tflop_per_s_per_rank = flop_per_s / facts.plan.world_size / 1e12
        rates = {
            "step_s": seconds / steps,
            "tokens_per_s": steps * facts.plan.tokens_per_step / seconds,
            "model_tflop_per_s_per_rank": tflop_per_s_per_rank,
        }
        if facts.peak_tflop_per_s:
            rates["mfu"] = tflop_per_s_per_rank / facts.peak_tflop_per_s
        return rates

    def _line(self, record: dict[str, float]) -> str:
        parts = [
            f"loss {record['loss']:.3f}",
            f"grad_norm {record['grad_norm']:.2f}",
            f"lr {record['lr']:.2e}",
        ]
        if "tokens_per_s" in record:
            parts.append(f"{record['tokens_per_s']:,.0f} {self.facts.plan.unit}/s")
        if "mfu" in record:
            parts.append(f"{record['model_tflop_per_s_per_rank']:.1f} TFLOP/s/rank | MFU {record['mfu']:.1%}")
        if "peak_memory_bytes" in record:
            parts.append(f"{record['peak_memory_bytes'] / 1e9:.1f} GB")
        if "step_s" in record:
            parts.append(f"{(self.facts.max_steps - record['step']) * record['step_s']:.0f} s left")
        return " | ".join(parts)

    def _write(self, trainer: Trainer, record: dict[str, float], line: str) -> None:
        if not trainer.is_global_zero:
            return
        with (self.facts.output_dir / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")
        width = len(str(self.facts.max_steps))
        print(f"step {trainer.global_step:>{width}}/{self.facts.max_steps} | {line}", flush=True)


def _finished_s(device: torch.device) -> float:
    """Return the time at which the device has finished what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
