"""Numbers that a run reports while it trains.

One row every N optimizer steps goes to the terminal, to `metrics.jsonl`, `metrics.csv` and the loggers of the recipe.
Rates are taken from the difference of two clock readings between which the device was waited for: reading the loss
waits. Nothing synchronizes between two logged steps, and the first step of a process, which allocates and compiles, is
in no average.
"""

import math
import resource
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from .lightning_module import Pretraining
from .loggers import Loggers
from .metrics_files import VALIDATION_LOSS, MetricsFiles, Row
from .progress import NoTrainingProgress, TrainingProgress, training_progress
from .rates import Throughput


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Facts of a run that its log needs.

    Attributes:
        throughput: Conversion of steps and seconds to rates.
        max_steps: Optimizer steps of the run.
        log_every_steps: Optimizer steps between two rows.
        bytes_per_token: Mean length of a token's text in the corpus; 0.0 where a loss is no code length (images, masked
            models), then no bits per byte are shown.
        output_dir: Folder of the files.
    """

    throughput: Throughput
    max_steps: int
    log_every_steps: int
    bytes_per_token: float
    output_dir: Path


@dataclass(kw_only=True)
class History:
    """What the log has shown so far, for the report at the end; empty on all ranks but the first.

    Attributes:
        losses: Losses of the logged steps, those of a continued run included.
        validation_losses: Losses of all passes over held-out samples.
        mean_rate: Tokens or images per second of this process, its first step left out.
        unit: Unit that the rate counts.
    """

    losses: list[float] = field(default_factory=list)
    validation_losses: list[float] = field(default_factory=list)
    mean_rate: float = 0.0
    unit: str = "tok"

    def add(self, row: Row) -> None:
        """Take the losses of a row."""
        if "loss" in row:
            self.losses.append(row["loss"])
        if VALIDATION_LOSS in row:
            self.validation_losses.append(row[VALIDATION_LOSS])


@dataclass(frozen=True, kw_only=True)
class _Mark:
    """A moment at which the device had finished a step."""

    step: int
    at_s: float


class MetricsLog(Callback):
    """Measures on all ranks, writes on the first.

    Args:
        facts: Facts of the run.
        loggers: Further receivers of the rows.

    Attributes:
        history: Rows written so far.
    """

    def __init__(self, facts: RunFacts, loggers: Loggers) -> None:
        self.facts = facts
        self.loggers = loggers
        self.history = History(unit=facts.throughput.plan.unit)
        self._files: MetricsFiles | None = None  # of the first rank, from the first row on
        self._progress: TrainingProgress = NoTrainingProgress()
        self._loss_sum: torch.Tensor | float = 0.0
        self._seen_step = self._logged_step = 0
        self._warm: _Mark | None = None  # after the first step of this process
        self._last: _Mark | None = None
        self._validation_s = self._validation_start_s = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to count at the present step, which is not 0 after a resume."""
        self._seen_step = self._logged_step = trainer.global_step
        self._begin(trainer)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Add up losses; at a logged step, reduce their mean over ranks and write a row."""
        self._loss_sum = self._loss_sum + outputs["loss"].detach()  # Lightning divided it by the accumulation
        step = trainer.global_step
        if step == self._seen_step:
            return
        self._seen_step = step
        if self._warm is None or step % self.facts.log_every_steps == 0 or step == self.facts.max_steps:
            self._log(trainer, cast(Pretraining, pl_module), step)
        self._progress.advance(step)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock of the training steps."""
        self._validation_start_s = _finished_s(pl_module.device)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the validation loss that the module computed, and start the clock again."""
        self._validation_s += _finished_s(pl_module.device) - self._validation_start_s
        loss = cast(Pretraining, pl_module).validation_loss
        row = {"step": trainer.global_step, VALIDATION_LOSS: loss}
        line = f"validation loss {loss:.3f}"
        if self.facts.throughput.plan.unit == "tok":
            row["perplexity"] = perplexity = cast(Pretraining, pl_module).validation_perplexity
            line += f" | perplexity {perplexity:,.2f}"
        if self.facts.bytes_per_token:
            row["bits_per_byte"] = loss / math.log(2) / self.facts.bytes_per_token
            line += f" | {row['bits_per_byte']:.2f} bits per byte"
        self._begin(trainer)
        self._write(row, line)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the loggers and leave the terminal as it was. Further calls have no effect."""
        self._end("success")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Close the loggers of a run that failed."""
        self._end("failed")

    def _begin(self, trainer: Trainer) -> None:
        """Open the files on the first rank; rows above the present step are dropped."""
        if self._files is not None or not trainer.is_global_zero:
            return
        self._files = MetricsFiles(self.facts.output_dir, trainer.global_step)
        for row in self._files.rows:
            self.history.add(row)
        self.loggers.begin(trainer.global_step)
        self._progress = training_progress(self.facts.max_steps)

    def _end(self, status: Any) -> None:
        self._progress.end()
        self._progress = NoTrainingProgress()
        self.loggers.end(status)

    def _log(self, trainer: Trainer, module: Pretraining, step: int) -> None:
        mean = torch.as_tensor(self._loss_sum, device=module.device) / (step - self._logged_step)
        loss = float(trainer.strategy.reduce(mean, reduce_op="mean"))  # waits for the device
        now = _Mark(step=step, at_s=time.perf_counter() - self._validation_s)
        row: Row = {
            "step": step,
            "loss": loss,
            "grad_norm": float(module.grad_norm),
            "lr": module.lr,
            **self.facts.throughput.progress(step),
        }
        if self._last is not None and self._warm is not None:
            row |= self._rates(self._last, now)
            self.history.mean_rate = self._rates(self._warm, now)[self.facts.throughput.main_rate]
        if module.device.type == "cuda":
            row["peak_memory_bytes"] = torch.cuda.max_memory_allocated(module.device)
        row["peak_host_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        self._write(row, self._line(row))
        self._warm, self._last = self._warm or now, now
        self._loss_sum, self._logged_step = 0.0, step

    def _rates(self, begin: _Mark, end: _Mark) -> dict[str, float]:
        return self.facts.throughput.rates(end.step - begin.step, end.at_s - begin.at_s)

    def _line(self, row: Row) -> str:
        throughput = self.facts.throughput
        parts = [f"loss {row['loss']:.3f}", f"grad_norm {row['grad_norm']:.2f}", f"lr {row['lr']:.2e}"]
        if throughput.main_rate in row:
            ranks = throughput.plan.world_size
            share = f" ({row[throughput.main_rate] / ranks:,.0f} a rank)" if ranks > 1 else ""
            parts.append(f"{row[throughput.main_rate]:,.0f} {throughput.plan.unit}/s{share}")
        if "mfu" in row:
            parts.append(f"{row['model_tflop_per_s_per_rank']:.1f} TFLOP/s/rank | MFU {row['mfu']:.1%}")
        if "peak_memory_bytes" in row:
            parts.append(f"{row['peak_memory_bytes'] / 1e9:.1f} GB")
        if "step_s" in row:
            parts.append(f"{(self.facts.max_steps - row['step']) * row['step_s']:.0f} s left")
        return " | ".join(parts)

    def _write(self, row: Row, line: str) -> None:
        if self._files is None:
            return
        self._files.append(row)
        self.history.add(row)
        self.loggers.log(row)
        self._progress.log(int(row["step"]), line)


def _finished_s(device: torch.device) -> float:
    """Return the time at which the device has finished what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
