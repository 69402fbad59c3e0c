"""The job of a process: what is asked for, which one it is, and which of its snapshots is the newest."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mics_strategy.comm.consensus import check_equal, gather_objects, run_on_all_ranks
from mics_strategy.comm.host_messages import HostMessages
from mics_strategy.errors import ConfigError
from mics_strategy.recovery.membership import is_member
from mics_strategy.snapshots import job_folder
from mics_strategy.snapshots.job_folder import JobFolder
from mics_strategy.snapshots.nodes import Nodes
from mics_strategy.snapshots.open_snapshot import OpenSnapshot, Place, age_of, find_snapshot

_OPTIONS = ("every", "job", "folder")
_num_ended: Counter[tuple[Path, str]] = Counter()  # trainings of a named job that this process has ended


@dataclass(frozen=True, slots=True)
class RecoveryOptions:
    """What ``recovery=`` asks for.

    Attributes:
        has_snapshots: Whether snapshots are taken.
        options: Options of `MemorySnapshots`.
    """

    has_snapshots: bool
    options: Mapping[str, Any]

    @classmethod
    def of(cls, recovery: str | Mapping[str, Any]) -> RecoveryOptions:
        """Parse the argument.

        Args:
            recovery: ``"none"``, ``"memory"``, or options of `MemorySnapshots` (`every`, `job`, `folder`).

        Raises:
            ConfigError: It is something else.
        """
        if isinstance(recovery, Mapping) and set(recovery) <= {*_OPTIONS}:
            return cls(True, dict(recovery))
        if recovery in ("none", "memory"):
            return cls(recovery == "memory", {})
        raise ConfigError(
            f"`recovery={recovery!r}` is not supported. Use 'none', 'memory', or a dict with options of "
            f"`MemorySnapshots` ({', '.join(_OPTIONS)}), such as {{'every': 50}}."
        )


@dataclass(frozen=True, slots=True)
class TrainingCounts:
    """The trainings with snapshots that this process has begun and ended, by which it tells one from the next.

    Attributes:
        begun: Trainings that have begun, by launcher.
        ended: Trainings that have ended, by folder and name.
    """

    begun: Mapping[str, int]
    ended: Mapping[tuple[Path, str], int]

    @classmethod
    def now(cls) -> TrainingCounts:
        """The present ones."""
        return cls(dict(job_folder.num_begun), dict(_num_ended))

    def restore(self) -> None:
        """Forget what came later: it begins again."""
        job_folder.num_begun.clear()
        job_folder.num_begun.update(self.begun)
        _num_ended.clear()
        _num_ended.update(self.ended)


class SnapshotJob:
    """The job whose snapshots a process takes and finds. It needs no model. Collective.

    Args:
        every: See `MemorySnapshots`.
        job: See `MemorySnapshots`.
        folder: See `MemorySnapshots`.

    Attributes:
        every: Steps between snapshots, or "auto".
        place: Folder of its snapshots on this node, and the way to those of other nodes.
        is_new: Whether no node knows the job.

    Raises:
        ConfigError: An option is invalid, or differs between ranks.
        CheckpointError: The folder cannot be used, or may be another user's. Raised on every rank.
    """

    def __init__(
        self, *, every: int | str = "auto", job: str | None = None, folder: str | os.PathLike[str] = "/dev/shm"
    ) -> None:
        self.every = every
        self._folder = Path(folder)
        self._named = None if job is None else (self._folder, job)
        launcher = job_folder.launcher_of(begins_again=is_member())

        def look() -> tuple[tuple[object, ...], str, str | None]:
            _check_every(every)
            if is_member(in_place=True):
                raise ConfigError(
                    "`MemorySnapshots` has a process group of its own, and `Recovery`, which this process uses, ends "
                    "all groups when a rank is lost. Use one of them, or `close()` the other first."
                )
            user_folder = job_folder.user_folder(self._folder)
            identity = job_folder.folder_identity(user_folder)
            if job is not None:
                job_folder.check_job(job)
                num_ended = _num_ended[self._folder, job]
                return identity, "", f"{job}.{num_ended}" if num_ended else job
            key = job_folder.launcher_key(launcher)
            return identity, key, job_folder.known_job(user_folder, key)

        identity, key, known = run_on_all_ranks(look)
        found = gather_objects((identity, known, {"job": repr(job), "every": repr(every)}), "MemorySnapshots")
        check_equal([options for *_, options in found])
        names = sorted({name for _, name, _ in found if name is not None})
        if len(names) > 1:
            raise ConfigError(
                f"The launchers of this job have started several jobs before: {', '.join(names)}. Pass `job`: one of "
                "them, or a new name."
            )
        self.is_new = not names
        name = names[0] if names else gather_objects(job_folder.new_job())[0]
        nodes = Nodes.of(identity for identity, *_ in found)
        own_folder = run_on_all_ranks(
            lambda: self._enter(name, (launcher, key), is_leader=nodes.is_leader(dist.get_rank()))
        )
        self.place = Place(
            folder=own_folder, nodes=nodes, messages=HostMessages("mics.snapshots"), rank=dist.get_rank()
        )

    def _enter(self, name: str, launcher: tuple[int, str], *, is_leader: bool) -> JobFolder:
        user_folder = job_folder.user_folder(self._folder)
        own_folder = JobFolder(user_folder, name)
        own_folder.name_launcher(*launcher)
        if is_leader:
            own_folder.lock(is_alone=is_member() and self._named is None)
            job_folder.remove_left_overs(user_folder, name)
        return own_folder

    def open(self) -> OpenSnapshot | None:
        """Open the newest whole snapshot; None if there is none. Collective.

        Rank 0 prints which one it is, with its step and its age. `OpenSnapshot.close` is called when all is read.
        """
        snapshot = find_snapshot(self.place)
        if snapshot is not None:
            self.report(f"the newest is of step {snapshot.step}, taken {age_of(snapshot.time_s)} ago")
        else:
            self.report("there is none: the job is new" if self.is_new else "none is whole")
        return snapshot

    def note_end(self) -> None:
        """The training has ended: a next one in this process has snapshots of its own, also under the same name.

        A script that is started again begins with its first training, which must not continue from those of a later
        one. Jobs without a name have numbers anyway (see `job_folder.launcher_key`).
        """
        if self._named is not None:
            _num_ended[self._named] += 1

    def report(self, text: str) -> None:
        """Print a line on rank 0."""
        if self.place.rank == 0:
            print(f"Snapshots of the job {self.place.folder.path.name}: {text}.", flush=True)


def _check_every(every: object) -> None:
    if every != "auto" and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
        raise ConfigError(f"`every={every!r}` is no number of steps. Use 1 or more, or 'auto'.")
