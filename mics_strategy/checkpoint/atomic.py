"""How is a checkpoint written and read without ever being half there?

It is written into a *draft*, a hidden folder beside its final place, and renamed when every byte of it is on the disk.
Where a checkpoint of that name exists, the two folders change places in one step, where the file system can; else the
older one steps aside under a hidden name, from which `find` brings it back should the process have died in between.

A draft has an owner (`claims`): of two jobs that save under one name at the same time the later one is refused, and
what a dead one has left is removed.

One rank calls `begin`, `publish` and `discard`; any rank reads.
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

_DRAFT, _ASIDE = "draft", "aside"
_CHUNK_BYTES = 1 << 22
_claims: dict[str, Claim] = {}  # by the name of the draft, of those that this process writes
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # Linux, renameat2(2)


def real(path: str | os.PathLike[str]) -> Path:
    """Where the checkpoint of a name is: a link's target, for what is renamed would replace the link."""
    given = Path(path)
    return Path(os.path.realpath(given)) if given.is_symlink() else given


def begin_draft(path: Path) -> Path:
    """Make the draft of a checkpoint, and remove those that runs which were killed have left.

    Args:
        path: Final path of the checkpoint, not a link (see `real`).

    Raises:
        CheckpointError: `path` holds something that is no checkpoint, another job is writing it, or nothing can be
            written there.

    Cost:
        30 s, once, where a process of another machine was killed while it saved there, less than ten minutes ago.
    """
    _check_replaceable(path)
    draft = path.parent / f".{path.name}.{secrets.token_hex(4)}.{_DRAFT}"
    try:
        draft.mkdir(parents=True)
        _claims[draft.name] = Claim(draft)
    except OSError as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise CheckpointError(
            f"`{path.parent}` cannot be written ({error.strerror}). Give a folder that this user may write, on a disk "
            "that is mounted for writing."
        ) from error
    try:
        _remove_drafts_of_the_dead(path, draft)
        find(path)
        _check_replaceable(path)
    except BaseException:
        abort(draft)
        raise
    return draft


def _check_replaceable(path: Path) -> None:
    if path.is_file() or (path.is_dir() and not is_checkpoint(path) and any(path.iterdir())):
        raise CheckpointError(
            f"`{path}` exists and is no sharded checkpoint; saving there would replace it. Choose another path, or "
            "move it away."
        )


def _remove_drafts_of_the_dead(path: Path, draft: Path) -> None:
    """Remove the other drafts of a checkpoint, or refuse where somebody writes one.

    The own one is there already: of two that begin at the same time, one at least finds the other's.
    """
    now = (draft / OWNER).stat().st_mtime
    for other in _hidden_name(path, _DRAFT):
        owner = living_owner(other, now, _claims) if other != draft else None
        if owner is not None:
            raise CheckpointError(
                f"`{path}` is being saved by another job: {owner} writes its draft `{other.name}`. Give every job a "
                "folder of its own, or save again when that one has ended."
            )
        if other != draft:
            shutil.rmtree(other, ignore_errors=True)


def commit(draft: Path, path: Path) -> None:
    """Put a whole draft in its final place, in the place of an older checkpoint of that name.

    Every file of it must be on the disk already; see `sync`.

    Raises:
        CheckpointError: `path` holds something else by now.
    """
    _release(draft.name)
    sync(draft)
    if not path.exists():
        os.rename(draft, path)
    elif _swap(draft, path):
        _clear(draft)
    else:
        aside = path.parent / f".{path.name}.{secrets.token_hex(4)}.{_ASIDE}"
        os.rename(path, aside)
        os.rename(draft, path)
        _clear(aside)
    (path / OWNER).unlink(missing_ok=True)
    sync(path.parent)


def abort(draft: Path) -> None:
    """Remove a draft that will not be finished. What cannot be removed is removed by the next `begin`."""
    _release(draft.name)
    shutil.rmtree(draft, ignore_errors=True)


def remove(path: Path) -> bool:
    """Delete a checkpoint, and the link that names it. It is whole or gone, even if the process dies meanwhile.

    Returns:
        Whether it was one; anything else is left alone.

    Raises:
        CheckpointError: It cannot be removed.
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
        raise CheckpointError(f"`{path}` could not be removed ({error}). Remove it yourself.") from error
    return True


def find(path: Path) -> bool:
    """Whether there is a checkpoint, after bringing back one that had stepped aside for one that never came.

    Not while another process may be writing it.
    """
    path = real(path)
    aside = _hidden_name(path, _ASIDE)
    for left in aside:
        if path.exists() or not is_checkpoint(left):
            shutil.rmtree(left, ignore_errors=True)
        else:
            os.rename(left, path)
    return is_checkpoint(path)


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is a checkpoint that was finished."""
    return (path / NAME).is_file()


def newest_first(folder: Path) -> list[Path]:
    """The finished checkpoints in a folder: those of the latest steps first, of equal steps the last written.

    One whose manifest cannot be read comes before all others: nobody knows how far it was.
    """
    names = {_name_of(entry) for entry in folder.iterdir() if entry.is_dir()} if folder.is_dir() else set()
    found = []
    for path in sorted(folder / name for name in names):
        if find(path):
            try:
                step = read_manifest(path).step
            except CheckpointError:  # whoever tries to load it is told
                step = sys.maxsize
            found.append((step, (path / NAME).stat().st_mtime_ns, path))
    return [path for _, _, path in sorted(found, reverse=True)]


def read_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        CheckpointError: There is none, or it is damaged.
    """
    file = path / NAME
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"`{path}` is no finished checkpoint: `{NAME}` cannot be read ({error}). Name the folder that holds it."
        ) from error
    return Manifest.from_json(text, str(file))


def write_manifest(draft: Path, manifest: Manifest) -> None:
    """Finish a draft."""
    file = draft / NAME
    file.write_text(manifest.to_json())
    sync(file)


def entry_of(file: Path) -> FileEntry:
    """Size and digest of a file. Reads it."""
    digest, num_bytes = hashlib.sha256(), 0
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with file.open("rb", buffering=0) as opened:
        while read := opened.readinto(buffer):
            digest.update(buffer[:read])
            num_bytes += read
    return FileEntry(num_bytes=num_bytes, sha256=digest.hexdigest())


def check_files(path: Path, manifest: Manifest, names: Iterable[str], *, digests: bool = True) -> None:
    """Hold files against the manifest.

    Args:
        path: The checkpoint.
        manifest: Its own.
        names: Which files.
        digests: Whether to read them; else their sizes are compared.

    Raises:
        CheckpointError: One is missing, or not what was written, naming it.
    """
    for name in names:
        file, expected = path / name, manifest.files[name]
        try:
            _check_regular(file)
            found = entry_of(file) if digests else FileEntry(num_bytes=file.stat().st_size, sha256=expected.sha256)
        except OSError as error:
            raise CheckpointError(f"`{file}` cannot be read ({error.strerror}). {_REMEDY}") from error
        if found.num_bytes != expected.num_bytes:
            raise CheckpointError(
                f"`{file}` has {found.num_bytes} bytes and had {expected.num_bytes} when it was written. {_REMEDY}"
            )
        if found != expected:
            raise CheckpointError(
                f"`{file}` has the right size and other bytes than were written: its SHA-256 begins with "
                f"{found.sha256[:12]} and not with {expected.sha256[:12]}. {_REMEDY}"
            )


def _release(draft_name: str) -> None:
    claim = _claims.pop(draft_name, None)
    if claim is not None:
        claim.release()


def _clear(folder: Path) -> None:
    """Remove a folder that another process may be removing, too."""
    while folder.exists():
        try:
            shutil.rmtree(folder)
        except FileNotFoundError:
            continue


def _check_regular(file: Path) -> None:
    """Refuse devices and pipes, whose reading need not end."""
    if not stat.S_ISREG(file.stat().st_mode):
        raise CheckpointError(f"`{file}` is no file that could be read to its end. {_REMEDY}")


_REMEDY = (
    "The checkpoint is damaged or mixed with another; use an older one (`newest_checkpoint(folder)` finds the newest "
    "whole one)."
)


def sync(path: Path) -> None:
    """Have the disk hold what was written to a file, or which entries a folder has."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _hidden_name(path: Path, kind: str) -> list[Path]:
    """Drafts of a checkpoint, or earlier versions of it that have stepped aside, oldest first."""
    if not path.parent.is_dir():
        return []
    found = [entry for entry in path.parent.iterdir() if _kind_of(entry) == kind and _name_of(entry) == path.name]
    return sorted(found, key=lambda entry: entry.stat().st_mtime_ns)


def _kind_of(entry: Path) -> str | None:
    """Whether a folder is hidden, and why."""
    kind = entry.name.rpartition(".")[2]
    return kind if entry.name.startswith(".") and kind in (_DRAFT, _ASIDE) else None


def _name_of(entry: Path) -> str:
    """The name of the checkpoint to which a folder belongs."""
    return entry.name if _kind_of(entry) is None else entry.name[1:].rsplit(".", 2)[0]


def _swap(one: Path, other: Path) -> bool:
    """Let two folders change places in one step; False where the system or the file system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EPERM):
        return False
    raise CheckpointError(f"`{one}` could not take the place of `{other}` ({os.strerror(number)}).")
