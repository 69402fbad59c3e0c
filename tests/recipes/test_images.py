"""Synthetic images: the same image for the same index, learnable labels, any number of ranks."""

import numpy as np
import pytest
import torch

from recipes.batch import BatchPlan
from recipes.data.config import DataConfig, ImagesConfig
from recipes.data.images import SyntheticImages
from recipes.data.loaders import TrainLoader, ValidationLoader
from recipes.data.masking import IGNORED_LABEL
from recipes.data.prepare import prepare
from recipes.data.samples import SampleIds
from recipes.errors import RecipeError

SMALL = ImagesConfig(count=50, size=16, num_classes=5)


def ids(*indices: int, epoch: int = 0, seed: int = 0) -> SampleIds:
    return SampleIds(indices=np.array(indices), epochs=np.full(len(indices), epoch), seed=seed)


def test_images_have_the_size_of_the_paper_by_default():
    batch = prepare(DataConfig(source="synthetic_images"), 0).train.read(ids(0, 1_281_166))
    assert batch["images"].shape == (2, 3, 224, 224)
    assert (batch["images"].dtype, batch["labels"].dtype) == (torch.float32, torch.int64)
    assert abs(batch["images"].mean()) < 0.1
    assert 0.2 < batch["images"].var() < 1.0


def test_an_image_depends_on_its_index_alone():
    store = SyntheticImages(config=SMALL)
    first, second = store.read(ids(3, 7)), store.read(ids(7, 3, epoch=2, seed=9))
    assert torch.equal(first["images"], second["images"].flip(0))
    assert torch.equal(first["labels"], second["labels"].flip(0))
    assert not torch.equal(first["images"][0], first["images"][1])


def test_images_are_the_same_on_every_machine():
    batch = SyntheticImages(config=SMALL).read(ids(0, 1, 2))
    assert batch["labels"].tolist() == [4, 0, 3]
    assert batch["images"][0, 0, 0, :3].tolist() == pytest.approx([-0.252179, 0.891258, -0.65232], abs=1e-5)


def test_labels_are_even_and_can_be_read_off_the_image():
    store = SyntheticImages(config=ImagesConfig(count=400, size=32, num_classes=4))
    batch = store.read(ids(*range(400)))
    assert torch.bincount(batch["labels"], minlength=4).min() > 70
    means = torch.stack([batch["images"][:200][batch["labels"][:200] == c].mean(0) for c in range(4)])
    held_out = batch["images"][200:]
    nearest = torch.cdist(held_out.flatten(1), means.flatten(1)).argmin(dim=1)
    assert (nearest == batch["labels"][200:]).float().mean() > 0.95


def test_validation_images_are_others_of_the_same_classes():
    data = prepare(DataConfig(source="synthetic_images", images=SMALL), 0)
    train, validation = data.train.read(ids(*range(50))), data.validation.read(ids(*range(50)))
    assert not torch.equal(train["images"], validation["images"])
    assert data.train.fingerprint != data.validation.fingerprint
    means = torch.stack([train["images"][train["labels"] == c].mean(0) for c in range(5)])
    nearest = torch.cdist(validation["images"].flatten(1), means.flatten(1)).argmin(dim=1)
    assert (nearest == validation["labels"]).float().mean() > 0.9


def test_loaders_share_images_as_they_share_sequences():
    def epoch_labels(world_size: int, micro_size: int) -> list[int]:
        plan = BatchPlan(global_size=10, micro_size=micro_size, world_size=world_size, sequence_length=1)
        ranks = [TrainLoader(SyntheticImages(config=SMALL), plan, rank, 5, seed=1) for rank in range(world_size)]
        return torch.cat([batch["labels"] for row in zip(*ranks, strict=True) for batch in row]).tolist()

    assert epoch_labels(1, 10) == epoch_labels(5, 1) == epoch_labels(2, 5)
    plan = BatchPlan(global_size=8, micro_size=4, world_size=2, sequence_length=1)
    ranks = [list(ValidationLoader(SyntheticImages(config=SMALL), plan, rank, 9)) for rank in range(2)]
    labels = torch.cat([batch["labels"] for batches in ranks for batch in batches])
    assert (labels != IGNORED_LABEL).sum() == 9


@pytest.mark.parametrize("name", ["count", "channels", "size", "num_classes"])
def test_images_without_extent_are_refused(name: str):
    with pytest.raises(RecipeError, match=rf"data.images.{name}=0.*at least 1"):
        ImagesConfig(**{name: 0})
