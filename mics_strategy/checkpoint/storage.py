"""How is a checkpoint written and read without ever being half there?

It is written into a *draft*, a hidden folder beside its final place, and renamed when every byte of it is on the disk.
Where a checkpoint of that name exists, the two folders change places in one step, where the file system can; else the
older one steps aside under a hidden name, from which `find` brings it back should the process have died in between.

One rank calls `begin`, `publish` and `discard`; any rank reads.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import secrets
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

from mics_strategy.checkpoint.manifest import NAME, FileEntry, Manifest
from mics_strategy.errors import CheckpointError

_DRAFT, _ASIDE = "draft", "aside"
_CHUNK_BYTES = 1 << 22
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # Linux, renameat2(2)


def begin(path: Path) -> Path:
    """Make the draft of a checkpoint, after those that runs which were killed have left.

    Args:
        path: Where the checkpoint will be.

    Raises:
        CheckpointError: `path` holds something that is no checkpoint, or nothing can be written there.
    """
    find(path)
    if path.is_file() or (path.is_dir() and not is_checkpoint(path) and any(path.iterdir())):
        raise CheckpointError(
            f"`{path}` exists and is no sharded checkpoint; saving there would replace it. Choose another path, or "
            "move it away."
        )
    for left in _hidden(path, _DRAFT):
        shutil.rmtree(left, ignore_errors=True)
    draft = path.parent / f".{path.name}.{secrets.token_hex(4)}.{_DRAFT}"
    try:
        draft.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(
            f"`{path.parent}` cannot be written ({error.strerror}). Give a folder that this user may write, on a disk "
            "that is mounted for writing."
        ) from error
    return draft


def publish(draft: Path, path: Path) -> None:
    """Put a whole draft in its final place, in the place of an older checkpoint of that name.

    Every file of it must be on the disk already; see `sync`.

    Raises:
        CheckpointError: `path` holds something else by now.
    """
    sync(draft)
    if not path.exists():
        os.rename(draft, path)
    elif _exchange(draft, path):
        shutil.rmtree(draft)
    else:
        aside = path.parent / f".{path.name}.{secrets.token_hex(4)}.{_ASIDE}"
        os.rename(path, aside)
        os.rename(draft, path)
        shutil.rmtree(aside)
    sync(path.parent)


def discard(draft: Path) -> None:
    """Remove a draft that will not be finished. What cannot be removed is removed by the next `begin`."""
    shutil.rmtree(draft, ignore_errors=True)


def remove(path: Path) -> bool:
    """Delete a checkpoint. Under its name it is whole or gone, even if the process dies meanwhile.

    Returns:
        Whether it was one; anything else is left alone.

    Raises:
        CheckpointError: It cannot be removed.
    """
    if not is_checkpoint(path):
        return False
    hidden = path.parent / f".{path.name}.{secrets.token_hex(4)}.{_DRAFT}"
    try:
        os.rename(path, hidden)
        shutil.rmtree(hidden)
    except OSError as error:
        raise CheckpointError(f"`{path}` could not be removed ({error}). Remove it yourself.") from error
    return True


def find(path: Path) -> bool:
    """Whether there is a checkpoint, after bringing back one that had stepped aside for one that never came.

    Not while another process may be writing it.
    """
    aside = _hidden(path, _ASIDE)
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


_REMEDY = "The checkpoint is damaged or mixed with another; use an older one (`resume='auto'` finds it)."


def sync(path: Path) -> None:
    """Have the disk hold what was written to a file, or which entries a folder has."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _hidden(path: Path, kind: str) -> list[Path]:
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


def _exchange(one: Path, other: Path) -> bool:
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
