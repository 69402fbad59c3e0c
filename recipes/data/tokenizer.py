"""Tokenizers: a byte-level BPE trained on the recipe's own text, or one that exists.

Byte-level: every text can be encoded, and decoding gives it back exactly. Trained on the spot: no download,
no licence, a second or two for a megabyte.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from ..errors import RecipeError
from .text_files import cut_position

Objective = Literal["causal", "masked"]
TRAINED = "bpe"
END_OF_TEXT = "<|endoftext|>"
PADDING, CLASS, SEPARATOR, MASK = "[PAD]", "[CLS]", "[SEP]", "[MASK]"
MIN_VOCAB_SIZE = 257  # one token for each byte, and the end of a text
_BATCH_DOCUMENTS, _BATCH_CHARACTERS = 1000, 4_000_000
_LONGEST_PIECE = 1_000_000  # characters that are encoded at once
_KNOWN_ENDS = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<|end▁of▁sentence|>", "<eos>")
_KNOWN_MASKED = ((CLASS, SEPARATOR, MASK), ("<s>", "</s>", "<mask>"))


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialTokens:
    """Ids of the tokens that are not text.

    Args:
        end: Token after each document: end of text, or the separator of a masked model.
        first: First token of a masked model's sequence; unused by causal models.
        mask: Token that replaces a target of a masked model; unused by causal models.
        ids: All special ids, ascending; none of them is masked or drawn as a random token.
    """

    end: int
    first: int = 0
    mask: int = 0
    ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerRequest:
    """The tokenizer that a recipe asks for.

    Args:
        name: `bpe`, a tokenizer.json, a folder with one, or a name on the hub.
        vocab_size: Rows of the model's embedding: size of a trained vocabulary, and limit of any other.
        objective: Objective of the training, which decides the special tokens.
        download: Whether a name may be fetched from the hub.
    """

    name: str
    vocab_size: int
    objective: Objective
    download: bool = False

    @property
    def identity(self) -> str:
        """Everything that decides the tokens, the text apart.

        Raises:
            RecipeError: The file does not exist.
        """
        if self.name == TRAINED:
            special = "" if self.objective == "causal" else " masked"
            return f"bpe vocab={self.vocab_size}{special}"
        path = Path(self.name).expanduser()
        file = path / "tokenizer.json" if path.is_dir() else path
        if file.is_file():
            return f"file {hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()} {self.objective}"
        if path.is_dir() or path.suffix == ".json" or path.is_absolute():
            raise RecipeError(
                f"`data.tokenizer={self.name}` has no file {file}. Name a tokenizer.json, a folder with one, a name on "
                "the hub, or `bpe`."
            )
        return f"hub {self.name} {self.objective}"


def train_tokenizer(documents: Iterable[str], vocab_size: int, objective: Objective = "causal") -> Tokenizer:
    """Train a byte-level BPE tokenizer.

    Args:
        documents: Texts to learn merges from.
        vocab_size: Largest number of tokens; a small corpus may yield fewer.
        objective: Masked models have the tokens [PAD], [CLS], [SEP] and [MASK], 0 to 3; causal ones the end
            of a text, 0.

    Returns:
        The tokenizer.

    Raises:
        RecipeError: The vocabulary is smaller than the bytes and special tokens.
    """
    special = [END_OF_TEXT] if objective == "causal" else [PADDING, CLASS, SEPARATOR, MASK]
    if vocab_size < 256 + len(special):
        raise RecipeError(
            f"`model.vocab_size={vocab_size}` is too small for a trained tokenizer: it has 256 bytes and "
            f"{', '.join(special)}. Use at least {256 + len(special)}."
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer=trainer)
    return tokenizer


def read_tokenizer(file: Path) -> Tokenizer:
    """Read a tokenizer.json.

    Raises:
        RecipeError: The file holds something else.
    """
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers has no class of its own for it
        raise RecipeError(f"`{file}` is not a tokenizer.json ({error}). Name another file, or use `bpe`.") from error


def load_tokenizer(request: TokenizerRequest) -> Tokenizer:
    """Load a tokenizer that exists.

    Args:
        request: A path, or a name; names are looked up in the local cache of the hub unless `download` is set.

    Raises:
        RecipeError: There is no such tokenizer, or its tokens do not fit the model.
    """
    path = Path(request.name).expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    tokenizer = read_tokenizer(file) if file.is_file() else _from_hub(request)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    size = vocabulary_size(tokenizer)
    if size > request.vocab_size:
        raise RecipeError(
            f"`data.tokenizer={request.name}` has tokens up to {size - 1}, `model.vocab_size={request.vocab_size}` has "
            f"rows up to {request.vocab_size - 1}. Use `--model.vocab_size={size}` or more, or another tokenizer."
        )
    special_tokens(tokenizer, request.objective)
    return tokenizer


def special_tokens(tokenizer: Tokenizer, objective: Objective) -> SpecialTokens:
    """Find the tokens that separate, begin and mask sequences, by their usual names.

    Raises:
        RecipeError: The tokenizer lacks one.
    """
    ids = tuple(sorted(index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special))
    if objective == "causal":
        ends = (tokenizer.token_to_id(name) for name in _KNOWN_ENDS)
        end = next((index for index in ends if index is not None), None)
        if end is None:
            raise RecipeError(
                f"The tokenizer has none of {', '.join(_KNOWN_ENDS)}, which ends documents of a causal model. Use "
                "another tokenizer, or `--data.tokenizer=bpe`."
            )
        return SpecialTokens(end=end, ids=tuple(sorted({*ids, end})))
    for names in _KNOWN_MASKED:
        first, separator, mask = (tokenizer.token_to_id(name) for name in names)
        if None not in (first, separator, mask):
            return SpecialTokens(
                end=separator, first=first, mask=mask, ids=tuple(sorted({*ids, first, separator, mask}))
            )
    wanted = " or ".join("(" + ", ".join(names) + ")" for names in _KNOWN_MASKED)
    raise RecipeError(
        f"The tokenizer has neither {wanted}, which a masked model needs. Use a tokenizer of a BERT or RoBERTa, or "
        "`--data.tokenizer=bpe`."
    )


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """Return one more than the largest token."""
    return 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())


def token_dtype(tokenizer: Tokenizer) -> np.dtype[np.generic]:
    """Return little-endian uint16 when all tokens fit, uint32 otherwise."""
    return np.dtype("<u2" if vocabulary_size(tokenizer) <= 2**16 else "<u4")


def encode_documents(tokenizer: Tokenizer, documents: Iterable[str], end: int) -> Iterator[npt.NDArray[np.generic]]:
    """Encode documents, each followed by the end token.

    Args:
        tokenizer: Any.
        documents: Texts of any length; long ones are encoded in pieces.
        end: Id after each document.

    Yields:
        [num_tokens] of one document, in the dtype of `token_dtype`.
    """
    dtype = token_dtype(tokenizer)
    for batch in _batches(documents):
        pieces = [_pieces(document) for document in batch]
        encodings = iter(tokenizer.encode_batch_fast(list(chain.from_iterable(pieces)), add_special_tokens=False))
        for document in pieces:
            encoded = islice(encodings, len(document))
            yield np.asarray([token for encoding in encoded for token in encoding.ids] + [end], dtype)


def _pieces(document: str) -> list[str]:
    pieces = []
    while len(document) > _LONGEST_PIECE:
        end = cut_position(document, _LONGEST_PIECE)
        pieces.append(document[:end])
        document = document[end:]
    return [*pieces, document]


def _batches(documents: Iterable[str]) -> Iterator[Sequence[str]]:
    batch: list[str] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document)
        if len(batch) == _BATCH_DOCUMENTS or size > _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _from_hub(request: TokenizerRequest) -> Tokenizer:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(request.name, local_files_only=not request.download)
    except (OSError, ValueError) as error:
        raise RecipeError(
            f"`data.tokenizer={request.name}` is neither a file nor in the local cache of the hub. Fetch it with the "
            f"preparation (`--data.download=true`) or `hf download {request.name}`, or name a tokenizer.json. "
            f"({error})"
        ) from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise RecipeError(
            f"`data.tokenizer={request.name}` has no fast version (a tokenizer.json). Choose one that has."
        )
    return Tokenizer.from_str(backend.to_str())
