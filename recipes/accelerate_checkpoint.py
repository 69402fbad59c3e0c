"""Checkpoints of the Accelerate loop: written at optimizer steps, read on any number of ranks.

`full` is one file with full tensors under unsharded names, for every strategy; `sharded` is a folder of this project's
own format, to which all ranks write in the background. The position in the data is the number of samples read, so a
run continues with the next sample whatever the number of ranks.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from mics_strategy import Sharded, finish_saves, load_newest_checkpoint, remove_checkpoint, save_checkpoint
from mics_strategy.comm.consensus import run_on_files

from .config import TrainerConfig
from .data.loaders import TrainLoader
from .errors import RecipeError
from .resume import checkpoint_path, checkpoints_of, step_of


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """Everything that a checkpoint holds.

    Attributes:
        model: Network without wrappers.
        optimizer: Optimizer without wrappers.
        scheduler: Learning rate of that optimizer.
        loader: Training data, with its position.
        sharded: Handle of the network, or None under DDP.
        scaler: Scaler of fp16 gradients, or None.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler
    loader: TrainLoader[Any]
    sharded: Sharded | None
    scaler: Any


class AccelerateCheckpoints:
    """Checkpoints of one run. All methods are collective.

    Args:
        config: Block `trainer` of the recipe.
        state: State to save and to restore.
        is_first: Whether this is rank 0.
    """

    def __init__(self, config: TrainerConfig, state: TrainingState, *, is_first: bool) -> None:
        self.config = config
        self.state = state
        self.is_first = is_first

    def is_due(self, step: int) -> bool:
        """Say whether a regular checkpoint is written after this optimizer step."""
        every = self.config.checkpoint_every_steps
        return every != "never" and (step % every == 0 or step == self.config.max_steps)

    def save(self, step: int) -> Path:
        """Write a checkpoint after an optimizer step, and remove the previous regular one.

        A `full` one is complete on return; a `sharded` one is copied, and complete after `finish`.

        Returns:
            Path of the checkpoint.

        Raises:
            mics_strategy.errors.CheckpointError: It could not be written. Raised on every rank.

        Cost:
            `full`: the full state in the host memory of rank 0. `sharded`: see `mics_strategy.save_checkpoint`.
        """
        path, state = checkpoint_path(self.config, step), self.state
        rest = {
            "step": step,
            "loader": dict(state.loader.state_dict()),
            "lr_scheduler": state.scheduler.state_dict(),
            "scaler": None if state.scaler is None else state.scaler.state_dict(),
        }
        if self.config.checkpoint_format == "sharded" and state.sharded is not None:
            self.finish()
            save_checkpoint(path, state.sharded, [state.optimizer], rest, asynchronous=True)
            return path
        if state.sharded is None:
            weights, moments = state.model.state_dict(), state.optimizer.state_dict()
        else:
            weights = state.sharded.full_state_dict()
            moments = state.sharded.full_optimizer_state_dict(state.optimizer)
        checkpoint = {**rest, "state_dict": weights, "optimizer": moments}
        _on_files(lambda: _write(checkpoint, path) if self.is_first else None)
        self._remove_previous()
        return path

    def finish(self) -> None:
        """Wait for a checkpoint that is being written, and remove the previous regular one.

        Raises:
            mics_strategy.errors.CheckpointError: It could not be written. Raised on every rank.
        """
        if self.state.sharded is not None:
            finish_saves(self.state.sharded)
        if self.config.checkpoint_format == "sharded" and self.config.checkpoint_every_steps != "never":
            self._remove_previous()

    def restore(self, path: Path) -> int:
        """Read a checkpoint of any number of ranks.

        Args:
            path: File, or folder that holds sharded checkpoints, of which the newest intact one is read.

        Returns:
            Optimizer steps done.

        Raises:
            RecipeError: The data or the precision is not that of the saved run.
            mics_strategy.errors.CheckpointError: It cannot be read. Raised on every rank.
        """
        state = self.state
        if path.is_dir() and state.sharded is not None:
            rest = self._restore_folder(path, state.sharded)
        else:
            rest = self._restore_file(path)
        state.loader.load_state_dict(rest["loader"])
        state.scheduler.load_state_dict(rest["lr_scheduler"])
        if state.scaler is not None and rest["scaler"] is None:
            raise RecipeError(
                f"`trainer.precision=16-mixed` found {path}, which was saved without a gradient scaler. Resume with "
                "the precision with which it was saved."
            )
        if state.scaler is not None:
            state.scaler.load_state_dict(rest["scaler"])
        return int(rest["step"])

    def _restore_folder(self, folder: Path, sharded: Sharded) -> dict[str, Any]:
        rest = load_newest_checkpoint(folder, sharded, [self.state.optimizer])
        if rest is None:
            raise RecipeError(f"`{folder}` holds no checkpoint any more. Start again with `--trainer.resume=never`.")
        return rest

    def _restore_file(self, path: Path) -> dict[str, Any]:
        state = self.state
        saved: dict[str, Any] = _on_files(lambda: torch.load(path, map_location="cpu", mmap=True, weights_only=True))
        if state.sharded is None:
            state.model.load_state_dict(saved["state_dict"])
            state.optimizer.load_state_dict(saved["optimizer"])
        else:
            state.sharded.load_full_state_dict(saved["state_dict"])
            state.sharded.load_full_optimizer_state_dict(state.optimizer, saved["optimizer"])
            state.sharded.steps_done = saved["step"]
        return saved

    def _remove_previous(self) -> None:
        """Remove regular checkpoints but the newest; those that a signal requested stay."""
        if self.is_first:
            regular = [path for path in checkpoints_of(self.config) if self.is_due(step_of(path))]
            for path in regular[:-1]:
                if not remove_checkpoint(path) and path.is_file():
                    path.unlink()


def _write(checkpoint: dict[str, Any], path: Path) -> None:
    """Write a file that appears only when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.draft")
    with draft.open("wb") as file:
        torch.save(checkpoint, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)


def _on_files(action: Any) -> Any:
    """Run an action on files; if it fails on one rank, raise on all."""
    return run_on_files(action) if dist.is_initialized() else action()
