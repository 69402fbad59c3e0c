"""What one rank writes of a snapshot, and when the parts of all ranks are whole.

A snapshot is a checkpoint whose files are spread over the folders of the nodes:

    __<rank>_shared_0.distcp    states of which another node has a copy
    __<rank>_sole_0.distcp      states that this node alone has; the buddy's node has a copy of the file
    extra-<rank>.pt             the extra state, of rank 0; the buddy's node has it as well
    part-<rank>.json            written last: what these files hold, with their digests; the buddy's node has it as well

Of copies on one node, one rank writes one; copies on different nodes are all written, so that each node reads its own.
A snapshot is whole if there is a report of every rank, and a file for every item that a report names. So nothing has to
be sealed on a node that may be lost, and a part that was being written when its process was killed has no report. Where
nodes have nothing of their own but random states (MiCS in a node, DDP), reports and random states of some may be lost.

Pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import WriteItem

from mics_strategy.checkpoint.chunks import check_metadata
from mics_strategy.checkpoint.manifest import FileEntry, Manifest, file_entry, inside
from mics_strategy.checkpoint.random_states import RNG_KEY
from mics_strategy.checkpoint.shard_report import ShardReport, shard_report_of
from mics_strategy.errors import CheckpointError

SHARED, SOLE = "shared", "sole"


def report_name(rank: int) -> str:
    """Name of the file that describes a rank's part."""
    return f"part-{rank}.json"


def extra_name(rank: int) -> str:
    """Name of the file with the extra state."""
    return f"extra-{rank}.pt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one rank has written of a snapshot.

    Attributes:
        snapshot: Name of the snapshot.
        rank: Rank that has written.
        time_s: Time of the snapshot, seconds since the epoch.
        manifest: Manifest of the run, without files.
        shards: Reports of the files with states that other nodes have, and of those that no other node has.
        scalars: Names of states in these files that are the first copy's; see `LocalState.scalars`.
        extra: File of the extra state by its name; empty on ranks that write none.
    """

    snapshot: str
    rank: int
    time_s: float
    manifest: Manifest
    shards: Mapping[str, ShardReport]
    scalars: Sequence[str]
    extra: Mapping[str, FileEntry]

    @property
    def files(self) -> dict[str, FileEntry]:
        """All files but the report."""
        return {**self.shards[SHARED].files, **self.sole_files}

    @property
    def sole_files(self) -> dict[str, FileEntry]:
        """Files that the buddy receives."""
        return {**self.shards[SOLE].files, **self.extra}

    @property
    def has_own_states(self) -> bool:
        """Whether this rank's node alone has states, beside random ones."""
        names = {item.index.fqn for item in self.shards[SOLE].plan.items} - {*self.scalars}
        return any(not name.startswith(f"{RNG_KEY}.") for name in names)

    def to_json(self) -> str:
        """Serialize for `part_from`."""
        return json.dumps(
            {
                "snapshot": self.snapshot,
                "rank": self.rank,
                "time_s": self.time_s,
                "manifest": self.manifest.to_json(),
                "shards": {kind: json.loads(report.to_json()) for kind, report in self.shards.items()},
                "scalars": list(self.scalars),
                "extra": {name: [entry.num_bytes, entry.sha256] for name, entry in self.extra.items()},
            }
        )


def part_from(text: str, file: str) -> Part:
    """Parse a report.

    Args:
        text: Text of the file.
        file: Name of the file in errors.

    Raises:
        CheckpointError: The text is not a report.
    """
    try:
        fields = json.loads(text)
        extra = {
            inside(name): file_entry(name, {"num_bytes": size, "sha256": digest})
            for name, (size, digest) in fields["extra"].items()
        }
        return Part(
            snapshot=_typed(str, fields["snapshot"]),
            rank=_typed(int, fields["rank"]),
            time_s=float(fields["time_s"]),
            manifest=Manifest.from_json(_typed(str, fields["manifest"]), file),
            shards={kind: shard_report_of(fields["shards"][kind]) for kind in (SHARED, SOLE)},
            scalars=[_typed(str, name) for name in fields["scalars"]],
            extra=extra,
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"`{file}` is no report of a snapshot ({type(error).__name__}: {error}).") from error


def _typed(cls: type, value: Any) -> Any:
    if not isinstance(value, cls) or isinstance(value, bool):
        raise TypeError(f"{value!r} has the wrong type")
    return value


@dataclass(frozen=True, slots=True)
class WholeSnapshot:
    """A snapshot of which no state is missing that a training needs.

    Attributes:
        parts: Part of each rank that has written.
        nodes_with: Numbers of the nodes that have an intact copy of each file.
    """

    parts: Sequence[Part]
    nodes_with: Mapping[str, Sequence[int]]

    @property
    def manifest(self) -> Manifest:
        """Manifest of the run, without files."""
        return self.parts[0].manifest

    def metadata_for(self, node: int) -> Metadata:
        """Metadata of a distributed checkpoint with the files that a node reads: its own where it has them.

        Raises:
            CheckpointError: The parts do not describe every value once.
        """
        return _metadata(self.parts, self.nodes_with, node)


def whole_snapshot(parts: Mapping[int, Part], nodes_with: Mapping[str, Sequence[int]]) -> WholeSnapshot:
    """Join the parts of a snapshot.

    Args:
        parts: Parts that were found, by rank.
        nodes_with: See `WholeSnapshot`.

    Raises:
        CheckpointError: Something is missing; the error says what.
    """
    whole = WholeSnapshot([part for _, part in sorted(parts.items())], nodes_with)
    missing = [rank for rank in range(whole.manifest.world_size) if rank not in parts]
    if missing and any(part.has_own_states for part in whole.parts):
        raise CheckpointError(f"no node has the part of rank {', '.join(map(str, missing))}")
    others = [part.rank for part in whole.parts if part.manifest != whole.manifest]
    if others:
        raise CheckpointError(
            f"it has parts of different runs: rank {others[0]} has not written what rank {whole.parts[0].rank} has"
        )
    if not any(nodes_with.get(name) for part in whole.parts for name in part.extra):
        raise CheckpointError("no node has the extra state, of rank 0, intact")
    whole.metadata_for(0)
    return whole


@dataclass(frozen=True, slots=True)
class _Stored:
    """A copy of an item in a file."""

    item: WriteItem
    storage: _StorageInfo
    is_first: bool  # whether this copy counts, where copies may differ
    rank: int


def _metadata(parts: Iterable[Part], nodes_with: Mapping[str, Sequence[int]], node: int) -> Metadata:
    copies: dict[MetadataIndex, list[_Stored]] = {}
    for part in parts:
        for report in part.shards.values():
            storage = {result.index: result.storage_data for result in report.results}
            for item in report.plan.items:
                stored = _Stored(item, storage[item.index], item.index.fqn in part.scalars, part.rank)
                copies.setdefault(item.index, []).append(stored)

    def rank_of_copy(stored: _Stored) -> tuple[bool, int]:
        """Nearest first; of copies that may differ, the lowest rank's."""
        is_far = node not in nodes_with[stored.storage.relative_path] and not stored.is_first
        return is_far, stored.rank

    entries: dict[str, Any] = {}
    storage_data: dict[MetadataIndex, _StorageInfo] = {}
    for index, found in copies.items():
        intact = [stored for stored in found if nodes_with.get(stored.storage.relative_path)]
        if not intact:
            raise CheckpointError(
                f"no node has an intact copy of `{index.fqn}`, which rank {found[0].rank} has written"
            )
        best = min(intact, key=rank_of_copy)
        storage_data[index] = best.storage
        _add_entry(entries, best.item)
    metadata = Metadata(state_dict_metadata=entries, storage_data=storage_data)
    try:
        check_metadata(metadata)
    except ValueError as error:
        raise CheckpointError(f"its parts do not fit one another: {error}") from error
    return metadata


def _add_entry(entries: dict[str, Any], item: WriteItem) -> None:
    data = item.tensor_data
    if data is None:
        entries[item.index.fqn] = BytesStorageMetadata()
        return
    empty = TensorStorageMetadata(properties=data.properties, size=data.size, chunks=[])
    entry = entries.setdefault(item.index.fqn, empty)
    entry.chunks.append(ChunkStorageMetadata(offsets=torch.Size(data.chunk.offsets), sizes=data.chunk.sizes))
