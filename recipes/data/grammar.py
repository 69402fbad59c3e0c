"""Which text is the same on every machine? Sentences drawn from a small grammar.

For tests, continuous integration and resume demonstrations: no file is read, the text depends on the seed
alone (not on the Python version: only `random.Random.random` is used, whose sequence Python promises to
keep), and the lowest loss any model can reach is known, because every sentence is drawn with a known
probability.
"""

import math
import random

from .corpus import Corpus

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


def make_grammar_corpus(num_documents: int, seed: int) -> Corpus:
    """Write documents of simple grammatical sentences.

    Args:
        num_documents: how many documents of 8 sentences; 2,000 are about 0.7 MB.
        seed: equal seeds give equal text on every machine.

    Returns:
        The corpus, with its exact information content in `surprise_nats`.
    """
    source = random.Random(seed)
    documents, nats = [], 0.0
    for _ in range(num_documents):
        sentences = []
        for _ in range(_SENTENCES_PER_DOCUMENT):
            sentence, sentence_nats = _expand("SENTENCE", source)
            sentences.append(sentence[0].upper() + sentence[1:])
            nats += sentence_nats
        documents.append(" ".join(sentences))
    origin = f"sentences drawn from a small grammar with seed {seed} ({num_documents:,} documents), no files read"
    return Corpus(documents=tuple(documents), origin=origin, surprise_nats=nats)


def _expand(rule: str, source: random.Random) -> tuple[str, float]:
    """Draw one expansion of a rule; returns the text and the information of the choices made, in nats."""
    options = _RULES[rule]
    nats = math.log(len(options))
    words = []
    for word in options[int(source.random() * len(options))].split():
        name = word.rstrip(".,")
        if name in _RULES:
            text, more = _expand(name, source)
            words.append(text + word[len(name) :])
            nats += more
        else:
            words.append(word)
    return " ".join(words), nats
