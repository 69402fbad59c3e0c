"""Atomic folders: a checkpoint appears under its name only when it is complete.

It is written into a *draft*, a hidden folder next to the final path, and renamed when every byte is on disk. If a
checkpoint of that name exists, the two folders are exchanged in one step if the file system supports it. Otherwise the
older one is renamed to a hidden backup first; if the process dies before the second rename, `find` restores the backup.

A draft has an owner (see `claims`). If two jobs save under one name at the same time, the later one is refused. Drafts
of dead jobs are removed.

One rank calls `begin_draft`, `commit` and `abort`; any rank reads.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import secrets
import shutil
import stat
import sys
from collections.abc import Iterable
from pathlib import Path

from mics_strategy.checkpoint.claims import NAME as OWNER
from mics_strategy.checkpoint.claims import Claim, living_owner
from mics_strategy.checkpoint.manifest import NAME, FileEntry, Manifest
from mics_strategy.errors import CheckpointError

_DRAFT, _BACKUP = "draft", "aside"
_CHUNK_BYTES = 1 << 22
_claims: dict[str, Claim] = {}  # of the drafts that this process writes, by name of the draft
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # Linux, renameat2(2)


def real(path: str | os.PathLike[str]) -> Path:
    """Resolve a symbolic link, because renaming onto the link would replace it."""
    link = Path(path)
    return Path(os.path.realpath(link)) if link.is_symlink() else link


def begin_draft(path: Path) -> Path:
    """Make the draft of a checkpoint, and remove drafts that killed jobs left behind.

    Args:
        path: Final path of the checkpoint, not a link (see `real`).

    Raises:
        CheckpointError: `path` holds something other than a checkpoint, another job is writing it, or the folder is
            not writable.

    Cost:
        30 s, once, if a process on another machine was killed while it saved there less than ten minutes ago.
    """
    _check_replaceable(path)
    draft = path.parent / f".{path.name}.{secrets.token_hex(4)}.{_DRAFT}"
    try:
        draft.mkdir(parents=True)
        _claims[draft.name] = Claim(draft)
    except OSError as error:
        shutil.rmtree(draft, ignore_errors=True)
        advice = "Save to a folder where this user has write permission, on a disk that is mounted for writing."
        if isinstance(error, NotADirectoryError | FileExistsError):
            advice = "A file is in the place of a folder: save to another path, or remove it."
        raise CheckpointError(f"`{path.parent}` is not writable ({error.strerror}). {advice}") from error
    try:
        _remove_stale_drafts(path, draft)
        find(path)
        _check_replaceable(path)
    except BaseException:
        abort(draft)
        raise
    return draft


def _check_replaceable(path: Path) -> None:
    if path.is_file() or (path.is_dir() and not is_checkpoint(path) and any(path.iterdir())):
        raise CheckpointError(
            f"`{path}` exists and is not a sharded checkpoint. Saving there would replace it. Choose another path, or "
            "move it away."
        )


def _remove_stale_drafts(path: Path, draft: Path) -> None:
    """Remove other drafts of a checkpoint, or raise if a living process writes one.

    This process's draft must already exist: of two jobs that begin at the same time, at least one sees the other's.
    """
    now = (draft / OWNER).stat().st_mtime
    for other in _leftovers(path, _DRAFT):
        owner = living_owner(other, now, _claims) if other != draft else None
        if owner is not None:
            raise CheckpointError(
                f"`{path}` is being saved by another job: {owner} is writing its draft `{other.name}`. Give every job "
                "its own folder, or save again when that job has ended."
            )
        if other != draft:
            shutil.rmtree(other, ignore_errors=True)


def commit(draft: Path, path: Path) -> None:
    """Move a complete draft to its final path, replacing an older checkpoint.

    Every file of the draft must already be on disk; see `sync`.

    Raises:
        CheckpointError: The folder at `path` could not be exchanged with the draft.
    """
    _release(draft.name)
    sync(draft)
    if not path.exists():
        os.rename(draft, path)
    elif _swap(draft, path):
        _clear(draft)
    else:
        backup = path.parent / f".{path.name}.{secrets.token_hex(4)}.{_BACKUP}"
        os.rename(path, backup)
        os.rename(draft, path)
        _clear(backup)
    (path / OWNER).unlink(missing_ok=True)
    sync(path.parent)


def abort(draft: Path) -> None:
    """Remove an unfinished draft. What cannot be removed now is removed by the next `begin_draft`."""
    _release(draft.name)
    shutil.rmtree(draft, ignore_errors=True)


def remove(path: Path) -> bool:
    """Delete a checkpoint and the link that names it.

    Under its name the checkpoint is complete or absent, even if the process dies meanwhile.

    Returns:
        Whether `path` was a checkpoint. Anything else is left unchanged.

    Raises:
        CheckpointError: The checkpoint cannot be removed.
    """
    if not is_checkpoint(path):
        return False
    folder = real(path)
    hidden = folder.parent / f".{folder.name}.{secrets.token_hex(4)}.{_DRAFT}"
    try:
        os.rename(folder, hidden)
        _clear(hidden)
        if path.is_symlink():
            path.unlink()
    except OSError as error:
        raise CheckpointError(f"`{path}` could not be removed ({error}). Remove it by hand.") from error
    return True


def find(path: Path) -> bool:
    """Whether `path` is a checkpoint, after restoring a backup of a killed save.

    Do not call it while another process may be writing the checkpoint.
    """
    path = real(path)
    backups = _leftovers(path, _BACKUP)
    for backup in backups:
        if path.exists() or not is_checkpoint(backup):
            shutil.rmtree(backup, ignore_errors=True)
        else:
            os.rename(backup, path)
    return is_checkpoint(path)


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is a finished checkpoint."""
    return (path / NAME).is_file()


def newest_first(folder: Path) -> list[Path]:
    """Return the finished checkpoints of a folder, newest first.

    They are ordered by step, and checkpoints of equal steps by the time of writing. A checkpoint with an unreadable
    manifest comes first, because its step is unknown.
    """
    names = {_checkpoint_name(entry) for entry in folder.iterdir() if entry.is_dir()} if folder.is_dir() else set()
    checkpoints = []
    for path in sorted(folder / name for name in names):
        if find(path):
            try:
                step = read_manifest(path).step
            except CheckpointError:  # loading it raises this error
                step = sys.maxsize
            checkpoints.append((step, (path / NAME).stat().st_mtime_ns, path))
    return [path for _, _, path in sorted(checkpoints, reverse=True)]


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of a checkpoint.

    Raises:
        CheckpointError: The folder or the manifest is missing, or the manifest is damaged.
    """
    file = path / NAME
    if not path.is_dir():
        raise CheckpointError(f"`{path}` {why_no_folder(path)}.")
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"`{path}` is not a finished checkpoint: `{NAME}` cannot be read ({error}). Pass the folder that holds it."
        ) from error
    return Manifest.from_json(text, str(file))


def why_no_folder(path: Path) -> str:
    """Say what a path is that is not a folder, and what to do."""
    if not path.exists():
        return "does not exist. Pass the folder of a checkpoint"
    return (
        "is a file, and this reads folders of sharded checkpoints. `torch.load` reads a full checkpoint, and `mics "
        "export-hf RUN FOLDER` exports a recipe's"
    )


def write_manifest(draft: Path, manifest: Manifest) -> None:
    """Write the manifest of a draft, as its last file."""
    file = draft / NAME
    file.write_text(manifest.to_json())
    sync(file)


def entry_of(file: Path) -> FileEntry:
    """Return size and digest of a file. Reads the whole file."""
    digest, num_bytes = hashlib.sha256(), 0
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with file.open("rb", buffering=0) as opened:
        while read := opened.readinto(buffer):
            digest.update(buffer[:read])
            num_bytes += read
    return FileEntry(num_bytes=num_bytes, sha256=digest.hexdigest())


def check_files(path: Path, manifest: Manifest, names: Iterable[str], *, digests: bool = True) -> None:
    """Verify files against the manifest.

    Args:
        path: Folder of the checkpoint.
        manifest: Manifest of the checkpoint.
        names: Names of the files to verify.
        digests: Whether to verify digests, which reads the files; False compares only sizes.

    Raises:
        CheckpointError: A file is missing or has changed; the error names it.
    """
    for name in names:
        file, expected = path / name, manifest.files[name]
        try:
            _check_regular(file)
            actual = entry_of(file) if digests else FileEntry(num_bytes=file.stat().st_size, sha256=expected.sha256)
        except OSError as error:
            raise CheckpointError(f"`{file}` cannot be read ({error.strerror}). {_REMEDY}") from error
        if actual.num_bytes != expected.num_bytes:
            raise CheckpointError(
                f"`{file}` has {actual.num_bytes} bytes, but had {expected.num_bytes} when it was written. {_REMEDY}"
            )
        if actual != expected:
            raise CheckpointError(
                f"`{file}` has the right size, but other bytes than when it was written: its SHA-256 begins with "
                f"{actual.sha256[:12]} instead of {expected.sha256[:12]}. {_REMEDY}"
            )


def _release(draft_name: str) -> None:
    claim = _claims.pop(draft_name, None)
    if claim is not None:
        claim.release()


def _clear(folder: Path) -> None:
    """Remove a folder that another process may also be removing."""
    while folder.exists():
        try:
            shutil.rmtree(folder)
        except FileNotFoundError:
            continue


def _check_regular(file: Path) -> None:
    """Refuse devices and pipes, which may never reach an end of file."""
    if not stat.S_ISREG(file.stat().st_mode):
        raise CheckpointError(f"`{file}` is not a regular file. {_REMEDY}")


_REMEDY = (
    "The checkpoint is damaged or mixed with another. Load an older one: `newest_checkpoint(folder)` returns the "
    "newest intact one."
)


def sync(path: Path) -> None:
    """Flush a file's contents or a folder's entries to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _leftovers(path: Path, kind: str) -> list[Path]:
    """List drafts or backups of a checkpoint, oldest first."""
    if not path.parent.is_dir():
        return []
    folders = [
        entry
        for entry in path.parent.iterdir()
        if _leftover_kind(entry) == kind and _checkpoint_name(entry) == path.name
    ]
    return sorted(folders, key=lambda entry: entry.stat().st_mtime_ns)


def _leftover_kind(entry: Path) -> str | None:
    """Return the kind of a hidden folder: draft, backup, or None for any other."""
    kind = entry.name.rpartition(".")[2]
    return kind if entry.name.startswith(".") and kind in (_DRAFT, _BACKUP) else None


def _checkpoint_name(entry: Path) -> str:
    """Return the name of the checkpoint to which a folder belongs."""
    return entry.name if _leftover_kind(entry) is None else entry.name[1:].rsplit(".", 2)[0]


def _swap(draft: Path, target: Path) -> bool:
    """Exchange two folders in one step; False if the system does not support it."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(draft), _AT_FDCWD, os.fsencode(target), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EPERM):
        return False
    raise CheckpointError(
        f"`{target}` could not be replaced by `{draft}` ({os.strerror(code)}). Check the permissions of both folders, "
        "or save under another name."
    )
