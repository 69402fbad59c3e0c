"""The interface of a source of text."""

import hashlib
import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Literal, NamedTuple, Protocol

from mics_strategy.version import install_advice

from ..errors import RecipeError

Split = Literal["train", "validation"]
SPLITS: tuple[Split, Split] = ("train", "validation")


class Document(NamedTuple):
    """One text.

    Attributes:
        text: The text; empty ones are counted and left out.
        information_nats: Information in the text when the source knows it (a generator does); 0.0 when unknown.
    """

    text: str
    information_nats: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPart:
    """A piece of a source that one worker reads from beginning to end.

    Args:
        name: Name within the source, the same in every run.
        files: Files to read, in this order; a generated source has none.
        split: Split of all documents, or `by_hash` when each document's text decides.
        span: First byte and end of the lines to read, of a single file; a line belongs where it begins.
    """

    name: str
    files: tuple[Path, ...] = ()
    split: Split | Literal["by_hash"] = "by_hash"
    span: tuple[int, int] | Literal["all"] = "all"


class TextSource(Protocol):
    """Documents of plain text in parts, in an order that is the same each time they are read.

    A source is plain data: workers receive it by pickling.

    Attributes:
        origin: Sentence for the log that says where the text comes from.
        identity: Everything that decides the text. Sources of equal identity contain equal documents.
        is_small: Whether the text is prepared within seconds, so that training may do it.
    """

    @property
    def origin(self) -> str: ...  # noqa: D102

    @property
    def identity(self) -> str: ...  # noqa: D102

    @property
    def is_small(self) -> bool: ...  # noqa: D102

    def parts(self) -> Sequence[TextPart]:
        """Return the parts; their order is the order of the documents.

        Raises:
            RecipeError: Files are missing.
        """
        ...

    def read(self, part: TextPart) -> Iterator[Document]:
        """Read the documents of a part.

        Raises:
            RecipeError: A file is damaged or has no text.
        """
        ...


def import_extra(name: str) -> ModuleType:
    """Import a module that the extra `recipes` installs.

    Raises:
        RecipeError: It is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise RecipeError(
            f"This source is read with `{name}`, and `{error.name}` is not installed. {install_advice('recipes')}"
        ) from None


def hash_of(text: str) -> int:
    """Return 32 bits that depend on a text alone."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big")


def held_out(document: str, share: float) -> bool:
    """Say whether a document belongs to the validation part.

    Decided by the text alone, so that a document stays on its side whatever else the corpus contains, and equal
    documents never fall on both sides.

    Args:
        document: Text.
        share: Part of all documents to hold out, 0 to 1.

    Returns:
        True for about `share` of all distinct documents.
    """
    return hash_of(document) < share * 2**32
