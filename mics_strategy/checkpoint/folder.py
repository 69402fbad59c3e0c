"""How does a folder that many have written into become a checkpoint that is whole or absent?

A framework's own checkpoint is a folder of many things: sharded checkpoints of ours, schedulers, random states, what
the user's hooks write. It is filled as a draft; when every rank is done, rank 0 describes it in a manifest and renames
it.
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
    """Let all ranks fill a folder that appears under its name when all is in it, and never otherwise. Collective.

    What an older checkpoint of that name holds beside what it was saved with (notes, say) is kept.

    Args:
        path: The folder, on a file system that all ranks see; rank 0's counts. It may hold nothing, or a checkpoint.
        models: Whose steps the manifest tells, of the first.

    Yields:
        The draft to write into, the same on all ranks.

    Raises:
        CheckpointError: On every rank, naming the one that failed, for anything that was raised while the folder was
            filled; that rank raises its own error. What was there is as it was.

    Cost:
        Rank 0 reads what lies in the folder outside of sharded checkpoints once more, for its digests.
    """
    is_first = dist.get_rank() == 0
    draft, target = begin(path)
    failure: BaseException | None = None
    try:
        yield draft
    except Exception as error:  # told to all ranks, and raised again here
        failure = error
    except BaseException:
        if is_first:
            atomic.abort(draft)
        raise
    told = gather_objects(None if failure is None else f"{type(failure).__name__}: {failure}")
    failed = next((rank for rank, words in enumerate(told) if words is not None), None)
    if failed is not None:
        if is_first:
            atomic.abort(draft)
        if failure is not None:
            raise failure
        raise CheckpointError(f"`{target}` was not saved: rank {failed} raised {told[failed]}")
    run_on_all_ranks(lambda: _commit(draft, target, models) if is_first else None)


def _commit(draft: Path, target: Path, models: Sequence[Sharded]) -> None:
    try:
        _keep_what_others_added(draft, target)
        atomic.write_manifest(draft, _manifest(draft, models))
        atomic.commit(draft, target)
    except OSError as error:
        raise CheckpointError(f"`{target}` was not saved: {error}") from error
    finally:
        atomic.abort(draft)  # where it was not published


def _keep_what_others_added(draft: Path, target: Path) -> None:
    """Copy what lies in an older checkpoint of that name without belonging to it."""
    if not atomic.is_checkpoint(target):
        return
    own = {name.partition("/")[0] for name in atomic.read_manifest(target).files} | {NAME, OWNER}
    for entry in target.iterdir():
        if entry.name not in own and not (draft / entry.name).exists():
            shutil.copytree(entry, draft / entry.name) if entry.is_dir() else shutil.copy2(entry, draft / entry.name)


def _manifest(draft: Path, models: Sequence[Sharded]) -> Manifest:
    scopes = models[0].scopes if models else None
    return Manifest(
        step=models[0].steps_done if models else 0,
        world_size=dist.get_world_size(),
        scopes={}
        if scopes is None
        else {"params": scopes.params, "grads": scopes.grads, "optimizer": scopes.optimizer},
        package_version=package_version(),
        torch_version=str(torch.__version__),
        files=_entries(draft),
        pending_micro_steps=models[0].pending_micro_steps if models else 0,
    )


def _entries(draft: Path) -> dict[str, FileEntry]:
    """Every file, but of checkpoints inside only their manifests: those know the rest."""
    inside = {manifest.parent for manifest in draft.rglob(NAME)}
    found = {}
    for file in sorted(draft.rglob("*")):
        is_known = any(folder in file.parents for folder in inside) and file.name != NAME
        if file.is_file() and not is_known and file.name != OWNER:
            atomic.sync(file)
            found[file.relative_to(draft).as_posix()] = atomic.entry_of(file)
    return found
