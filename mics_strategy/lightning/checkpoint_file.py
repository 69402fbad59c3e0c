"""How is one ordinary checkpoint file written by rank 0, and read by all ranks?

Through the CheckpointIO plug-in. Lightning's own is known to read what torch writes, so such files are mapped into
memory instead of being read whole by every rank.
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
    """The part of a strategy that writes and reads single files. Mixed into a Lightning strategy."""

    def write_file(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any) -> None:
        """Let rank 0 write; a failure is raised on every rank. Collective.

        Args:
            checkpoint: Of rank 0.
            path: Equal on all ranks.
            storage_options: For a plug-in that takes them.

        Raises:
            TypeError: `storage_options` for a plug-in that takes none.
            IsADirectoryError: `path` is a directory.
            CheckpointError: Rank 0 could not write; its own error is raised there.
        """
        if storage_options is not None and isinstance(self.checkpoint_io, self.framework.plain_checkpoint_io):
            raise TypeError(
                f"`storage_options={storage_options!r}` is not supported by {type(self.checkpoint_io).__name__}. "
                "Use a CheckpointIO plug-in that takes them."
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

    def read_file(self, path: str | Path, weights_only: bool | None, permission: str) -> dict[str, Any]:
        """Open a file on this rank; its tensors are read when they are used.

        Args:
            path: What the plug-in reads.
            weights_only: As `torch.load` takes it.
            permission: What to write in order to allow objects.

        Raises:
            CheckpointError: It needs unpickling that is not allowed.
        """
        try:
            return self._read(path, weights_only)
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"`{path}` holds objects that are not plain data, and reading them may run code. If you trust the "
                f"file, use {permission}. ({error})"
            ) from error

    def _read(self, path: str | Path, weights_only: bool | None) -> dict[str, Any]:
        plain = type(self.checkpoint_io) is self.framework.plain_checkpoint_io
        wrapped = isinstance(self.checkpoint_io, self.framework.wrapping_checkpoint_io)
        if not (plain or wrapped) or not is_local(path) or not zipfile.is_zipfile(path):
            asked = {} if weights_only is None else {"weights_only": weights_only}  # older plug-ins do not know it
            found: dict[str, Any] = self.checkpoint_io.load_checkpoint(path, **asked)
            return found
        checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
        # What is kept as it is (counters, scores) must not keep the file mapped: it may be overwritten later.
        copied: dict[str, Any] = tree_map(_copy_of_number, checkpoint)
        return copied


def as_path(path: str | os.PathLike[str]) -> str | Path:
    """A path of any class as Lightning knows them, and as every rank can read it."""
    return path if isinstance(path, (str, Path)) else os.fspath(path)


def is_local(path: str | Path) -> bool:
    """Whether `path` is in a file system, not behind a URL."""
    return isinstance(path, Path) or "://" not in path


def check_not_folder(path: str | Path, storage_options: Any) -> None:
    """Refuse a place to which ranks cannot write a folder together.

    Raises:
        TypeError: `storage_options`, which belong to a plug-in.
        CheckpointError: A remote path.
    """
    if storage_options is not None:
        raise TypeError(f"`storage_options={storage_options!r}` mean nothing for a folder that ranks write together.")
    if not is_local(path):
        raise CheckpointError(
            f"`{path}` is no folder of a file system, and sharded checkpoints are written to one. Save to a folder "
            "that all nodes share, or use `state_dict_type='full'`."
        )


def _copy_of_number(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) and not leaf.dim() else leaf
