"""Which copies go where, and when the parts of a snapshot are whole? Pure."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from mics_strategy import CheckpointError
from mics_strategy.checkpoint.manifest import FileEntry, Manifest
from mics_strategy.checkpoint.shard_report import ShardReport
from mics_strategy.snapshots.nodes import Nodes
from mics_strategy.snapshots.parts import SHARED, SOLE, Part, part_from, whole_snapshot

NODES = {
    "two of two": "0011",
    "three of two": "001122",
    "uneven": "00001122",
    "not in the order of ranks": "0101",
    "one": "0000",
}


def manifest(world_size: int) -> Manifest:
    return Manifest(
        step=7, world_size=world_size, scopes={}, package_version="1", torch_version="2", files={}, optimizer_classes=[]
    )


def report(rank: int, kind: str, rows: dict[str, tuple[int, int, int]]) -> ShardReport:
    """A file that holds rows of 1-D tensors: first row, rows here, rows of the whole tensor."""
    name, items, results = f"__{rank}_{kind}_0.distcp", [], []
    for tensor, (start, num, size) in rows.items():
        index = MetadataIndex(tensor, torch.Size([start]))
        chunk = ChunkStorageMetadata(offsets=torch.Size([start]), sizes=torch.Size([num]))
        data = TensorWriteData(chunk=chunk, properties=TensorProperties(torch.float32), size=torch.Size([size]))
        items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        results.append(WriteResult(index=index, size_in_bytes=4 * num, storage_data=_StorageInfo(name, 0, 4 * num)))
    plan = SavePlan(items=items, planner_data={item.index.fqn: (item.index.fqn,) for item in items})
    return ShardReport(plan, results, {name: FileEntry(num_bytes=8, sha256="0")} if rows else {})


def part(
    rank: int, world_size: int, shared: dict[str, Any], sole: dict[str, Any], scalars: tuple[str, ...] = ()
) -> Part:
    return Part(
        snapshot="000000000007-ab-0",
        rank=rank,
        time_s=1.0,
        manifest=manifest(world_size),
        shards={SHARED: report(rank, SHARED, shared), SOLE: report(rank, SOLE, sole)},
        scalars=scalars,
        extra={"extra-0.pt": FileEntry(num_bytes=3, sha256="1")} if rank == 0 else {},
    )


@pytest.mark.parametrize("numbers", NODES.values(), ids=NODES)
def test_a_buddy_is_on_another_node_and_knows_its_wards(numbers: str) -> None:
    nodes = Nodes.of(numbers)
    for rank in range(len(numbers)):
        buddy = nodes.buddy_of(rank)
        assert (buddy is None) == (nodes.num_nodes == 1)
        if buddy is not None:
            assert nodes.node_of[buddy] == (nodes.node_of[rank] + 1) % nodes.num_nodes
            assert rank in nodes.wards_of(buddy)
    assert sum(len(nodes.wards_of(rank)) for rank in range(len(numbers))) == (
        len(numbers) if nodes.num_nodes > 1 else 0
    )
    assert [rank for rank in range(len(numbers)) if nodes.is_leader(rank)] == sorted(
        numbers.index(node) for node in {*numbers}
    )


def sharded_parts() -> dict[int, Part]:
    """A tensor of 4 rows over two ranks, each on a node of its own."""
    return {rank: part(rank, 2, {}, {"w": (2 * rank, 2, 4)}) for rank in range(2)}


def files_of(parts: dict[int, Part], nodes: dict[int, list[int]]) -> dict[str, list[int]]:
    return {name: nodes[rank] for rank, found in parts.items() for name in found.files}


def test_a_report_is_the_same_after_json() -> None:
    own = part(0, 2, {"b": (0, 3, 3)}, {"w": (0, 2, 4)}, scalars=("b",))
    assert part_from(own.to_json(), "file").to_json() == own.to_json()
    assert sorted(part_from(own.to_json(), "file").sole_files) == ["__0_sole_0.distcp", "extra-0.pt"]


BROKEN: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no number": lambda fields: fields.update(rank="0"),
    "a path": lambda fields: fields.update(extra={"../extra": [1, "a"]}),
    "no shards": lambda fields: fields.pop("shards"),
    "a dtype": lambda fields: fields["shards"]["sole"]["items"][0]["tensor"].update(dtype="load"),
    "a manifest": lambda fields: fields.update(manifest="{}"),
}


@pytest.mark.parametrize("change", BROKEN.values(), ids=BROKEN)
def test_a_report_of_another_hand_is_refused(change: Callable[[dict[str, Any]], Any]) -> None:
    fields = json.loads(part(0, 2, {}, {"w": (0, 2, 4)}).to_json())
    change(fields)
    with pytest.raises(CheckpointError, match=r"file"):
        part_from(json.dumps(fields), "file")


def test_the_buddys_copy_makes_a_snapshot_whole() -> None:
    parts = sharded_parts()
    lost = whole_snapshot(parts, files_of(parts, {0: [0, 1], 1: [0]}))  # the second node's memory is gone
    metadata = lost.metadata_for(0)
    assert {info.relative_path for info in metadata.storage_data.values()} == {
        "__0_sole_0.distcp",
        "__1_sole_0.distcp",
    }


MISSING: dict[str, tuple[Callable[[dict[int, Part], dict[str, list[int]]], Any], str]] = {
    "a report": (lambda parts, _: parts.pop(1), "no node has the part of rank 1"),
    "a file": (lambda _, files: files.update({"__1_sole_0.distcp": []}), "no node has an intact copy of `w`.*rank 1"),
    "the extra state": (lambda _, files: files.update({"extra-0.pt": []}), "no node has the extra state"),
    "rows": (
        lambda parts, _: parts.update({1: part(1, 2, {}, {"w": (3, 1, 4)})}),
        "do not fit one another.*no chunk holds 1 of the 4 values of `w`",
    ),
}


@pytest.mark.parametrize(("take_away", "expected"), MISSING.values(), ids=MISSING)
def test_a_snapshot_without_a_piece_is_not_whole(take_away: Callable[..., Any], expected: str) -> None:
    parts = sharded_parts()
    files = files_of(parts, {0: [0], 1: [1]})
    assert whole_snapshot(parts, files).manifest.step == 7
    take_away(parts, files)
    with pytest.raises(CheckpointError, match=expected):
        whole_snapshot(parts, files)


def replicated_parts(scalars: tuple[str, ...] = ()) -> dict[int, Part]:
    """A tensor of which two ranks on two nodes have a copy each."""
    return {rank: part(rank, 2, {"w": (0, 4, 4)}, {}, scalars) for rank in range(2)}


def file_read_by(node: int, parts: dict[int, Part], nodes: dict[int, list[int]]) -> str:
    [info] = whole_snapshot(parts, files_of(parts, nodes)).metadata_for(node).storage_data.values()
    return str(info.relative_path)


def test_each_node_reads_its_own_copy_and_without_one_anothers() -> None:
    parts = replicated_parts()
    assert [file_read_by(node, parts, {0: [0], 1: [1]}) for node in range(2)] == [
        "__0_shared_0.distcp",
        "__1_shared_0.distcp",
    ]
    files = {**files_of(parts, {0: [0], 1: [1]}), "__0_shared_0.distcp": []}
    [info] = whole_snapshot(parts, files).metadata_for(0).storage_data.values()
    assert info.relative_path == "__1_shared_0.distcp"


def test_of_copies_that_may_differ_all_nodes_read_the_first() -> None:
    parts = replicated_parts(scalars=("w",))
    assert {file_read_by(node, parts, {0: [0], 1: [1]}) for node in range(2)} == {"__0_shared_0.distcp"}


def test_parts_of_different_runs_do_not_make_a_snapshot() -> None:
    parts = sharded_parts()
    parts[1] = dataclasses.replace(parts[1], manifest=dataclasses.replace(manifest(2), step=8))
    with pytest.raises(CheckpointError, match="parts of different runs: rank 1"):
        whole_snapshot(parts, files_of(parts, {0: [0], 1: [1]}))


def parts_without_own_states() -> dict[int, Part]:
    """A tensor of which each of three nodes has a copy, a scalar, and random states."""
    return {
        rank: part(rank, 3, {"w": (0, 4, 4)}, {"s": (0, 1, 1), f"random.{rank}": (0, 1, 1)}, scalars=("s",))
        for rank in range(3)
    }


@pytest.mark.parametrize("lost", [[1], [1, 2], [2]])
def test_where_all_nodes_have_all_states_parts_of_some_may_be_lost(lost: list[int]) -> None:
    parts = parts_without_own_states()
    files = files_of(parts, {0: [0], 1: [1], 2: [2]})
    for rank in lost:
        files |= {name: [] for name in parts.pop(rank).files}
    names = whole_snapshot(parts, files).metadata_for(0).state_dict_metadata
    assert {"w", "s", "random.0"} <= {*names}
    assert not {f"random.{rank}" for rank in lost} & {*names}


def test_the_extra_state_is_needed() -> None:
    parts = parts_without_own_states()
    files = files_of(parts, {0: [0], 1: [1], 2: [2]})
    del parts[0]
    with pytest.raises(CheckpointError, match="extra state"):
        whole_snapshot(parts, files)


def test_a_part_is_needed_where_a_node_has_states_of_its_own() -> None:
    parts = parts_without_own_states() | {2: part(2, 3, {"w": (0, 4, 4)}, {"moment": (0, 1, 1)})}
    files = files_of(parts, {0: [0], 1: [1], 2: [2]})
    del parts[1]
    with pytest.raises(CheckpointError, match="no node has the part of rank 1"):
        whole_snapshot(parts, files)
