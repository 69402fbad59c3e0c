"""Snapshots of the Trainer in host memory: `MiCSStrategy(recovery="memory")`.

A callback behind all others counts optimizer steps, and takes a snapshot of what the Trainer's own checkpoint would
hold at that place. When the launcher starts the script again, `fit` continues from the newest whole snapshot, as with
its path in `ckpt_path`; the path that the script passes counts only where there is none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from torch.optim import Optimizer
from typing_extensions import override

from mics_strategy import MemorySnapshots, OpenCheckpoint, Sharded
from mics_strategy.lightning.framework import TrainerFramework, append_callback, dump_checkpoint, redirect_resume
from mics_strategy.snapshots.job import RecoveryOptions, SnapshotJob

if TYPE_CHECKING:
    from mics_strategy.snapshots.open_snapshot import OpenSnapshot


class _Stepping(Sequence[Optimizer]):
    """The optimizers that a strategy has at present: the Trainer makes them after a snapshot is opened."""

    def __init__(self, strategy: TrainerSnapshotMixin) -> None:
        self._strategy = strategy

    @override
    def __len__(self) -> int:
        return len(self._strategy.stepping)

    @override
    def __getitem__(self, index: Any) -> Any:
        return self._strategy.stepping[index]


class TrainerSnapshotMixin:
    """Snapshots of the Trainer's strategy. Mixed into a Lightning strategy."""

    framework: ClassVar[TrainerFramework]
    _recovery: RecoveryOptions
    _opened: OpenCheckpoint | None
    _state_dict_type: str
    _job: SnapshotJob | None = None
    _snapshot: OpenSnapshot | None = None  # from which this fit continues, until training starts
    _snapshots: MemorySnapshots | None = None

    @property
    def _trainer(self) -> Any:
        raise NotImplementedError

    @property
    def sharded(self) -> Sharded:
        """The sharded model."""
        raise NotImplementedError

    @property
    def stepping(self) -> list[Optimizer]:
        """Optimizers with parameters."""
        raise NotImplementedError

    def request_recovery(self, recovery: str | Mapping[str, Any]) -> None:
        """Set what this strategy does for the case that all ranks die; see `RecoveryOptions.of`."""
        self._recovery = RecoveryOptions.of(recovery)

    def find_snapshot(self) -> None:
        """Let this fit continue from the newest whole snapshot, if there is one. Collective."""
        if not self._recovery.has_snapshots or self._trainer.state.fn != self.framework.fitting:
            return
        self._job = SnapshotJob(**self._recovery.options)
        self._snapshot = self._job.open()
        if self._snapshot is not None:
            redirect_resume(self._trainer, self._snapshot.path)

    def begin_snapshots(self) -> None:
        """Take snapshots from now on. Collective."""
        if self._job is not None:
            self._snapshots = MemorySnapshots(self.sharded, _Stepping(self), job=self._job)
            step_counter: Any = type("StepCounter", (_StepCounter, self.framework.callback), {})
            append_callback(self._trainer, step_counter(self))

    def close_snapshot(self) -> None:
        """End reading of the snapshot from which this fit continues. Collective."""
        snapshot, self._snapshot = self._snapshot, None
        if snapshot is not None:
            snapshot.close()

    def count_step(self) -> None:
        """Count an optimizer step, and take a snapshot if it is due. Collective where it is."""
        if self._snapshots is None or not self._snapshots.count_step():
            return
        with self._as_shards():
            checkpoint = dump_checkpoint(self._trainer)
        model_state = checkpoint.pop("state_dict")
        if self.stepping:
            del checkpoint["optimizer_states"]  # the optimizers' own are taken
        self._snapshots.take(checkpoint, model_state=model_state)

    def end_snapshots(self) -> None:
        """Remove the snapshots of a fit that has ended. Collective."""
        snapshots, self._snapshots, self._job = self._snapshots, None, None
        if snapshots is not None:
            snapshots.close()

    def abandon_snapshots(self) -> None:
        """Let a later fit continue, after an exception. Not collective: other ranks may be gone."""
        if self._snapshot is not None:
            self._snapshot.abandon()
        if self._job is not None:
            self._job.place.folder.release()
        self._snapshots, self._job, self._snapshot = None, None, None

    @contextmanager
    def _as_shards(self) -> Iterator[None]:
        """Let the Trainer's state hold sharded tensors, whatever its own checkpoints hold."""
        before, self._state_dict_type = self._state_dict_type, "sharded"
        try:
            yield
        finally:
            self._state_dict_type = before


class _StepCounter:
    """Counts the optimizer steps of a strategy. A callback behind all others.

    Args:
        strategy: Strategy that takes snapshots.
    """

    def __init__(self, strategy: TrainerSnapshotMixin) -> None:
        self._strategy = strategy
        self._num_steps: int | None = None

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        """Learn with which step the training begins."""
        if self._num_steps is None:
            self._num_steps = trainer.global_step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Count a step, if the batch ended one."""
        if trainer.global_step != self._num_steps:
            self._num_steps = trainer.global_step
            self._strategy.count_step()
