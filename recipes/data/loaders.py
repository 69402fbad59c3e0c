"""The micro-batches that each rank reads at each step.

The order is a function of (seed, epoch, position), and a global batch is the next `global_size` positions, on any
ranks. So the batches do not depend on the number of ranks, and the only state is how many samples were read: a run
may resume on another number of ranks and see exactly the data it would have seen.
"""

from collections.abc import Iterator
from typing import Generic, TypedDict

import numpy as np
import torch

from ..batch import BatchPlan
from ..errors import RecipeError
from .masking import IGNORED_LABEL
from .permutation import Int64Array, Permutation
from .samples import BatchT, SampleIds, SampleStore


class LoaderState(TypedDict):
    """Everything a loader needs to continue: plain numbers, the same on all ranks.

    `consumed_samples` is the position; the others name what was read, and are compared.
    """

    consumed_samples: int
    seed: int
    fingerprint: str


def samples_at(positions: Int64Array, num_samples: int, seed: int) -> SampleIds:
    """Return which sample is read at each position of an endless run.

    Args:
        positions: [B], counted from the start of training; each epoch reads every sample once.
        num_samples: samples in one epoch.
        seed: of the order.

    Returns:
        [B] indices and epochs.
    """
    indices = np.empty_like(positions)
    epochs = positions // num_samples
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        order = Permutation(size=num_samples, seed=seed, epoch=int(epoch))
        indices[chosen] = order(positions[chosen] % num_samples)
    return SampleIds(indices=indices, epochs=epochs, seed=seed)


class TrainLoader(Generic[BatchT]):
    """The micro-batches of one rank, for a whole run.

    One pass over the loader is `num_steps` optimizer steps, whatever the epochs of the data are.

    Args:
        store: the training samples.
        plan: how a global batch is shared.
        rank: of this process, among `plan.world_size`.
        num_steps: optimizer steps in the run.
        seed: of the order of samples.
    """

    def __init__(self, store: SampleStore[BatchT], plan: BatchPlan, rank: int, num_steps: int, seed: int) -> None:
        self.store = store
        self.plan = plan
        self.rank = rank
        self.num_steps = num_steps
        self.seed = seed
        self.consumed_samples = 0

    def __len__(self) -> int:
        """Micro-batches in one pass (without a length Lightning reads ahead, and loses a batch on resume)."""
        return self.num_steps * self.plan.accumulation

    def __iter__(self) -> Iterator[BatchT]:
        """Yield the micro-batches from the present position to the end of the pass."""
        pass_samples = self.num_steps * self.plan.global_size
        end = (self.consumed_samples // pass_samples + 1) * pass_samples
        while self.consumed_samples < end:
            first = self.consumed_samples + self.rank * self.plan.micro_size
            positions = np.arange(first, first + self.plan.micro_size, dtype=np.int64)
            self.consumed_samples += self.plan.round_size
            yield self.store.read(samples_at(positions, self.store.num_samples, self.seed))

    def state_dict(self) -> LoaderState:
        """Say where this loader is."""
        return {
            "consumed_samples": self.consumed_samples,
            "seed": self.seed,
            "fingerprint": self.store.fingerprint,
        }

    def load_state_dict(self, state: LoaderState) -> None:
        """Continue where another loader stopped, on any number of ranks.

        Raises:
            RecipeError: the data, the order or the batch boundary is not that of the saved run.
        """
        saved = (state["fingerprint"], state["seed"])
        present = (self.store.fingerprint, self.seed)
        if saved != present:
            raise RecipeError(
                f"The checkpoint was trained on data {saved[0]} with seed {saved[1]}, this run reads data "
                f"{present[0]} with seed {present[1]}: the order of samples would not continue. Resume "
                "with the same corpus, vocabulary, sequence length and seed, or start a new run."
            )
        consumed = state["consumed_samples"]
        if consumed % self.plan.global_size:
            raise RecipeError(
                f"The checkpoint stopped after {consumed} samples, which is inside a global batch of "
                f"`batch.global_size={self.plan.global_size}`. Resume with a global batch that divides it, "
                "or from a checkpoint that was saved at an optimizer step."
            )
        self.consumed_samples = consumed


class ValidationLoader(Generic[BatchT]):
    """The same samples in every run, shared by the ranks; short ranks get rows whose labels are ignored.

    Every rank yields the same number of batches, because a forward of a sharded model is collective.

    Args:
        store: the held-out samples.
        plan: gives micro-batch and ranks.
        rank: of this process.
        num_samples: how many samples to read; fewer when the store is smaller.
    """

    def __init__(self, store: SampleStore[BatchT], plan: BatchPlan, rank: int, num_samples: int) -> None:
        self.store = store
        self.plan = plan
        self.rank = rank
        self.num_samples = min(num_samples, store.num_samples)

    def __len__(self) -> int:
        """Batches that each rank reads."""
        return -(-self.num_samples // self.plan.round_size)

    def __iter__(self) -> Iterator[BatchT]:
        """Yield the batches of this rank."""
        for index in range(len(self)):
            first = index * self.plan.round_size + self.rank * self.plan.micro_size
            positions = np.arange(first, first + self.plan.micro_size, dtype=np.int64)
            indices = np.minimum(positions, self.num_samples - 1)
            batch = self.store.read(SampleIds(indices=indices, epochs=np.zeros_like(indices), seed=0))
            batch["labels"][torch.from_numpy(positions >= self.num_samples)] = IGNORED_LABEL
            yield batch
