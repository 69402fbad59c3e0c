"""Images for vision models that exist on no disk: a pattern per class, and noise per image."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from .config import ImagesConfig
from .hashing import draws, keys_of, uniform
from .permutation import Int64Array
from .samples import ImageBatch, SampleIds

_PATTERN = 8  # rows and columns of a class's pattern, enlarged to the image
_BYTE_MEAN, _BYTE_STD = 127.5, 73.9  # of uniform bytes
_TRAIN, _VALIDATION, _CLASS = 0, 1, 2  # first counter of the hashes, so that they have nothing in common


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticImages:
    """Random images with labels that can be learnt.

    Image i is half a coarse pattern that its class determines and half uniform noise, with mean about 0 and variance
    about 1/2. It depends on i alone, not on the run's seed, like an image of a file.

    Args:
        config: Number and size of the images.
        is_validation: Whether the images differ from those of training; patterns are the same.

    Cost:
        About 1 ms for an image of 3 x 224 x 224.
    """

    config: ImagesConfig
    is_validation: bool = False

    @property
    def num_samples(self) -> int:
        """Images in an epoch."""
        return self.config.count

    @property
    def fingerprint(self) -> str:
        """Name of the images."""
        shape = f"{self.config.channels}x{self.config.size}x{self.config.size}"
        split = "-validation" if self.is_validation else ""
        return f"synthetic-images-{self.config.count}-{shape}-{self.config.num_classes}{split}"

    def read(self, ids: SampleIds) -> ImageBatch:
        """Draw images."""
        split = np.full_like(ids.indices, _VALIDATION if self.is_validation else _TRAIN)
        keys = keys_of([split, ids.indices])
        labels = (draws(keys, 1, 0)[:, 0] % np.uint64(self.config.num_classes)).astype(np.int64)
        pixels = np.stack([self._noise(int(key)) for key in keys]) + self._patterns(labels)
        return {"images": torch.from_numpy(pixels / np.float32(2)), "labels": torch.from_numpy(labels)}

    def _noise(self, key: int) -> npt.NDArray[np.float32]:
        shape = (self.config.channels, self.config.size, self.config.size)
        count = int(np.prod(shape))
        words = np.random.Philox(key=key).random_raw(-(-count // 8))  # bits of a counter: the same in every release
        pixels = words.astype("<u8").view(np.uint8)[:count].reshape(shape).astype(np.float32)
        return (pixels - np.float32(_BYTE_MEAN)) / np.float32(_BYTE_STD)

    def _patterns(self, labels: Int64Array) -> npt.NDArray[np.float32]:
        """Enlarge the patterns of some classes to [B, C, H, W], values -1 to 1."""
        config = self.config
        keys = keys_of([np.full_like(labels, _CLASS), labels])
        values = uniform(draws(keys, config.channels * _PATTERN**2, 0)) * 2 - 1
        coarse = values.astype(np.float32).reshape(-1, config.channels, _PATTERN, _PATTERN)
        nearest = np.arange(config.size) * _PATTERN // config.size
        return coarse[:, :, nearest[:, None], nearest[None, :]]
