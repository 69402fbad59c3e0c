"""A run that continues from its last checkpoint, on any number of ranks.

Lightning restores weights, optimizer, learning rate and the position of the loader. It also restores a count
of micro-batches, from which it tells when an optimizer step is due; on another number of ranks a step has
another number of micro-batches, so that count is converted.
"""

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from mics_strategy.lightning.framework import throttle_sigterm_check

from .config import TrainerConfig
from .errors import RecipeError
from .plain_data import parse
from .signals import Request, SaveRequests

_FOLDER = "checkpoints"
# Fields of `model` that a resumed run may change.
_OF_NO_SHAPE = ("dropout", "activation_checkpointing", "compile", "meta_start")
_SUFFIXES = {"lightning": ".ckpt", "accelerate": ".accelerate"}


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


class SaveOnSignal(Callback):
    """Save on signals and after the last step, and end the run on SIGTERM and SIGINT.

    It is in place of Lightning's own reactions to signals.

    Lightning would broadcast inside of the handler, wait for the device at every micro-batch, hear SIGTERM of rank 0
    only, and end without saving.

    Args:
        requests: Signals of the run.
        config: Block `trainer` of the recipe.
    """

    def __init__(self, requests: SaveRequests, config: TrainerConfig) -> None:
        self.requests = requests
        self.config = config
        self._seen_step = 0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Drop the check at every micro-batch."""
        throttle_sigterm_check(trainer, sys.maxsize)

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Replace the handlers that the Trainer has just installed."""
        self.requests.install()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Replace the handlers where nothing is validated first."""
        self.requests.install()
        self._seen_step = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After an optimizer step, do what the ranks agree on; save the last one."""
        step, requests = trainer.global_step, self.requests
        if step == self._seen_step:
            return
        self._seen_step = step
        request = requests.agree(step)
        is_regular = requests.saves and step % int(self.config.checkpoint_every_steps) == 0
        is_wanted = request or step == self.config.max_steps
        if is_wanted and requests.saves and not is_regular:  # a regular one is written after this callback
            trainer.save_checkpoint(checkpoint_path(self.config, step))
        if request >= Request.STOP:
            trainer.should_stop = True
            trainer.limit_val_batches = 0
        elif request and trainer.is_global_zero:
            print(requests.describe(request, step), flush=True)


class ValidateEvery(Callback):
    """Validate during training, counted in optimizer steps on any number of ranks.

    Lightning counts micro-batches, and leaves out the last validation where its interval does not divide the run.

    Args:
        config: Block `trainer` of the recipe.
    """

    def __init__(self, config: TrainerConfig) -> None:
        self.config = config
        self._seen_step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to count at the present step."""
        self._seen_step = trainer.global_step
        trainer.val_check_batch = math.inf  # only after the last batch

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Let the Trainer validate after this batch if its step is due."""
        step, is_new = trainer.global_step, trainer.global_step != self._seen_step
        self._seen_step = step
        trainer.val_check_batch = 1 if is_new and is_validated(self.config, step) else math.inf


def is_validated(config: TrainerConfig, step: int) -> bool:
    """Return whether held-out samples are read after an optimizer step."""
    every = config.validate_every_steps
    return step == config.max_steps or (every != "never" and step % every == 0)


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


def progress_callbacks(config: TrainerConfig, accumulation: int) -> list[Callback]:
    """Return what validates, what writes checkpoints when the recipe asks for them, and what reads them."""
    callbacks: list[Callback] = [ElasticProgress(accumulation), ValidateEvery(config)]
    if config.checkpoint_every_steps == "never":
        return callbacks
    writer = ModelCheckpoint(
        dirpath=Path(config.output_dir) / _FOLDER,
        filename="step={step}",
        auto_insert_metric_name=False,
        every_n_train_steps=config.checkpoint_every_steps,
        save_top_k=1,
        enable_version_counter=False,
    )
    return [*callbacks, writer]


def checkpoint_path(config: TrainerConfig, step: int) -> Path:
    """Return where the checkpoint after an optimizer step is, a file or a folder."""
    return Path(config.output_dir) / _FOLDER / f"step={step}{_SUFFIXES[config.framework]}"


def checkpoints_of(config: TrainerConfig) -> list[Path]:
    """Return the checkpoints in the output folder that the recipe's framework wrote, by step."""
    return sorted((Path(config.output_dir) / _FOLDER).glob(f"step=*{_SUFFIXES[config.framework]}"), key=step_of)


def check_same_model(model: Mapping[str, Any], folder: Path) -> None:
    """Refuse to continue the run of a folder with a model of another shape, before the files of the run are replaced.

    Args:
        model: Block `model` of the recipe, as a mapping.
        folder: Output folder of the run, whose config.yaml describes its model.

    Raises:
        RecipeError: The models differ.
    """
    file = folder / "config.yaml"
    saved = parse(file.read_text(), f"`{file}`") if file.is_file() else None
    block = saved.get("model") if isinstance(saved, Mapping) else None
    if not isinstance(block, Mapping):  # of another rank, that writes it now
        return
    for name, value in model.items():
        if name in _OF_NO_SHAPE or "auto" in (value, block.get(name, "auto")):
            continue
        if block[name] != value:
            raise RecipeError(
                f"`model.{name}={value}` was asked for, but the run in {folder} has {block[name]}. Continue it with "
                f"`--model.{name}={block[name]}`, or choose another `--trainer.output_dir`."
            )


def checkpoint_to_resume(config: TrainerConfig, *, reads_folders: bool) -> Path | None:
    """Return the newest checkpoint of the output folder when the recipe resumes; None starts from the beginning.

    Where that is a sharded one, return the folder of all: loading takes the newest that is whole.

    Args:
        config: Block `trainer` of the recipe.
        reads_folders: Whether the strategy reads sharded checkpoints.

    Raises:
        RecipeError: A new run would mix its checkpoints with those of an earlier one, or the run would continue a
            checkpoint of the other framework, or a sharded one with a strategy that cannot read it.
    """
    is_new, writes = config.resume == "never", config.checkpoint_every_steps != "never"
    checkpoints = sorted((Path(config.output_dir) / _FOLDER).glob("step=*"), key=step_of)
    checkpoints = [path for path in checkpoints if path.suffix in _SUFFIXES.values()]
    if not checkpoints or (is_new and not writes):
        return None
    newest = checkpoints[-1]
    if is_new:
        raise RecipeError(
            f"A new run was asked to write checkpoints to {newest.parent}, which holds {newest.name} "
            "of an earlier run. Continue it with `--trainer.resume=auto`, or choose another "
            "`--trainer.output_dir`."
        )
    others = [path for path in checkpoints if path.suffix != _SUFFIXES[config.framework]]
    if others:
        (other,) = (name for name in _SUFFIXES if name != config.framework)
        raise RecipeError(
            f"`trainer.framework={config.framework}` found {others[-1]}, which `{other}` wrote and which it cannot "
            f"continue. Use `--trainer.framework={other}`, or another `--trainer.output_dir`."
        )
    if newest.is_dir() and not reads_folders:
        raise RecipeError(
            f"`trainer.resume=auto` found {newest}, a sharded checkpoint, which only `mics` strategies read. Use "
            "`--strategy.name=mics`, or another `--trainer.output_dir`."
        )
    return newest.parent if newest.is_dir() else newest


def step_of(path: Path) -> int:
    """Return the optimizer steps that a checkpoint was saved after."""
    return int(path.stem.removeprefix("step="))
