"""Loading of sharded checkpoints onto any number of ranks, with any scopes."""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from mics_strategy.checkpoint import atomic
from mics_strategy.checkpoint.delayed import load_delayed
from mics_strategy.checkpoint.feedback import FeedbackSource
from mics_strategy.checkpoint.islands import SavedIsland, check_islands, load_outer, saved_island
from mics_strategy.checkpoint.manifest import Manifest
from mics_strategy.checkpoint.random_states import RNG_KEY, request_rng, restore_rng
from mics_strategy.checkpoint.references import request_references, restore_references
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
    """A sharded checkpoint, verified and open for partial reads. Collective methods.

    Args:
        path: Folder of the checkpoint. Rank 0's path is used.
        weights_only: Whether objects must be plain data, as in `torch.load`.

    Attributes:
        path: Path of rank 0.
        extra: Extra state that was passed to `save_checkpoint`.

    Raises:
        CheckpointError: The checkpoint is damaged or mixed with another. Raised on every rank.
    """

    def __init__(self, path: str | os.PathLike[str], *, weights_only: bool = True) -> None:
        self.path = gather_objects(Path(path))[0]
        self._weights_only = weights_only
        self._manifest = None if _is_foreign(self.path) else check_checkpoint(self.path)
        self._metadata = run_on_all_ranks(SafeReader(self.path).read_metadata)
        self.extra = run_on_all_ranks(lambda: self._as_checkpoint_error(self._read_extra))

    @property
    def num_optimizers(self) -> int:
        """Number of optimizers that were saved."""
        names = (name.partition(".")[0] for name in self._metadata.state_dict_metadata)
        return len({name for name in names if name.startswith(OPTIMIZER)})

    def load(
        self, sharded: Sharded, optimizers: Optimizers = (), *, strict: bool = True, has_model: bool = True
    ) -> None:
        """Read everything into a model and its optimizers, and set the random generators.

        Args:
            sharded: Model.
            optimizers: Optimizers in the order in which they were saved, or by the same keys.
            strict: Same as for `load_checkpoint`.
            has_model: Whether the model is also read; False reads only the optimizers.

        Raises:
            CheckpointError: The checkpoint belongs to another model (then nothing was changed), or it could not be
                read.
        """
        rank, world_size = dist.get_rank(), dist.get_world_size()
        if optimizers:
            run_on_all_ranks(lambda: check_islands(self._manifest, sharded, self._metadata.state_dict_metadata))
        island = self._island(sharded) if optimizers else SavedIsland(self._metadata.state_dict_metadata)
        classes = () if self._manifest is None else self._manifest.optimizer_classes
        contents = CheckpointContents(island.entries, classes)
        target = run_on_all_ranks(lambda: LoadTarget(sharded, optimizers, contents, strict=strict, has_model=has_model))
        if self._manifest is not None:
            prefix, names = f"{RNG_KEY}.", self._metadata.state_dict_metadata
            saved_rng = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
            target.values[RNG_KEY] = request_rng(rank, world_size, self._manifest.world_size, saved_rng)

        feedback = FeedbackSource(
            self._metadata.state_dict_metadata if optimizers else {}, self._read_into, sharded, rank
        )
        run_on_all_ranks(lambda: self._as_checkpoint_error(feedback.read_layout))
        load_feedback = feedback.agree()
        references = request_references(sharded, self._metadata.state_dict_metadata) if optimizers else {}

        def fill() -> None:
            """Read the model last: it is read in place, and afterwards only reading may fail."""
            self._read_into(island.nested({name: v for name, v in target.values.items() if name != MODEL}))
            states = target.optimizer_states()
            self._read_into(island.nested({MODEL: target.values[MODEL]}))
            target.apply(states)
            load_feedback()
            self._read_into(references)
            saved = self._metadata.state_dict_metadata
            load_outer(self._manifest, sharded, self._read_into, saved, has_optimizers=bool(optimizers))
            load_delayed(sharded, self._read_into, saved if optimizers else ())

        run_on_all_ranks(lambda: self._as_checkpoint_error(fill))
        restore_references(sharded, references)
        if self._manifest is not None:
            restore_rng(target.values[RNG_KEY], rank, sharded.internals.generators)
            sharded.steps_done = self._manifest.step
            if self._manifest.pending_micro_steps and optimizers and rank == 0:
                _log.warning(
                    "`%s` was saved after %d micro-steps of an unfinished accumulation. It does not hold their "
                    "gradients. Repeat that accumulation from its first micro-step, or accept one step without them.",
                    self.path,
                    self._manifest.pending_micro_steps,
                )

    def _island(self, sharded: Sharded) -> SavedIsland:
        return saved_island(self._metadata.state_dict_metadata, self._manifest, sharded)

    def model_state(self, sharded: Sharded) -> dict[str, Any]:
        """Read the saved model into new memory, with tensors sharded like the model's own.

        Tensors whose names the model does not have are read in full.
        """
        island = self._island(sharded)
        state = run_on_all_ranks(lambda: empty_model_like_saved(sharded, island.entries))
        run_on_all_ranks(lambda: self._as_checkpoint_error(lambda: self._read_into(island.nested({MODEL: state}))))
        return state

    def _read_into(self, values: dict[str, Any]) -> None:
        with torch.no_grad():
            read(self._reader(), self._metadata, values, weights_only=self._weights_only)

    def _reader(self) -> SafeReader:
        return SafeReader(self.path)

    def _as_checkpoint_error(self, action: Callable[[], T]) -> T:
        """Run an action, with errors of reading converted to a `CheckpointError`."""
        try:
            return action()
        except CheckpointError:
            raise
        except Exception as error:  # torch's readers also raise assertions, and all that unpickling raises
            raise CheckpointError(f"`{self.path}` could not be loaded: {type(error).__name__}: {error}") from error

    def _read_extra(self) -> dict[str, Any]:
        file = self.path / EXTRA
        if not file.exists():
            return {}
        if self._manifest is not None:
            check_listed(self.path, EXTRA, self._manifest.files)
        try:
            extra: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=self._weights_only)
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"`{file}` holds objects that are not plain data, and loading them may run code ({error}). If you "
                "trust the checkpoint, load it with `weights_only=False`."
            ) from error
        return extra


def load_checkpoint(
    path: str | os.PathLike[str],
    sharded: Sharded,
    optimizers: Optimizers = (),
    *,
    strict: bool = True,
    weights_only: bool = True,
) -> dict[str, Any]:
    """Load model, optimizers and random generators from a checkpoint. Collective.

    The checkpoint may have been written by any number of ranks, with any scopes, optimizer layout and dtypes. Every
    file is first verified against its digest; ranks share that work. Folders of torch's distributed checkpoint with the
    same names (``model``, ``optimizer_0``, ...), such as those of FSDP2, are also read, without verification.

    Args:
        path: Folder of the checkpoint. Rank 0's path is used.
        sharded: Model.
        optimizers: Optimizers in the order in which they were saved, or by the same keys. Without optimizers, only the
            model is loaded.
        strict: Whether names that only the model or only the checkpoint has are errors.
        weights_only: Whether objects must be plain data, as in `torch.load`.

    Returns:
        Extra state that was passed to `save_checkpoint`.

    Raises:
        CheckpointError: The checkpoint is damaged, mixed with another, or belongs to another model. Raised on every
            rank, before anything is changed.

    Cost:
        Memory: this rank's shards, and about four copies of the largest saved item, because of how torch reads it.
    """
    finish_saves(sharded)
    sharded.internals.groups.agree_on(None, "load_checkpoint (call it on every rank)")
    checkpoint = OpenCheckpoint(path, weights_only=weights_only)
    checkpoint.load(sharded, optimizers, strict=strict)
    return checkpoint.extra


def load_newest_checkpoint(
    folder: str | os.PathLike[str], sharded: Sharded, optimizers: Optimizers = (), **options: Any
) -> dict[str, Any] | None:
    """Load the newest intact checkpoint of a folder. Collective.

    It is loaded by `load_checkpoint`. Rank 0 prints which checkpoints it skips and why, or that there is none: a job
    that starts for the first time goes on without one.

    Args:
        folder: Folder that holds checkpoints. Rank 0's path is used.
        sharded: Model.
        optimizers: Optimizers in the order in which they were saved.
        **options: Options of `load_checkpoint`.

    Returns:
        Extra state of the checkpoint; None if the folder holds no checkpoint.

    Raises:
        CheckpointError: All checkpoints are damaged, or the newest intact one belongs to another model.
    """
    finish_saves(sharded)
    sharded.internals.groups.agree_on(None, "load_newest_checkpoint (call it on every rank)")
    path = newest_checkpoint(folder)
    if path is not None:
        return load_checkpoint(path, sharded, optimizers, **options)
    if dist.get_rank() == 0:
        print(f"No checkpoint is loaded: `{os.fspath(folder)}` {_emptiness(Path(folder))}.", flush=True)
    return None


def _emptiness(folder: Path) -> str:
    """Say why a folder holds no checkpoint."""
    if atomic.is_checkpoint(folder):
        return "is a checkpoint itself; pass the folder that holds it, or use `load_checkpoint`"
    return "holds none" if folder.exists() else "does not exist"


def newest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """Find the newest intact sharded checkpoint of a folder. Collective.

    Ranks share the work of reading all files. Rank 0 prints which checkpoints it skips and why.

    Args:
        folder: Folder that holds checkpoints. Rank 0's path is used.

    Returns:
        Path of the checkpoint. None if the folder holds no checkpoint, or is a checkpoint itself.

    Raises:
        CheckpointError: All checkpoints are damaged.
    """
    rank = dist.get_rank()
    paths = gather_objects(atomic.newest_first(Path(folder)) if rank == 0 else [])[0]
    for path in paths:
        try:
            check_checkpoint(path)
        except CheckpointError as error:
            if rank == 0:
                print(f"Skipped: {error}", flush=True)
            continue
        return path
    if paths:
        raise CheckpointError(
            f"None of the {len(paths)} checkpoints in `{folder}` is intact. Restore one from a backup, or start again "
            "in another folder."
        )
    return None


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether a folder is a finished checkpoint.

    A checkpoint that a killed save left under its backup name is restored first. Do not call this function while
    another process may be writing the checkpoint.
    """
    return atomic.find(Path(path))


def check_checkpoint(path: str | os.PathLike[str]) -> Manifest:
    """Verify every file of a checkpoint against the manifest. Collective.

    Ranks share the work of reading the files.

    Args:
        path: Folder of the checkpoint, equal on all ranks.

    Raises:
        CheckpointError: A file is missing or has changed. Raised on every rank; the error names the file.
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
    """Whether another library wrote the folder, so that it has no digests. Collective."""
    return gather_objects(not atomic.is_checkpoint(folder) and (folder / ".metadata").is_file())[0]
