"""What does a Trainer checkpoint of a sharded model hold, and how is it read?

One ordinary file, as plain data parallel training writes it: whole tensors, plain names, so that any strategy reads it.
Reading maps the file into memory on every rank; each takes its shards out of it, after the hooks have seen the whole.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_map
from typing_extensions import override

from mics_strategy import CheckpointError, Sharded
from mics_strategy.lightning.agreement import require_every_rank
from mics_strategy.lightning.framework import Framework, unwrap_optimizer

if TYPE_CHECKING:
    from mics_strategy.lightning.processes import Processes as Base
else:
    Base = object


class Checkpoints(Base):
    """The part of the strategy that saves and restores. Mixed into a Lightning strategy."""

    framework: ClassVar[Framework]
    _load_weights_only: bool | None
    _timeout: timedelta
    _num_interrupted_saves = 0

    @property
    def _trainer(self) -> Any:
        raise NotImplementedError

    @property
    def sharded(self) -> Sharded:
        """The sharded model."""
        raise NotImplementedError

    # -- saving -----------------------------------------------------------------------------------------------

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The plain module's state dict on rank 0's CPU, empty on other ranks. Collective.

        Raises:
            CheckpointError: After an exception that not every rank has met.
        """
        if self._trainer.state.status == self.framework.interrupted:
            self._num_interrupted_saves += 1
            require_every_rank(self._num_interrupted_saves, self._timeout)
        return self.sharded.full_state_dict()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The plain optimizer's state dict on rank 0's CPU, empty on other ranks. Collective."""
        return self.sharded.full_optimizer_state_dict(unwrap_optimizer(self.framework, optimizer))

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Let rank 0 write the file; a failure is raised on every rank.

        Raises:
            TypeError: `storage_options` for a checkpoint plug-in that has none.
            IsADirectoryError: `filepath` is a directory.
            CheckpointError: Rank 0 could not write; its own error is raised on rank 0.
        """
        path = self.broadcast(filepath)
        if storage_options is not None and isinstance(self.checkpoint_io, self.framework.plain_checkpoint_io):
            raise TypeError(
                f"`storage_options={storage_options!r}` is not supported by {type(self.checkpoint_io).__name__}. "
                "Give the Trainer a CheckpointIO plug-in that takes them."
            )
        failure: BaseException | None = None
        if self.is_global_zero:
            try:
                self._write(checkpoint, path, storage_options)
            except Exception as error:  # raised below, on every rank
                failure = error
        self._raise_everywhere(failure, path)

    def _write(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any) -> None:
        if _is_local(path) and Path(path).is_dir():
            raise IsADirectoryError(f"`{path}` is a directory, and the checkpoint is one file. Name a file in it.")
        self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options=storage_options)

    def _raise_everywhere(self, failure: BaseException | None, path: str | Path) -> None:
        found = self.broadcast(None if failure is None else (type(failure), str(failure)))
        if failure is not None:
            raise failure
        if found is None:
            return
        kind, message = found
        raise (
            kind(message)
            if kind is IsADirectoryError
            else CheckpointError(f"Rank 0 could not write `{path}`: {message}")
        )

    # -- loading ----------------------------------------------------------------------------------------------

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Open a checkpoint on every rank; its tensors are read when they are used.

        Args:
            checkpoint_path: Rank 0's counts.
            weights_only: The Trainer's; it does not pass what `fit(weights_only=...)` was given, so the strategy's
                `load_weights_only` goes first.

        Raises:
            CheckpointError: The path is a directory, or the file needs unpickling that is not allowed.
        """
        path = self.broadcast(checkpoint_path)
        allowed = self._load_weights_only if self._load_weights_only is not None else weights_only
        if _is_local(path) and Path(path).is_dir():
            raise CheckpointError(
                f"`{path}` is a directory, and this version reads checkpoints of one file. Name the file."
            )
        try:
            return self._read(path, allowed)
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"`{path}` holds objects that are not plain data, and reading them may run code. If you trust the "
                f"file, use {type(self).__name__}(load_weights_only=False). ({error})"
            ) from error

    def _read(self, path: str | Path, weights_only: bool | None) -> dict[str, Any]:
        plain = type(self.checkpoint_io) is self.framework.plain_checkpoint_io
        wrapped = isinstance(self.checkpoint_io, self.framework.wrapping_checkpoint_io)
        if not (plain or wrapped) or not _is_local(path) or not zipfile.is_zipfile(path):
            asked = {} if weights_only is None else {"weights_only": weights_only}  # older plug-ins do not know it
            return self.checkpoint_io.load_checkpoint(path, **asked)
        checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
        # What is kept as it is (counters, scores) must not keep the file mapped: it may be overwritten later.
        copied: dict[str, Any] = tree_map(_copy_of_number, checkpoint)
        return copied

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self.sharded.load_full_state_dict(checkpoint["state_dict"], strict=strict)

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
        for optimizer, state in zip(self.optimizers, states, strict=True):
            self.sharded.load_full_optimizer_state_dict(unwrap_optimizer(self.framework, optimizer), state)


def _is_local(path: str | Path) -> bool:
    return isinstance(path, Path) or "://" not in path


def _copy_of_number(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) and not leaf.dim() else leaf
