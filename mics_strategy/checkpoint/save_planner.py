"""Save planner: which items this rank writes, and from which memory.

Items are those of torch's distributed checkpoint, so that its tools can read them. Of several equal copies, one rank
writes one. The choice depends only on names and sizes, so it needs no communication: all ranks that hold the same items
compute the same writers, and each writes about the same number of bytes. Plans of items that other ranks write stay
local.
"""

from __future__ import annotations

import dataclasses
import io
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from typing_extensions import override

from mics_strategy.checkpoint.rank_local import RankLocalState
from mics_strategy.checkpoint.state import LocalState, ReplicaId
from mics_strategy.comm.consensus import gather_objects
from mics_strategy.comm.workspace import aligned_bytes
from mics_strategy.engine.internals import Internals
from mics_strategy.engine.optimizer.quantized import dequantize, is_quantized
from mics_strategy.errors import CheckpointError

_SHOWN = 3  # names in an error


class HostCopyPool:
    """Host memory for copies of tensors, which later copies use again.

    The caller must ensure that earlier copies are no longer read.
    """

    def __init__(self) -> None:
        self._sizes_bytes: dict[Any, int] = {}
        self._is_pinned = False
        self._places: dict[Any, tuple[torch.Tensor, int]] = {}

    def copy(
        self, sizes_bytes: dict[Any, int], tensors: Iterable[tuple[Any, torch.Tensor]], *, is_pinned: bool
    ) -> dict[Any, torch.Tensor]:
        """Copy tensors to the host. The copies are complete when it returns, and each has a storage of its own.

        Args:
            sizes_bytes: Bytes of each tensor, by the name of its copy.
            tensors: Names and tensors, which may be made one by one.
            is_pinned: Whether the memory is pinned, for tensors on a GPU.

        Cost:
            Memory of the copies, and up to about the largest one for what torch rounds up. Nothing is allocated where
            sizes are those of the last time.
        """
        if (sizes_bytes, is_pinned) != (self._sizes_bytes, self._is_pinned):
            self._places = {}  # so that new chunks may have the memory of the old ones
            self._sizes_bytes, self._is_pinned = sizes_bytes, is_pinned
            self._places = _places(sizes_bytes, is_pinned)
        copies: dict[Any, torch.Tensor] = {}
        devices: set[torch.device] = set()
        for name, tensor in tensors:
            chunk, start = self._places[name]
            end = start + sizes_bytes[name]
            copy = chunk[start:end].view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
            storage: Any = chunk.untyped_storage()[start:end]  # torch's writer would clone a view of a larger one
            copies[name] = torch.empty(0, dtype=copy.dtype).set_(storage, 0, copy.shape, copy.stride())
            if tensor.is_cuda:
                devices.add(tensor.device)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return copies


def _places(sizes_bytes: dict[Any, int], is_pinned: bool) -> dict[Any, tuple[torch.Tensor, int]]:
    """Allocate memory for pieces: of each, its chunk and its first byte there.

    The bytes of a chunk are a power of two, to which torch rounds any pinned allocation up (torch 2.11 to 2.15,
    `CachingHostAllocator::allocate`): one slab of 33 GB would take 64 GB. Large pieces come first, and small ones fill
    what those leave.
    """
    places: dict[Any, tuple[torch.Tensor, int]] = {}
    chunks: list[torch.Tensor] = []
    used_bytes: list[int] = []
    padded = {name: aligned_bytes((max(1, size), torch.uint8)) for name, size in sizes_bytes.items()}
    left_bytes = sum(padded.values())
    for name, size in sorted(padded.items(), key=lambda item: -item[1]):
        index = next((i for i, chunk in enumerate(chunks) if chunk.numel() - used_bytes[i] >= size), len(chunks))
        if index == len(chunks):
            num_bytes = max(1 << (left_bytes.bit_length() - 1), 1 << (size - 1).bit_length())
            chunks.append(torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned))
            used_bytes.append(0)
        places[name] = chunks[index], used_bytes[index]
        used_bytes[index] += size
        left_bytes -= size
    return places


class ShardedSavePlanner(DefaultSavePlanner):
    """Plan of the items that this rank writes.

    Attributes:
        state_names: Names and sizes of all items that this rank holds, by the number of equal copies.
        replicas: Position of this rank among all equal copies of each item that it writes, by name.
        scalars: See `LocalState.scalars`.

    Args:
        local: State that this rank holds.
        host: Pool into which values are copied now, so that training may change the originals during the write; None
            copies nothing. Copies are complete when the constructor returns.
        writers: Position of this rank among those equal copies of which one is written, from its position among all.
    """

    def __init__(
        self,
        local: LocalState,
        *,
        host: HostCopyPool | None = None,
        writers: Callable[[ReplicaId], ReplicaId] = lambda replica: replica,
    ) -> None:
        super().__init__()
        self._state = local
        self._writers = writers
        self._copies: dict[Any, torch.Tensor | bytes] = {}  # by the item's index
        self.state_names: dict[int, set[str]] = {}
        self.replicas: dict[str, ReplicaId] = {}
        self.scalars = local.scalars
        self.set_up_planner(local.values)
        self.plan = self.create_local_plan()
        if host is not None:
            resolve: Callable[[WriteItem], Any] = super().resolve_data
            items = [item for item in self.plan.items if item.tensor_data is not None]
            self._copies = {i.index: resolve(i).getvalue() for i in self.plan.items if i.tensor_data is None}
            self._copies |= host.copy(
                {item.index: _num_bytes(item) for item in items},
                ((item.index, resolve(item)) for item in items),  # one by one: a quantized tensor is decoded here
                is_pinned=any(isinstance(value, torch.Tensor) and value.is_cuda for value in self.state_dict.values()),
            )
            self.state_dict, self._state = {}, LocalState({})

    @override
    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = [item for item in plan.items if not _is_empty(item)]
        save_items = [self._piece(item) for item in items]
        names = items_to_write([dataclasses.replace(item, replica=self._writers(item.replica)) for item in save_items])
        self.replicas = {item.name: item.replica for item in save_items if item.name in names}
        for save_item in save_items:
            self.state_names.setdefault(save_item.replica.count, set()).add(
                f"{save_item.name} ({save_item.num_bytes} B)"
            )
        local_items = [item for item in items if item.index.fqn in names]
        mappings = {item.index.fqn: self.mappings[item.index.fqn] for item in local_items}
        return dataclasses.replace(plan, items=local_items, planner_data=mappings)

    def _piece(self, item: WriteItem) -> SaveItem:
        name = item.index.fqn
        replica = self._state.replica_of(name, self.state_dict[name])
        return SaveItem(name, _num_bytes(item), replica, is_scalar=name in self._state.scalars)

    @override
    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        copied = self._copies.get(write_item.index)
        if copied is None:
            return super().resolve_data(write_item)
        return io.BytesIO(copied) if isinstance(copied, bytes) else copied

    @override
    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """Convert an object before the write; a quantized tensor becomes its values."""
        if isinstance(object, RankLocalState):
            object = object.plain()
        elif is_quantized(object):
            object = dequantize(object)
        return super().transform_object(write_item, object)


def check_replica_counts(planner: ShardedSavePlanner, internals: Internals) -> None:
    """Check that ranks with equal copies hold the same items. Collective.

    Otherwise they would not agree on the writers.

    Args:
        planner: Planner of this rank.
        internals: Parts of the model: index of this rank's shards, and the ranks that hold the same ones.

    Raises:
        CheckpointError: Items are missing on some ranks. Raised on every rank; the error names the items.
    """
    ranks_of_step, index = internals.groups.island.ranks, internals.index
    local_names = {
        (ranks_of_step.start, c, 0 if c == len(ranks_of_step) else index): names
        for c, names in planner.state_names.items()
        if c > 1
    }
    checksums_by_rank = gather_objects(
        {group: zlib.crc32("\n".join(sorted(names)).encode()) for group, names in local_names.items()}
    )
    for group in sorted({group for checksums in checksums_by_rank for group in checksums}):
        ranks = [rank for rank, checksums in enumerate(checksums_by_rank) if group in checksums]
        if len({checksums_by_rank[rank][group] for rank in ranks}) > 1:
            names_by_rank = gather_objects(local_names.get(group, set()))
            missing = sorted(
                set().union(*names_by_rank) - names_by_rank[ranks[0]].intersection(*(names_by_rank[r] for r in ranks))
            )
            more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
            raise CheckpointError(
                f"Nothing was saved: ranks {', '.join(map(str, ranks))} should hold the same state, but some of them "
                f"lack {', '.join(missing[:_SHOWN])}{more}. Make every rank step on the same parameters, and make "
                "state-dict hooks behave equally on every rank."
            )


def _num_bytes(item: WriteItem) -> int:
    """Bytes of a tensor; 0 of another object."""
    data = item.tensor_data
    return 0 if data is None else data.chunk.sizes.numel() * data.properties.dtype.itemsize


def _is_empty(item: WriteItem) -> bool:
    """Whether an item is the empty shard of a tensor with fewer rows than ranks."""
    data = item.tensor_data
    return data is not None and data.chunk.sizes.numel() == 0 != data.size.numel()


@dataclass(frozen=True, slots=True)
class SaveItem:
    """One tensor shard or object of a checkpoint, which exactly one rank writes.

    Attributes:
        name: Name of the item, unique on a rank and equal on all ranks that hold the item.
        num_bytes: Size of the data in bytes; 0 if unknown.
        replica: Index of this rank's copy among the equal ones.
        is_scalar: Whether it is one of `LocalState.scalars`, of which the first copy is written.
    """

    name: str
    num_bytes: int
    replica: ReplicaId
    is_scalar: bool = False


def items_to_write(items: Iterable[SaveItem]) -> set[str]:
    """Return the names of the items that this rank writes.

    Items are assigned largest first, each to the copy with the fewest bytes so far. Among copies with equally few bytes
    the checksum of the name decides, which also spreads items of unknown size. No copy writes more than an equal share
    plus one item; the first one writes scalars, too.

    Args:
        items: All items that this rank holds. Ranks with other copies of an item hold the same items with the same
            number of copies.
    """
    names: set[str] = set()
    loads: dict[int, list[int]] = {}  # by the number of copies
    for item in sorted(items, key=lambda item: (-item.num_bytes, item.name)):
        load = loads.setdefault(item.replica.count, [0] * item.replica.count)
        first = zlib.crc32(item.name.encode()) % item.replica.count
        by_load = min(range(len(load)), key=lambda copy: (load[copy], (copy - first) % len(load)))
        writer = 0 if item.is_scalar else by_load
        load[writer] += item.num_bytes
        if writer == item.replica.index:
            names.add(item.name)
    return names
