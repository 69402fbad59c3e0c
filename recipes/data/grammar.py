"""Text that is the same on every machine: sentences drawn from a small grammar.

For tests, continuous integration and resume demonstrations: no file is read, the text depends on the seed
alone (not on the Python version: only `random.Random.random` is used, whose sequence Python promises to
keep), and the lowest loss any model can reach is known, because every sentence is drawn with a known
probability.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from .source import Document, TextPart

# A rule lists equally likely expansions; words in capitals name further rules. Different choices give
# different sentences, so the probability of a sentence is the product of its choices.
_RULES: dict[str, tuple[str, ...]] = {
    "SENTENCE": (
        "SUBJECT ACTION.",
        "SUBJECT ACTION PLACE.",
        "WHEN SUBJECT ACTION.",
        "SUBJECT ACTION because SUBJECT FEELING.",
        "SUBJECT FEELING, so SUBJECT ACTION.",
    ),
    "SUBJECT": ("the PERSON", "the QUALITY PERSON", "a PERSON", "PRONOUN"),
    "PRONOUN": ("she", "he"),
    "PERSON": (
        "king",
        "queen",
        "teacher",
        "farmer",
        "sailor",
        "doctor",
        "child",
        "painter",
        "miller",
        "stranger",
    ),
    "QUALITY": ("old", "young", "brave", "quiet", "clever", "tired", "kind", "proud"),
    "ACTION": ("VERB the THING", "VERB the COLOUR THING", "MOVED", "MOVED MANNER", "spoke to the PERSON"),
    "VERB": ("found", "carried", "painted", "sold", "wanted", "dropped", "admired", "repaired"),
    "THING": ("lamp", "book", "boat", "apple", "letter", "wheel", "coat", "bell", "basket", "clock"),
    "COLOUR": ("red", "green", "blue", "white", "black", "yellow"),
    "MOVED": ("walked home", "waited", "slept", "laughed", "sang", "ran away"),
    "MANNER": ("slowly", "quickly", "happily", "alone"),
    "PLACE": ("in the garden", "near the river", "behind the market", "on the hill", "under the bridge"),
    "WHEN": ("in the morning,", "at night,", "after the rain,", "one day,", "in winter,"),
    "FEELING": ("was hungry", "was happy", "was cold", "was late", "knew the PERSON", "loved the PERSON"),
}
_SENTENCES_PER_DOCUMENT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarSource:
    """Documents of simple grammatical sentences, with their exact information.

    Args:
        num_documents: Documents of 8 sentences; 2,000 are about 0.7 MB.
        seed: Equal seeds give equal text on every machine.
    """

    num_documents: int
    seed: int = 0
    is_small: bool = True

    @property
    def origin(self) -> str:
        """Where the text comes from."""
        return f"sentences drawn from a small grammar with seed {self.seed}, no files read"

    @property
    def identity(self) -> str:
        """Number of documents and seed."""
        return f"grammar documents={self.num_documents} seed={self.seed}"

    def parts(self) -> tuple[TextPart]:
        """Return one part: the sentences are drawn one after the other."""
        return (TextPart(name="grammar"),)

    def read(self, part: TextPart) -> Iterator[Document]:
        """Write the documents."""
        generator = random.Random(self.seed)
        for _ in range(self.num_documents):
            sentences, nats = [], 0.0
            for _ in range(_SENTENCES_PER_DOCUMENT):
                sentence, sentence_nats = _expand("SENTENCE", generator)
                sentences.append(sentence[0].upper() + sentence[1:])
                nats += sentence_nats
            yield Document(" ".join(sentences), nats)


def _expand(rule: str, generator: random.Random) -> tuple[str, float]:
    """Draw one expansion of a rule; returns the text and the information of the choices made, in nats."""
    options = _RULES[rule]
    nats = math.log(len(options))
    words = []
    for word in options[int(generator.random() * len(options))].split():
        name = word.rstrip(".,")
        if name in _RULES:
            text, more = _expand(name, generator)
            words.append(text + word[len(name) :])
            nats += more
        else:
            words.append(word)
    return " ".join(words), nats
