"""The folder of one job's snapshots on one node, and how a restarted job finds it.

    /dev/shm/mics_strategy-1000/        of the user, 0700
      3f9c.../                          of a job
        lock                            locked while a process of the job runs on this node
        launcher-8a0d....json           the launcher that restarts the job here
        000000000150-5b1c77e0-2/        a snapshot, see `parts`

A launcher (the agent of torchrun) stays the same process when it starts its workers again, and no other job has it. So
the job of a process is that whose folder names its parent process: by its number, its start and the machine's boot. It
is enough that one node knows the job: the others, and a launcher that is new, take the name from it. A store's keys
would be lost with the node that holds the store.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import time
import weakref
from pathlib import Path

from mics_strategy.checkpoint.claims import identity_of
from mics_strategy.errors import CheckpointError, ConfigError
from mics_strategy.snapshots.user_files import (
    check_private_folder,
    make_private_folder,
    read_private,
    write_private,
)

LEFT_OVER_S = 24 * 3600.0  # age from which the snapshots of a job that has ended are removed
_LOCK_WITHIN_S = 10.0  # in which a killed process of the same job is gone
_LAUNCHER = "launcher"
_open: weakref.WeakValueDictionary[Path, JobFolder] = weakref.WeakValueDictionary()  # in this process
_ended: set[Path] = set()  # folders to be removed at the end of the job
num_begun: dict[str, int] = {}  # jobs that this process has begun under each launcher


def user_folder(folder: Path) -> Path:
    """The folder of this user's snapshots, made if it is missing."""
    return make_private_folder(folder / f"mics_strategy-{os.geteuid()}")


def folder_identity(folder: Path) -> tuple[object, ...]:
    """What is equal on ranks that see the same folder."""
    found = folder.stat()
    identity = identity_of(os.getpid())
    return identity["boot"] or identity["host"], found.st_dev, found.st_ino


def launcher_of(*, begins_again: bool) -> int:
    """The process that starts this training again; 0 without one.

    Args:
        begins_again: Whether this process does, where no launcher does.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return os.getppid()
    return os.getpid() if begins_again else 0


def launcher_key(pid: int) -> str:
    """A name of a launcher, and of the training in this process; empty without one.

    A script may train several models, one after the other, which have numbers in this order.
    """
    identity = identity_of(pid)
    if not pid or not identity["boot"] or identity["started"] is None:
        return ""
    launcher = json.dumps([identity[key] for key in ("boot", "namespace", "pid", "started")])
    number = num_begun.get(launcher, 0)
    num_begun[launcher] = number + 1
    return hashlib.sha256(f"{launcher} {number}".encode()).hexdigest()[:32]


def known_job(folder: Path, key: str) -> str | None:
    """The name of the job of a launcher in a user's folder; None if it is not known there."""
    found = sorted(folder.glob(f"*/{_LAUNCHER}-{key}.json")) if key else []
    return found[0].parent.name if found else None


def new_job() -> str:
    """A name that no other job has."""
    return secrets.token_hex(16)


def check_job(job: str) -> None:
    """Check the name of a job that a user has given.

    Raises:
        ConfigError: It is no name of a folder.
    """
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}", job):
        raise ConfigError(f"`job={job!r}` is no name of a job. Use up to 100 letters, digits, and `_`, `-` or `.`.")


class JobFolder:
    """The folder of a job on this node.

    Args:
        folder: Folder of the user.
        job: Name of the job.

    Attributes:
        path: Path of the folder.

    Raises:
        CheckpointError: It may be another user's, or this process already keeps snapshots in it.
    """

    def __init__(self, folder: Path, job: str) -> None:
        self.path = make_private_folder(folder / job)
        self._lock: int | None = None
        if _open:  # of one job, the POSIX lock would not show it; of two, no snapshots would be of one moment
            raise CheckpointError(
                f"This process already keeps snapshots of the job `{next(iter(_open)).name}`. `close()` them first. Of "
                "several models that are trained together, snapshots would be of different steps: save them with "
                "`atomic_checkpoint_folder`."
            )
        _open[self.path] = self

    def lock(self, *, is_alone: bool = False) -> None:
        """Let no other job use the folder while this process runs. Called by the leader of a node.

        The lock is of POSIX, so that it ends with this process: its children do not inherit it.

        Args:
            is_alone: Whether no other job can have this name. Who has the lock then is of this job, and was taken for
                lost while it lives.

        Raises:
            CheckpointError: A living process has it.
        """
        self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        deadline_s = time.monotonic() + _LOCK_WITHIN_S
        while not _try_lock(self._lock) and not is_alone:
            if time.monotonic() > deadline_s:
                raise CheckpointError(
                    f"The job `{self.path.name}` already runs on this node: a living process has locked `{self.path}`. "
                    "Give each job a name of its own."
                )
            time.sleep(0.05)

    def name_launcher(self, pid: int, key: str) -> None:
        """Let the trainings that this launcher starts later find the folder."""
        if key:
            write_private(self.path / f"{_LAUNCHER}-{key}.json", json.dumps(identity_of(pid)).encode())

    def snapshots(self) -> list[Path]:
        """Folders of snapshots, whole or not.

        Raises:
            CheckpointError: One may be another user's, or the job's folder was removed.
        """
        try:
            folders = sorted(path for path in self.path.iterdir() if re.fullmatch(r"\d+-\w+-\d+", path.name))
        except OSError as error:
            raise CheckpointError(
                f"The folder of this job's snapshots, `{self.path}`, cannot be read ({error.strerror}). Start the job "
                "again: it continues from what other nodes have."
            ) from error
        for path in folders:
            check_private_folder(path)
        return folders

    def remove(self, *, begins_again: bool = False) -> None:
        """Remove the folder, when the training has ended.

        Args:
            begins_again: Whether the job begins again if a rank is lost now. The folder stays until `remove_ended`.
        """
        if begins_again:
            _ended.add(self.path)
        else:
            shutil.rmtree(self.path, ignore_errors=True)  # ranks of this node may do it at the same time
        self.release()

    def release(self) -> None:
        """Let another object keep snapshots in the folder."""
        _open.pop(self.path, None)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def remove_ended() -> None:
    """Remove the folders of trainings that have ended, in a job that cannot begin again any more."""
    for path in _ended:
        shutil.rmtree(path, ignore_errors=True)
    _ended.clear()


def release_all() -> None:
    """Let other objects of this process keep snapshots in all of its folders."""
    for folder in list(_open.values()):
        folder.release()


def remove_left_overs(folder: Path, job: str) -> list[str]:
    """Remove the snapshots of this user's jobs that ended a day ago; returns their names.

    A job runs if a process has its lock, or if its launcher lives.

    Args:
        folder: Folder of the user.
        job: Name of this job, whose folder stays.
    """
    removed = []
    for path in sorted(folder.iterdir()):
        if path.name != job and path.is_dir() and not path.is_symlink() and _is_left_over(path):
            shutil.rmtree(path, ignore_errors=True)  # another job may remove it at the same time
            removed.append(path.name)
    return removed


def _is_left_over(path: Path) -> bool:
    try:
        newest = max(entry.lstat().st_mtime for entry in (path, *path.iterdir()))
        if time.time() - newest < LEFT_OVER_S:
            return False
        if any(_is_alive(json.loads(read_private(file))) for file in path.glob(f"{_LAUNCHER}-*.json")):
            return False
        descriptor = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except (OSError, ValueError, CheckpointError):
        return False  # not a folder of ours, or another job removes it now
    try:
        return _try_lock(descriptor)
    finally:
        os.close(descriptor)


def _is_alive(launcher: dict[str, object]) -> bool:
    """Whether a launcher lives; one in another table of processes may live as long as the machine is not booted."""
    here = identity_of(int(str(launcher["pid"])))
    if launcher["boot"] != here["boot"]:
        return False
    return launcher["namespace"] != here["namespace"] or launcher["started"] == here["started"] is not None


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
