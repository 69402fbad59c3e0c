"""A run that continues from its last checkpoint, on any number of ranks.

Lightning restores weights, optimizer, learning rate and the position of the loader. It also restores a count
of micro-batches, from which it tells when an optimizer step is due; on another number of ranks a step has
another number of micro-batches, so that count is converted.
"""

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from .config import TrainerConfig
from .errors import RecipeError

_FOLDER = "checkpoints"


class ElasticProgress(Callback):
    """Convert saved counts of micro-batches to this run's accumulation.

    Args:
        accumulation: micro-batches per optimizer step in this run.
    """

    def __init__(self, accumulation: int) -> None:
        self.accumulation = accumulation

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Say in which unit the counts of this checkpoint are."""
        checkpoint["accumulation"] = self.accumulation

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Rewrite the counts before Lightning's loops read them."""
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        for counts in (progress["total"], progress["current"]):
            convert_progress(counts, checkpoint["accumulation"], self.accumulation)


def convert_progress(counts: dict[str, int], saved: int, present: int) -> None:
    """Convert one of Lightning's progress records in place.

    Args:
        counts: `ready`, `started`, `processed` and `completed` micro-batches. Inside the hook that saves, the
            last ones may lag behind `ready` by one; that lag is kept.
        saved: micro-batches per optimizer step when it was saved, at an optimizer step.
        present: micro-batches per optimizer step now.
    """
    ready = counts["ready"] // saved * present
    for name, count in list(counts.items()):
        counts[name] = ready - (counts["ready"] - count) if name != "ready" else count
    counts["ready"] = ready


def checkpoint_callbacks(config: TrainerConfig, accumulation: int) -> list[Callback]:
    """Return what writes checkpoints, when the recipe asks for them, and what reads them."""
    progress = ElasticProgress(accumulation)
    if config.checkpoint_every_steps == "never":
        return [progress]
    writer = ModelCheckpoint(
        dirpath=Path(config.output_dir) / _FOLDER,
        filename="step={step}",
        auto_insert_metric_name=False,
        every_n_train_steps=config.checkpoint_every_steps,
        save_top_k=1,
        enable_version_counter=False,
    )
    return [progress, writer]


def checkpoint_to_resume(config: TrainerConfig) -> Path | None:
    """Return the newest checkpoint of the output folder when the recipe resumes; None starts from the beginning.

    Where that is a sharded one, return the folder of all: the strategy takes the newest that is whole.

    Raises:
        RecipeError: a new run would mix its checkpoints with those of an earlier one.
    """
    checkpoints = sorted((Path(config.output_dir) / _FOLDER).glob("step=*.ckpt"), key=_step_of)
    if not checkpoints:
        return None
    if config.resume == "never" and config.checkpoint_every_steps != "never":
        raise RecipeError(
            f"A new run was asked to write checkpoints to {checkpoints[-1].parent}, which holds {checkpoints[-1].name} "
            "of an earlier run. Continue it with `--trainer.resume=auto`, or choose another "
            "`--trainer.output_dir`."
        )
    if config.resume == "never":
        return None
    return checkpoints[-1].parent if checkpoints[-1].is_dir() else checkpoints[-1]


def _step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step="))
