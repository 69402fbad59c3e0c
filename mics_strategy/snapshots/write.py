"""Writing of a snapshot in the background: files, copies for the buddy, and the end that all ranks agree on."""

from __future__ import annotations

import dataclasses
import io
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import WriteItem

from mics_strategy.checkpoint import atomic
from mics_strategy.checkpoint.manifest import Manifest
from mics_strategy.checkpoint.save_planner import ShardedSavePlanner
from mics_strategy.checkpoint.shard_report import ShardReport, StoreChannel
from mics_strategy.errors import CheckpointError
from mics_strategy.snapshots.buddy import BuddyExchange
from mics_strategy.snapshots.open_snapshot import read_extra
from mics_strategy.snapshots.parts import SHARED, SOLE, Part, extra_name, report_name
from mics_strategy.snapshots.user_files import write_private


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteResult:
    """What one rank has written of a snapshot.

    Attributes:
        num_bytes: Bytes of its files.
        sent_bytes: Bytes that it has sent to its buddy.
        seconds: Time from the end of the copy until the snapshot was whole on all ranks.
    """

    num_bytes: int
    sent_bytes: int
    seconds: float


@dataclass(slots=True, kw_only=True)
class SnapshotWriter:
    """One rank's work on one snapshot, behind the copy. It uses no process group of the training.

    Attributes:
        folder: Folder of the snapshot on this node.
        planner: What this rank writes, copied.
        sole: Names of states that no other node has.
        manifest: Manifest of the run, without files.
        extra: Extra state, of rank 0; None on other ranks.
        rank: Rank of this process.
        channel: Channel of the ranks of this snapshot.
        buddies: Sends copies to the next node.
        outdated: Folders of older snapshots, which this rank removes when this one is whole.
        result: What was written, at the end.
    """

    folder: Path
    planner: ShardedSavePlanner
    sole: Sequence[str]
    manifest: Manifest
    extra: Mapping[str, Any] | None
    rank: int
    channel: StoreChannel
    buddies: BuddyExchange
    outdated: Sequence[Path]
    result: WriteResult | None = None

    def write(self) -> None:
        """Write, send and agree; then remove older snapshots.

        Raises:
            CheckpointError: A rank failed. Raised on every rank. The older snapshots stay.
        """
        begin_s = time.monotonic()
        files: list[Part] = []
        self._agree("written", lambda: files.append(self._write_files()))
        sent: list[int] = []
        self._agree("whole", lambda: sent.append(self._exchange()))
        num_bytes = sum(entry.num_bytes for entry in files[0].files.values())
        self.result = WriteResult(num_bytes=num_bytes, sent_bytes=sent[0], seconds=time.monotonic() - begin_s)
        for path in self.outdated:
            shutil.rmtree(path, ignore_errors=True)  # what stays is older, and is removed with the job's folder

    def _agree(self, stage: str, action: Any) -> None:
        """Do this rank's part of a stage, and wait for all ranks.

        Raises:
            CheckpointError: A rank failed. Raised on every rank.
        """
        failure = ""
        with self.channel.heartbeat():
            try:
                action()
            except BaseException as error:  # of any kind: the other ranks wait for the outcome
                failure = f"Rank {self.rank} could not keep a snapshot of step {self.manifest.step}: {error}"
            self.channel.send(f"{stage} {self.rank}", failure.encode())
            if self.rank == 0:
                ranks = range(self.manifest.world_size if not failure else 1)  # others may be gone
                failures = [self.channel.recv(f"{stage} {rank}", rank).decode(errors="replace") for rank in ranks]
                for rank in ranks:
                    self.channel.delete(f"{stage} {rank}")
                self.channel.send(f"all {stage}", next(filter(None, failures), "").encode())
            outcome = self.channel.recv(f"all {stage}", 0).decode(errors="replace")
        if outcome:
            raise CheckpointError(outcome)

    def _write_files(self) -> Part:
        sole = {*self.sole}
        items = self.planner.plan.items
        shards = {
            SHARED: self._write_shard(SHARED, [item for item in items if item.index.fqn not in sole]),
            SOLE: self._write_shard(SOLE, [item for item in items if item.index.fqn in sole]),
        }
        extra = {}
        if self.extra is not None:
            buffer = io.BytesIO()
            torch.save(dict(self.extra), buffer)
            read_extra(buffer.getvalue())  # rather now than after a crash
            path = self.folder / extra_name(self.rank)
            write_private(path, buffer.getvalue())
            extra[path.name] = atomic.entry_of(path)
        part = Part(
            snapshot=self.folder.name,
            rank=self.rank,
            time_s=time.time(),
            manifest=self.manifest,
            shards=shards,
            scalars=sorted(self.planner.scalars.intersection(item.index.fqn for item in items)),
            extra=extra,
        )
        write_private(self.folder / report_name(self.rank), part.to_json().encode())
        return part

    def _write_shard(self, kind: str, items: list[WriteItem]) -> ShardReport:
        mappings = self.planner.plan.planner_data or {}
        paths = {item.index.fqn: mappings[item.index.fqn] for item in items}
        plan = dataclasses.replace(self.planner.plan, items=items, planner_data=paths)
        if not items:
            return ShardReport(plan, [], {})
        writer = FileSystemWriter(self.folder, sync_files=False)  # memory has nothing to sync
        writer.set_up_storage_writer(False, rank=f"{self.rank}_{kind}", use_collectives=False)
        results = writer.write_data(writer.prepare_local_plan(plan), self.planner).value()
        names = sorted({result.storage_data.relative_path for result in results})
        for name in names:
            os.chmod(self.folder / name, 0o600)
        return ShardReport(plan, results, {name: atomic.entry_of(self.folder / name) for name in names})

    def _exchange(self) -> int:
        try:
            return self.buddies.exchange(self.folder)
        except BaseException:
            self.buddies.cancel()  # the other ranks would wait for this one's chunks
            raise
