"""Single-file checkpoints, written by rank 0 and read by all ranks.

Files are written and read by the CheckpointIO plug-in. Lightning's own plug-in uses torch's format, so its files are
mapped into memory instead of being read in full by every rank.
"""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map

from mics_strategy import CheckpointError

if TYPE_CHECKING:
    from mics_strategy.lightning.process_group import ProcessGroupMixin as Base
else:
    Base = object


class CheckpointFileMixin(Base):
    """Writing and reading of single files. Mixed into a Lightning strategy."""

    def write_file(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any) -> None:
        """Write a file on rank 0; a failure is raised on every rank. Collective.

        Args:
            checkpoint: Checkpoint of rank 0.
            path: Path of the file, equal on all ranks.
            storage_options: Options for a plug-in that supports them.

        Raises:
            TypeError: `storage_options` are given for a plug-in that does not support them.
            IsADirectoryError: `path` is a directory.
            CheckpointError: Rank 0 could not write; rank 0 raises its own error.
        """
        if storage_options is not None and isinstance(self.checkpoint_io, self.framework.plain_checkpoint_io):
            raise TypeError(
                f"`storage_options={storage_options!r}` is not supported by {type(self.checkpoint_io).__name__}. "
                "Use a CheckpointIO plug-in that supports them."
            )
        failure: BaseException | None = None
        if self.is_global_zero:
            try:
                self._write(checkpoint, path, storage_options)
            except Exception as error:  # raised below, on every rank
                failure = error
        self._raise_everywhere(failure, path)

    def _write(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any) -> None:
        if is_local(path) and Path(path).is_dir():
            raise IsADirectoryError(
                f"`{path}` is a directory, but the checkpoint is one file. Pass the path of a file in it."
            )
        self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options=storage_options)

    def _raise_everywhere(self, failure: BaseException | None, path: str | Path) -> None:
        rank_0_failure = self.broadcast(None if failure is None else (type(failure), str(failure)))
        if failure is not None:
            raise failure
        if rank_0_failure is None:
            return
        error_class, message = rank_0_failure
        raise (
            error_class(message)
            if error_class is IsADirectoryError
            else CheckpointError(f"Rank 0 could not write `{path}`: {message}")
        )

    def read_file(self, path: str | Path, weights_only: bool | None, permission: str) -> dict[str, Any]:
        """Open a file on this rank; its tensors are read on use.

        Args:
            path: Path that the plug-in reads.
            weights_only: Same as in `torch.load`.
            permission: Code that allows objects, for the error.

        Raises:
            CheckpointError: The file needs unpickling that is not allowed.
        """
        try:
            return self._read(path, weights_only)
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"`{path}` holds objects that are not plain data, and loading them may run code. If you trust the "
                f"file, use {permission}. ({error})"
            ) from error

    def _read(self, path: str | Path, weights_only: bool | None) -> dict[str, Any]:
        plain = type(self.checkpoint_io) is self.framework.plain_checkpoint_io
        wrapped = isinstance(self.checkpoint_io, self.framework.wrapping_checkpoint_io)
        if not (plain or wrapped) or not is_local(path) or not zipfile.is_zipfile(path):
            options = (
                {} if weights_only is None else {"weights_only": weights_only}
            )  # older plug-ins have no such parameter
            loaded: dict[str, Any] = self.checkpoint_io.load_checkpoint(path, **options)
            return loaded
        checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
        # Scalars that are kept (counters, scores) must not keep the file mapped, because it may be overwritten later.
        with_copied_scalars: dict[str, Any] = tree_map(_copy_scalar, checkpoint)
        return with_copied_scalars


def as_path(path: str | os.PathLike[str]) -> str | Path:
    """Convert to a path class that Lightning supports and every rank can unpickle."""
    return path if isinstance(path, (str, Path)) else os.fspath(path)


def is_local(path: str | Path) -> bool:
    """Whether `path` is in a file system and not behind a URL."""
    return isinstance(path, Path) or "://" not in path


def check_not_folder(path: str | Path, storage_options: Any) -> None:
    """Refuse a path to which ranks cannot write a folder together.

    Raises:
        TypeError: `storage_options` are given; only plug-ins support them.
        CheckpointError: The path is remote.
    """
    if storage_options is not None:
        raise TypeError(
            f"`storage_options={storage_options!r}` are not supported for a folder that ranks write together. Remove "
            "them."
        )
    if not is_local(path):
        raise CheckpointError(
            f"`{path}` is not in a file system, but sharded checkpoints are folders. Save to a folder that all nodes "
            "share, or use `state_dict_type='full'`."
        )


def _copy_scalar(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) and not leaf.dim() else leaf
