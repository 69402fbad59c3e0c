"""The user's own text: files and folders of .txt, .md, .jsonl and .parquet."""

import gzip
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Literal

from ..errors import RecipeError
from .source import Document, TextPart, import_extra

_PLAIN = (".txt", ".md")
_JSON_LINES = (".jsonl", ".jsonl.gz", ".json.gz")
_PARQUET = (".parquet",)
SUFFIXES = (*_PLAIN, *_JSON_LINES, *_PARQUET)
COLUMN = "text"
SMALL_BYTES = 64_000_000
_PART_BYTES = 64_000_000  # files are read together until they have this size
# A long plain file becomes several documents, so that some of it can be held out.
_MIN_DOCUMENT, _MAX_DOCUMENT, _DOCUMENTS_PER_FILE = 4_000, 256_000, 256  # characters, characters, at least if long
_ROWS = 1000  # of a parquet file, read together


@dataclass(frozen=True)
class TextFiles:
    """Documents in the user's own files.

    A .jsonl line and a .parquet row are a document each, with the text in `text`. A .txt or .md file of up to
    4,000 characters is one document; longer ones are cut at blank lines, and no character is lost.

    Args:
        paths: Files, and folders that are searched for files with a known suffix, in the order of their names.
    """

    paths: tuple[Path, ...]

    @property
    def origin(self) -> str:
        """Where the text comes from."""
        return f"{len(self.files)} files of {', '.join(map(str, self.paths))}"

    @cached_property
    def files(self) -> tuple[Path, ...]:
        """All files, in the order in which they are read.

        Raises:
            RecipeError: A path does not exist, has no known suffix, or a folder has no such file.
        """
        return tuple(file for path in self.paths for file in _files_of(path))

    @cached_property
    def num_bytes(self) -> int:
        """Size of all files, compressed ones as they are."""
        return sum(file.stat().st_size for file in self.files)

    @property
    def is_small(self) -> bool:
        """Whether training prepares the files itself."""
        return self.num_bytes <= SMALL_BYTES

    @cached_property
    def identity(self) -> str:
        """Digest of the contents of small sources; of names, sizes and times of change of large ones."""
        digest = hashlib.blake2b(digest_size=16)
        for file in self.files:
            status = file.stat()
            digest.update(f"{file.name} {status.st_size}\n".encode())
            digest.update(file.read_bytes() if self.is_small else f"{file} {status.st_mtime_ns}\n".encode())
        return f"text {digest.hexdigest()}"

    def parts(self) -> tuple[TextPart, ...]:
        """Group files until they have 64 MB; long .jsonl files are divided into pieces of that size."""
        groups: list[tuple[list[Path], tuple[int, int] | Literal["all"]]] = []
        room = 0
        for file in self.files:
            size = file.stat().st_size
            if _suffix(file) == ".jsonl" and size >= 2 * _PART_BYTES:
                starts = range(0, size, _PART_BYTES)
                groups += [([file], (start, min(start + _PART_BYTES, size))) for start in starts]
                room = 0
                continue
            if room <= 0:
                groups.append(([], "all"))
                room = _PART_BYTES
            groups[-1][0].append(file)
            room -= size
        return tuple(
            TextPart(name=f"{index:05d}", files=tuple(files), span=span) for index, (files, span) in enumerate(groups)
        )

    def read(self, part: TextPart) -> Iterator[Document]:
        """Read the documents of some files."""
        for file in part.files:
            if _suffix(file) in _PLAIN:
                yield from map(Document, _sections(file))
            elif _suffix(file) in _PARQUET:
                yield from map(Document, _parquet_texts(file))
            else:
                yield from map(Document, _json_texts(file, part.span))


def _suffix(file: Path) -> str:
    return next((suffix for suffix in reversed(SUFFIXES) if file.name.lower().endswith(suffix)), "")


def _files_of(path: Path) -> list[Path]:
    path = path.expanduser()
    if path.is_dir():
        files = [file for file in sorted(path.rglob("*")) if file.is_file() and _suffix(file)]
        if not files:
            raise RecipeError(f"`data.path={path}` is a folder without files of text. Known are {', '.join(SUFFIXES)}.")
        return files
    if not path.is_file():
        raise RecipeError(
            f"`data.path={path}` does not exist (searched from {Path.cwd()}). Correct the path; a relative one "
            "begins in the folder in which the command is started."
        )
    if not _suffix(path):
        raise RecipeError(
            f"`data.path={path}` has an unknown suffix. Rename it, or convert it to one of {', '.join(SUFFIXES)}."
        )
    return [path]


def _sections(file: Path) -> Iterator[str]:
    """Cut a plain file into documents, at blank lines if there are any; joined they are the file again."""
    length = min(max(file.stat().st_size // _DOCUMENTS_PER_FILE, _MIN_DOCUMENT), _MAX_DOCUMENT)
    rest = ""
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            while text := lines.read(length):
                rest += text
                while len(rest) > length:
                    end = cut_position(rest, length)
                    yield rest[:end]
                    rest = rest[end:]
    except UnicodeDecodeError as error:
        raise RecipeError(
            f"{file} is not UTF-8: {error}. Convert it, for example with `iconv -f latin1 -t utf8 {file.name}`."
        ) from None
    if rest:
        yield rest


def cut_position(text: str, limit: int) -> int:
    """Return where to cut a text: after the last blank line, line or word before `limit`, or at `limit`."""
    for separator in ("\n\n", "\n", " "):
        position = text.rfind(separator, limit // 2, limit)
        if position >= 0:
            return position + len(separator)
    return limit


def _json_texts(file: Path, span: tuple[int, int] | Literal["all"]) -> Iterator[str]:
    place = f"{file}:1"
    try:
        with gzip.open(file) if file.name.endswith(".gz") else file.open("rb") as stream:
            for place, line in _lines(stream, file, span):
                if line.strip():
                    yield _text_of(json.loads(line), place)
    except (ValueError, EOFError, OSError) as error:
        if isinstance(error, RecipeError):
            raise
        after = "" if isinstance(error, ValueError) else "after "
        raise RecipeError(
            f"{after}{place} cannot be read: {error}. Each line must be one JSON object in UTF-8; repair or "
            "remove the file."
        ) from error


def _lines(stream: IO[bytes], file: Path, span: tuple[int, int] | Literal["all"]) -> Iterator[tuple[str, bytes]]:
    """Yield lines, each with its place for errors."""
    if span == "all":
        yield from ((f"{file}:{number}", line) for number, line in enumerate(stream, 1))
        return
    start, end = span
    if start:
        stream.seek(start - 1)
        stream.readline()  # the rest of a line that begins before
    while (position := stream.tell()) < end and (line := stream.readline()):
        yield f"{file} (line at byte {position})", line


def _text_of(record: object, place: str) -> str:
    text = record.get(COLUMN, 0) if isinstance(record, dict) else 0
    if text is None:
        return ""
    if not isinstance(text, str):
        keys = sorted(record) if isinstance(record, dict) else type(record).__name__
        raise RecipeError(f"{place} has no string in the field `{COLUMN}`; found {keys}. Rename the field that has it.")
    return text.encode("utf-8", "replace").decode()  # JSON can escape halves of surrogate pairs


def _parquet_texts(file: Path) -> Iterator[str]:
    pyarrow, parquet = import_extra("pyarrow"), import_extra("pyarrow.parquet")
    try:
        with parquet.ParquetFile(file) as table:
            if COLUMN not in table.schema_arrow.names:
                raise RecipeError(
                    f"{file} has no column `{COLUMN}`; found {table.schema_arrow.names}. Rename the one with the text."
                )
            for batch in table.iter_batches(_ROWS, columns=[COLUMN]):
                for text in batch.column(0).to_pylist():
                    yield _text_of({COLUMN: text}, str(file))
    except (pyarrow.ArrowException, OSError) as error:
        raise RecipeError(f"{file} cannot be read: {error}. Write it again, or remove it.") from error
