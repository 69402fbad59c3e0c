"""The token store: what is on disk, and what is verified before it is believed.

A store is a folder:

    manifest.json           format, source, tokenizer, one record per part, a checksum of all that
    tokenizer.json
    parts/NAME.train.bin            tokens without a header, little-endian uint16 or uint32
    parts/NAME.validation.bin
    parts/NAME.json                 the part's record; written last

`docs/data.md` describes the fields.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ..errors import RecipeError
from .source import SPLITS, Split
from .stream import TokenStream, map_tokens
from .tokenizer import SpecialTokens, read_tokenizer

FORMAT = 2  # counts up when equal keys would give other tokens or files
MANIFEST, TOKENIZER, PARTS = "manifest.json", "tokenizer.json", "parts"
DTYPES = ("<u2", "<u4")
_NAME, _DIGEST = re.compile(r"\w[\w.-]*"), re.compile(r"[0-9a-f]{32}")
_VERIFIED_AT_EACH_START = 64_000_000  # bytes
_CHUNK = 1 << 22


def _check(name: str, value: object, is_met: object) -> None:
    """Refuse a value; `Manifest.read` and the readers of records say in which file it is.

    Raises:
        ValueError: `is_met` is false.
    """
    if not is_met:
        raise ValueError(f"`{name}` is {value!r}")


def _check_fields(record: "SplitRecord | PartRecord | Manifest") -> None:
    """Refuse fields that are not of their types, and numbers that are no counts, shares or amounts."""
    for field in fields(record):
        value = getattr(record, field.name)
        if field.type in (int, float):
            is_number = type(value) is int or (type(value) is field.type and math.isfinite(value))
            _check(field.name, value, is_number and value >= 0)
        elif field.type is str:
            _check(field.name, value, type(value) is str)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRecord:
    """The tokens of one part and split.

    Args:
        num_documents: Documents, empty ones not counted.
        num_tokens: Tokens, one end token per document included.
        num_bytes: Text in UTF-8.
        digest: Blake2b of the file, 16 bytes in hexadecimal digits.
    """

    num_documents: int
    num_tokens: int
    num_bytes: int
    digest: str

    def __post_init__(self) -> None:
        """Refuse what no preparation writes."""
        _check_fields(self)
        _check("digest", self.digest, _DIGEST.fullmatch(self.digest))


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRecord:
    """One complete part.

    Args:
        name: Name of the part.
        train: Tokens of the training split.
        validation: Tokens of held-out documents.
        num_empty: Documents without text, which are left out.
        information_nats: Information in all documents, when the source knows it.
        lowest_hash: Smallest hash of a document, which is held out if no other is; 2**32 without documents.
    """

    name: str
    train: SplitRecord
    validation: SplitRecord
    num_empty: int
    information_nats: float
    lowest_hash: int

    def __post_init__(self) -> None:
        """Refuse what no preparation writes."""
        _check_fields(self)
        _check("name", self.name, _NAME.fullmatch(self.name))

    def split(self, split: Split) -> SplitRecord:
        """Return the record of one split."""
        return self.train if split == "train" else self.validation

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "PartRecord":
        """Read what `dataclasses.asdict` wrote.

        Raises:
            TypeError: A field is missing or unknown.
            KeyError: A split is missing.
        """
        splits = {split: SplitRecord(**fields[split]) for split in SPLITS}
        return cls(**{**fields, **splits})


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a complete store contains.

    Args:
        format: Version of the layout.
        key: Name of source, tokenizer and held-out share.
        source: `identity` of the source.
        origin: Sentence for the log.
        tokenizer: Identity of the tokenizer.
        tokenizer_digest: Blake2b of tokenizer.json.
        dtype: Dtype of the tokens, `<u2` or `<u4`.
        special: Ids of the tokens that are not text.
        validation_share: Part of the documents that is held out by hash.
        parts: Records in the order of the stream.
    """

    format: int
    key: str
    source: str
    origin: str
    tokenizer: str
    tokenizer_digest: str
    dtype: str
    special: SpecialTokens
    validation_share: float
    parts: tuple[PartRecord, ...]

    def __post_init__(self) -> None:
        """Refuse what no preparation writes."""
        _check_fields(self)
        _check("dtype", self.dtype, self.dtype in DTYPES)
        ids = (self.special.end, self.special.first, self.special.mask, *self.special.ids)
        _check("special", ids, all(type(token) is int and 0 <= token < 2**32 for token in ids))
        names = [part.name for part in self.parts]
        _check("parts", names, len({*names}) == len(names))

    @property
    def digest(self) -> str:
        """Blake2b of everything here, 16 bytes in hexadecimal digits."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def total(self, field: str, splits: Sequence[Split] = SPLITS) -> int:
        """Sum up a field of the split records."""
        return sum(getattr(part.split(split), field) for part in self.parts for split in splits)

    def to_json(self) -> str:
        """Return the file, with totals for readers and the checksum."""
        totals = {
            split: {name: self.total(name, (split,)) for name in ("num_documents", "num_tokens", "num_bytes")}
            for split in SPLITS
        }
        return json.dumps({**asdict(self), "totals": totals, "checksum": self.digest}, indent=1) + "\n"

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read and verify the manifest of a store.

        Raises:
            RecipeError: It is missing, damaged, or of another version.
        """
        file = folder / MANIFEST
        if (fault := file_fault(folder, file)) is not None:
            raise damaged(folder, fault)
        try:
            fields = json.loads(file.read_bytes())
            checksum = fields.pop("checksum")
            if fields["format"] != FORMAT:
                raise RecipeError(
                    f"The token store {folder} has format {fields['format']!r}, this version reads {FORMAT}. "
                    f"Delete the folder and prepare it again."
                )
            del fields["totals"]
            parts = tuple(PartRecord.from_json(part) for part in fields["parts"])
            special = SpecialTokens(**{**fields["special"], "ids": tuple(fields["special"]["ids"])})
            manifest = cls(**{**fields, "parts": parts, "special": special})
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            if isinstance(error, RecipeError):
                raise
            raise damaged(folder, f"{file.name} cannot be read ({type(error).__name__}: {error})") from error
        if manifest.digest != checksum:
            raise damaged(folder, f"{file.name} does not match its checksum")
        return manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStore:
    """An open store.

    Args:
        folder: Folder of the store.
        manifest: Its contents.
        tokenizer: Turns tokens into text and back.
    """

    folder: Path
    manifest: Manifest
    tokenizer: Tokenizer

    def stream(self, split: Split) -> TokenStream:
        """Map the tokens of a split, parts in order."""
        files = (part_file(self.folder, part.name, split) for part in self.manifest.parts)
        return TokenStream([map_tokens(file, self.manifest.dtype) for file in files])


def open_store(folder: Path) -> TokenStore:
    """Open a complete store.

    Raises:
        RecipeError: A file is missing or damaged. Checksums of tokens are verified up to 64 MB, sizes always.
    """
    manifest = Manifest.read(folder)
    num_bytes = manifest.total("num_tokens") * int(manifest.dtype[-1])
    for part in manifest.parts:
        fault = part_fault(folder, part, manifest.dtype, with_digest=num_bytes <= _VERIFIED_AT_EACH_START)
        if fault:
            raise damaged(folder, fault)
    return TokenStore(folder=folder, manifest=manifest, tokenizer=open_tokenizer(folder, manifest.tokenizer_digest))


def open_tokenizer(folder: Path, digest: str) -> Tokenizer:
    """Open the tokenizer of a store.

    Raises:
        RecipeError: It is missing, or is not the one that made the tokens.
    """
    file = folder / TOKENIZER
    if (fault := file_fault(folder, file)) is not None:
        raise damaged(folder, fault)
    if digest_of(file) != digest:
        raise damaged(folder, f"{TOKENIZER} does not match its checksum")
    return read_tokenizer(file)


def part_fault(folder: Path, part: PartRecord, dtype: str, *, with_digest: bool) -> str:
    """Say what is wrong with the files of a part; an empty string when nothing is."""
    for split in SPLITS:
        file, record = part_file(folder, part.name, split), part.split(split)
        num_bytes = record.num_tokens * int(dtype[-1])
        if (fault := file_fault(folder, file)) is not None:
            return fault
        if file.stat().st_size != num_bytes:
            return f"{file.name} has {file.stat().st_size:,} bytes instead of {num_bytes:,}"
        if with_digest and digest_of(file) != record.digest:
            return f"{file.name} does not match its checksum"
    return ""


def file_fault(folder: Path, file: Path) -> str | None:
    """Say why a file is none of a store's; None for a regular file inside the folder."""
    if not file.is_file():
        return f"{file.name} is missing"
    if not file.resolve().is_relative_to(folder.resolve()):
        return f"{file.name} is a link that leads out of the folder"
    return None


def part_file(folder: Path, name: str, kind: str) -> Path:
    """Return the path of a part's tokens (`kind` is the split) or record (`kind` is `json`)."""
    return folder / PARTS / (f"{name}.json" if kind == "json" else f"{name}.{kind}.bin")


def digest_of(file: Path) -> str:
    """Return the Blake2b of a file, 16 bytes in hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=16)
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def write_durably(file: Path, content: bytes) -> None:
    """Give a file its name when its content is on disk; a reader finds all of it or nothing."""
    draft = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    with draft.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    draft.replace(file)


def damaged(folder: Path, fault: str) -> RecipeError:
    """Return the error of a store that cannot be believed."""
    return RecipeError(
        f"The token store {folder} is damaged: {fault}. Repair it with `mics data prepare RECIPE` and the options of "
        "this run: parts that are intact are kept. Or delete the folder."
    )
