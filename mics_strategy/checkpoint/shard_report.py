"""Reports of ranks about their parts of a save, over the job's store.

Other processes can also write to the store. Therefore a report is JSON, which runs no code when it is parsed, and every
value is checked for its type before it enters torch's metadata.

No process group takes part. A receiver polls, so that it never blocks the store for other ranks. Every rank writes a
heartbeat, so that a receiver detects a rank that is gone.
"""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
_HEARTBEAT_S = 5.0  # interval of the heartbeat
_SILENT_S = 120.0  # without a heartbeat, after which a rank counts as dead
_POLL_S = (0.001, 0.05)  # first and longest polling interval


@dataclass(frozen=True, slots=True)
class ShardReport:
    """Report of what one rank has written.

    Attributes:
        plan: Items to write.
        results: Storage locations of the written items.
        files: Written files, by their paths in the draft.
    """

    plan: SavePlan
    results: Sequence[WriteResult]
    files: Mapping[str, FileEntry]

    def to_json(self) -> str:
        """Serialize for `shard_report_from`."""
        return json.dumps(
            {
                "items": [_plain_item(item) for item in self.plan.items],
                "paths": {name: list(path) for name, path in (self.plan.planner_data or {}).items()},
                "results": [_plain_result(result) for result in self.results],
                "files": {name: dataclasses.asdict(entry) for name, entry in self.files.items()},
            }
        )


def failed(message: str) -> str:
    """Return the report of a rank that could not write, for `shard_report_from`."""
    return json.dumps({"failure": message})


def shard_report_from(text: str, rank: int) -> ShardReport:
    """Parse the report of a rank.

    Raises:
        CheckpointError: The rank could not write, with its error text; or the text is not a report.
    """
    try:
        fields = json.loads(text)
        if "failure" in fields:
            raise CheckpointError(str(fields["failure"]))
        return shard_report_of(fields)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"The job's store holds no valid report of rank {rank} ({type(error).__name__}: {error}), so nothing was "
            "saved. Another process writes to the store. Save again."
        ) from error


def shard_report_of(fields: Mapping[str, Any]) -> ShardReport:
    """Convert the plain data of a report, value by value.

    Raises:
        ValueError: They are not those of a report. Also raised as TypeError, KeyError or AttributeError.
    """
    paths = {name: tuple(_typed((str, int), part) for part in path) for name, path in fields["paths"].items()}
    return ShardReport(
        SavePlan(items=[_item(item) for item in fields["items"]], planner_data=paths),
        [_result(result) for result in fields["results"]],
        {inside(name): file_entry(name, entry) for name, entry in fields["files"].items()},
    )


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
        requires_grad=_typed(bool, data["requires_grad"]),
        pin_memory=_typed(bool, data["pin_memory"]),
    )
    chunk = ChunkStorageMetadata(offsets=_size(data["offsets"]), sizes=_size(data["sizes"]))
    tensor_data = TensorWriteData(chunk=chunk, properties=properties, size=_size(data["size"]))
    return WriteItem(index=_index(plain["index"]), type=WriteItemType[plain["type"]], tensor_data=tensor_data)


def _plain_result(result: WriteResult) -> dict[str, Any]:
    storage = result.storage_data
    return {
        "index": _plain_index(result.index),
        "num_bytes": result.size_in_bytes,
        "file": storage.relative_path,
        "offset": storage.offset,
        "length": storage.length,
        "transforms": None if storage.transform_descriptors is None else list(storage.transform_descriptors),
    }


def _result(plain: Any) -> WriteResult:
    transforms = plain["transforms"]
    storage = _StorageInfo(
        relative_path=inside(plain["file"]),
        offset=_typed(int, plain["offset"]),
        length=_typed(int, plain["length"]),
        transform_descriptors=None if transforms is None else [_typed(str, descriptor) for descriptor in transforms],
    )
    return WriteResult(
        index=_index(plain["index"]), size_in_bytes=_typed(int, plain["num_bytes"]), storage_data=storage
    )


def _plain_index(index: MetadataIndex) -> list[Any]:
    return [index.fqn, None if index.offset is None else list(index.offset), index.index]


def _index(plain: Any) -> MetadataIndex:
    name, offset, index = plain
    offsets = None if offset is None else _size(offset)
    return MetadataIndex(_typed(str, name), offsets, None if index is None else _typed(int, index))


def _size(plain: Any) -> torch.Size:
    return torch.Size([_typed(int, length) for length in plain])


def _name(value: object) -> str:
    return str(value).removeprefix("torch.")


def _torch(cls: type[T], name: Any) -> T:
    return _typed(cls, vars(torch).get(_typed(str, name)))  # `getattr` would import submodules


def _typed(cls: type[T] | tuple[type[T], ...], value: Any) -> T:
    if not isinstance(value, cls):
        raise TypeError(f"{value!r} has the wrong type")
    return value


class StoreChannel:
    """Message channel of the ranks of one save.

    Args:
        store: Store of the job.
        name: Name of the save, unique in the job.
        rank: Rank of this process.
    """

    def __init__(self, store: Any, name: str, rank: int) -> None:
        self._store = store
        self._name = name
        self._rank = rank

    def send(self, topic: str, value: bytes) -> None:
        """Send a value to all ranks."""
        self._ask("set", topic, value)

    def recv(self, topic: str, rank: int) -> bytes:
        """Wait for a value that a rank sends.

        Raises:
            CheckpointError: The rank has written no heartbeat for two minutes, or the store cannot be reached.
        """
        pause_s, last_heartbeat, heard_s = _POLL_S[0], b"", time.monotonic()
        while not self._ask("check", topic):
            now, heartbeat = time.monotonic(), self._heartbeat_of(rank)
            if heartbeat != last_heartbeat:
                last_heartbeat, heard_s = heartbeat, now
            elif now - heard_s > _SILENT_S:
                raise CheckpointError(
                    f"Rank {rank} has written no heartbeat for {_SILENT_S:.0f} s while a checkpoint was being saved. "
                    "Its process is dead or stopped. Look at the end of its output, then start the job again."
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_S[1])
        value: bytes = self._ask("get", topic)
        return value

    def delete(self, topic: str) -> None:
        """Delete a value to free its memory in the store."""
        self._ask("delete_key", topic)

    @contextmanager
    def heartbeat(self) -> Iterator[None]:
        """Write a heartbeat during the block."""
        done = threading.Event()

        def beat() -> None:
            topic, count = f"heartbeat {self._rank}", 0
            try:
                while not done.wait(_HEARTBEAT_S):
                    count += 1
                    self.send(topic, str(count).encode())
                if count:
                    self.delete(topic)
            except CheckpointError:
                return  # the receiver of this store raises

        thread = threading.Thread(target=beat, name=f"heartbeat of {self._name}")
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _heartbeat_of(self, rank: int) -> bytes:
        return self._ask("get", f"heartbeat {rank}") if self._ask("check", f"heartbeat {rank}") else b""

    def _ask(self, operation: str, topic: str, *value: bytes) -> Any:
        key = f"mics/save/{self._name}/{topic}"
        try:
            return getattr(self._store, operation)([key] if operation == "check" else key, *value)
        except RuntimeError as error:
            raise CheckpointError(
                f"Ranks cannot report the result of a save over the job's store ({error}). A rank was lost, or the "
                "process that holds the store, usually rank 0's, has ended. Look at the end of its output."
            ) from error
