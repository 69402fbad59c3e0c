"""Snapshots in host memory, from which a job continues after all of its processes died.

    training    step | copy to the host | step  step  step ...            step | copy | ...
    background         write > digests > wait for all > send to the buddy > wait for all > remove the one before

The copy alone is in the way of a step. The snapshot before is removed when the new one is whole on every rank, so a
kill at any moment leaves one.
"""

from __future__ import annotations

import math
import os
import secrets
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mics_strategy.checkpoint.load import load_checkpoint
from mics_strategy.checkpoint.save import PendingSave, finish_saves, manifest_of, plan_save
from mics_strategy.checkpoint.save_planner import HostCopyPool, ShardedSavePlanner
from mics_strategy.checkpoint.shard_report import StoreChannel
from mics_strategy.checkpoint.state import Optimizers, ReplicaId
from mics_strategy.comm import host_messages
from mics_strategy.comm.consensus import gather_objects, run_on_all_ranks
from mics_strategy.engine.handle import Sharded
from mics_strategy.errors import CheckpointError
from mics_strategy.recovery.membership import is_member, raise_if_failed
from mics_strategy.snapshots import job_folder
from mics_strategy.snapshots.buddy import BuddyExchange
from mics_strategy.snapshots.job import SnapshotJob
from mics_strategy.snapshots.open_snapshot import age_of, later_checkpoint
from mics_strategy.snapshots.user_files import make_private_folder
from mics_strategy.snapshots.write import SnapshotWriter

SHARE_OF_TIME = 0.01  # that copies may take of a training with `every="auto"`
_FIRST_AUTO_STEP = 3  # of which the one before shows how long a step takes
_NUM_KEPT = 2  # of which one is being written
_open: weakref.WeakSet[MemorySnapshots] = weakref.WeakSet()  # in this process


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotCost:
    """What the last snapshot of this rank cost.

    Attributes:
        num_bytes: Bytes that this rank wrote.
        planned_buddy_bytes: Bytes of the states that this rank sends to its buddy.
        sent_bytes: Bytes that were sent to the buddy: these states, and what describes them.
        copy_s: Seconds that the training waited.
        background_s: Seconds from then until the snapshot was whole on all ranks.
    """

    num_bytes: int
    planned_buddy_bytes: int
    sent_bytes: int
    copy_s: float
    background_s: float


@dataclass(slots=True)
class _Interval:
    """How many steps there are between snapshots, equal on all ranks.

    Attributes:
        every: Number of steps, or "auto".
        steps: Steps since the last snapshot.
        due: Steps after which the next one is due.
        begin_s: When these steps began.
    """

    every: int | str
    steps: int = 0
    due: int = 0
    begin_s: float = 0.0

    def begin(self, seconds_by_rank: list[tuple[float, float, float]]) -> None:
        """Begin the next interval.

        Args:
            seconds_by_rank: Seconds of a copy, of its background, and of a step, on each rank; 0 if unknown.
        """
        self.due = self.every if isinstance(self.every, int) else _FIRST_AUTO_STEP
        if self.every == "auto" and all(copy_s > 0 and step_s > 0 for copy_s, _, step_s in seconds_by_rank):
            by_rank = [max(c / SHARE_OF_TIME, b) / s for c, b, s in seconds_by_rank]
            self.due = max(1, math.ceil(max(by_rank)))
        self.steps, self.begin_s = 0, time.monotonic()


class MemorySnapshots:
    """Snapshots of a training in host memory. Collective.

    Every so many optimizer steps each rank copies its states, and writes them in the background into a folder in
    memory (tmpfs), which outlives the process. When processes die, and the launcher starts the script again, `load`
    continues from the newest snapshot that is whole across the job, on any number of ranks. A node that is lost takes
    nothing with it: states that no other node has are also sent to the next node.

    Args:
        sharded: Model.
        optimizers: Optimizers, in order or by key.
        every: Optimizer steps between two snapshots. "auto": the copies take 1 % of the time, as measured by the
            snapshot before, and the background ends before the next one begins.
        job: Name of the job, equal on all ranks, for a job that is started again by hand. By default the job is that
            of the launcher (torchrun) that started this process, and another launcher's is another job. Adapters pass
            a job that they have opened.
        folder: Folder in memory on each node.

    Attributes:
        cost: What the last complete snapshot cost; None before.

    Raises:
        ConfigError: An option is invalid, or differs between ranks.
        CheckpointError: The folder cannot be used, or may be another user's. Raised on every rank.

    Cost:
        Host memory: three times what the ranks of a node write (a copy and two snapshots), which is what they hold, of
        equal copies one, and the same for what they keep for other nodes. A step with a snapshot: a copy of it, and
        four small collectives. Background: reading and writing it, SHA-256, and the messages to the buddy.
    """

    def __init__(
        self,
        sharded: Sharded,
        optimizers: Optimizers = (),
        *,
        every: int | str = "auto",
        job: str | SnapshotJob | None = None,
        folder: str | os.PathLike[str] = "/dev/shm",
    ) -> None:
        self._sharded = sharded
        self._optimizers = optimizers
        self._job = job if isinstance(job, SnapshotJob) else SnapshotJob(every=every, job=job, folder=folder)
        self._place = self._job.place
        self._buddies = BuddyExchange(self._place.messages, self._place.nodes, self._place.rank)
        self._host = HostCopyPool()
        self._pending: tuple[PendingSave, SnapshotWriter] | None = None
        self._channel: StoreChannel | None = None
        self._attempt = gather_objects(secrets.token_hex(4))[0]
        self._num_taken = 0
        self._interval = _Interval(self._job.every)
        self._interval.begin([(0.0, 0.0, 0.0)])
        self._copy_s = 0.0
        self._planned_bytes = 0
        self.cost: SnapshotCost | None = None
        _open.add(self)

    @property
    def interval(self) -> int:
        """Steps from the last snapshot to the next one."""
        return self._interval.due

    # -- loading ----------------------------------------------------------------------------------------------

    def load(
        self, default: Mapping[str, Any] | None = None, *, checkpoints: str | os.PathLike[str] | None = None
    ) -> dict[str, Any]:
        """Continue from the newest whole snapshot of this job, or from a checkpoint, if there is any. Collective.

        Rank 0 prints which one it is, with its step and its age. The checkpoint is taken if it is of a later step.

        Args:
            default: Extra state of a training that begins.
            checkpoints: Folder of checkpoints on disk.

        Returns:
            Extra state of the snapshot or the checkpoint; otherwise `default`.

        Raises:
            CheckpointError: What is newest belongs to another model.
        """
        self.finish()
        self._sharded.internals.groups.agree_on(None, "MemorySnapshots.load (call it on every rank)")
        snapshot = self._job.open()
        try:
            path = later_checkpoint(checkpoints, -1 if snapshot is None else snapshot.step)
            if path is None and snapshot is not None:
                snapshot.load(self._sharded, self._optimizers)
                self._job.report(f"continue from step {snapshot.step}")
                return snapshot.extra
        finally:
            if snapshot is not None:
                snapshot.close()
        if path is None:
            return dict(default or {})
        extra = load_checkpoint(path, self._sharded, self._optimizers)
        self._job.report(f"continue from the checkpoint of step {self._sharded.steps_done}, saved {age_of(path)} ago")
        return extra

    # -- taking -----------------------------------------------------------------------------------------------

    def after_step(self, extra: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None = None) -> bool:
        """Count an optimizer step, and take a snapshot if one is due. Called on every rank after each step.

        Args:
            extra: Other state of rank 0, such as schedulers and counters, as for `save_checkpoint`; or a function that
                returns it, called when a snapshot is due.

        Returns:
            Whether a snapshot was taken. It may still be written.

        Raises:
            CheckpointError: This snapshot or the one before failed on a rank. Raised on every rank.
        """
        if not self.count_step():
            return False
        self.take(extra() if callable(extra) else extra)
        return True

    def count_step(self) -> bool:
        """Count an optimizer step; whether a snapshot is due. Called on every rank after each step, to `take` it."""
        raise_if_failed()
        self._interval.steps += 1
        return self._interval.steps >= self._interval.due

    def take(self, extra: Mapping[str, Any] | None = None, *, model_state: Mapping[str, Any] | None = None) -> None:
        """Take a snapshot now. Collective.

        It returns when everything is copied. The snapshot before is waited for first.

        Args:
            extra: See `after_step`.
            model_state: State dict that replaces the model's own.

        Raises:
            CheckpointError: This snapshot or the one before failed on a rank. Raised on every rank.
        """
        begin_s = time.monotonic()
        step_s = (begin_s - self._interval.begin_s) / max(1, self._interval.steps)
        self.finish()
        planner, whole = plan_save(
            self._sharded,
            self._optimizers,
            extra,
            model_state=model_state,
            host=self._host,
            writers=self._writers,
        )
        background_s = 0.0 if self.cost is None else self.cost.background_s
        self._copy_s = time.monotonic() - begin_s
        seconds = gather_objects((self._copy_s, background_s, step_s), "MemorySnapshots.take")
        self._begin_writing(planner, whole)
        self._interval.begin(seconds)

    def _begin_writing(self, planner: ShardedSavePlanner, extra: Mapping[str, Any]) -> None:
        place, manifest = self._place, manifest_of(self._sharded, self._optimizers)
        sole = [
            name
            for name, replica in planner.replicas.items()
            if name in planner.scalars or not self._is_on_other_nodes(replica)
        ]
        has_buddy = place.nodes.num_nodes > 1
        self._planned_bytes = _tensor_bytes(planner, {*sole}) if has_buddy else 0
        name = f"{manifest.step:012}-{self._attempt}-{self._num_taken}"
        older = run_on_all_ranks(lambda: self._check_place(planner))
        run_on_all_ranks(lambda: make_private_folder(place.folder.path / name))
        self._num_taken += 1
        store = dist.distributed_c10d._get_default_store()
        previous, self._channel = self._channel, StoreChannel(store, f"snapshot {name}", place.rank)
        if previous is not None and place.rank == 0:
            for stage in ("written", "whole"):
                previous.delete(f"all {stage}")  # which every rank has read: it has finished that snapshot
        writer = SnapshotWriter(
            folder=place.folder.path / name,
            planner=planner,
            sole=sole,
            manifest=manifest,
            extra=extra if place.rank == 0 else None,
            rank=place.rank,
            channel=self._channel,
            buddies=self._buddies,
            outdated=[path for path in older if path.name != name],
        )
        pending = PendingSave(writer.folder)
        self._pending = pending, writer
        threading.Thread(  # it delays no end of the process: the snapshot before is whole
            target=pending.run, args=(writer.write,), name=f"snapshot {manifest.step}", daemon=True
        ).start()

    def _check_place(self, planner: ShardedSavePlanner) -> list[Path]:
        """Check that the memory of a node holds what its ranks write and receive. Ranks of a node write about alike.

        Returns:
            Folders of older snapshots, on the leader of a node.
        """
        older = self._place.folder.snapshots()
        num_bytes = _tensor_bytes(planner, {item.index.fqn for item in planner.plan.items})
        num_new = _NUM_KEPT if self._num_taken == 0 else 1
        needed = (num_bytes + self._planned_bytes) * num_new * len(self._place.nodes.peers(self._place.rank))
        free = shutil.disk_usage(self._place.folder.path).free
        if needed > free:
            raise CheckpointError(
                f"Snapshots need {needed / 1e9:.1f} GB more on this node, and `{self._place.folder.path}` has "
                f"{free / 1e9:.1f} GB left. Enlarge that file system (`mount -o remount,size=... /dev/shm`), or pass "
                "another `folder` in memory."
            )
        return older if self._place.nodes.is_leader(self._place.rank) else []

    def _writers(self, replica: ReplicaId) -> ReplicaId:
        """This rank's position among the copies on its node, from that among all."""
        local = self._place.nodes.local(self._ranks_with(replica), self._place.rank)
        return ReplicaId(local.index(self._place.rank), len(local))

    def _is_on_other_nodes(self, replica: ReplicaId) -> bool:
        ranks = self._ranks_with(replica)
        return len(self._place.nodes.local(ranks, self._place.rank)) < len(ranks)

    def _ranks_with(self, replica: ReplicaId) -> list[int]:
        """The ranks with equal copies, of which there are as many as `replica` says."""
        scopes, island = self._sharded.scopes, self._sharded.internals.groups.island
        if replica.count == 1:
            return [self._place.rank]
        if replica.count == len(island.ranks):
            return list(island.ranks)
        if replica.count == scopes.job_size:
            return list(range(scopes.job_size))
        return scopes.span(scopes.optimizer, scopes.world_size).group_ranks(self._place.rank)

    # -- ending -----------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait until the last snapshot is whole, or has failed.

        Raises:
            CheckpointError: It has failed on a rank. Raised on every rank. The one before is unchanged.
        """
        finish_saves(self._sharded)
        pending, self._pending = self._pending, None
        if pending is None:
            return
        pending[0].wait()
        result = pending[1].result
        if result is not None:
            self.cost = SnapshotCost(
                num_bytes=result.num_bytes,
                planned_buddy_bytes=self._planned_bytes,
                sent_bytes=result.sent_bytes,
                copy_s=self._copy_s,
                background_s=result.seconds,
            )

    def close(self, *, keep: bool = False) -> None:
        """End taking snapshots, and remove them: the training has ended. Collective.

        Args:
            keep: Whether the snapshots stay, for a later process with the same `job`. They are removed a day later.
        """
        self.finish()
        run_on_all_ranks(lambda: None)  # the last rank has finished
        removes = self._place.nodes.is_leader(self._place.rank) and not keep
        folder = self._place.folder
        run_on_all_ranks(lambda: folder.remove(begins_again=is_member()) if removes else folder.release())
        self._place.messages.close()
        _open.discard(self)
        if not keep:
            self._job.note_end()


def abandon_snapshots() -> None:
    """End all snapshots of this process, of which ranks were lost; whole ones stay. Not collective.

    Behind `cancel_collectives`, and in front of `abandon_groups`. A training that begins again can take others.
    """
    for snapshots in list(_open):
        if snapshots._pending is not None:
            with suppress(CheckpointError):  # of ranks that are lost
                snapshots._pending[0].wait()
    _open.clear()
    host_messages.close_all()
    job_folder.release_all()


def _tensor_bytes(planner: ShardedSavePlanner, names: Container[str]) -> int:
    """Bytes of the tensors of these names that a rank writes."""
    return sum(
        item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize
        for item in planner.plan.items
        if item.tensor_data is not None and item.index.fqn in names
    )
