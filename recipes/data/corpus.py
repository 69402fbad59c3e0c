"""What is a corpus, before it becomes tokens?"""

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Documents of plain text, in an order that is the same each time they are read.

    Args:
        documents: the texts; a document never spans two entries.
        origin: one sentence for the log that says where the text comes from.
        surprise_nats: information in all documents together when the source knows it (a generator does),
            which is the lowest loss that any model can reach on them; 0.0 when unknown.
    """

    documents: tuple[str, ...]
    origin: str
    surprise_nats: float = 0.0

    @property
    def num_bytes(self) -> int:
        """Size of all documents in UTF-8."""
        return sum(len(document.encode()) for document in self.documents)


def held_out(document: str, share: float) -> bool:
    """Say whether a document belongs to the validation part.

    Decided by the text alone, so that a document stays on its side whatever else the corpus holds, and equal
    documents never fall on both sides.

    Args:
        document: the text.
        share: part of all documents to hold out, 0 to 1.

    Returns:
        True for about `share` of all distinct documents.
    """
    digest = hashlib.blake2b(document.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") < share * 2**32
