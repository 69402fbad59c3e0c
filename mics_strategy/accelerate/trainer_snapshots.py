"""Snapshots of `transformers.Trainer` in host memory: `MiCSPlugin(recovery="memory")`.

A snapshot holds what the Trainer's own checkpoint would hold behind the same step. When the launcher starts the script
again, `train` continues from the newest whole one, as from a checkpoint: the Trainer gets the path of a folder with the
small files of one, and reads them itself, while model and optimizer come from the snapshot.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from mics_strategy import CheckpointError, ConfigError, MemorySnapshots, Sharded
from mics_strategy.accelerate import framework
from mics_strategy.checkpoint.random_states import restore_rng, save_rng
from mics_strategy.snapshots.job import RecoveryOptions, SnapshotJob


@contextmanager
def snapshots_during(trainer: Any, recovery: RecoveryOptions) -> Iterator[TrainerSnapshots | None]:
    """Take snapshots while a Trainer trains; they are removed at its end, and stay if it raises. Collective.

    Args:
        trainer: The Trainer, before it trains.
        recovery: Snapshots that the plugin asks for.

    Yields:
        The snapshots; None where none are asked for.

    Raises:
        ConfigError: See `TrainerSnapshots`. Raised on every rank.
    """
    if not recovery.has_snapshots:
        yield None
        return
    with TemporaryDirectory(prefix="mics-snapshot-") as folder:
        snapshots = trainer.accelerator.trainer_snapshots = TrainerSnapshots(trainer, recovery, Path(folder))
        try:
            with framework.trainer_hooks(trainer, snapshots.after_step, snapshots.set_random_states):
                yield snapshots
        except BaseException:
            snapshots.abandon()
            raise
        finally:
            trainer.accelerator.trainer_snapshots = None
        snapshots.end()


class TrainerSnapshots:
    """Snapshots of one call of `Trainer.train`. Collective.

    Args:
        trainer: The Trainer, before it trains.
        recovery: Options of `MemorySnapshots`.
        folder: Empty folder of this process.

    Attributes:
        path: Folder from which the Trainer shall resume; None if there is no snapshot.

    Raises:
        ConfigError: `auto_find_batch_size` is on, or an option is invalid, or differs between ranks.
        CheckpointError: The folder of the snapshots cannot be used, or another kind of script has taken them. Raised
            on every rank.
    """

    def __init__(self, trainer: Any, recovery: RecoveryOptions, folder: Path) -> None:
        if trainer.args.auto_find_batch_size:
            raise ConfigError(
                "`auto_find_batch_size` begins a training again from its first step, and with `recovery` from the "
                "newest snapshot. Use one of them."
            )
        self._trainer = trainer
        self._job = SnapshotJob(**recovery.options)
        self._opened = self._job.open()
        self._random: dict[str, bytes] = {}  # of this rank in the snapshot
        self._snapshots: MemorySnapshots | None = None
        self._seen = self._counted = 0  # steps
        self.path: str | None = None
        if self._opened is not None:
            if "trainer" not in self._opened.extra:
                self.abandon()
                raise CheckpointError(
                    f"The snapshot in `{self._job.place.folder.path}` was not taken by `transformers.Trainer`, which "
                    "cannot continue from it. Give this training another `job`, or remove that folder."
                )
            self.path = str(folder)
            framework.write_checkpoint_files(trainer, folder, self._opened.extra)

    @property
    def _sharded(self) -> Sharded:
        sharded: Sharded = self._trainer.accelerator.sharded_of(self._trainer.model)
        return sharded

    def is_in(self, folder: str | os.PathLike[str]) -> bool:
        """Whether that folder stands for the snapshot."""
        return str(folder) == self.path

    def load(self) -> None:
        """Load model and optimizer, and keep the random states of this rank. Collective."""
        if self._opened is None:
            return
        sharded, optimizer = self._sharded, framework.unwrap_optimizer(self._trainer.optimizer)
        self._opened.load(sharded, [optimizer])
        self._random = save_rng(self._trainer.args.process_index, sharded.internals.generators)
        self._opened.close()
        self._opened = None

    def set_random_states(self, stock: Callable[[str | None], None], checkpoint: str | None) -> None:
        """Set the random states where the Trainer loads those of a checkpoint."""
        if checkpoint is None or not self.is_in(checkpoint):
            stock(checkpoint)
            return
        restore_rng(self._random, self._trainer.args.process_index, self._sharded.internals.generators)

    def after_step(self) -> None:
        """Count a step, if there was one since the last call, and take a snapshot if one is due.

        The last step of an epoch counts behind what the Trainer does at the end of the epoch, such as an evaluation.
        """
        state = self._trainer.state
        is_first_call, self._seen = state.global_step != self._seen, state.global_step
        if self._counted == state.global_step or (is_first_call and float(state.epoch).is_integer()):
            return
        self._counted = state.global_step
        self._begun().after_step(lambda: framework.checkpoint_state(self._trainer))

    def _begun(self) -> MemorySnapshots:
        if self._snapshots is None:
            optimizer = framework.unwrap_optimizer(self._trainer.optimizer)
            self._snapshots = MemorySnapshots(self._sharded, [optimizer], job=self._job)
        return self._snapshots

    def end(self) -> None:
        """Remove the snapshots: the training has ended. Collective."""
        self._begun().close()

    def abandon(self) -> None:
        """Let a later process continue, after an exception. Not collective: other ranks may be gone."""
        if self._opened is not None:
            self._opened.abandon()
        self._job.place.folder.release()


def refuse_step(accelerator: Any) -> Callable[..., None]:
    """A hook of an optimizer that raises in loops that take no snapshots, though the plugin asks for them."""

    def check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if accelerator.trainer_snapshots is None:
            raise ConfigError(
                "`recovery` of the plugin or of the launcher's file works in `transformers.Trainer`; this loop takes "
                "no snapshots. Remove it there, and take them with `MemorySnapshots(accelerator.sharded_of(model), "
                "[optimizer.optimizer])` in the loop."
            )

    return check
