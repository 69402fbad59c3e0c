"""Launcher that returns trained weights from spawned or forked processes.

Lightning collects the module's state dict on every rank and returns rank 0's to the parent. For a sharded module that
would be one shard, so full tensors are collected instead.
"""

from __future__ import annotations

import functools
import os
import tempfile
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from mics_strategy.lightning.framework import TrainerFramework, load_framework

if TYPE_CHECKING:
    from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher as Base
else:
    Base = object


class FullWeightsMixin(Base):
    """Collection of results in the child processes. Mixed into Lightning's launcher."""

    @override
    def _collect_rank_zero_results(self, trainer: Any, results: Any) -> Any:
        state_dict = trainer.strategy.lightning_module_state_dict()  # collective
        if trainer.strategy.local_rank != 0:
            return None
        callback = trainer.checkpoint_callback
        weights_path = None
        if trainer.state.fn == trainer.strategy.framework.fitting:
            weights_path = os.path.join(tempfile.mkdtemp(), "weights.ckpt")
            trainer.strategy.checkpoint_io.save_checkpoint(state_dict, weights_path)
        return trainer.strategy.framework.worker_output(
            getattr(callback, "best_model_path", None),
            weights_path,
            trainer.state,
            results,
            self.get_extra_results(trainer),
        )


_CLASS_NAMES = {
    "WholeWeightsLauncher": "lightning.pytorch",
    "PytorchLightningWholeWeightsLauncher": "pytorch_lightning",
}


@functools.cache
def full_weights_launcher(framework: TrainerFramework) -> type[Any]:
    """Return the launcher class of one namespace."""
    name = next(name for name, owner in _CLASS_NAMES.items() if owner == framework.name)
    return type(name, (FullWeightsMixin, framework.multiprocessing_launcher), {"__module__": __name__})


def __getattr__(name: str) -> Any:
    if name in _CLASS_NAMES:  # a spawned process looks the class up here
        return full_weights_launcher(load_framework(_CLASS_NAMES[name]))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}.")
