"""Pieces of files that a node lacks, sent by a node that has them while a snapshot is loaded.

What a rank reads is known only while it reads: another number of ranks, other scopes or a lost node need other pieces.
So every rank answers requests in a thread, and a reader asks for the bytes of one saved item at a time. Pieces are not
stored on the way.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata
from typing_extensions import override

from mics_strategy.checkpoint.safe_reader import SafeReader
from mics_strategy.comm.host_messages import HostMessages
from mics_strategy.errors import CheckpointError
from mics_strategy.snapshots.nodes import Nodes
from mics_strategy.snapshots.user_files import open_private

_REQUEST_TAG, _PIECE_TAG = 2, 3
_END, _PIECE = 0, 1  # kinds of requests
_CHUNK_BYTES = 64 << 20


class PieceExchange:
    """Reads bytes of a snapshot's files, on this node or from another one.

    Args:
        messages: Messages of the job.
        nodes: Nodes of the job.
        rank: Rank of this process.
        folder: Folder of the snapshot on this node.
        nodes_with: Nodes that have an intact copy of each file, equal on all ranks.

    Attributes:
        received_bytes: Bytes that came from other nodes.
    """

    def __init__(
        self, messages: HostMessages, nodes: Nodes, rank: int, folder: Path, nodes_with: Mapping[str, Sequence[int]]
    ) -> None:
        self._messages = messages
        self._nodes = nodes
        self._rank = rank
        self._folder = folder
        self._names = sorted(nodes_with)
        self._nodes_with = nodes_with
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.received_bytes = 0
        if any(len(found) < nodes.num_nodes for found in nodes_with.values()):
            self._reads, self._answers = messages.waits("mics pieces"), messages.waits("mics answers")
            self._thread = threading.Thread(target=self._serve, name="pieces of a snapshot", daemon=True)
            self._thread.start()

    def is_local(self, name: str) -> bool:
        """Whether this node has a file."""
        return self._nodes.node_of[self._rank] in self._nodes_with[name]

    def read(self, name: str, offset: int, num_bytes: int) -> bytes:
        """Read bytes of a file.

        Raises:
            CheckpointError: The file is not this user's, or shorter; or the other node cannot be reached.
        """
        if self.is_local(name):
            return _read_piece(self._folder / name, offset, num_bytes)
        holders = [rank for node in self._nodes_with[name] for rank in self._nodes.ranks(node)]
        source, number = holders[self._rank % len(holders)], self._names.index(name)
        pieces = []
        with self._lock:  # two requests of one rank would get one another's pieces
            for start in range(offset, offset + num_bytes, _CHUNK_BYTES):
                piece = torch.empty(min(_CHUNK_BYTES, offset + num_bytes - start), dtype=torch.uint8)
                request = torch.tensor([_PIECE, number, start, piece.numel()])
                try:
                    arriving = source, self._messages.recv(piece, source, _PIECE_TAG)
                    self._reads.wait([arriving, (source, self._messages.send(request, source, _REQUEST_TAG))])
                except RuntimeError as error:
                    raise CheckpointError(f"Rank {source} did not send a piece of `{name}`: {error}") from error
                pieces.append(piece.numpy().tobytes())
        self.received_bytes += num_bytes
        return b"".join(pieces)

    def _serve(self) -> None:
        request = torch.zeros(4, dtype=torch.int64)
        try:
            while True:
                rank = self._messages.recv_from_any(request, _REQUEST_TAG)
                kind, number, offset, num_bytes = request.tolist()
                if kind == _END:
                    return
                data = bytearray(_read_piece(self._folder / self._names[number], offset, num_bytes))
                piece = torch.frombuffer(data, dtype=torch.uint8)
                self._answers.wait([(rank, self._messages.send(piece, rank, _PIECE_TAG))])
        except (RuntimeError, IndexError):  # a peer died, or this node's file did: who waits for a piece raises
            self._messages.cancel()

    def close(self) -> None:
        """End the thread that answers, when no rank reads any more: behind a collective of all ranks."""
        thread, self._thread = self._thread, None
        if thread is not None:
            end, next_rank = torch.tensor([_END, 0, 0, 0]), (self._rank + 1) % len(self._nodes.node_of)
            self._messages.send(end, next_rank, _REQUEST_TAG).wait()
            thread.join()

    def abandon(self) -> None:
        """End the thread that answers, without the other ranks."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._messages.cancel()
            thread.join()


def _read_piece(path: Path, offset: int, num_bytes: int) -> bytes:
    with open_private(path) as descriptor:
        pieces, end = [], offset + num_bytes
        while offset < end and (piece := os.pread(descriptor, end - offset, offset)):  # up to 2 GiB at a time
            pieces.append(piece)
            offset += len(piece)
    if offset < end:
        raise CheckpointError(f"`{path}` ends {end - offset} bytes too early.")
    return b"".join(pieces)


class PieceReader(SafeReader):
    """Reader of a snapshot whose files are spread over nodes.

    Args:
        folder: Folder of the snapshot on this node.
        pieces: Reads the files.
    """

    def __init__(self, folder: Path, pieces: PieceExchange) -> None:
        super().__init__(folder)
        self._pieces = pieces
        self.fs = _NamesOnly()

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        raise CheckpointError("The metadata of a snapshot is made from its parts. This is a defect; please report it.")

    @override
    def _slice_file(self, file: Any, sinfo: Any) -> io.BytesIO:
        return io.BytesIO(self._pieces.read(file, sinfo.offset, sinfo.length))


class _NamesOnly(FileSystem):
    """Opens no file: the stream of a file is its name."""

    @override
    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        yield Path(path).name
