"""Samples as tensors: next tokens, hidden tokens.

A sample is read by its index, so nothing has to be read before it. What differs between epochs (masks) is a function
of (seed, epoch, index).
"""

from dataclasses import dataclass
from typing import Protocol, TypedDict, TypeVar

import numpy as np
import torch

from ..errors import RecipeError
from .hashing import keys_of
from .masking import Masker
from .permutation import Int64Array
from .stream import TokenStream
from .tokenizer import SpecialTokens


class Batch(TypedDict):
    """A micro-batch of B sequences of S tokens, both [B, S] int64.

    Labels are the next tokens, or hidden tokens with -100 elsewhere.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor


class ImageBatch(TypedDict):
    """A micro-batch of B images, [B, C, H, W] float32, and their classes, [B] int64."""

    images: torch.Tensor
    labels: torch.Tensor


BatchT = TypeVar("BatchT", Batch, ImageBatch)
BatchT_co = TypeVar("BatchT_co", bound=Batch | ImageBatch, covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleIds:
    """The names of samples.

    Args:
        indices: [B] int64, in 0 .. num_samples - 1.
        epochs: [B] int64.
        seed: Seed of the run.
    """

    indices: Int64Array
    epochs: Int64Array
    seed: int


class SampleStore(Protocol[BatchT_co]):
    """Samples that are read by index.

    Attributes:
        num_samples: Samples in an epoch.
        fingerprint: Name of the samples, which runs that resume compare.
    """

    @property
    def num_samples(self) -> int: ...  # noqa: D102

    @property
    def fingerprint(self) -> str: ...  # noqa: D102

    def read(self, ids: SampleIds) -> BatchT_co:
        """Read samples, one row each."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NextTokenSamples:
    """A stream of tokens cut into sequences, each token with the next one as label.

    Args:
        tokens: Documents, each followed by the end token.
        sequence_length: S; sequence i is tokens i*S .. i*S + S, its labels the same range one further on.
        name: Name of the tokens.
    """

    tokens: TokenStream
    sequence_length: int
    name: str

    def __post_init__(self) -> None:
        """Refuse tokens without a single sequence."""
        _require_sample(self.num_samples, self.sequence_length, self.sequence_length + 1, len(self.tokens))

    @property
    def num_samples(self) -> int:
        """Sequences with a next token for each of theirs; up to S tokens at the end are in none."""
        return max(0, len(self.tokens) - 1) // self.sequence_length

    @property
    def fingerprint(self) -> str:
        """Name of tokens and sequences."""
        return f"{self.name}-s{self.sequence_length}"

    def read(self, ids: SampleIds) -> Batch:
        """Read sequences."""
        window = torch.from_numpy(self.tokens.read(ids.indices * self.sequence_length, self.sequence_length + 1))
        return {"input_ids": window[:, :-1].contiguous(), "labels": window[:, 1:].contiguous()}


class MaskedSamples:
    """A stream of tokens cut into sequences with hidden tokens, for BERT and RoBERTa.

    A sequence is the first token ([CLS]), S - 2 tokens of the stream, and the end token ([SEP]). Documents follow
    one another, separated by the end token, and nothing is padded.

    Args:
        tokens: Documents, each followed by the end token.
        sequence_length: S, at least 3.
        name: Name of the tokens.
        special: Special tokens.
        vocab_size: Ids are below it.
        mask_share: Part of the sequence that is hidden.
    """

    def __init__(
        self,
        tokens: TokenStream,
        *,
        sequence_length: int,
        name: str,
        special: SpecialTokens,
        vocab_size: int,
        mask_share: float,
    ) -> None:
        self.tokens = tokens
        self.sequence_length = sequence_length
        self.special = special
        self.fingerprint = f"{name}-s{sequence_length}-mask{mask_share}"
        self._masker = Masker(
            mask=special.mask,
            special_ids=special.ids,
            vocab_size=vocab_size,
            num_targets=max(1, round(mask_share * sequence_length)),
        )
        if sequence_length < 3:
            raise RecipeError(
                f"`data.sequence_length={sequence_length}` leaves no token between the first and the last of a "
                "masked model's sequence. Use at least 3."
            )
        _require_sample(self.num_samples, sequence_length, sequence_length - 2, len(tokens))

    @property
    def num_samples(self) -> int:
        """Sequences; up to S - 3 tokens at the end are in none."""
        return len(self.tokens) // (self.sequence_length - 2)

    def read(self, ids: SampleIds) -> Batch:
        """Read sequences and hide tokens of them."""
        length = self.sequence_length - 2
        rows = np.empty((len(ids.indices), self.sequence_length), np.int64)
        rows[:, 0], rows[:, -1] = self.special.first, self.special.end
        rows[:, 1:-1] = self.tokens.read(ids.indices * length, length)
        keys = keys_of([np.full_like(ids.indices, ids.seed), ids.epochs, ids.indices])
        masked = self._masker(rows, keys)
        return {"input_ids": torch.from_numpy(masked.inputs), "labels": torch.from_numpy(masked.labels)}


def _require_sample(num_samples: int, sequence_length: int, needed: int, num_tokens: int) -> None:
    if num_samples < 1:
        raise RecipeError(
            f"`data.sequence_length={sequence_length}` needs {needed} tokens or "
            f"more; this part of the corpus has {num_tokens}. Use shorter ones or a larger corpus."
        )
