"""The newest snapshot that is whole, open for loading."""

from __future__ import annotations

import io
import os
import pickle
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override

from mics_strategy.checkpoint import atomic
from mics_strategy.checkpoint.load import OpenCheckpoint, newest_checkpoint
from mics_strategy.checkpoint.manifest import NAME as MANIFEST
from mics_strategy.checkpoint.manifest import FileEntry
from mics_strategy.comm.consensus import gather_objects, run_on_all_ranks
from mics_strategy.comm.host_messages import HostMessages
from mics_strategy.errors import CheckpointError
from mics_strategy.snapshots.job_folder import JobFolder
from mics_strategy.snapshots.nodes import Nodes
from mics_strategy.snapshots.parts import Part, WholeSnapshot, part_from, report_name, whole_snapshot
from mics_strategy.snapshots.pieces import PieceExchange, PieceReader
from mics_strategy.snapshots.user_files import open_private, read_private


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a rank's snapshots are, and how it reaches those of other nodes.

    Attributes:
        folder: Folder of the job on this node.
        nodes: Nodes of the job.
        messages: Messages of the job.
        rank: Rank of this process.
    """

    folder: JobFolder
    nodes: Nodes
    messages: HostMessages
    rank: int


class OpenSnapshot(OpenCheckpoint):
    """A whole snapshot, verified and open for partial reads. Collective methods.

    Args:
        place: Folder of the job on this node, and the way to other nodes.
        name: Name of the snapshot.
        whole: Parts of all ranks that have written.

    Attributes:
        name: Name of the snapshot.
        step: Optimizer steps of its run.
        time_s: Time of the snapshot, seconds since the epoch.
    """

    def __init__(self, place: Place, name: str, whole: WholeSnapshot) -> None:
        folder = place.folder.path / name
        self.name = name
        self.path = folder
        self.step = whole.manifest.step
        self.time_s = whole.parts[0].time_s
        self._pieces = PieceExchange(place.messages, place.nodes, place.rank, folder, whole.nodes_with)
        self._weights_only = True
        self._manifest = whole.manifest
        self._metadata = whole.metadata_for(place.nodes.node_of[place.rank])
        try:
            self.extra = run_on_all_ranks(lambda: self._as_checkpoint_error(lambda: self._read_extra_of(whole)))
        except CheckpointError:
            self._pieces.close()
            raise

    @property
    def received_bytes(self) -> int:
        """Bytes that this rank has read from other nodes."""
        return self._pieces.received_bytes

    def close(self) -> None:
        """End reading. Collective."""
        run_on_all_ranks(lambda: None)
        self._pieces.close()

    def abandon(self) -> None:
        """End reading on this rank, after an error. Pieces that other ranks wait for do not come."""
        self._pieces.abandon()

    @override
    def _reader(self) -> PieceReader:
        return PieceReader(self.path, self._pieces)

    def _read_extra_of(self, whole: WholeSnapshot) -> dict[str, Any]:
        [(name, entry)] = [item for part in whole.parts for item in part.extra.items()]
        return read_extra(self._pieces.read(name, 0, entry.num_bytes))


def read_extra(data: bytes) -> dict[str, Any]:
    """Read an extra state, which holds plain data and tensors.

    Raises:
        CheckpointError: Reading it would run code.
    """
    try:
        extra: dict[str, Any] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"The extra state of a snapshot holds objects that are no plain data, and loading them would run code "
            f"({error}). Save numbers, strings, tensors, lists and dicts of them."
        ) from error
    return extra


def find_snapshot(place: Place) -> OpenSnapshot | None:
    """Open the newest snapshot that is whole; None if there is none. Collective.

    Files of this node are verified against their digests by its ranks together. Rank 0 prints which snapshots it skips,
    and why.

    Args:
        place: Folder of the job on this node, and the way to other nodes.

    Raises:
        CheckpointError: A folder or a file may be another user's. Raised on every rank.
    """
    is_leader = place.nodes.is_leader(place.rank)
    names = run_on_all_ranks(lambda: [path.name for path in place.folder.snapshots()] if is_leader else [])
    for name in sorted({name for found in gather_objects(names) for name in found}, reverse=True):
        try:
            whole = _join(place, name)
            return OpenSnapshot(place, name, whole)
        except CheckpointError as error:
            if place.rank == 0:
                print(f"Snapshots: skipped that of step {int(name.partition('-')[0])}: {error}", flush=True)
    return None


def _join(place: Place, name: str) -> WholeSnapshot:
    """Collect the parts of one snapshot from all nodes. Collective; raises on all ranks, or on none."""
    node, peers = place.nodes.node_of[place.rank], place.nodes.peers(place.rank)
    folder = place.folder.path / name
    reports = _read_reports(folder, name)
    files = sorted({(file, entry) for part in reports.values() for file, entry in part.files.items()}, key=str)
    intact = [file for file, entry in files[peers.index(place.rank) :: len(peers)] if _is_intact(folder, file, entry)]
    is_leader = place.nodes.is_leader(place.rank)
    texts = {rank: part.to_json() for rank, part in reports.items()} if is_leader else {}
    found = gather_objects((node, texts, intact))
    parts: dict[int, Part] = {}
    nodes_with: dict[str, list[int]] = {}
    for _, others, _ in found:
        for rank, text in others.items():
            parts.setdefault(rank, part_from(text, report_name(rank)))
    for other, _, others_intact in found:
        for file in others_intact:
            nodes_with.setdefault(file, []).append(other)
    for part in parts.values():
        for file in part.files:
            nodes_with.setdefault(file, [])
    if not parts:
        raise CheckpointError("it has no report that can be read")
    return whole_snapshot(parts, nodes_with)


def _read_reports(folder: Path, name: str) -> dict[int, Part]:
    """The reports of a node's folder that can be read."""
    found: dict[int, Part] = {}
    for path in sorted(folder.glob("part-*.json")) if folder.is_dir() else []:
        if not re.fullmatch(r"part-\d+\.json", path.name):
            continue
        try:
            part = part_from(read_private(path).decode(errors="replace"), str(path))
        except CheckpointError as error:
            print(f"Snapshots: {error}", flush=True)
            continue
        if (part.snapshot, report_name(part.rank)) == (name, path.name):
            found[part.rank] = part
    return found


def _is_intact(folder: Path, name: str, entry: FileEntry) -> bool:
    """Whether a file is as it was written. A part that another node keeps is missing here."""
    path = folder / name
    if not os.path.lexists(path):
        return False
    try:
        with open_private(path):
            is_same = atomic.entry_of(path) == entry
    except CheckpointError as error:
        print(f"Snapshots: {error}", flush=True)
        return False
    if not is_same:
        print(f"Snapshots: `{path}` has other bytes than when it was written, and is not read.", flush=True)
    return is_same


def age_of(saved: float | Path) -> str:
    """How long ago a snapshot or a checkpoint was saved, for messages.

    Args:
        saved: Seconds since the epoch, or the path of a checkpoint.
    """
    time_s = (saved / MANIFEST).stat().st_mtime if isinstance(saved, Path) else saved
    seconds = max(0.0, time.time() - time_s)
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def later_checkpoint(folder: str | os.PathLike[str] | None, step: int) -> Path | None:
    """The newest intact checkpoint of a folder, if it is of a later step. Collective.

    Args:
        folder: Folder of checkpoints; None for no checkpoint.
        step: Step of a snapshot; -1 without one. Files are read only for what may be later.

    Raises:
        CheckpointError: There is no snapshot, and all checkpoints are damaged.
    """
    if folder is None or gather_objects(_newest_step(Path(folder)) if dist.get_rank() == 0 else 0)[0] <= step:
        return None
    try:
        path = newest_checkpoint(folder)
    except CheckpointError as error:
        if step < 0:
            raise
        if dist.get_rank() == 0:
            print(f"Skipped: {error}", flush=True)
        return None
    return path if path is not None and atomic.read_manifest(path).step > step else None


def _newest_step(folder: Path) -> int:
    """Step of the newest checkpoint of a folder, or above all steps if that cannot be read; -1 without one."""
    paths = atomic.newest_first(folder)
    try:
        return atomic.read_manifest(paths[0]).step if paths else -1
    except CheckpointError:
        return sys.maxsize  # `newest_checkpoint` names it
