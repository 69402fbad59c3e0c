"""Classes of Lightning, and all private names that the strategies depend on.

`lightning.pytorch` and `pytorch_lightning` are two copies of one code base with separate classes. Every class and every
private name that we use from either is listed in this file, so that a new release is checked against one page.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from mics_strategy import ConfigError

# Trainer namespace -> Fabric namespace on which it is built.
NAMESPACES = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """Classes and functions of a namespace that both kinds of strategies use."""

    name: str
    parallel_strategy: type[Any]
    cpu_or_cuda: tuple[type[Any], ...]
    precision: type[Any]
    foreign_precisions: tuple[type[Any], ...]
    mixed_precision: type[Any]
    checkpoint_io: type[Any]
    cluster_environment: type[Any]
    accelerator: type[Any]
    plain_checkpoint_io: type[Any]
    wrapping_checkpoint_io: tuple[type[Any], ...]
    subprocess_launcher: type[Any]
    multiprocessing_launcher: type[Any]
    default_timeout: timedelta
    rank_zero_only: tuple[Any, ...]
    init_dist_connection: Callable[..., None]
    default_backend: Callable[[Any], str]
    reduce_if_distributed: Callable[..., Any]
    reset_seed: Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerFramework(Framework):
    """Classes and functions of one of the Trainer's namespaces."""

    copying_callbacks: tuple[type[Any], ...]
    pruning_callbacks: tuple[type[Any], ...]
    unfreezing_callbacks: tuple[type[Any], ...]
    optimizer_wrapper: type[Any]
    worker_output: type[Any]
    set_sampler_epoch: Callable[[object, int], None]
    fitting: Any
    interrupted: Any
    callback: type[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricFramework(Framework):
    """Classes and functions of one of Fabric's namespaces."""

    module_wrapper: type[Any]
    optimizer_wrapper: type[Any]


@functools.cache
def load_framework(name: str) -> TrainerFramework:
    """Import one of the Trainer's namespaces.

    Raises:
        ConfigError: The name is not one of them.
    """
    if name not in NAMESPACES:
        raise ConfigError(
            f"`namespace={name!r}` is not a namespace of Lightning. Use {' or '.join(map(repr, NAMESPACES))}."
        )

    def trainer(path: str) -> Any:
        return _find(name, path)

    callbacks = importlib.import_module(f"{name}.callbacks")
    copying = [getattr(callbacks, cls, None) for cls in ("StochasticWeightAveraging", "WeightAveraging")]
    return TrainerFramework(
        name=name,
        **_shared_classes(trainer, NAMESPACES[name]),
        copying_callbacks=tuple(cls for cls in copying if cls is not None),
        pruning_callbacks=(callbacks.ModelPruning,),
        unfreezing_callbacks=(callbacks.BaseFinetuning,),
        wrapping_checkpoint_io=(trainer("plugins.io.wrapper:_WrappingCheckpointIO"),),
        optimizer_wrapper=trainer("core.optimizer:LightningOptimizer"),
        worker_output=trainer("strategies.launchers.multiprocessing:_WorkerOutput"),
        set_sampler_epoch=_find(NAMESPACES[name], "utilities.data:_set_sampler_epoch"),
        fitting=trainer("trainer.states:TrainerFn").FITTING,
        interrupted=trainer("trainer.states:TrainerStatus").INTERRUPTED,
        callback=callbacks.Callback,
    )


@functools.cache
def load_fabric_framework(name: str) -> FabricFramework:
    """Import one of Fabric's namespaces.

    Raises:
        ConfigError: The name is not one of them.
    """
    if name not in NAMESPACES.values():
        names = " or ".join(map(repr, NAMESPACES.values()))
        raise ConfigError(f"`namespace={name!r}` is not a namespace of Fabric. Use {names}.")

    def fabric(path: str) -> Any:
        return _find(name, path)

    return FabricFramework(
        name=name,
        **_shared_classes(fabric, name),
        wrapping_checkpoint_io=(),
        module_wrapper=fabric("wrappers:_FabricModule"),
        optimizer_wrapper=fabric("wrappers:_FabricOptimizer"),
    )


def _shared_classes(find: Callable[[str], Any], fabric_name: str) -> dict[str, Any]:
    """Load the classes that both kinds of strategies use."""

    def fabric(path: str) -> Any:
        return _find(fabric_name, path)

    foreign = ("FSDPPrecision", "DeepSpeedPrecision", "XLAPrecision")
    return {
        "parallel_strategy": find("strategies:ParallelStrategy"),
        "cpu_or_cuda": (find("accelerators:CPUAccelerator"), find("accelerators:CUDAAccelerator")),
        "precision": find("plugins:Precision"),
        "foreign_precisions": tuple(find(f"plugins:{cls}") for cls in foreign),
        "mixed_precision": find("plugins:MixedPrecision"),
        "checkpoint_io": find("plugins:CheckpointIO"),
        "cluster_environment": fabric("plugins:ClusterEnvironment"),
        "accelerator": find("accelerators:Accelerator"),
        "plain_checkpoint_io": find("plugins:TorchCheckpointIO"),
        "subprocess_launcher": find("strategies.launchers.subprocess_script:_SubprocessScriptLauncher"),
        "multiprocessing_launcher": find("strategies.launchers.multiprocessing:_MultiProcessingLauncher"),
        "default_timeout": fabric("plugins.collectives.torch_collective:default_pg_timeout"),
        "rank_zero_only": (
            find("utilities.rank_zero:rank_zero_only"),
            _find("lightning_utilities", "core.rank_zero:rank_zero_only"),
        ),
        "init_dist_connection": fabric("utilities.distributed:_init_dist_connection"),
        "default_backend": fabric("utilities.distributed:_get_default_process_group_backend_for_device"),
        "reduce_if_distributed": fabric("utilities.distributed:_sync_ddp_if_available"),
        "reset_seed": fabric("utilities.seed:reset_seed"),
    }


def _find(namespace: str, path: str) -> Any:
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(f"{namespace}.{module}"), attribute)


def unwrap_optimizer(framework: TrainerFramework | FabricFramework, optimizer: Any) -> Any:
    """Return the torch optimizer inside Lightning's wrapper."""
    return optimizer._optimizer if isinstance(optimizer, framework.optimizer_wrapper) else optimizer


def unwrap_module(framework: FabricFramework, module: Any) -> Any:
    """Return the user's module inside Fabric's wrapper."""
    return module.module if isinstance(module, framework.module_wrapper) else module


def redirected_method(forward: Callable[..., Any]) -> str | None:
    """Return the name of the method that Fabric runs through a module's forward.

    None for any other forward.

    For the duration of such a call, Fabric replaces the module's `forward` by a closure over the name.
    """
    if not inspect.isfunction(forward) or forward.__name__ != "wrapped_forward":
        return None
    name = inspect.getclosurevars(forward).nonlocals.get("method_name")
    return name if isinstance(name, str) else None


def throttle_sigterm_check(trainer: Any, every_n_steps: int) -> None:
    """Limit the Trainer's SIGTERM check to every n-th batch.

    The Trainer broadcasts from rank 0 over the world in every batch.
    """
    loop = trainer.fit_loop.epoch_loop
    check = getattr(type(loop), "_broadcast_sigterm_tensor", None)
    if check is None:
        return

    def check_every_n_steps() -> None:
        if loop.total_batch_idx % every_n_steps == 0:
            check(loop)

    loop._broadcast_sigterm_tensor = check_every_n_steps


def redirect_resume(trainer: Any, path: Any) -> None:
    """Let the next fit continue from a path, whichever its caller passes."""
    connector = trainer._checkpoint_connector
    start = type(connector).resume_start

    def resume_start(checkpoint_path: Any = None, *args: Any, **options: Any) -> None:
        del connector.resume_start  # the method again
        start(connector, path, *args, **options)

    connector.resume_start = resume_start


def append_callback(trainer: Any, callback: Any) -> None:
    """Add a callback behind all others, in place of an earlier one of its class."""
    name = type(callback).__qualname__
    trainer.callbacks = [*(own for own in trainer.callbacks if type(own).__qualname__ != name), callback]


def dump_checkpoint(trainer: Any) -> dict[str, Any]:
    """Return what a checkpoint of the Trainer holds, its hooks included."""
    checkpoint: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(False)
    return checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochState:
    """Where a checkpoint was saved in the Trainer's loops.

    Attributes:
        next_epoch: Epoch of the next batch.
        is_inside_epoch: Whether more batches of an epoch follow, from an iterator that existed before the save.
        ignores_draws: Whether draws of the resumed Trainer's first iterator do not count: inside an epoch, and in the
            validation at its end, after which Lightning creates another iterator.
    """

    next_epoch: int
    is_inside_epoch: bool
    ignores_draws: bool


def epoch_state(trainer: Any) -> EpochState:
    """Return the position that the Trainer's loops have loaded."""
    epochs = trainer.fit_loop.epoch_progress.current
    batches = trainer.fit_loop.epoch_loop.batch_progress
    is_unfinished = epochs.processed < epochs.ready
    is_inside_epoch = is_unfinished and not batches.is_last_batch
    is_batch_over = batches.current.completed == batches.current.processed  # false in `on_train_batch_end`
    return EpochState(
        next_epoch=epochs.processed + int(is_unfinished and not is_inside_epoch),
        is_inside_epoch=is_inside_epoch,
        ignores_draws=is_inside_epoch or (is_unfinished and is_batch_over),
    )


def disable_inference_mode(trainer: Any) -> None:
    """Evaluate under `no_grad` instead of `inference_mode`.

    Tensors of `inference_mode` cannot be used in training, and the engine's tensors outlive a stage.
    """
    for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
        loop.inference_mode = False
