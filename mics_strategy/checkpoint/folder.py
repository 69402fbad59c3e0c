"""Atomic folders for checkpoints of a framework, which all ranks write into.

Such a folder holds many things: sharded checkpoints, schedulers, random states, files of the user's hooks. Ranks write
into a draft. When every rank is done, rank 0 describes the draft in a manifest and renames it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from mics_strategy.checkpoint import atomic
from mics_strategy.checkpoint.claims import NAME as OWNER
from mics_strategy.checkpoint.manifest import NAME, FileEntry, Manifest
from mics_strategy.checkpoint.save import begin
from mics_strategy.comm.consensus import gather_objects, run_on_all_ranks
from mics_strategy.engine.handle import Sharded
from mics_strategy.errors import CheckpointError
from mics_strategy.version import package_version


@contextmanager
def atomic_checkpoint_folder(path: str | os.PathLike[str], models: Sequence[Sharded] = ()) -> Iterator[Path]:
    """Let all ranks fill a folder that appears only when it is complete. Collective.

    Files that were added to an older checkpoint of that name after it was saved (such as notes) are kept.

    Args:
        path: Folder on a file system that all ranks share. Rank 0's path is used. It may be empty or a checkpoint.
        models: Sharded models. The manifest records the step count of the first one.

    Yields:
        The draft to write into, equal on all ranks.

    Raises:
        CheckpointError: An exception was raised while the folder was filled. Raised on every other rank, with the rank
            that failed; that rank raises its own exception. The existing folder is unchanged.

    Cost:
        Rank 0 reads all files outside of sharded checkpoints once more, for their digests.
    """
    is_first = dist.get_rank() == 0
    draft, target = begin(path)
    failure: BaseException | None = None
    try:
        yield draft
    except Exception as error:  # reported to all ranks, and raised again below
        failure = error
    except BaseException:
        if is_first:
            atomic.abort(draft)
        raise
    failures = gather_objects(None if failure is None else f"{type(failure).__name__}: {failure}")
    failed = next((rank for rank, failure_text in enumerate(failures) if failure_text is not None), None)
    if failed is not None:
        if is_first:
            atomic.abort(draft)
        if failure is not None:
            raise failure
        raise CheckpointError(f"`{target}` was not saved: rank {failed} raised {failures[failed]}")
    run_on_all_ranks(lambda: _commit(draft, target, models) if is_first else None)


def _commit(draft: Path, target: Path, models: Sequence[Sharded]) -> None:
    try:
        _copy_added_files(draft, target)
        atomic.write_manifest(draft, _manifest(draft, models))
        atomic.commit(draft, target)
    except OSError as error:
        raise CheckpointError(f"`{target}` was not saved: {error}") from error
    finally:
        atomic.abort(draft)  # unless it was committed


def _copy_added_files(draft: Path, target: Path) -> None:
    """Copy files that were added to an older checkpoint of that name."""
    if not atomic.is_checkpoint(target):
        return
    saved_names = {name.partition("/")[0] for name in atomic.read_manifest(target).files} | {NAME, OWNER}
    for entry in target.iterdir():
        if entry.name not in saved_names and not (draft / entry.name).exists():
            shutil.copytree(entry, draft / entry.name) if entry.is_dir() else shutil.copy2(entry, draft / entry.name)


def _manifest(draft: Path, models: Sequence[Sharded]) -> Manifest:
    return Manifest(
        step=models[0].steps_done if models else 0,
        world_size=dist.get_world_size(),
        scopes=models[0].scopes.degrees if models else {},
        package_version=package_version(),
        torch_version=str(torch.__version__),
        files=_entries(draft),
        pending_micro_steps=models[0].internals.pending_micro_steps if models else 0,
    )


def _entries(draft: Path) -> dict[str, FileEntry]:
    """Describe every file; of sharded checkpoints inside, only their manifests."""
    inside = {manifest.parent for manifest in draft.rglob(NAME)}
    entries = {}
    for file in sorted(draft.rglob("*")):
        is_known = any(folder in file.parents for folder in inside) and file.name != NAME
        if file.is_file() and not is_known and file.name != OWNER:
            atomic.sync(file)
            entries[file.relative_to(draft).as_posix()] = atomic.entry_of(file)
    return entries
