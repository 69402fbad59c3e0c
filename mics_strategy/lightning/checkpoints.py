"""Checkpoints of the Trainer with a sharded model.

By default a checkpoint is one ordinary file, like that of plain data parallelism: full tensors and unsharded names, so
that any strategy can load it. Every rank maps the file into memory and reads its shards from it, after the hooks have
seen the full state. One more entry holds the random states of all ranks, which other strategies ignore.

With ``state_dict_type="sharded"`` a checkpoint is a folder to which every rank writes its shards. Hooks then see
DTensors, and may remove or change them. Both formats load, whichever is saved.
"""

from __future__ import annotations

import functools
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
    finish_saves,
    newest_checkpoint,
    remove_checkpoint,
    save_checkpoint,
)
from mics_strategy.checkpoint.whole_tensors import whole_tensors
from mics_strategy.comm.consensus import Rendezvous
from mics_strategy.lightning import validate
from mics_strategy.lightning.checkpoint_file import CheckpointFileMixin, as_path, check_not_folder, is_local
from mics_strategy.lightning.framework import TrainerFramework, unwrap_optimizer
from mics_strategy.lightning.random_states import RNG_KEY, RandomStatesMixin
from mics_strategy.lightning.snapshots import TrainerSnapshotMixin

ARRIVAL_TIMEOUT = timedelta(seconds=30)


class TrainerCheckpointMixin(TrainerSnapshotMixin, RandomStatesMixin, CheckpointFileMixin):
    """Saving and loading of the Trainer's strategy. Mixed into a Lightning strategy."""

    framework: ClassVar[TrainerFramework]
    _load_weights_only: bool | None
    _state_dict_type: str
    _saves_asynchronously: bool
    _timeout: timedelta
    _opened: OpenCheckpoint | None = None
    _to_load: tuple[dict[str, Any], bool] | None = None  # state dict, and whether to load it strictly
    _to_remove: tuple[str | Path, ...] = ()  # after the pending save has succeeded

    @property
    def is_sharded(self) -> bool:
        """Whether this process holds shards: after setup, not in the ranks' parent."""
        raise NotImplementedError

    def shard_model(self) -> None:
        """Shard the model now, unless it is sharded already."""
        raise NotImplementedError

    @functools.cached_property
    def _interrupted_saves(self) -> Rendezvous:
        """Rendezvous before saves after an exception. Other ranks may be inside a step, whose collectives block."""
        return Rendezvous("interrupted")

    def _require_every_rank(self) -> None:
        """Wait until all ranks save after an exception.

        Raises:
            CheckpointError: A rank did not reach the save in time.
        """
        missing = self._interrupted_saves.missing_ranks(min(self._timeout, ARRIVAL_TIMEOUT).total_seconds())
        if missing:
            raise CheckpointError(
                f"A checkpoint was requested after an exception, but ranks {missing} did not reach the save, so the "
                "exception occurred on some ranks only. Nothing was saved. To lose less, save regularly with "
                "ModelCheckpoint(every_n_train_steps=...)."
            )

    # -- saving -----------------------------------------------------------------------------------------------

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state dict: full on rank 0's CPU, or sharded. Collective.

        The full state dict is empty on other ranks.

        Raises:
            CheckpointError: An exception was raised on some ranks only.
        """
        if not self.is_sharded:
            return super().lightning_module_state_dict()
        if self._trainer.state.status == self.framework.interrupted:
            self._require_every_rank()
        if self._state_dict_type == "sharded":
            self.sharded.buffers.synchronize()
            return dict(self.sharded.model.state_dict())
        return self.sharded.full_state_dict()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's state dict: full on rank 0's CPU, or sharded. Collective.

        The full state dict is empty on other ranks.
        """
        if not optimizer.param_groups:  # Lightning's stand-in if `configure_optimizers` returned None
            return dict(optimizer.state_dict())
        if self._state_dict_type == "sharded":
            return dict(unwrap_optimizer(self.framework, optimizer).state_dict())
        return self.sharded.full_optimizer_state_dict(unwrap_optimizer(self.framework, optimizer))

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Save one file on rank 0, or a folder on all ranks. Collective.

        Raises:
            TypeError: `storage_options` are given for a plug-in that does not support them, or for a folder.
            IsADirectoryError: `filepath` is a directory, but one file is to be written.
            CheckpointError: A rank could not write; that rank raises its own error. Or a sharded folder is requested
                after the ranks that this process started have ended. Raised on every rank.
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
            self.sharded.internals.warn_pending_gradients()
            checkpoint = {**checkpoint, RNG_KEY: self.random_states()}
        self.write_file(whole_tensors(lambda: checkpoint), path, storage_options)

    def _save_shards(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any) -> None:
        """Save on all ranks; the state dict is taken as the hooks have changed it."""
        check_not_folder(path, storage_options)
        self._finish()
        rest = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
        optimizers = self.stepping if "optimizer_states" in checkpoint else []
        if "optimizer_states" in checkpoint and not optimizers:
            rest["optimizer_states"] = checkpoint[
                "optimizer_states"
            ]  # state of Lightning's stand-in, which has no parameters
        save_checkpoint(
            path,
            self.sharded,
            optimizers,
            rest,
            model_state=checkpoint["state_dict"],
            asynchronous=self._saves_asynchronously,
        )

    @property
    @override
    def stepping(self) -> list[Optimizer]:
        """Optimizers, without Lightning's stand-in for no optimizer."""
        optimizers = (unwrap_optimizer(self.framework, optimizer) for optimizer in self.optimizers)
        return [optimizer for optimizer in optimizers if optimizer.param_groups]

    def finish_saves(self) -> None:
        """Wait for a pending save, except after an exception, when a rank may be gone.

        Raises:
            CheckpointError: The checkpoint could not be written.
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
        """Remove a checkpoint; during a pending save, as soon as that one is complete."""
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
        return False  # hooks see a checkpoint before optimizers are made, as with DDP

    @override
    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Open a checkpoint on every rank; its tensors are read on use.

        Args:
            checkpoint_path: Path of the checkpoint. Rank 0's path is used. In a folder with several sharded
                checkpoints, the newest intact one is opened.
            weights_only: Value of `fit(weights_only=...)`; if None, the strategy's `load_weights_only` is used.

        Raises:
            CheckpointError: The folder is not an intact checkpoint, or the checkpoint needs unpickling that is not
                allowed.
        """
        if self._snapshot is not None and checkpoint_path == self._snapshot.path:
            return self._open_shards(self._snapshot)
        path = self.broadcast(as_path(checkpoint_path))
        allowed = weights_only if weights_only is not None else self._load_weights_only
        if self.is_sharded:
            finish_saves(self.sharded)
        self._opened = None
        if is_local(path) and self.broadcast(Path(path).is_dir()):
            path = newest_checkpoint(path) or path
            return self._open_shards(OpenCheckpoint(path, weights_only=allowed is not False))
        return self.read_file(path, allowed, "`weights_only=False` of the Trainer's method")

    def _open_shards(self, opened: OpenCheckpoint) -> dict[str, Any]:
        """Read the model, and leave the optimizers to `load_optimizer_state_dict`. Collective."""
        self.shard_model()  # folders are read into shards
        self._opened = opened
        checkpoint = {**opened.extra, "state_dict": opened.model_state(self.sharded)}
        if opened.num_optimizers:
            checkpoint["optimizer_states"] = [{}] * opened.num_optimizers
        return checkpoint

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load into shards, now or after setup. Until setup, hooks may change the unsharded model."""
        self._to_load = (checkpoint["state_dict"], strict)
        if self.is_sharded:
            self.load_pending_model()

    def load_pending_model(self) -> None:
        """Load the model state dict that was read before the model was sharded, if any."""
        pending, self._to_load = self._to_load, None
        if pending is not None:
            self.sharded.load_full_state_dict(pending[0], strict=pending[1])

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the states of all optimizers.

        Raises:
            CheckpointError: The checkpoint has a different number of optimizers.
        """
        states = checkpoint["optimizer_states"]
        if len(states) != len(self.optimizers):
            raise CheckpointError(
                f"The checkpoint holds {len(states)} optimizers, but `configure_optimizers` returned "
                f"{len(self.optimizers)}. Return {len(states)} optimizers, or load only the weights."
            )
        if self._opened is not None:
            before = self.local_random_states()
            self._opened.load(self.sharded, self.stepping, has_model=False)
            self.schedule_random_states(self.local_random_states())
            self.set_random_states(before)
            return
        self.schedule_random_states(self.needed_random_states(checkpoint.get(RNG_KEY, {})))
        self.sharded.steps_done = checkpoint.get("global_step", 0)
        for optimizer, state in zip(self.optimizers, states, strict=True):
            if optimizer.param_groups:
                self.sharded.load_full_optimizer_state_dict(unwrap_optimizer(self.framework, optimizer), state)
