"""Random states and order of the data of a resumed Trainer.

The states in a checkpoint are those of the save. Before its first batch, a resumed Trainer does two things that draw
random numbers, at other moments than the uninterrupted one:

1. It asks for the data loaders, whose construction may draw. The uninterrupted Trainer did so at its start, from the
   states that the script's seed gives. So the saved states are not set earlier, and both Trainers split data equally.
2. It creates the iterator of the training data, which draws a seed for its workers. Between two epochs, the
   uninterrupted Trainer does so after the save. So the saved states are set before the iterator is created. Inside an
   epoch, it had done so before the save. So they are set again afterwards.

Workers read ahead as soon as the iterator exists, so the sampler's epoch is also set before it is created.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch.distributed as dist
from torch.utils.data import DataLoader
from typing_extensions import override

from mics_strategy.checkpoint.random_states import request_rng, restore_rng, save_rng
from mics_strategy.comm.consensus import gather_objects
from mics_strategy.lightning.framework import EpochState, TrainerFramework, epoch_state

if TYPE_CHECKING:
    from lightning.pytorch.strategies import ParallelStrategy as Base

    from mics_strategy import Sharded
else:
    Base = object

RNG_KEY = "mics_random_states"  # in the checkpoint of one file


def call_after_iterator(dataloader: Any, action: Callable[[], None]) -> None:
    """Run `action` as soon as a loader has created its next iterator.

    Where the loader's `__iter__` is a generator, that is in front of the first batch.
    """
    create = dataloader._get_iterator

    def create_and_act() -> Any:
        del dataloader._get_iterator  # the method again
        iterator = create()
        action()
        return iterator

    dataloader._get_iterator = create_and_act


class RandomStatesMixin(Base):
    """Random states of the Trainer's strategy. Mixed into a Lightning strategy."""

    framework: ClassVar[TrainerFramework]
    _saved_states: Mapping[str, bytes] = {}  # of this rank, until training starts
    _epoch_state: EpochState | None = None  # of the save, until training starts

    @property
    def _trainer(self) -> Any:
        raise NotImplementedError

    @property
    def sharded(self) -> Sharded:
        """The sharded model."""
        raise NotImplementedError

    def random_states(self) -> dict[str, bytes]:
        """Return the states of the random generators of all ranks, by rank. Collective."""
        states: dict[str, bytes] = {}
        for rank_states in gather_objects(self.local_random_states()):
            states |= rank_states
        return states

    def needed_random_states(self, saved: Mapping[str, bytes]) -> dict[str, bytes]:
        """Select the states that this rank needs.

        Args:
            saved: States of all ranks of the save, by rank; may be empty.
        """
        return {name: saved[name] for name in request_rng(dist.get_rank(), dist.get_world_size(), len(saved), saved)}

    def local_random_states(self) -> dict[str, bytes]:
        """Return the states of this rank's random generators, by rank."""
        return save_rng(dist.get_rank(), self.sharded.internals.generators)

    def set_random_states(self, states: Mapping[str, bytes]) -> None:
        """Set the random generators of this rank.

        Args:
            states: States that this rank needs; may be empty.
        """
        restore_rng(states, dist.get_rank(), self.sharded.internals.generators)

    def schedule_random_states(self, states: Mapping[str, bytes]) -> None:
        """Set random states and the sampler's epoch later, when training starts.

        Args:
            states: States that this rank needs; may be empty.
        """
        self._saved_states = states
        self._epoch_state = epoch_state(self._trainer)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Set random states and the sampler's epoch before there is an iterator."""
        if self._epoch_state is not None and self._trainer.training:
            self.framework.set_sampler_epoch(dataloader, self._epoch_state.next_epoch)
            self.set_random_states(self._saved_states)
            if self._epoch_state.is_inside_epoch and isinstance(dataloader, DataLoader):
                call_after_iterator(dataloader, functools.partial(self.set_random_states, self._saved_states))
        return super().process_dataloader(dataloader)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        if self._epoch_state is not None and self._epoch_state.ignores_draws:
            self.set_random_states(self._saved_states)
        self._saved_states, self._epoch_state = {}, None
