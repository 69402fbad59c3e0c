"""How does text become numbers? A byte-level BPE tokenizer, trained on the recipe's own corpus.

Byte-level: every text can be encoded, and decoding gives it back exactly. Trained on the spot: no download,
no licence, a second or two for a megabyte.
"""

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
MIN_VOCAB_SIZE = 257  # one token for each byte, and the end of a text
_BATCH = 1000


def train_tokenizer(documents: Sequence[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer.

    Args:
        documents: the texts to learn merges from.
        vocab_size: largest number of tokens; a small corpus may yield fewer.

    Returns:
        A tokenizer whose token 0 is the end of a text.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer=trainer, length=len(documents))
    return tokenizer


def encode_documents(tokenizer: Tokenizer, documents: Sequence[str]) -> npt.NDArray[np.generic]:
    """Encode documents into one stream of tokens, each document followed by the end-of-text token.

    Returns:
        [num_tokens], uint16 when the vocabulary allows it, uint32 otherwise.
    """
    end = tokenizer.token_to_id(END_OF_TEXT)
    dtype = np.uint16 if tokenizer.get_vocab_size() <= 2**16 else np.uint32
    pieces = [np.empty(0, dtype)]
    for batch in _batches(documents):
        for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
            pieces.append(np.asarray([*encoding.ids, end], dtype))
    return np.concatenate(pieces)


def _batches(documents: Sequence[str]) -> Iterator[list[str]]:
    remaining = iter(documents)
    while batch := list(islice(remaining, _BATCH)):
        yield batch
