"""The smallest masks and images that a run can be tried with."""

import numpy as np
import torch

from ..models.config import ModelConfig
from .config import ImagesConfig
from .permutation import Int64Array
from .tokens import IGNORED_LABEL, Batch


def mask_tokens(batch: Batch, model: ModelConfig, mask_share: float) -> Batch:
    """Replace a share of the tokens of each sequence by the last one of the vocabulary, and predict those.

    Args:
        batch: Sequences [B, S].
        model: Model with the vocabulary.
        mask_share: Share of the tokens to hide, equally many in each sequence.
    """
    tokens = batch["input_ids"]
    num_masked = max(1, round(mask_share * tokens.shape[1]))
    source = torch.Generator().manual_seed(int(tokens.sum()))
    chosen = torch.rand(tokens.shape, generator=source).argsort(dim=1)[:, :num_masked]
    labels = torch.full_like(tokens, IGNORED_LABEL).scatter(1, chosen, tokens.gather(1, chosen))
    return {"input_ids": tokens.scatter(1, chosen, int(model.vocab_size) - 1), "labels": labels}


class SyntheticImages:
    """Random images whose label is visible: the mean brightness grows with it.

    Args:
        config: Size and number of the images.
    """

    def __init__(self, config: ImagesConfig) -> None:
        self.config = config
        self.num_sequences = config.count
        self.fingerprint = f"images-{config.count}-{config.size}-{config.num_classes}"

    def read(self, indices: Int64Array) -> dict[str, torch.Tensor]:
        """Read the images at [B] indices: `images` [B, C, H, W] float32 and `labels` [B] int64."""
        config, images = self.config, []
        for index in indices:
            source = np.random.default_rng(int(index))
            images.append(source.standard_normal((config.channels, config.size, config.size), dtype=np.float32))
        labels = torch.from_numpy(indices % config.num_classes)
        brightness = labels.float() / config.num_classes
        return {"images": torch.from_numpy(np.stack(images)) + brightness[:, None, None, None], "labels": labels}
