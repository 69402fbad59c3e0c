"""Masked language modelling: which tokens a sequence hides, as a function of (seed, epoch, sample)."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .hashing import UInt64Array, draws, uniform
from .permutation import Int64Array

IGNORED_LABEL = -100  # what torch.nn.functional.cross_entropy leaves out by default
_MASKED_SHARE, _RANDOM_SHARE = 0.8, 0.1  # of the targets; the remaining tenth keeps its token


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedRows:
    """Sequences with hidden tokens.

    Attributes:
        inputs: [B, S] tokens, some of them replaced.
        labels: [B, S] original tokens at targets, -100 elsewhere.
    """

    inputs: Int64Array
    labels: Int64Array


class Masker:
    """Hides tokens by the rule of BERT: of the targets 80 % [MASK], 10 % a random token, 10 % unchanged.

    Every row has the same number of targets, so that the mean over micro-batches is the mean over the global
    batch. Only a row with fewer ordinary tokens than that has fewer.

    Args:
        mask: Id of the mask token.
        special_ids: Ids that are neither hidden nor drawn.
        vocab_size: Ids are below it.
        num_targets: Targets per row.

    Source:
        Devlin et al., "BERT" (arXiv:1810.04805), section 3.1; dynamic masks: Liu et al., "RoBERTa"
        (arXiv:1907.11692), section 4.1.
    """

    def __init__(self, *, mask: int, special_ids: tuple[int, ...], vocab_size: int, num_targets: int) -> None:
        self.mask = mask
        self.num_targets = num_targets
        self._is_special = np.zeros(vocab_size, dtype=bool)
        self._is_special[list(special_ids)] = True
        self._ordinary = np.flatnonzero(~self._is_special)

    def __call__(self, tokens: Int64Array, keys: UInt64Array) -> MaskedRows:
        """Hide tokens.

        Args:
            tokens: [B, S]; unchanged.
            keys: [B], one per row; equal keys hide equally.
        """
        columns = tokens.shape[1]
        is_target = self._targets(tokens, draws(keys, columns, 0))
        action = uniform(draws(keys, columns, 1))
        random = self._ordinary[(draws(keys, columns, 2) % np.uint64(len(self._ordinary))).astype(np.int64)]
        replaced = np.where(
            action < _MASKED_SHARE, self.mask, np.where(action < _MASKED_SHARE + _RANDOM_SHARE, random, tokens)
        )
        return MaskedRows(
            inputs=np.where(is_target, replaced, tokens), labels=np.where(is_target, tokens, IGNORED_LABEL)
        )

    def _targets(self, tokens: Int64Array, scores: UInt64Array) -> npt.NDArray[np.bool_]:
        """Choose the ordinary tokens with the lowest scores."""
        is_special = self._is_special[tokens]
        scores = np.where(is_special, np.uint64(2**64 - 1), scores >> np.uint64(1))
        lowest = np.argsort(scores, axis=1, kind="stable")[:, : self.num_targets]
        is_target = np.zeros(tokens.shape, dtype=bool)
        np.put_along_axis(is_target, lowest, True, axis=1)
        return is_target & ~is_special
