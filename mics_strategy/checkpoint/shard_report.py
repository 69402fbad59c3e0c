"""What does a rank say about its share of a save, as plain data?

Rank 0 gets it through the job's store, into which others can write, too; so it is JSON, which runs nothing when it is
read, and every value is put into torch's own description of a checkpoint with the type that belongs there.

Pure.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from mics_strategy.checkpoint.manifest import FileEntry, file_entry, inside
from mics_strategy.errors import CheckpointError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ShardReport:
    """What one rank has written.

    Attributes:
        plan: Pieces to write.
        results: Places of the written pieces.
        files: The files, by their paths in the draft.
    """

    plan: SavePlan
    results: Sequence[WriteResult]
    files: Mapping[str, FileEntry]

    def to_json(self) -> str:
        """For `shard_report_from`."""
        return json.dumps(
            {
                "items": [_plain_item(item) for item in self.plan.items],
                "paths": {name: list(path) for name, path in (self.plan.planner_data or {}).items()},
                "results": [_plain_result(result) for result in self.results],
                "files": {name: dataclasses.asdict(entry) for name, entry in self.files.items()},
            }
        )


def failed(words: str) -> str:
    """What a rank says that has written nothing, for `shard_report_from`."""
    return json.dumps({"failure": words})


def shard_report_from(text: str, rank: int) -> ShardReport:
    """Read what a rank has said.

    Raises:
        CheckpointError: It could not write, in its own words; or it is not what a rank says.
    """
    try:
        found = json.loads(text)
        if "failure" in found:
            raise CheckpointError(str(found["failure"]))
        paths = {name: tuple(_of((str, int), part) for part in path) for name, path in found["paths"].items()}
        return ShardReport(
            SavePlan(items=[_item(item) for item in found["items"]], planner_data=paths),
            [_result(result) for result in found["results"]],
            {inside(name): file_entry(name, entry) for name, entry in found["files"].items()},
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"What the job's store holds of rank {rank} is no description of its share ({type(error).__name__}: "
            f"{error}), so nothing was saved. Somebody else writes to the store; save again."
        ) from error


def _plain_item(item: WriteItem) -> dict[str, Any]:
    data = item.tensor_data
    plain: dict[str, Any] = {"index": _plain_index(item.index), "type": item.type.name}
    if data is not None:
        properties = data.properties
        plain["tensor"] = {
            "offsets": list(data.chunk.offsets),
            "sizes": list(data.chunk.sizes),
            "size": list(data.size),
            "dtype": _name(properties.dtype),
            "layout": _name(properties.layout),
            "memory_format": _name(properties.memory_format),
            "requires_grad": properties.requires_grad,
            "pin_memory": properties.pin_memory,
        }
    return plain


def _item(plain: Any) -> WriteItem:
    data = plain.get("tensor")
    if data is None:
        return WriteItem(index=_index(plain["index"]), type=WriteItemType[plain["type"]])
    properties = TensorProperties(
        dtype=_torch(torch.dtype, data["dtype"]),
        layout=_torch(torch.layout, data["layout"]),
        memory_format=_torch(torch.memory_format, data["memory_format"]),
        requires_grad=_of(bool, data["requires_grad"]),
        pin_memory=_of(bool, data["pin_memory"]),
    )
    chunk = ChunkStorageMetadata(offsets=_size(data["offsets"]), sizes=_size(data["sizes"]))
    written = TensorWriteData(chunk=chunk, properties=properties, size=_size(data["size"]))
    return WriteItem(index=_index(plain["index"]), type=WriteItemType[plain["type"]], tensor_data=written)


def _plain_result(result: WriteResult) -> dict[str, Any]:
    place = result.storage_data
    return {
        "index": _plain_index(result.index),
        "num_bytes": result.size_in_bytes,
        "file": place.relative_path,
        "offset": place.offset,
        "length": place.length,
        "transforms": None if place.transform_descriptors is None else list(place.transform_descriptors),
    }


def _result(plain: Any) -> WriteResult:
    transforms = plain["transforms"]
    place = _StorageInfo(
        relative_path=inside(plain["file"]),
        offset=_of(int, plain["offset"]),
        length=_of(int, plain["length"]),
        transform_descriptors=None if transforms is None else [_of(str, each) for each in transforms],
    )
    return WriteResult(index=_index(plain["index"]), size_in_bytes=_of(int, plain["num_bytes"]), storage_data=place)


def _plain_index(index: MetadataIndex) -> list[Any]:
    return [index.fqn, None if index.offset is None else list(index.offset), index.index]


def _index(plain: Any) -> MetadataIndex:
    name, offset, number = plain
    offsets = None if offset is None else _size(offset)
    return MetadataIndex(_of(str, name), offsets, None if number is None else _of(int, number))


def _size(plain: Any) -> torch.Size:
    return torch.Size([_of(int, each) for each in plain])


def _name(value: object) -> str:
    return str(value).removeprefix("torch.")


def _torch(kind: type[T], name: Any) -> T:
    return _of(kind, getattr(torch, _of(str, name)))


def _of(kind: type[T] | tuple[type[T], ...], value: Any) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} stands in the place of another kind of value")
    return value
