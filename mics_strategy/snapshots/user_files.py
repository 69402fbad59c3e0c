"""Folders and files in host memory that are this user's alone.

A folder that all users may write to, such as `/dev/shm`, holds one folder of each user, with the mode 0700. What is
found there is refused if another user could have put it there: it has another owner, a mode that lets others in, or is
a link.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mics_strategy.errors import CheckpointError

_OTHERS = 0o077  # bits of a mode that let the group or others in


def make_private_folder(path: Path) -> Path:
    """Make a folder of this user, unless there is one.

    Raises:
        CheckpointError: It cannot be made, or what is there may be another user's.
    """
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        check_private_folder(path)
    except OSError as error:
        raise CheckpointError(
            f"Snapshots cannot be kept in `{path.parent}` ({error.strerror}). Pass `folder`: a folder in memory "
            "(tmpfs) where this user may write."
        ) from error
    return path


def check_private_folder(path: Path) -> None:
    """Check that a folder is this user's alone.

    Raises:
        CheckpointError: It is not; the error says why.
    """
    found = path.lstat()
    _check(path, found, is_kind=stat.S_ISDIR(found.st_mode), kind="folder")


def _check(path: Path, found: os.stat_result, *, is_kind: bool, kind: str) -> None:
    mode = stat.S_IMODE(found.st_mode)
    problem = (
        f"it is no {kind}"
        if not is_kind
        else f"it belongs to the user {found.st_uid} and not to {os.geteuid()}"
        if found.st_uid != os.geteuid()
        else f"its mode {mode:o} lets other users in"
        if mode & _OTHERS
        else ""
    )
    if problem:
        raise CheckpointError(
            f"`{path}` is not used for snapshots: {problem}. Another user may have put it there. Remove it, or pass "
            "another `folder`."
        )


@contextmanager
def open_private(path: Path) -> Iterator[int]:
    """Open a file of this user for reading; yields its descriptor.

    Raises:
        CheckpointError: It is missing, a link, no regular file, or may be another user's.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe would block without a writer
    except OSError as error:
        raise CheckpointError(f"`{path}` cannot be read ({error.strerror}): it is missing, or a link.") from error
    try:
        found = os.fstat(descriptor)
        _check(path, found, is_kind=stat.S_ISREG(found.st_mode), kind="regular file")
        yield descriptor
    finally:
        os.close(descriptor)


def read_private(path: Path) -> bytes:
    """Read a file of this user. Raises as `open_private`."""
    with open_private(path) as descriptor, os.fdopen(os.dup(descriptor), "rb") as file:
        return file.read()


def write_private(path: Path, data: bytes) -> None:
    """Write a file that appears with all of its bytes, or not at all."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    os.rename(draft, path)
