"""Fabric's strategy: `Fabric(strategy="mics")`.

`fabric.setup` shards a module in place, and switches optimizers that were built on the unsharded parameters to the
sharded ones. As with DDP, Fabric gets a thin wrapper module. Methods other than `forward` that are marked with
`mark_forward_method` then run with unsharded parameters, and Fabric refuses unmarked ones with a clear error.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from mics_strategy import LifecycleError, ShardConfig, Sharded, shard
from mics_strategy.lightning import validate
from mics_strategy.lightning.fabric_checkpoints import FabricCheckpointMixin
from mics_strategy.lightning.framework import (
    FabricFramework,
    load_fabric_framework,
    redirected_method,
    unwrap_module,
    unwrap_optimizer,
)
from mics_strategy.lightning.modules import (
    UnitRule,
    autocast_dtype,
    move_unsharded,
    precision_flag,
    unit_rule_for,
    with_precision,
)
from mics_strategy.lightning.process_group import ProcessGroupMixin, is_initialized
from mics_strategy.lightning.registration import make_strategy_class
from mics_strategy.mixed_precision import apply_mixed_precision

_CLASS_NAMES = {"MiCSFabricStrategy": "lightning.fabric", "LightningFabricMiCSStrategy": "lightning_fabric"}

if TYPE_CHECKING:
    MiCSFabricStrategy: type[FabricStrategyMixin]


class ShardedModule(nn.Module):
    """Wrapper of a sharded module; its forward is the module's.

    Fabric runs marked methods in place of the module's forward, with all hooks. Only the `training_step` of manual
    optimization bypasses the root's hooks: it contains backwards and optimizer steps and cannot be one forward. The
    units inside are gathered when they are called, as in the Trainer.

    Args:
        sharded: Handle of the module.
    """

    def __init__(self, sharded: Sharded) -> None:
        super().__init__()
        self.module = sharded.model
        self.sharded = sharded

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if _is_manual(self.module) and redirected_method(self.module.forward) == "training_step":
            self.sharded.buffers.pre_forward()
            return self.module.forward(*args, **kwargs)
        return self.module(*args, **kwargs)


class SyncControl:
    """Implementation of `fabric.no_backward_sync`."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Announce whether more micro-steps of this optimizer step follow.

        A wrong announcement costs overlap, not correctness.

        Raises:
            TypeError: This strategy has not set up the module.
        """
        if not isinstance(module, ShardedModule):
            raise TypeError(
                "Blocking backward sync is only possible if the module passed to `no_backward_sync` was set up by this "
                f"strategy. Got: {type(module).__name__}. Pass the module that `fabric.setup` returned."
            )
        return module.sharded.micro_step(0, of=2 if enabled else 1)


class FabricStrategyMixin(FabricCheckpointMixin, ProcessGroupMixin):  # for a type checker, these are the Trainer's
    """Strategy that shards modules according to a `ShardConfig`.

    The class for users is `mics_strategy.lightning.MiCSFabricStrategy`, which mixes this class into a namespace's
    `ParallelStrategy`.

    Args:
        config: Name of a preset, or a `ShardConfig`.
        units: Units, as in `mics_strategy.shard`; classes may also be given by name.
        initializer: Initializer of modules on the meta device, as in `mics_strategy.shard`.
        accelerator: Accelerator, as in other strategies of Fabric.
        parallel_devices: Devices of this node, as in other strategies of Fabric.
        cluster_environment: Cluster environment, as in other strategies of Fabric.
        checkpoint_io: Checkpoint plug-in, as in other strategies of Fabric.
        precision: Precision plug-in, as in other strategies of Fabric.
        process_group_backend: Backend of the default process group; None chooses it by the device.
        timeout: Timeout of the default process group.
        state_dict_type: Format that `fabric.save` writes: ``"full"``, one ordinary file, or ``"sharded"``, a folder on
            a file system that all nodes share. Both formats load on any number of ranks.
        save_asynchronously: Whether folders are written in the background.
        start_method: Start of the ranks: ``"popen"`` runs the script once per rank; ``"spawn"`` and ``"fork"`` (for
            notebooks) start processes from this one.
        **overrides: Fields of `ShardConfig`.

    Raises:
        ConfigError: An option is unknown or invalid.
    """

    framework: ClassVar[FabricFramework]

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
        precision: Any = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        state_dict_type: str = "full",
        save_asynchronously: bool = False,
        start_method: str = "popen",
        **overrides: Any,
    ) -> None:
        super().__init__(  # type: ignore[call-arg]
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision=precision,
        )
        self.config = ShardConfig.of(config, **overrides)
        self._units = units
        self._initializer = initializer
        self._num_nodes = 1
        self._process_group_backend = process_group_backend
        self._timeout = timeout if timeout is not None else self.framework.default_timeout
        self._state_dict_type = validate.check_choice("state_dict_type", state_dict_type, ("full", "sharded"))
        self._saves_asynchronously = save_asynchronously
        validate.check_async_save(state_dict_type, save_asynchronously)
        self._start_method = validate.check_choice(
            "start_method", start_method, ("popen", "spawn", "fork", "forkserver")
        )
        self._backward_sync_control = SyncControl()
        self._handles: list[weakref.ref[Sharded]] = []

    @property
    def precision(self) -> Any:
        """The precision plug-in."""
        return super().precision  # type: ignore[misc]

    @precision.setter
    def precision(self, plugin: Any) -> None:
        validate.check_precision(self.framework, "precision", plugin)
        self._precision = plugin

    def _set_world_ranks(self) -> None:
        self.set_world_ranks()

    # -- building ---------------------------------------------------------------------------------------------

    @contextmanager
    def module_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Build modules on the CPU or the meta device, in the precision's dtype.

        They are not built on the GPU, because the full model may not fit there.

        Args:
            empty_init: Whether to use the meta device; values are then set when the module is set up.
        """
        with torch.device("meta") if empty_init else nullcontext(), self.precision.module_init_context():
            yield

    def module_to_device(self, module: nn.Module) -> None:
        """Do nothing: the engine moves the shards, and the full model may not fit."""

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Shard a module in place.

        Raises:
            ConfigError: `mics_strategy.shard` refuses the module. Raised on every rank.
            LifecycleError: `fabric.launch()` was not called.
        """
        if not is_initialized():
            raise LifecycleError(
                "`fabric.setup()` was called before the ranks were started. Call `fabric.launch()` first, right after "
                "`Fabric(...)`."
            )
        units = unit_rule_for(module, self._units, every_child=_is_manual(module))
        config = with_precision(self.framework, self.precision, self.config, module)
        sharded = shard(module, config, units=units, device=self.root_device, initializer=self._initializer)
        apply_mixed_precision(sharded, autocast_dtype(self.framework, self.precision), precision_flag(self.precision))
        self._handles = [*(reference for reference in self._handles if reference() is not None), weakref.ref(sharded)]
        move_unsharded(module, self.root_device)
        return ShardedModule(sharded)

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Switch an optimizer from unsharded to sharded parameters.

        Raises:
            ConfigError: The optimizer also has parameters of other models. Raised on every rank.
            LifecycleError: The optimizer's model is not set up.
        """
        return self.sharded_of(optimizer).adopt(optimizer)

    def sharded_of(self, target: Any) -> Sharded:
        """Return the handle of a model: plan, traffic, memory.

        Args:
            target: Module or optimizer, from before or after `fabric.setup`.

        Raises:
            LifecycleError: This strategy has not sharded the model.
        """
        handle = self.handle_of(target)
        if handle is None:
            kind = "an optimizer of a model" if isinstance(target, Optimizer) else "a model"
            raise LifecycleError(
                f"{type(target).__name__} is not {kind} that this strategy has set up. Call `fabric.setup(model, "
                "optimizer)`, or `fabric.setup_module(model)` before `fabric.setup_optimizers(optimizer)`."
            )
        return handle

    @property
    @override
    def handles(self) -> list[Sharded]:
        return [handle for reference in self._handles if (handle := reference()) is not None]

    @override
    def handle_of(self, target: Any) -> Sharded | None:
        target = unwrap_module(self.framework, unwrap_optimizer(self.framework, target))
        if isinstance(target, ShardedModule):
            return target.sharded
        if isinstance(target, Optimizer):
            first = next((parameter for group in target.param_groups for parameter in group["params"]), None)
            return None if first is None else next((h for h in self.handles if _has_param(h, first)), None)
        return next((handle for handle in self.handles if handle.model is target), None)

    # -- steps ------------------------------------------------------------------------------------------------

    @override
    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Run the optimizer step; a backward in the closure is the last micro-step."""
        handle = self.handle_of(optimizer)
        with nullcontext() if handle is None else handle.micro_step(0, of=1):
            return super().optimizer_step(optimizer, **kwargs)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """Clip the gradients of the optimizer's parameters by their norm.

        The same as `Sharded.clip_grad_norm_`.

        Returns:
            Norm before clipping: a plain scalar tensor, equal on all ranks.
        """
        self.precision.unscale_gradients(optimizer)
        return self.sharded_of(optimizer).clip_grad_norm_(
            float(max_norm),
            float(norm_type),
            error_if_nonfinite=error_if_nonfinite,
            only=list(self.precision.main_params(optimizer)),
        )

    # -- communication ----------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over all ranks, in place; any other value is returned unchanged."""
        return self.reduce(tensor, group, reduce_op)


def _is_manual(module: nn.Module) -> bool:
    """Whether the module is a LightningModule with manual optimization."""
    return getattr(module, "automatic_optimization", True) is False


def _has_param(handle: Sharded, parameter: torch.Tensor) -> bool:
    return handle.internals.sharded_param_for(parameter) is not None


@functools.cache
def fabric_strategy_for(namespace: str) -> type[FabricStrategyMixin]:
    """Return the strategy class for ``"lightning.fabric"`` or ``"lightning_fabric"``.

    Raises:
        ConfigError: The namespace is unknown.
    """
    framework = load_fabric_framework(namespace)
    name = next(name for name, owner in _CLASS_NAMES.items() if owner == namespace)
    return make_strategy_class(FabricStrategyMixin, framework, name)  # type: ignore[type-abstract]


def __getattr__(name: str) -> Any:
    if name in _CLASS_NAMES:
        return fabric_strategy_for(_CLASS_NAMES[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}.")
