"""Sharded data parallelism for clusters with slow links between nodes.

The models need not fit on one GPU. Importing the package registers ``Trainer(strategy="mics")`` with Lightning, without
importing Lightning. torch and the engine are imported when the first of the names is used.
"""

from typing import TYPE_CHECKING

from mics_strategy.version import package_version

__all__ = [
    "CheckpointError",
    "Codec",
    "CommunicationError",
    "ConfigError",
    "LifecycleError",
    "MemorySnapshots",
    "MiCSError",
    "NoFeasiblePlan",
    "OpenCheckpoint",
    "PendingSave",
    "Recovery",
    "ShapeError",
    "ShardConfig",
    "Sharded",
    "StragglerWatch",
    "Topology",
    "atomic_checkpoint_folder",
    "check_checkpoint",
    "finish_delayed",
    "finish_saves",
    "is_checkpoint",
    "load_checkpoint",
    "load_newest_checkpoint",
    "load_weights",
    "newest_checkpoint",
    "remove_checkpoint",
    "restart_on_loss",
    "save_checkpoint",
    "shard",
]
__version__ = package_version()

if TYPE_CHECKING:
    from mics_strategy.api import shard
    from mics_strategy.checkpoint.folder import atomic_checkpoint_folder
    from mics_strategy.checkpoint.load import (
        OpenCheckpoint,
        check_checkpoint,
        is_checkpoint,
        load_checkpoint,
        load_newest_checkpoint,
        newest_checkpoint,
    )
    from mics_strategy.checkpoint.save import PendingSave, finish_saves, remove_checkpoint, save_checkpoint
    from mics_strategy.checkpoint.weights import load_weights
    from mics_strategy.comm.codecs.format import Codec
    from mics_strategy.config import ShardConfig
    from mics_strategy.engine.handle import Sharded
    from mics_strategy.engine.optimizer.delayed import finish_delayed
    from mics_strategy.engine.profile.stragglers import StragglerWatch
    from mics_strategy.errors import (
        CheckpointError,
        CommunicationError,
        ConfigError,
        LifecycleError,
        MiCSError,
        NoFeasiblePlan,
        ShapeError,
    )
    from mics_strategy.recovery.attempt import Recovery
    from mics_strategy.recovery.restart import restart_on_loss
    from mics_strategy.snapshots.memory import MemorySnapshots
    from mics_strategy.topology import Topology
else:
    _HOMES = ("errors", "topology", "config", "comm.codecs.format", "api", "engine.handle", "engine.optimizer.delayed")
    _HOMES += tuple(f"checkpoint.{name}" for name in ("folder", "load", "save", "weights"))
    _HOMES += ("recovery.attempt", "recovery.restart", "snapshots.memory", "engine.profile.stragglers")

    def __getattr__(name: str) -> object:
        """Import a public name where it is first used."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        import torch

        from mics_strategy.version import check_torch

        check_torch(torch.__version__)
        for home in _HOMES:
            module = import_module(f"{__name__}.{home}")
            if hasattr(module, name):
                return globals().setdefault(name, getattr(module, name))

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


def _register_strategies() -> None:
    """Register the strategies' names with Lightning, now or when it is imported."""
    from mics_strategy.lightning.registration import register

    register()


_register_strategies()
