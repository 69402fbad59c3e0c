"""What one worker does: read a part, write its tokens.

Imported by worker processes, so nothing here starts one.
"""

import functools
import hashlib
import json
import os
import threading
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from multiprocessing import connection, parent_process
from pathlib import Path
from typing import BinaryIO

from tokenizers import Tokenizer

from .source import SPLITS, Document, Split, TextPart, TextSource, hash_of
from .store import TOKENIZER, PartRecord, SplitRecord, part_file, write_durably
from .tokenizer import encode_documents, token_dtype

_WAITING_DOCUMENTS, _WAITING_CHARACTERS = 1000, 4_000_000  # of one split, before they are encoded together


@dataclass(frozen=True, slots=True, kw_only=True)
class PartJob:
    """One part to prepare.

    Args:
        folder: Store that is being written; it has a tokenizer.
        source: Gives the documents.
        part: Which of them.
        end: Id of the token after each document.
        validation_share: Part of the documents that is held out by hash.
    """

    folder: Path
    source: TextSource
    part: TextPart
    end: int
    validation_share: float


def write_part(job: PartJob) -> PartRecord:
    """Write the tokens of a part, then its record.

    Files have temporary names until they are complete and on disk. The record comes last.

    Raises:
        RecipeError: A file of the source cannot be read.
    """
    tokenizer = _tokenizer(job.folder / TOKENIZER)
    with ExitStack() as stack:
        writers = {split: stack.enter_context(_SplitWriter(job, tokenizer, split)) for split in SPLITS}
        num_empty, nats, lowest_hash = 0, 0.0, 2**32
        for document in job.source.read(job.part):
            if not document.text:
                num_empty += 1
                continue
            hashed = hash_of(document.text)
            lowest_hash, nats = min(lowest_hash, hashed), nats + document.information_nats
            writers[_split_of(job, hashed)].add(document)
        records = {split: writer.finish() for split, writer in writers.items()}
    record = PartRecord(
        name=job.part.name, **records, num_empty=num_empty, information_nats=nats, lowest_hash=lowest_hash
    )
    write_durably(part_file(job.folder, job.part.name, "json"), json.dumps(asdict(record)).encode())
    return record


def exit_with_parent() -> None:
    """End this process when its parent dies, even by SIGKILL; and let it use one core."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = parent_process()
    if parent is not None:
        threading.Thread(target=_wait_and_exit, args=(parent.sentinel,), daemon=True).start()


def _wait_and_exit(sentinel: int) -> None:
    connection.wait([sentinel])
    os._exit(1)


def _split_of(job: PartJob, hashed: int) -> Split:
    if job.part.split != "by_hash":
        return job.part.split
    return "validation" if hashed < job.validation_share * 2**32 else "train"


@functools.lru_cache(maxsize=1)
def _load(file: Path, _: int) -> Tokenizer:
    return Tokenizer.from_file(str(file))


def _tokenizer(file: Path) -> Tokenizer:
    return _load(file, file.stat().st_mtime_ns)


class _SplitWriter:
    """Encodes the documents of one split and writes them under a temporary name."""

    def __init__(self, job: PartJob, tokenizer: Tokenizer, split: Split) -> None:
        self.tokenizer = tokenizer
        self.end = job.end
        self.file = part_file(job.folder, job.part.name, split)
        self._draft = self.file.with_name(f"{self.file.name}.{os.getpid()}.tmp")
        self._stream: BinaryIO = self._draft.open("wb")
        self._waiting: list[str] = []
        self._digest = hashlib.blake2b(digest_size=16)
        self._num_documents = self._num_bytes = self._waiting_characters = 0

    def __enter__(self) -> "_SplitWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()
        self._draft.unlink(missing_ok=True)

    def add(self, document: Document) -> None:
        """Take a document."""
        self._waiting.append(document.text)
        self._num_documents += 1
        self._num_bytes += len(document.text.encode())
        self._waiting_characters += len(document.text)
        if len(self._waiting) == _WAITING_DOCUMENTS or self._waiting_characters > _WAITING_CHARACTERS:
            self._flush()

    def finish(self) -> SplitRecord:
        """Encode the rest and give the file its name."""
        self._flush()
        self._stream.flush()
        os.fsync(self._stream.fileno())
        num_tokens = self._stream.tell() // token_dtype(self.tokenizer).itemsize
        self._draft.replace(self.file)
        return SplitRecord(
            num_documents=self._num_documents,
            num_tokens=num_tokens,
            num_bytes=self._num_bytes,
            digest=self._digest.hexdigest(),
        )

    def _flush(self) -> None:
        for tokens in encode_documents(self.tokenizer, self._waiting, self.end):
            content = tokens.tobytes()
            self._digest.update(content)
            self._stream.write(content)
        self._waiting, self._waiting_characters = [], 0
