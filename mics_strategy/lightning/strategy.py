"""The Trainer's strategy: `Trainer(strategy="mics")`.

The model is built unsharded, sharded in place in `setup`, and remains a LightningModule: hooks, optimizers, loggers and
callbacks see parameters with their own names and shapes. The strategy passes to the engine what Lightning knows about
gradient accumulation; what Lightning does not know costs overlap, never correctness.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from typing_extensions import override

from mics_strategy import ConfigError, LifecycleError, ShardConfig, Sharded, finish_delayed, shard
from mics_strategy.lightning import validate
from mics_strategy.lightning.checkpoints import TrainerCheckpointMixin
from mics_strategy.lightning.framework import (
    TrainerFramework,
    disable_inference_mode,
    load_framework,
    throttle_sigterm_check,
)
from mics_strategy.lightning.modules import (
    UnitRule,
    autocast_dtype,
    grad_codec_steps,
    log_dtensors,
    move_unsharded,
    precision_flag,
    run_as_forward,
    unit_rule_for,
    with_frozen_as_trainable,
    with_micro_steps,
    with_precision,
    without_codec_schedule,
    without_micro_steps,
)
from mics_strategy.lightning.process_group import ProcessGroupMixin, full_weights_launcher, skip_group_teardown
from mics_strategy.lightning.registration import make_strategy_class
from mics_strategy.mixed_precision import apply_mixed_precision

_HANDLE = "_mics_of_strategy"  # on the module, so that every strategy object finds the handle
_CLASS_NAMES = {"MiCSStrategy": "lightning.pytorch", "PytorchLightningMiCSStrategy": "pytorch_lightning"}

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import ParallelStrategy as Base

    MiCSStrategy: type[TrainerStrategyMixin]
else:
    Base = object


class TrainerStrategyMixin(TrainerCheckpointMixin, ProcessGroupMixin, Base):
    """Strategy that shards a LightningModule according to a `ShardConfig`.

    The class for users is `mics_strategy.lightning.MiCSStrategy`, which mixes this class into a namespace's
    `ParallelStrategy`.

    Args:
        config: Name of a preset, or a `ShardConfig`.
        units: Units, as in `mics_strategy.shard`; classes may also be given by name.
        initializer: Initializer of modules on the meta device, as in `mics_strategy.shard`.
        accelerator: Accelerator, as in other Lightning strategies.
        parallel_devices: Devices of this node, as in other Lightning strategies.
        cluster_environment: Cluster environment, as in other Lightning strategies.
        checkpoint_io: Checkpoint plug-in, as in other Lightning strategies.
        precision_plugin: Precision plug-in, as in other Lightning strategies.
        process_group_backend: Backend of the default process group; None chooses it by the device.
        timeout: Timeout of the default process group.
        load_weights_only: Whether objects in checkpoints must be plain data, unless the Trainer's method says so itself
            (`fit(weights_only=...)`); None uses torch's default.
        state_dict_type: Format of saved checkpoints: ``"full"``, one ordinary file, or ``"sharded"``, a folder on a
            file system that all nodes share. Both formats load on any number of ranks.
        save_asynchronously: Whether sharded checkpoints are written in the background.
        sigterm_check_every_n_steps: Interval of the Trainer's SIGTERM check, in batches. Each check synchronizes the
            device and communicates between nodes. A larger interval is cheaper, but reacts later.
        start_method: Start of the ranks: ``"popen"`` runs the script once per rank; ``"spawn"`` and ``"fork"`` (for
            notebooks) start processes from this one and return the full weights to it.
        recovery: ``"memory"`` takes snapshots in host memory, from which `fit` continues when the launcher starts the
            script again; a dict has options of `mics_strategy.MemorySnapshots`, such as ``{"every": 50}``.
        **overrides: Fields of `ShardConfig`.

    Raises:
        ConfigError: An option is unknown or invalid.
    """

    framework: ClassVar[TrainerFramework]

    @override
    def __init__(
        self,
        config: str | ShardConfig = "mics",
        *,
        units: UnitRule = "auto",
        initializer: Callable[[nn.Module], None] | str = "auto",
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        load_weights_only: bool | None = None,
        state_dict_type: str = "full",
        save_asynchronously: bool = False,
        sigterm_check_every_n_steps: int = 1,
        start_method: str = "popen",
        recovery: str | dict[str, Any] = "none",
        **overrides: Any,
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self.config = ShardConfig.of(config, **overrides)
        self.request_recovery(recovery)
        self._units = units
        self._initializer = initializer
        self._num_nodes = 1
        self._process_group_backend = process_group_backend
        self._timeout = timeout if timeout is not None else self.framework.default_timeout
        self._load_weights_only = load_weights_only
        self._state_dict_type = validate.check_choice("state_dict_type", state_dict_type, ("full", "sharded"))
        self._saves_asynchronously = save_asynchronously
        validate.check_async_save(state_dict_type, save_asynchronously)
        self._sigterm_every = validate.check_positive("sigterm_check_every_n_steps", sigterm_check_every_n_steps)
        self._start_method = validate.check_choice(
            "start_method", start_method, ("popen", "spawn", "fork", "forkserver")
        )

    @property
    @override
    def precision_plugin(self) -> Any:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        validate.check_precision(self.framework, "precision_plugin", plugin)
        self._precision_plugin = plugin

    # -- building ---------------------------------------------------------------------------------------------

    @property
    @override
    def sharded(self) -> Sharded:
        """The handle of the sharded model: plan, traffic, memory.

        Raises:
            LifecycleError: The Trainer has not set up the model yet.
        """
        module = self.lightning_module
        handle = None if module is None else vars(module).get(_HANDLE)
        if not isinstance(handle, Sharded):
            raise LifecycleError("The model is not sharded yet. Read `strategy.sharded` in `on_fit_start` or later.")
        return handle

    @property
    @override
    def is_sharded(self) -> bool:
        return self.lightning_module is not None and _HANDLE in vars(self.lightning_module)

    @override
    def connect(self, model: LightningModule) -> None:
        super().connect(model)
        log_dtensors(model)

    @override
    def _multiprocessing_launcher(self) -> type[Any]:
        return full_weights_launcher(self.framework)

    @override
    def setup_environment(self) -> None:
        validate.check_callbacks(self.framework, self._trainer)
        validate.check_saves_of_islands(self.config.outer_every, self._state_dict_type, self._trainer)
        super().setup_environment()
        self.find_snapshot()

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        # Not on the GPU, because the full model may not fit there.
        with torch.device("meta") if empty_init else nullcontext(), self.precision_plugin.tensor_init_context():
            yield

    @override
    def setup(self, trainer: Trainer) -> None:
        """Shard the model once, and set up the stage."""
        if self.accelerator is not None:
            self.accelerator.setup(trainer)
        disable_inference_mode(trainer)
        if self._sigterm_every > 1:
            throttle_sigterm_check(trainer, self._sigterm_every)
        self.shard_model()
        requested = self._resolved_config(self._module)
        if without_micro_steps(self.sharded.config) != without_micro_steps(requested):
            raise ConfigError(
                f"The model is already sharded with {self.sharded.config}, but this strategy requests {requested}. "
                "Build a new model, or use the same strategy and `precision`."
            )
        self.load_pending_model()
        self.model_to_device()
        self.barrier()
        if trainer.state.fn == self.framework.fitting:
            self.setup_optimizers(trainer)
            self.sharded.grad_codec_steps = grad_codec_steps(self.config, trainer)
            self.begin_snapshots()
        self.setup_precision_plugin()

    @override
    def shard_model(self) -> None:
        if self.is_sharded:
            return
        module: Any = self._module
        if self._layer_sync is not None:
            module = self._layer_sync.apply(module)
        module = self.precision_plugin.convert_module(module)
        units = unit_rule_for(module, self._units, every_child=not module.automatic_optimization)
        with with_frozen_as_trainable(self.framework, self._trainer, module):
            options: dict[str, Any] = {"units": units, "initializer": self._initializer, "device": self.root_device}
            config = with_micro_steps(self._resolved_config(module), self._trainer, module)
            vars(module)[_HANDLE] = shard(module, config, **options)
        self._lightning_module = self.model = module
        plugin = self.precision_plugin
        apply_mixed_precision(self.sharded, autocast_dtype(self.framework, plugin), precision_flag(plugin))

    def _resolved_config(self, module: nn.Module) -> ShardConfig:
        """Return the configuration of `shard` under the Trainer's precision."""
        return with_precision(self.framework, self.precision_plugin, without_codec_schedule(self.config), module)

    @override
    def model_to_device(self) -> None:
        move_unsharded(self._module, self.root_device)

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        self._reset_optimizers_and_schedulers()
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            self.sharded.adopt(optimizer)

    @property
    def _module(self) -> LightningModule:
        if self.lightning_module is None:
            raise LifecycleError(
                "The strategy has no model yet. Pass the strategy to a Trainer and call one of its methods."
            )
        return self.lightning_module

    @property
    def _trainer(self) -> Trainer:
        return self._module.trainer

    # -- steps ------------------------------------------------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.train_step_context():
            if not self._module.automatic_optimization:
                with self.sharded.micro_step(0, of=2):  # buffers stay local to each rank, as with Lightning's DDP
                    self.sharded.buffers.pre_forward()
                    return self._module.training_step(*args, **kwargs)
            return run_as_forward(self._module, "training_step", args, kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return run_as_forward(self._module, "validation_step", args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return run_as_forward(self._module, "test_step", args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            return run_as_forward(self._module, "predict_step", args, kwargs)

    @contextmanager
    @override
    def block_backward_sync(self) -> Iterator[None]:
        """Announce further micro-steps of this optimizer step."""
        with self.sharded.micro_step(0, of=2):
            yield

    @override
    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Run the optimizer step; a backward in the closure is the last micro-step."""
        with self.sharded.micro_step(0, of=1 if self._module.automatic_optimization else 2):
            return super().optimizer_step(optimizer, closure, model, **kwargs)

    # -- ending -----------------------------------------------------------------------------------------------

    @override
    def on_train_end(self) -> None:
        """Finish outer steps; let the gradients that delayed second hops have left make a last step."""
        super().on_train_end()
        module, trainer = self._module, self._trainer
        is_between = self.sharded.internals.pending_micro_steps > 0  # the fit was stopped in an accumulation
        is_ours = module.automatic_optimization or self.config.outer_every > 0  # gradients are clipped as it says
        if is_ours and not is_between and finish_delayed(self.sharded):
            (optimizer,) = self.optimizers
            module.configure_gradient_clipping(optimizer, trainer.gradient_clip_val, trainer.gradient_clip_algorithm)
            optimizer.step()
            optimizer.zero_grad()
        self.end_snapshots()

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self.close_snapshot()

    @override
    def on_exception(self, exception: BaseException) -> None:
        skip_group_teardown()
        self.abandon_snapshots()
        validate.add_advice(exception)

    @override
    def teardown(self) -> None:
        # Shards stay on the device; a pending save is waited for.
        self.finish_saves()
        self.close_snapshot()
        if self.cluster_environment is not None:
            self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
        self.checkpoint_io.teardown()


@functools.cache
def strategy_for(namespace: str) -> type[TrainerStrategyMixin]:
    """Return the class for ``"lightning.pytorch"`` or ``"pytorch_lightning"``.

    Raises:
        ConfigError: The namespace is unknown.
    """
    framework = load_framework(namespace)
    name = next(name for name, owner in _CLASS_NAMES.items() if owner == namespace)
    return make_strategy_class(TrainerStrategyMixin, framework, name)


def __getattr__(name: str) -> Any:
    if name in _CLASS_NAMES:
        return strategy_for(_CLASS_NAMES[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}.")
