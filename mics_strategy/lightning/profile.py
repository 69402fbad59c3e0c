"""A callback that records a few steps of a Trainer's run."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from mics_strategy import ConfigError
from mics_strategy.lightning.framework import TrainerFramework, load_framework
from mics_strategy.lightning.strategy import TrainerStrategyMixin
from mics_strategy.lightning.validate import check_positive

_CLASS_NAMES = {"MiCSProfile": "lightning.pytorch", "PytorchLightningMiCSProfile": "pytorch_lightning"}

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import Callback as Base

    from mics_strategy import Sharded

    MiCSProfile: type[ProfileCallbackMixin]
else:
    Base = object


class ProfileCallbackMixin(Base):
    """Callback that records optimizer steps with `Sharded.profile`.

    It writes ``trace.json`` and, as text, ``profile.txt`` with the parts of rank 0's step; loggers receive the seconds
    of a step by category. A training that ends before the last step has a profile of the steps so far.

    The class for users is `mics_strategy.lightning.MiCSProfile`, which mixes this class into a namespace's `Callback`.

    Args:
        steps: Optimizer steps to record.
        skip: Optimizer steps before the first recorded one, which allocate and compile.
        folder: Folder of the files; None for the Trainer's `default_root_dir`.

    Attributes:
        profile: The profile; None before it has begun.

    Raises:
        ConfigError: `steps` is not positive, `skip` is negative.
    """

    framework: ClassVar[TrainerFramework]

    def __init__(self, *, steps: int = 3, skip: int = 10, folder: str | Path | None = None) -> None:
        super().__init__()
        self._steps = check_positive("steps", steps)
        if isinstance(skip, bool) or not isinstance(skip, int) or skip < 0:
            raise ConfigError(f"`skip={skip!r}` is no number of steps. Use 0 or more.")
        self._skip = skip
        self._folder = folder
        self._first_step = 0
        self._is_reported = False
        self.profile: Any = None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin with the first step, if none is to be skipped."""
        self._first_step, self._is_reported, self.profile = trainer.global_step, False, None
        self._begin_after_skipped(trainer)

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Begin after the skipped steps; report after the last one."""
        if self.profile is None:
            self._begin_after_skipped(trainer)
        elif not self.profile.is_recording and not self._is_reported:
            self._report(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report the steps so far, if the training has ended before the last one."""
        if self.profile is None or self._is_reported:
            return
        if self.profile.is_recording and self.profile.steps_left == self._steps:
            self.profile.cancel()
            return
        self.profile.stop()
        self._report(trainer)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """End the recording without a result."""
        if self.profile is not None and self.profile.is_recording:
            self.profile.cancel()

    def _begin_after_skipped(self, trainer: Trainer) -> None:
        if trainer.global_step - self._first_step >= self._skip:
            self.profile = _handle_of(trainer).profile(self._steps)

    def _report(self, trainer: Trainer) -> None:
        self._is_reported, result = True, self.profile.result
        folder = Path(self._folder if self._folder is not None else trainer.default_root_dir)
        result.write_trace(folder / "trace.json")
        for logger in trainer.loggers:
            logger.log_metrics(result.metrics(), step=trainer.global_step)
        if trainer.is_global_zero:
            (folder / "profile.txt").write_text(f"{result.summary()}\n\n{result.table()}\n")


def _handle_of(trainer: Trainer) -> Sharded:
    if not isinstance(trainer.strategy, TrainerStrategyMixin):
        raise ConfigError(
            f"`MiCSProfile` records models that a MiCS strategy has sharded, and this Trainer uses "
            f'{type(trainer.strategy).__name__}. Use `Trainer(strategy="mics")`, or drop the callback.'
        )
    return trainer.strategy.sharded


@functools.cache
def profile_callback_for(namespace: str) -> type[ProfileCallbackMixin]:
    """Return the class for ``"lightning.pytorch"`` or ``"pytorch_lightning"``.

    Raises:
        ConfigError: The namespace is unknown.
    """
    framework = load_framework(namespace)
    name = next(name for name, owner in _CLASS_NAMES.items() if owner == namespace)
    attributes = {"framework": framework, "__module__": __name__, "__doc__": ProfileCallbackMixin.__doc__}
    return type(name, (ProfileCallbackMixin, framework.callback), attributes)


def __getattr__(name: str) -> Any:
    if name in _CLASS_NAMES:
        return profile_callback_for(_CLASS_NAMES[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}.")
