"""Which tokens does each rank read at each step?

Tokens lie packed in one array: documents end with an end-of-text token and are cut into sequences without
padding. The order is a function of (seed, epoch, position), and a global batch is the next `global_size`
positions, on any ranks. So the batches do not depend on the number of ranks, and the only state is how
many sequences were read: a run may resume on another number of ranks and see exactly the data it would have
seen.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypedDict

import numpy as np
import numpy.typing as npt
import torch

from ..batch import BatchPlan
from ..errors import RecipeError
from .permutation import Int64Array, Permutation

IGNORED_LABEL = -100  # what torch.nn.functional.cross_entropy leaves out by default


class Batch(TypedDict):
    """A micro-batch of one rank: B sequences of S tokens, both [B, S] int64; labels are the next tokens."""

    input_ids: torch.Tensor
    labels: torch.Tensor


class LoaderState(TypedDict):
    """Everything a loader needs to continue: plain numbers, the same on all ranks."""

    consumed_sequences: int
    seed: int
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStore:
    """Packed tokens, seen as sequences.

    Args:
        tokens: [num_tokens] unsigned integers, usually a read-only memory map.
        sequence_length: S; sequence i is tokens i*S .. i*S + S, its labels the same range one further on.
        fingerprint: names the tokens; runs that resume compare it.
    """

    tokens: npt.NDArray[np.generic]
    sequence_length: int
    fingerprint: str

    def __post_init__(self) -> None:
        """Refuse a store without a single sequence."""
        if self.num_sequences < 1:
            raise RecipeError(
                f"`data.sequence_length={self.sequence_length}` needs {self.sequence_length + 1} tokens or "
                f"more; this part of the corpus has {len(self.tokens)}. Use shorter ones or a larger corpus."
            )

    @property
    def num_sequences(self) -> int:
        """Sequences with a next token for each of theirs."""
        return (len(self.tokens) - 1) // self.sequence_length

    def read(self, indices: Int64Array) -> Batch:
        """Read the sequences at [B] indices."""
        rows = indices[:, None] * self.sequence_length + np.arange(self.sequence_length + 1)[None, :]
        window = torch.from_numpy(self.tokens[rows].astype(np.int64))
        return {"input_ids": window[:, :-1].contiguous(), "labels": window[:, 1:].contiguous()}


def sequences_at(positions: Int64Array, num_sequences: int, seed: int) -> Int64Array:
    """Return which sequence is read at each position of an endless run.

    Args:
        positions: [B], counted from the start of training; each epoch reads every sequence once.
        num_sequences: sequences in one epoch.
        seed: of the order.

    Returns:
        [B] indices in 0 .. num_sequences - 1.
    """
    indices = np.empty_like(positions)
    epochs = positions // num_sequences
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        order = Permutation(size=num_sequences, seed=seed, epoch=int(epoch))
        indices[chosen] = order(positions[chosen] % num_sequences)
    return indices


class TrainLoader:
    """The micro-batches of one rank, for a whole run.

    One pass over the loader is `num_steps` optimizer steps, whatever the epochs of the data are.

    Args:
        store: the training tokens.
        plan: how a global batch is shared.
        rank: of this process, among `plan.world_size`.
        num_steps: optimizer steps in the run.
        seed: of the order of sequences.
    """

    def __init__(self, store: TokenStore, plan: BatchPlan, rank: int, num_steps: int, seed: int) -> None:
        self.store = store
        self.plan = plan
        self.rank = rank
        self.num_steps = num_steps
        self.seed = seed
        self.consumed_sequences = 0

    def __len__(self) -> int:
        """Micro-batches in one pass (without a length Lightning reads ahead, and loses a batch on resume)."""
        return self.num_steps * self.plan.accumulation

    def __iter__(self) -> Iterator[Batch]:
        """Yield the micro-batches from the present position to the end of the pass."""
        pass_sequences = self.num_steps * self.plan.global_size
        end = (self.consumed_sequences // pass_sequences + 1) * pass_sequences
        while self.consumed_sequences < end:
            first = self.consumed_sequences + self.rank * self.plan.micro_size
            positions = np.arange(first, first + self.plan.micro_size, dtype=np.int64)
            self.consumed_sequences += self.plan.round_size
            yield self.store.read(sequences_at(positions, self.store.num_sequences, self.seed))

    def state_dict(self) -> LoaderState:
        """Say where this loader is."""
        return {
            "consumed_sequences": self.consumed_sequences,
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
                f"{present[0]} with seed {present[1]}: the order of sequences would not continue. Resume "
                "with the same corpus, vocabulary, sequence length and seed, or start a new run."
            )
        consumed = state["consumed_sequences"]
        if consumed % self.plan.global_size:
            raise RecipeError(
                f"The checkpoint stopped after {consumed} sequences, which is inside a global batch of "
                f"`batch.global_size={self.plan.global_size}`. Resume with a global batch that divides it, "
                "or from a checkpoint that was saved at an optimizer step."
            )
        self.consumed_sequences = consumed


class ValidationLoader:
    """The same sequences in every run, shared by the ranks; short ranks get rows whose labels are ignored.

    Every rank yields the same number of batches, because a forward of a sharded model is collective.

    Args:
        store: the held-out tokens.
        plan: gives micro-batch and ranks.
        rank: of this process.
        num_sequences: how many sequences to read; fewer when the store is smaller.
    """

    def __init__(self, store: TokenStore, plan: BatchPlan, rank: int, num_sequences: int) -> None:
        self.store = store
        self.plan = plan
        self.rank = rank
        self.num_sequences = min(num_sequences, store.num_sequences)

    def __len__(self) -> int:
        """Batches that each rank reads."""
        return -(-self.num_sequences // self.plan.round_size)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches of this rank."""
        for index in range(len(self)):
            first = index * self.plan.round_size + self.rank * self.plan.micro_size
            positions = np.arange(first, first + self.plan.micro_size, dtype=np.int64)
            batch = self.store.read(np.minimum(positions, self.num_sequences - 1))
            batch["labels"][torch.from_numpy(positions >= self.num_sequences)] = IGNORED_LABEL
            yield batch
