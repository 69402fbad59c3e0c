"""Which pieces of a state does this rank write, and from which memory?

The pieces are those of torch's distributed checkpoints, so everybody's tools read them. One rank writes each of several
equal copies, and all ranks compute alike which (`writers`); what others write never leaves this rank.
"""

from __future__ import annotations

import dataclasses
import io
import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from typing_extensions import override

from mics_strategy.checkpoint.rank_local import RankLocalState
from mics_strategy.checkpoint.replicas import SaveItem, items_to_write
from mics_strategy.checkpoint.state import LocalState
from mics_strategy.comm.consensus import gather_objects
from mics_strategy.engine.optimizer.quantized import dequantize, is_quantized
from mics_strategy.errors import CheckpointError

_SHOWN = 3  # names in an error


class HostCopyPool:
    """Copies of tensors, whose memory is taken again by the next copies of the same pieces. Pinned, of a GPU's.

    One who copies must know that nobody reads the earlier copies any more.
    """

    def __init__(self) -> None:
        self._buffers: dict[Any, torch.Tensor] = {}

    def copy(self, index: Any, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the host; of a GPU's tensor it is complete when the current stream is."""
        kept = self._buffers.get(index)
        if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
            kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[index] = kept
        return kept.copy_(tensor, non_blocking=True)


class ShardedSavePlanner(DefaultSavePlanner):
    """What this rank writes.

    Attributes:
        state_names: All pieces that it holds, with their sizes, by the number of copies there are.

    Args:
        held: What it holds.
        host: Memory into which the values are copied now, so that the originals may change while the copies are
            written; None copies nothing. The copies are complete when this returns.
    """

    def __init__(self, held: LocalState, *, host: HostCopyPool | None = None) -> None:
        super().__init__()
        self._state = held
        self._copies: dict[Any, torch.Tensor | bytes] = {}  # by the item's index
        self.state_names: dict[int, set[str]] = {}
        self.set_up_planner(held.values)
        self.plan = self.create_local_plan()
        if host is not None:
            for item in self.plan.items:
                value = super().resolve_data(item)
                self._copies[item.index] = (
                    value.getvalue() if isinstance(value, io.BytesIO) else host.copy(item.index, value)
                )
            if torch.cuda.is_available():
                torch.cuda.current_stream().synchronize()
            self.state_dict, self._state = {}, LocalState({})

    @override
    def create_local_plan(self) -> SavePlan:
        whole = super().create_local_plan()
        held = [item for item in whole.items if not _is_empty(item)]
        pieces = [self._piece(item) for item in held]
        names = items_to_write(pieces)
        for piece in pieces:
            self.state_names.setdefault(piece.replica.count, set()).add(f"{piece.name} ({piece.num_bytes} B)")
        mine = [item for item in held if item.index.fqn in names]
        mappings = {item.index.fqn: self.mappings[item.index.fqn] for item in mine}
        return dataclasses.replace(whole, items=mine, planner_data=mappings)

    def _piece(self, item: WriteItem) -> SaveItem:
        name, data = item.index.fqn, item.tensor_data
        num_bytes = 0 if data is None else data.chunk.sizes.numel() * data.properties.dtype.itemsize
        return SaveItem(name, num_bytes, self._state.copy_of(name, self.state_dict[name]))

    @override
    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        copied = self._copies.get(write_item.index)
        if copied is None:
            return super().resolve_data(write_item)
        return io.BytesIO(copied) if isinstance(copied, bytes) else copied

    @override
    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """What is written: of quantized tensors their values, one at a time."""
        if isinstance(object, RankLocalState):
            object = object.plain()
        elif is_quantized(object):
            object = dequantize(object)
        return super().transform_object(write_item, object)


def check_replica_counts(pieces: ShardedSavePlanner, shard_index: int) -> None:
    """Refuse a save for which ranks with copies of the same would not agree on who writes what. Collective.

    Args:
        pieces: Of this rank.
        shard_index: The same on ranks that hold the same shards.

    Raises:
        CheckpointError: On every rank, naming what some of them lack.
    """
    world_size = dist.get_world_size()
    held = {(c, 0 if c == world_size else shard_index): names for c, names in pieces.state_names.items() if c > 1}
    everyone = gather_objects({group: zlib.crc32("\n".join(sorted(names)).encode()) for group, names in held.items()})
    for group in sorted({group for found in everyone for group in found}):
        ranks = [rank for rank, found in enumerate(everyone) if group in found]
        if len({everyone[rank][group] for rank in ranks}) > 1:
            by_rank = gather_objects(held.get(group, set()))
            lacking = sorted(set().union(*by_rank) - by_rank[ranks[0]].intersection(*(by_rank[r] for r in ranks)))
            more = f" and {len(lacking) - _SHOWN} more" if len(lacking) > _SHOWN else ""
            raise CheckpointError(
                f"Nothing was saved: ranks {', '.join(map(str, ranks))} should hold copies of the same state, and not "
                f"all of them have {', '.join(lacking[:_SHOWN])}{more}. Let every rank step on the same parameters, "
                "and hooks change state dicts alike."
            )


def _is_empty(item: WriteItem) -> bool:
    """Whether it is the empty end of a tensor that has fewer rows than ranks."""
    data = item.tensor_data
    return data is not None and data.chunk.sizes.numel() == 0 != data.size.numel()
