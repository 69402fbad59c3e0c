"""Whether the metadata of a distributed checkpoint describes every value once.

Metadata is a pickle, so any attribute may hold anything. A tensor that lacks a chunk would keep old values there, and
one with two chunks in the same place would get one of them by chance. torch checks this when it saves, not when it
loads.

Pure.
"""

from __future__ import annotations

import bisect
import itertools
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

_MAX_TRIED = 100_000  # corners at which a gap is looked for


def check_metadata(metadata: Metadata) -> None:
    """Check the types of metadata, and that chunks cover every tensor once.

    Args:
        metadata: Metadata that was unpickled.

    Raises:
        ValueError: It describes no checkpoint; the error names the entry, and the offsets of a chunk.

    Cost:
        n log n for a tensor of n chunks.
    """
    entries, storage = metadata.state_dict_metadata, metadata.storage_data
    _require(isinstance(entries, dict) and isinstance(storage, dict), "it has no entries")
    for index, info in storage.items():
        _require(isinstance(index, MetadataIndex) and isinstance(index.fqn, str), "the index of a stored value is none")
        is_place = isinstance(info.relative_path, str) and _is_count(info.offset) and _is_count(info.length)
        _require(is_place, f"`{index.fqn}` is stored at no offset and length of a file")
    for name, entry in entries.items():
        _require(isinstance(name, str), f"an entry is named {name!r}")
        if isinstance(entry, TensorStorageMetadata):
            _check_tensor(name, entry, storage)
        else:
            _require(isinstance(entry, BytesStorageMetadata), f"`{name}` is a {type(entry).__name__}")
            _require(MetadataIndex(name) in storage, f"`{name}` is stored nowhere")


def _check_tensor(name: str, entry: TensorStorageMetadata, storage: Mapping[MetadataIndex, Any]) -> None:
    size = entry.size
    _require(_are_counts(size) and isinstance(entry.properties.dtype, torch.dtype), f"`{name}` has no shape or dtype")
    _require(isinstance(entry.chunks, list), f"`{name}` has no list of chunks")
    for chunk in entry.chunks:
        fits = isinstance(chunk, ChunkStorageMetadata) and _are_counts(chunk.offsets) and _are_counts(chunk.sizes)
        _require(fits and len(chunk.offsets) == len(chunk.sizes) == len(size), f"a chunk of `{name}` is not in it")
        ends = [offset + length for offset, length in zip(chunk.offsets, chunk.sizes, strict=True)]
        is_inside = all(end <= whole for end, whole in zip(ends, size, strict=True))
        _require(is_inside, f"the {_shown(chunk)} of `{name}` leaves its shape {list(size)}")
        is_stored = MetadataIndex(name, chunk.offsets) in storage
        _require(is_stored, f"the {_shown(chunk)} of `{name}` is stored nowhere")
    chunks = [chunk for chunk in entry.chunks if math.prod(chunk.sizes)]
    for chunk, other in _overlaps(chunks, len(size)):
        raise ValueError(f"the {_shown(chunk)} and the {_shown(other)} of `{name}` overlap")
    missing = math.prod(size) - sum(math.prod(chunk.sizes) for chunk in chunks)
    if missing:
        gap = _gap(chunks, size)
        place = "" if gap is None else f", the first at offsets {list(gap)}"
        raise ValueError(f"no chunk holds {missing} of the {math.prod(size)} values of `{name}`{place}")


def _overlaps(chunks: Sequence[Any], num_dims: int) -> Iterator[tuple[Any, Any]]:
    """Yield pairs of chunks that overlap.

    It sweeps along the dimension in which chunks have the most different offsets.
    """
    starts = [len({chunk.offsets[dim] for chunk in chunks}) for dim in range(num_dims)]
    sweep = starts.index(max(starts)) if starts else None
    if sweep is None:  # scalars
        yield from itertools.pairwise(chunks)
        return
    open_chunks: list[tuple[int, int]] = []  # end along the sweep, and index, ascending
    order = sorted(range(len(chunks)), key=lambda index: chunks[index].offsets[sweep])
    for index in order:
        chunk = chunks[index]
        start = chunk.offsets[sweep]
        del open_chunks[: bisect.bisect_right(open_chunks, (start, sys.maxsize))]
        for _, other in open_chunks:
            if _meet(chunk, chunks[other]):
                yield chunks[other], chunk
        bisect.insort(open_chunks, (start + chunk.sizes[sweep], index))


def _meet(chunk: Any, other: Any) -> bool:
    boxes = zip(chunk.offsets, chunk.sizes, other.offsets, other.sizes, strict=True)
    return all(a < b + b_size and b < a + a_size for a, a_size, b, b_size in boxes)


def _gap(chunks: Sequence[Any], size: Sequence[int]) -> tuple[int, ...] | None:
    """Return the first offsets that no chunk holds, each 0 or the end of a chunk."""
    ends = [{0, *(chunk.offsets[dim] + chunk.sizes[dim] for chunk in chunks)} for dim in range(len(size))]
    corners = itertools.product(*(sorted(end for end in ends[dim] if end < size[dim]) for dim in range(len(size))))
    for corner in itertools.islice(corners, _MAX_TRIED):
        point = ChunkStorageMetadata(offsets=torch.Size(corner), sizes=torch.Size([1] * len(size)))
        if not any(_meet(point, chunk) for chunk in chunks):
            return corner
    return None


def _shown(chunk: Any) -> str:
    return f"chunk at offsets {list(chunk.offsets)} of sizes {list(chunk.sizes)}"


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _are_counts(values: Any) -> bool:
    return isinstance(values, tuple) and all(map(_is_count, values))


def _require(is_met: bool, fault: str) -> None:
    if not is_met:
        raise ValueError(fault)
