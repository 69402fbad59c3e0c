"""What does a Trainer checkpoint of a sharded model hold, and how is it read?

By default it is one ordinary file, as plain data parallel training writes it: whole tensors, plain names, so that any
strategy reads it. Reading maps the file into memory on every rank; each takes its shards out of it, after the hooks
have seen the whole.

With ``state_dict_type="sharded"`` it is a folder to which every rank writes its share. Hooks see DTensors then, and may
leave some out or change them. Either kind is read, whatever is written.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

from torch.optim import Optimizer
from typing_extensions import override

from mics_strategy import (
    CheckpointError,
    OpenCheckpoint,
    Sharded,
    finish_saves,
    newest_checkpoint,
    remove_checkpoint,
    save_checkpoint,
)
from mics_strategy.lightning import validate
from mics_strategy.lightning.checkpoint_file import CheckpointFileMixin, as_path, check_not_folder, is_local
from mics_strategy.lightning.consensus import require_every_rank
from mics_strategy.lightning.framework import TrainerFramework, unwrap_optimizer


class TrainerCheckpointMixin(CheckpointFileMixin):
    """The part of the strategy that saves and restores. Mixed into a Lightning strategy."""

    framework: ClassVar[TrainerFramework]
    _load_weights_only: bool | None
    _state_dict_type: str
    _saves_asynchronously: bool
    _timeout: timedelta
    _num_interrupted_saves = 0
    _opened: OpenCheckpoint | None = None
    _to_load: tuple[dict[str, Any], bool] | None = None  # a state dict, and whether strictly
    _to_remove: tuple[str | Path, ...] = ()  # when the save that is under way has succeeded

    @property
    def _trainer(self) -> Any:
        raise NotImplementedError

    @property
    def sharded(self) -> Sharded:
        """The sharded model."""
        raise NotImplementedError

    @property
    def is_sharded(self) -> bool:
        """Whether this process has shards of the model; not before setup, nor in one that has started the ranks."""
        raise NotImplementedError

    def shard_model(self) -> None:
        """Shard the model now, if it is not."""
        raise NotImplementedError

    # -- saving -----------------------------------------------------------------------------------------------

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state dict: whole on rank 0's CPU and empty on other ranks, or in shards. Collective.

        Raises:
            CheckpointError: After an exception that not every rank has met.
        """
        if not self.is_sharded:
            return super().lightning_module_state_dict()
        if self._trainer.state.status == self.framework.interrupted:
            self._num_interrupted_saves += 1
            require_every_rank(self._num_interrupted_saves, self._timeout)
        if self._state_dict_type == "sharded":
            self.sharded.synchronize_buffers()
            return dict(self.sharded.model.state_dict())
        return self.sharded.full_state_dict()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state dict: whole on rank 0's CPU and empty on other ranks, or in shards. Collective."""
        if not optimizer.param_groups:  # Lightning's, where `configure_optimizers` returned None
            return dict(optimizer.state_dict())
        if self._state_dict_type == "sharded":
            return dict(unwrap_optimizer(self.framework, optimizer).state_dict())
        return self.sharded.full_optimizer_state_dict(unwrap_optimizer(self.framework, optimizer))

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Let rank 0 write the file, or every rank its share of the folder; a failure is raised on every rank.

        Raises:
            TypeError: `storage_options` for a checkpoint plug-in that has none, or for a folder.
            IsADirectoryError: `filepath` is a directory, and one file is to be written.
            CheckpointError: A rank could not write; its own error is raised on it. Or a folder of shards is asked for,
                and the ranks that had them were started by this process and are gone.
        """
        path = self.broadcast(as_path(filepath))
        if not self.is_sharded:
            validate.check_ranks_remain(self._state_dict_type)
            self.write_file(checkpoint, path, storage_options)
            return
        if self._state_dict_type == "sharded":
            self._save_shards(checkpoint, path, storage_options)
            return
        if "optimizer_states" in checkpoint:
            self.sharded.warn_pending_gradients()
        self.write_file(checkpoint, path, storage_options)

    def _save_shards(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any) -> None:
        """Let every rank write; what the hooks have made of the state dict counts."""
        check_not_folder(path, storage_options)
        self._finish()
        rest = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
        optimizers = self._stepping if "optimizer_states" in checkpoint else []
        if "optimizer_states" in checkpoint and not optimizers:
            rest["optimizer_states"] = checkpoint["optimizer_states"]  # of Lightning's stand-in; it has none
        save_checkpoint(
            path,
            self.sharded,
            optimizers,
            rest,
            model_state=checkpoint["state_dict"],
            asynchronous=self._saves_asynchronously,
        )

    @property
    def _stepping(self) -> list[Optimizer]:
        """The optimizers, without Lightning's stand-in where `configure_optimizers` returned None."""
        found = (unwrap_optimizer(self.framework, optimizer) for optimizer in self.optimizers)
        return [optimizer for optimizer in found if optimizer.param_groups]

    def finish_saves(self) -> None:
        """Wait for a checkpoint that is being written, but not after an exception: a rank may be gone.

        Raises:
            CheckpointError: It could not be written.
        """
        module = self.lightning_module
        if (
            self._saves_asynchronously
            and module is not None
            and self.is_sharded
            and self._trainer.state.status != self.framework.interrupted
        ):
            self._finish()

    def _finish(self) -> None:
        finish_saves(self.sharded)
        for path in self._to_remove:
            self._remove(path)
        self._to_remove = ()

    @override
    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        """Remove a checkpoint; while another one is being written, only when that one is whole."""
        if self._saves_asynchronously:
            self._to_remove = (*self._to_remove, as_path(filepath))
        else:
            self._remove(as_path(filepath))

    def _remove(self, path: str | Path) -> None:
        if self.is_global_zero and not (is_local(path) and remove_checkpoint(path)):
            super().remove_checkpoint(path)

    # -- loading ----------------------------------------------------------------------------------------------

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return False  # so that hooks see a checkpoint before optimizers are made, as with DDP

    @override
    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Open a checkpoint on every rank; its tensors are read when they are used.

        Args:
            checkpoint_path: Rank 0's counts. A folder that holds sharded checkpoints means the newest whole one.
            weights_only: As `fit(weights_only=...)` was given it; else the strategy's `load_weights_only` counts.

        Raises:
            CheckpointError: A folder that is no whole checkpoint, or what needs unpickling that is not allowed.
        """
        path = self.broadcast(as_path(checkpoint_path))
        allowed = weights_only if weights_only is not None else self._load_weights_only
        if self.is_sharded:
            finish_saves(self.sharded)
        self._opened = None
        if is_local(path) and self.broadcast(Path(path).is_dir()):
            path = newest_checkpoint(path) or path
            self.shard_model()  # what a folder holds is read into shards
            opened = self._opened = OpenCheckpoint(path, weights_only=allowed is not False)
            checkpoint = {**opened.extra, "state_dict": opened.model_state(self.sharded)}
            if opened.num_optimizers:
                checkpoint["optimizer_states"] = [{}] * opened.num_optimizers  # read when they are asked for
            return checkpoint
        return self.read_file(path, allowed, "`weights_only=False` of the Trainer's method")

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load into shards: now, or when there are some. Until then hooks may change the plain model."""
        self._to_load = (checkpoint["state_dict"], strict)
        if self.is_sharded:
            self.load_pending_optimizers()

    def load_pending_optimizers(self) -> None:
        """Load the state dict that was read before the model was sharded, if there is one."""
        waiting, self._to_load = self._to_load, None
        if waiting is not None:
            self.sharded.load_full_state_dict(waiting[0], strict=waiting[1])

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load every optimizer's state.

        Raises:
            CheckpointError: The checkpoint has another number of optimizers.
        """
        states = checkpoint["optimizer_states"]
        if len(states) != len(self.optimizers):
            raise CheckpointError(
                f"The checkpoint holds {len(states)} optimizers, and `configure_optimizers` made "
                f"{len(self.optimizers)}. Return as many as there were, or load the weights only."
            )
        if self._opened is not None:
            self._opened.load(self.sharded, self._stepping, has_model=False)
            return
        self.sharded.steps_done = checkpoint.get("global_step", 0)
        for optimizer, state in zip(self.optimizers, states, strict=True):
            if optimizer.param_groups:
                self.sharded.load_full_optimizer_state_dict(unwrap_optimizer(self.framework, optimizer), state)
