"""The preparation: from a source to a complete store, continued after any interruption.

The store is written in a draft folder and gets its name when it is whole. A part of the draft is complete when its
record is there and agrees with its files; everything else is written again.
"""

import hashlib
import json
import multiprocessing
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from tokenizers import Tokenizer

from ..errors import RecipeError
from . import worker
from .progress import Progress
from .source import TextPart, TextSource
from .store import (
    FORMAT,
    MANIFEST,
    PARTS,
    TOKENIZER,
    Manifest,
    PartRecord,
    digest_of,
    part_fault,
    part_file,
    write_durably,
)
from .tokenizer import TRAINED, TokenizerRequest, load_tokenizer, special_tokens, token_dtype, train_tokenizer
from .worker import PartJob, write_part

_DRAFT = "draft.json"
_SAMPLE_CHARACTERS, _SAMPLE_PARTS = 100_000_000, 64  # of text for the tokenizer: all of a small source
_LEAST_EXPECTED = 0.05  # documents: fewer expected ones mean that none is wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRequest:
    """What a store shall contain.

    Args:
        source: Documents.
        tokenizer: How they become tokens.
        validation_share: Part of the documents that is held out by hash.
    """

    source: TextSource
    tokenizer: TokenizerRequest
    validation_share: float

    @property
    def key(self) -> str:
        """Short name of everything that decides the tokens."""
        described = f"{FORMAT} {self.source.identity} held_out={self.validation_share} {self.tokenizer.identity}"
        return hashlib.blake2b(described.encode(), digest_size=6).hexdigest()


def build_store(request: StoreRequest, folder: Path, draft: Path, workers: int, progress: Progress) -> None:
    """Prepare a store.

    Args:
        request: Its contents.
        folder: Its name when it is complete.
        draft: Folder for unfinished work. Complete parts that an earlier run left there are kept.
        workers: Processes; more than there are parts are not started.
        progress: Shows the parts.

    Raises:
        RecipeError: A file cannot be read, a worker was killed, or a split has no documents.
    """
    parts = request.source.parts()
    tokenizer = _draft_tokenizer(request, parts, draft)
    end = special_tokens(tokenizer, request.tokenizer.objective).end
    fields = {"folder": draft, "source": request.source, "end": end, "validation_share": request.validation_share}
    jobs = [PartJob(part=part, **fields) for part in parts]
    records = _complete_parts(draft, jobs, str(token_dtype(tokenizer).str), workers, progress)
    pending = [job for job in jobs if job.part.name not in records]
    progress.begin(f"tokenizing {len(pending)} of {len(jobs)} parts", len(pending))
    for record in _run(pending, workers):
        records[record.name] = record
        progress.advance(record.train.num_bytes + record.validation.num_bytes)
    share = _hold_one_out(jobs, records, request)
    manifest = Manifest(
        format=FORMAT,
        key=request.key,
        source=request.source.identity,
        origin=request.source.origin,
        tokenizer=request.tokenizer.identity,
        tokenizer_digest=digest_of(draft / TOKENIZER),
        dtype=token_dtype(tokenizer).str,
        special=special_tokens(tokenizer, request.tokenizer.objective),
        validation_share=share,
        parts=tuple(records[part.name] for part in parts),
    )
    _require_documents(manifest, request)
    write_durably(draft / MANIFEST, manifest.to_json().encode())
    draft.rename(folder)
    (folder / _DRAFT).unlink()  # after the renaming: until then an interrupted run continues here


def verify_store(folder: Path, workers: int, progress: Progress) -> tuple[str, ...]:
    """Read every file of a complete store.

    Returns:
        Names of damaged parts.

    Raises:
        RecipeError: The manifest is damaged.
    """
    manifest = Manifest.read(folder)
    progress.begin("verifying", len(manifest.parts))
    with ThreadPoolExecutor(workers) as threads:
        faults = threads.map(lambda part: part_fault(folder, part, manifest.dtype, with_digest=True), manifest.parts)
        names = []
        for part, fault in zip(manifest.parts, faults, strict=True):
            progress.advance(part.train.num_bytes + part.validation.num_bytes)
            names += [part.name] if fault else []
    return tuple(names)


def reopen_as_draft(folder: Path, draft: Path, request: StoreRequest, faulty: Sequence[str]) -> None:
    """Turn a damaged store into a draft whose intact parts are kept.

    Args:
        folder: The store; it has its name no longer.
        draft: Folder for unfinished work, which does not exist.
        request: Content that the store shall have.
        faulty: Names of damaged parts.
    """
    _write_draft_note(folder, request, request.source.parts(), Manifest.read(folder).tokenizer_digest)
    for name in faulty:
        part_file(folder, name, "json").unlink(missing_ok=True)
    folder.rename(draft)
    (draft / MANIFEST).unlink()


def _draft_tokenizer(request: StoreRequest, parts: Sequence[TextPart], draft: Path) -> Tokenizer:
    """Return the draft's tokenizer; a draft of other files, or whose tokenizer is damaged, is emptied first."""
    note, file = draft / _DRAFT, draft / TOKENIZER
    try:
        is_current = json.loads(note.read_bytes()) == _draft_note(request, parts, digest_of(file))
    except (OSError, ValueError):
        is_current = False
    if is_current:
        return Tokenizer.from_file(str(file))
    shutil.rmtree(draft, ignore_errors=True)
    (draft / PARTS).mkdir(parents=True)
    wanted = request.tokenizer
    if wanted.name == TRAINED:
        tokenizer = train_tokenizer(_sample(request.source, parts), wanted.vocab_size, wanted.objective)
    else:
        tokenizer = load_tokenizer(wanted)
    write_durably(file, tokenizer.to_str().encode())
    _write_draft_note(draft, request, parts, digest_of(file))
    return tokenizer


def _draft_note(request: StoreRequest, parts: Sequence[TextPart], tokenizer_digest: str) -> dict[str, str]:
    """Describe what the parts of a draft were made of: files by name and size."""
    files = [(part.name, part.split, [(file.name, file.stat().st_size) for file in part.files]) for part in parts]
    digest = hashlib.blake2b(json.dumps(files).encode(), digest_size=16).hexdigest()
    return {"key": request.key, "files": digest, "tokenizer": tokenizer_digest}


def _write_draft_note(draft: Path, request: StoreRequest, parts: Sequence[TextPart], tokenizer_digest: str) -> None:
    write_durably(draft / _DRAFT, json.dumps(_draft_note(request, parts, tokenizer_digest)).encode())


def _sample(source: TextSource, parts: Sequence[TextPart]) -> Iterator[str]:
    """Read the beginning of up to 64 training parts, evenly spaced, 100 million characters in all."""
    training = [part for part in parts if part.split != "validation"]
    count = min(len(training), _SAMPLE_PARTS)
    chosen = [training[index * len(training) // count] for index in range(count)]
    for part in chosen:
        budget = _SAMPLE_CHARACTERS // count
        for document in source.read(part):
            yield document.text
            budget -= len(document.text)
            if budget <= 0:
                break


def _complete_parts(
    draft: Path, jobs: Sequence[PartJob], dtype: str, workers: int, progress: Progress
) -> dict[str, PartRecord]:
    """Return the records of complete parts, after reading their files; remove what is half written."""
    for file in (draft / PARTS).glob("*.tmp"):
        file.unlink(missing_ok=True)
    names = [job.part.name for job in jobs if part_file(draft, job.part.name, "json").is_file()]
    if not names:
        return {}
    progress.begin("verifying finished parts", len(names))
    records = {}
    with ThreadPoolExecutor(workers) as threads:
        for name, record in zip(names, threads.map(lambda name: _record(draft, name, dtype), names), strict=True):
            progress.advance()
            if record is not None:
                records[name] = record
    return records


def _record(draft: Path, name: str, dtype: str) -> PartRecord | None:
    """Read a record; None when it or one of its files is damaged."""
    file = part_file(draft, name, "json")
    try:
        record = PartRecord.from_json(json.loads(file.read_bytes()))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        record = None
    if record is None or record.name != name or part_fault(draft, record, dtype, with_digest=True):
        file.unlink(missing_ok=True)
        return None
    return record


def _run(jobs: Sequence[PartJob], workers: int) -> Iterator[PartRecord]:
    """Yield records as parts complete; a part that fails is reported after the others."""
    if min(workers, len(jobs)) <= 1:
        for job in jobs:
            yield write_part(job)
        return
    context = multiprocessing.get_context("forkserver")  # imports once; a fork of this process could hold locks
    context.set_forkserver_preload([worker.__name__])
    errors: list[RecipeError] = []
    with ProcessPoolExecutor(min(workers, len(jobs)), context, worker.exit_with_parent) as pool:
        try:
            futures = [pool.submit(write_part, job) for job in jobs]
            for future in as_completed(futures):
                try:
                    yield future.result()
                except RecipeError as error:
                    errors.append(error)
        except BrokenProcessPool as error:
            raise RecipeError(
                f"One of {workers} workers was killed, usually because memory ran out. Parts that are complete are "
                f"kept: run the command again with fewer, for example `--workers={max(1, workers // 2)}`."
            ) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    if errors:
        raise RecipeError(f"{len(errors)} of {len(jobs)} parts failed, the others are kept. The first: {errors[0]}")


def _hold_one_out(jobs: Sequence[PartJob], records: dict[str, PartRecord], request: StoreRequest) -> float:
    """Hold out one document of a small source when chance chose none; return the share that does it."""
    share = request.validation_share
    splits = list(chain.from_iterable((record.train, record.validation) for record in records.values()))
    num_documents = sum(split.num_documents for split in splits)
    has_validation = any(record.validation.num_documents for record in records.values())
    is_wanted = request.source.is_small and num_documents >= 2 and share * num_documents >= _LEAST_EXPECTED
    if has_validation or not is_wanted:
        return share
    lowest = min(record.lowest_hash for record in records.values())
    share = (lowest + 1) / 2**32
    for job in jobs:
        if records[job.part.name].lowest_hash == lowest:
            fields = {"folder": job.folder, "source": job.source, "end": job.end}
            records[job.part.name] = write_part(PartJob(part=job.part, validation_share=share, **fields))
    return share


def _require_documents(manifest: Manifest, request: StoreRequest) -> None:
    num_documents = manifest.total("num_documents")
    for split in ("train", "validation"):
        if not manifest.total("num_documents", (split,)):
            raise RecipeError(
                f"`data.validation_share={request.validation_share}` of {num_documents} documents leaves "
                f"none for {split}. Use `--data.validation_share=0.05`, or a larger corpus."
            )
