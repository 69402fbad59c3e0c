"""How does every rank get its share of a checkpoint, whatever ranks have written it?"""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from mics_strategy.checkpoint import atomic, rng
from mics_strategy.checkpoint.manifest import Manifest
from mics_strategy.checkpoint.safe_reader import SafeReader, check_listed, read
from mics_strategy.checkpoint.save import EXTRA, finish_saves
from mics_strategy.checkpoint.state import (
    MODEL,
    OPTIMIZER,
    CheckpointContents,
    LoadTarget,
    Optimizers,
    empty_model_like_saved,
)
from mics_strategy.comm.consensus import gather_objects, run_on_all_ranks
from mics_strategy.engine.handle import Sharded
from mics_strategy.errors import CheckpointError

T = TypeVar("T")
_log = logging.getLogger(__name__)


class OpenCheckpoint:
    """A sharded checkpoint that was looked at, to be read part by part. All methods are collective.

    Args:
        path: The folder; rank 0's counts.
        weights_only: Whether objects may be nothing but plain data, as `torch.load` has it.

    Attributes:
        path: Of rank 0.
        extra: What `save_checkpoint` was given.

    Raises:
        CheckpointError: On every rank, for one that is damaged or mixed.
    """

    def __init__(self, path: str | os.PathLike[str], *, weights_only: bool = True) -> None:
        self.path = gather_objects(Path(path))[0]
        self._weights_only = weights_only
        self._manifest = None if _is_foreign(self.path) else check_checkpoint(self.path)
        self._metadata = run_on_all_ranks(SafeReader(self.path).read_metadata)
        self.extra = run_on_all_ranks(lambda: self._as_checkpoint_error(self._read_extra))

    @property
    def num_optimizers(self) -> int:
        """How many were saved."""
        names = (name.partition(".")[0] for name in self._metadata.state_dict_metadata)
        return len({name for name in names if name.startswith(OPTIMIZER)})

    def load(
        self, sharded: Sharded, optimizers: Optimizers = (), *, strict: bool = True, has_model: bool = True
    ) -> None:
        """Read everything into a model and its optimizers, and set the random generators.

        Args:
            sharded: The model.
            optimizers: In the order in which they were saved, or by the same names.
            strict: As for `load_checkpoint`.
            has_model: False reads the optimizers only.

        Raises:
            CheckpointError: It is another model's, before anything is changed; or it could not be read.
        """
        rank, world_size = dist.get_rank(), dist.get_world_size()
        template = run_on_all_ranks(
            lambda: LoadTarget(sharded, optimizers, self._saved(), strict=strict, has_model=has_model)
        )
        if self._manifest is not None:
            wanted = rng.request_rng(rank, world_size, self._manifest.world_size)
            saved = self._metadata.state_dict_metadata  # weights alone have no random states
            template.values[rng.KEY] = {k: v for k, v in wanted.items() if f"{rng.KEY}.{k}" in saved}

        def fill() -> None:
            """The model last: it is read in place, and nothing but reading may fail any more."""
            self._read_into({name: values for name, values in template.values.items() if name != MODEL})
            states = template.optimizer_states()
            self._read_into({MODEL: template.values[MODEL]})
            template.apply(states)

        run_on_all_ranks(lambda: self._as_checkpoint_error(fill))
        if self._manifest is not None:
            rng.restore_rng(template.values[rng.KEY], rank, sharded.generators)
            sharded.steps_done = self._manifest.step
            if self._manifest.pending_micro_steps and optimizers and rank == 0:
                _log.warning(
                    "`%s` was saved after %d micro-steps of an unfinished accumulation, whose gradients it does not "
                    "hold. Take that accumulation from its first micro-step, or go on with a step that lacks them.",
                    self.path,
                    self._manifest.pending_micro_steps,
                )

    def _saved(self) -> CheckpointContents:
        classes = () if self._manifest is None else self._manifest.optimizer_classes
        return CheckpointContents(self._metadata.state_dict_metadata, classes)

    def model_state(self, sharded: Sharded) -> dict[str, Any]:
        """The saved model in new memory, each tensor in this rank's share, cut as the model's own are.

        Names that the model does not have are whole tensors.
        """
        state = run_on_all_ranks(lambda: empty_model_like_saved(sharded, self._metadata))
        run_on_all_ranks(lambda: self._as_checkpoint_error(lambda: self._read_into({MODEL: state})))
        return state

    def _read_into(self, values: dict[str, Any]) -> None:
        with torch.no_grad():
            read(self.path, self._metadata, values, weights_only=self._weights_only)

    def _as_checkpoint_error(self, action: Callable[[], T]) -> T:
        """With errors of reading as a `CheckpointError`, which all ranks are told of."""
        try:
            return action()
        except CheckpointError:
            raise
        except (OSError, RuntimeError, ValueError, TypeError, KeyError) as error:
            raise CheckpointError(f"`{self.path}` could not be loaded: {type(error).__name__}: {error}") from error

    def _read_extra(self) -> dict[str, Any]:
        file = self.path / EXTRA
        if not file.exists():
            return {}
        if self._manifest is not None:
            check_listed(self.path, EXTRA, self._manifest.files)
        try:
            found: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=self._weights_only)
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"`{file}` holds objects that are not plain data, and reading them may run code ({error}). If you "
                "trust the checkpoint, load it with `weights_only=False`."
            ) from error
        return found


def load_checkpoint(
    path: str | os.PathLike[str],
    sharded: Sharded,
    optimizers: Optimizers = (),
    *,
    strict: bool = True,
    weights_only: bool = True,
) -> dict[str, Any]:
    """Read a sharded checkpoint into a model, its optimizers and the random generators. Collective.

    It may have been written by any number of ranks, with any scopes, layout of the optimizer and dtypes. Every file is
    held against its digest first; ranks share that work. A folder that torch's distributed checkpoints have written, of
    FSDP2 for instance, with the same names (``model``, ``optimizer_0``, ...) is read, too, without digests.

    Args:
        path: The folder; rank 0's counts.
        sharded: The model.
        optimizers: In the order in which they were saved, or by the same names; none loads the model only.
        strict: Whether names that only the model, or only the checkpoint, has are an error.
        weights_only: Whether objects may be nothing but plain data, as `torch.load` has it.

    Returns:
        What `save_checkpoint` was given as `extra`.

    Raises:
        CheckpointError: On every rank, for a checkpoint that is damaged, mixed or another model's, before anything is
            changed.

    Cost:
        Memory: this rank's share, and about four copies of the largest saved piece, as torch reads it.
    """
    finish_saves(sharded)
    found = OpenCheckpoint(path, weights_only=weights_only)
    found.load(sharded, optimizers, strict=strict)
    return found.extra


def load_newest_checkpoint(
    folder: str | os.PathLike[str], sharded: Sharded, optimizers: Optimizers = (), **options: Any
) -> dict[str, Any] | None:
    """Load the newest whole checkpoint in a folder, as `load_checkpoint` does. Collective.

    Rank 0 says which it passes over and why.

    Args:
        folder: That holds checkpoints; rank 0's counts.
        sharded: The model.
        optimizers: In the order in which they were saved.
        **options: Of `load_checkpoint`.

    Returns:
        Its `extra`; None where the folder holds no checkpoint.

    Raises:
        CheckpointError: All are damaged, or the newest whole one is another model's.
    """
    finish_saves(sharded)
    path = newest_checkpoint(folder)
    return None if path is None else load_checkpoint(path, sharded, optimizers, **options)


def newest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """The newest sharded checkpoint in a folder that is whole. Collective: ranks share the reading of all its files.

    Rank 0 says which it passes over and why.

    Args:
        folder: That holds checkpoints; rank 0's counts.

    Returns:
        Its folder; None where there is no checkpoint in it, as in one that is a checkpoint itself.

    Raises:
        CheckpointError: All are damaged.
    """
    rank = dist.get_rank()
    found = gather_objects(atomic.newest_first(Path(folder)) if rank == 0 else [])[0]
    for path in found:
        try:
            check_checkpoint(path)
        except CheckpointError as error:
            if rank == 0:
                print(f"Passed over: {error}", flush=True)
            continue
        return path
    if found:
        raise CheckpointError(
            f"None of the {len(found)} checkpoints in `{folder}` is whole. Restore one from a backup, or start anew in "
            "another folder."
        )
    return None


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether a folder is a checkpoint that was finished, or one that its successor has put aside and never replaced.

    Not while another process may be writing it.
    """
    return atomic.find(Path(path))


def check_checkpoint(path: str | os.PathLike[str]) -> Manifest:
    """Hold every file of a checkpoint against the manifest. Collective: ranks share the reading.

    Args:
        path: The folder, the same on all ranks.

    Raises:
        CheckpointError: On every rank, naming a file that is missing or not what was written.
    """
    rank, world_size, folder = dist.get_rank(), dist.get_world_size(), Path(path)

    def check() -> Manifest:
        manifest = atomic.read_manifest(folder)
        names = sorted(manifest.files)
        atomic.check_files(folder, manifest, names, digests=False)
        atomic.check_files(folder, manifest, names[rank::world_size])
        return manifest

    return run_on_all_ranks(check)


def _is_foreign(folder: Path) -> bool:
    """Whether others have written a folder, so that nothing says what its files were like. Collective."""
    return gather_objects(not atomic.is_checkpoint(folder) and (folder / ".metadata").is_file())[0]
