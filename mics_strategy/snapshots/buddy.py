"""Files that go to the next node, for the case that this one is lost.

They are sent in the background over a group of their own, in chunks of which one is in flight at a time, so that a
collective of a step waits for one chunk at most. Each rank sends to its buddy and receives from its wards, chunk by
chunk: number i of all of them is posted together, so that no rank waits for another one in a circle.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from mics_strategy.comm.host_messages import HostMessages
from mics_strategy.comm.work import BackendWork
from mics_strategy.errors import CheckpointError
from mics_strategy.snapshots.nodes import Nodes
from mics_strategy.snapshots.parts import part_from, report_name
from mics_strategy.snapshots.user_files import read_private, write_private

_CHUNK_BYTES = 4 << 20
_TAG = 1


@dataclass(slots=True)
class _WardFiles:
    """Files of a ward on their way.

    Attributes:
        rank: The ward.
        report: Its report.
        sizes: Bytes of each of its files that come.
    """

    rank: int
    report: bytes
    sizes: Mapping[str, int]


class BuddyExchange:
    """Copies of files between nodes. All ranks call `exchange` equally often.

    Args:
        messages: Messages of the job.
        nodes: Nodes of the job.
        rank: Rank of this process.
    """

    def __init__(self, messages: HostMessages, nodes: Nodes, rank: int) -> None:
        self._messages = messages
        self._waits = messages.waits("mics buddy") if nodes.num_nodes > 1 else None
        self._buddy = nodes.buddy_of(rank)
        self._wards = nodes.wards_of(rank)
        self._rank = rank

    def exchange(self, folder: Path) -> int:
        """Send this rank's report and sole files to its buddy, and keep those of its wards.

        Args:
            folder: Folder of the snapshot, with this rank's files and report.

        Returns:
            Bytes that were sent.

        Raises:
            CheckpointError: A ward sends something else than its part.
        """
        before = self._messages.sent_bytes
        report = b"" if self._buddy is None else read_private(folder / report_name(self._rank))
        incoming = self._exchange_reports(report)
        with ExitStack() as stack:
            outgoing: Iterator[torch.Tensor] = iter(())
            if self._buddy is not None:
                files = part_from(report.decode(), report_name(self._rank)).sole_files
                outgoing = _chunks_of([stack.enter_context((folder / name).open("rb")) for name in sorted(files)])
            places = [iter(_places(ward, folder, stack)) for ward in incoming]
            while self._exchange_chunk(next(outgoing, None), places):
                pass
        for ward in incoming:
            write_private(folder / report_name(ward.rank), ward.report)
        return self._messages.sent_bytes - before

    def cancel(self) -> None:
        """Fail the exchange in flight, on this rank and those that exchange with it."""
        self._messages.cancel()

    def _exchange_reports(self, report: bytes) -> list[_WardFiles]:
        texts = [report] if self._buddy is not None else []
        sizes = self._exchange_tensors([torch.tensor([len(text)]) for text in texts], [1] * len(self._wards))
        received = self._exchange_tensors(
            [_tensor(text) for text in texts], [int(size) for size in sizes], dtype=torch.uint8
        )
        return [_incoming(rank, tensor.numpy().tobytes()) for rank, tensor in zip(self._wards, received, strict=True)]

    def _exchange_tensors(
        self, sent: list[torch.Tensor], numels: list[int], dtype: torch.dtype = torch.int64
    ) -> list[torch.Tensor]:
        received = [torch.empty(numel, dtype=dtype) for numel in numels]
        pairs = zip(received, self._wards, strict=True)
        works = [(rank, self._messages.recv(tensor, rank, _TAG)) for tensor, rank in pairs]
        if self._buddy is not None:
            works += [(self._buddy, self._messages.send(tensor, self._buddy, _TAG)) for tensor in sent]
        self._wait(works)
        return received

    def _wait(self, works: list[tuple[int, BackendWork]]) -> None:
        if self._waits is not None:
            self._waits.wait(works)

    def _exchange_chunk(self, chunk: torch.Tensor | None, places: list[Iterator[tuple[BinaryIO, int]]]) -> bool:
        """Exchange the next chunk with every rank that has one; returns whether there was any."""
        works: list[tuple[int, BackendWork]] = []
        arriving: list[tuple[BinaryIO, torch.Tensor]] = []
        for rank, place in zip(self._wards, places, strict=True):
            file, num_bytes = next(place, (None, 0))
            if file is not None:
                arriving.append((file, torch.empty(num_bytes, dtype=torch.uint8)))
                works.append((rank, self._messages.recv(arriving[-1][1], rank, _TAG)))
        if chunk is not None and self._buddy is not None:
            works.append((self._buddy, self._messages.send(chunk, self._buddy, _TAG)))
        self._wait(works)
        for file, data in arriving:
            file.write(data.numpy().data)
        return bool(works)


def _incoming(rank: int, report: bytes) -> _WardFiles:
    part = part_from(report.decode(errors="replace"), f"report of rank {rank}")
    sizes = {name: entry.num_bytes for name, entry in sorted(part.sole_files.items())}
    foreign = [name for name in sizes if "/" in name or not name.startswith((f"__{rank}_", f"extra-{rank}."))]
    if part.rank != rank or foreign:
        raise CheckpointError(f"Rank {rank} sends {foreign or json.dumps(part.rank)} as its part of a snapshot.")
    return _WardFiles(rank, report, sizes)


def _places(ward: _WardFiles, folder: Path, stack: ExitStack) -> Iterator[tuple[BinaryIO, int]]:
    """The file of each chunk of a ward, and the chunk's bytes."""
    for name, size in ward.sizes.items():
        path = folder / name
        path.touch(mode=0o600)
        file = stack.enter_context(path.open("wb"))
        for start in range(0, size, _CHUNK_BYTES):
            yield file, min(_CHUNK_BYTES, size - start)


def _chunks_of(files: list[BinaryIO]) -> Iterator[torch.Tensor]:
    for file in files:
        while data := file.read(_CHUNK_BYTES):
            yield _tensor(data)


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
