"""Report at the end of the training: fall of the loss, a text by the model, bytes sent, and a page with all of it.

The last table compares the engine's plan with the bytes that it counted, per rank and optimizer step. It
exists for this project's strategies only; everything else is the same under any strategy.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from lightning.pytorch import Callback, LightningModule, Trainer
from tokenizers import Tokenizer

from .config import SampleConfig
from .environment import end_environment
from .hf_export import HFExport
from .metrics import History
from .report_page import ENGINE, write_page
from .sampling import write_sample

_BARS = "▁▂▃▄▅▆▇█"


class TrafficRow(Protocol):
    """One line of the engine's account: what one rank sends over one axis in one optimizer step."""

    axis: str
    collective: str
    planned_bytes: int
    sent_bytes: int
    count: int


class ClosingReport(Callback):
    """Print the report when training ends, while the ranks can still communicate.

    Args:
        history: filled by the metrics log.
        tokenizer: of the training data; none for images.
        sample: what to write.
        max_context: tokens in a sequence.
        folder: Output folder of the run, for the page.
        export: Export of the trained model, if the recipe asks for it.
    """

    def __init__(
        self,
        history: History,
        tokenizer: Tokenizer | None,
        sample: SampleConfig,
        max_context: int,
        *,
        folder: Path,
        export: HFExport | None,
    ) -> None:
        self.export = export
        self.history = history
        self.folder = folder
        self.tokenizer = tokenizer
        self.sample = sample
        self.max_context = max_context

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report on the first rank, unless a signal ended the run; writing the sample takes all of them."""
        if trainer.should_stop:
            return
        traffic = traffic_of(trainer)  # before the forwards of the sample, which also communicate
        parts, text = [loss_summary(self.history)], ""
        if self.sample.num_tokens and self.tokenizer is not None:
            text = write_sample(trainer, pl_module, self.tokenizer, self.sample, max_context=self.max_context)
            parts.append(f"The model continues {self.sample.prompt!r}:\n  {text}")
        if traffic:
            parts.append("Sent by the first rank in the last optimizer step:\n" + traffic_table(traffic))
        if self.export is not None:
            self.export.write(trainer, pl_module)
            parts.append(f"The model for transformers is {self.export.folder}")
        if trainer.is_global_zero:
            print("\n" + "\n\n".join(filter(None, parts)), flush=True)
            write_engine_account(self.folder, trainer, traffic)
            end_environment(self.folder, text)
            print(f"\nThe report is {write_page(self.folder)}", flush=True)


def traffic_of(trainer: Trainer) -> list[TrafficRow]:
    """Return the engine's account of the last optimizer step; empty under any other strategy."""
    sharded = getattr(trainer.strategy, "sharded", None)
    return [] if sharded is None else list(sharded.traffic())


def write_engine_account(folder: Path, trainer: Trainer, traffic: Sequence[TrafficRow]) -> None:
    """Write the engine's bytes to the folder of the run; under any other strategy, remove those of an earlier run."""
    sharded = getattr(trainer.strategy, "sharded", None)
    if sharded is None:
        (folder / ENGINE).unlink(missing_ok=True)
        return
    columns = ("axis", "collective", "count", "planned_bytes", "sent_bytes")
    rows = [{name: getattr(row, name) for name in columns} for row in traffic]
    account = {"traffic": rows, "memory_bytes": dict(sharded.memory.bytes_by_purpose)}
    (folder / ENGINE).write_text(json.dumps(account, indent=1) + "\n")


def traffic_table(rows: Sequence[TrafficRow]) -> str:
    """Lay out planned and sent bytes by axis and collective, and their sums."""
    table = [("axis", "collective", "calls", "planned", "sent", "")]
    table += [(row.axis, row.collective, *_numbers([row]), _verdict([row])) for row in rows]
    table.append(("total", "", *_numbers(rows), _verdict(rows)))
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    alignment = "<<>>><"
    return "\n".join(
        "  ".join(
            ["", *(f"{cell:{side}{width}}" for cell, side, width in zip(line, alignment, widths, strict=True))]
        ).rstrip()
        for line in table
    )


def _numbers(rows: Sequence[TrafficRow]) -> tuple[str, str, str]:
    """Sum up calls, planned and sent bytes."""
    planned = sum(row.planned_bytes for row in rows)
    sent = sum(row.sent_bytes for row in rows)
    return f"{sum(row.count for row in rows)}", f"{planned:,} B", f"{sent:,} B"


def _verdict(rows: Sequence[TrafficRow]) -> str:
    """Say whether every row was sent as planned; differences of two rows do not cancel."""
    return "equal" if all(row.planned_bytes == row.sent_bytes for row in rows) else "DIFFERENT"


def loss_summary(history: History) -> str:
    """Show the fall of the loss in one line, and the mean rate."""
    losses = history.losses
    lines = [f"Loss {sparkline(losses)}  {losses[0]:.3f} -> {losses[-1]:.3f}"] if losses else []
    if len(history.validation_losses) > 1:
        first, *_, last = history.validation_losses
        lines.append(f"Validation loss {first:.3f} -> {last:.3f}")
    if history.mean_rate:
        lines.append(f"{history.mean_rate:,.0f} {history.unit}/s on average, first step left out")
    return "\n".join(lines)


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """Draw values as bars of eight heights, at most `width` of them, evenly picked."""
    if len(values) > width:
        values = [values[index * (len(values) - 1) // (width - 1)] for index in range(width)]
    low, high = min(values), max(values)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in values)
