"""The Accelerator for sharded models.

It shards a model in place in `prepare`, switches optimizers to the shards (in any order), tells the engine where an
optimizer step ends, and clips, saves and loads over all ranks. Everything else is unchanged from Accelerate.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from mics_strategy import ConfigError, LifecycleError, ShardConfig, Sharded
from mics_strategy.accelerate import checkpoints, framework, launch
from mics_strategy.accelerate.checkpoints import SaveRendezvous
from mics_strategy.accelerate.plugin import MiCSPlugin
from mics_strategy.accelerate.prepare import (
    check_output_layer,
    reuse_sharded,
    shard_for_plugin,
    sharded_of_model,
    use_fp32_masters,
)
from mics_strategy.accelerate.trainer_snapshots import TrainerSnapshots, refuse_step
from mics_strategy.accelerate.transformers_patches import patch_save_pretrained, patch_trainers
from mics_strategy.mixed_precision import apply_mixed_precision, with_mixed_precision


class MiCSAccelerator(Accelerator):  # type: ignore[misc]
    """An `Accelerator` that shards models according to a `ShardConfig`.

    ``accelerate.Accelerator(...)`` constructs this class if MiCS is requested. Derive from this class to extend it. It
    runs on GPUs and on CPUs, with any launcher or none.

    Args:
        *args: Arguments of `Accelerator`.
        **kwargs: Arguments of `Accelerator`. `fsdp_plugin` is a `MiCSPlugin`; its default is the launcher's
            configuration. `parallelism_config` may set the partition size (`dp_shard_size`).

    Raises:
        ConfigError: An option is invalid, or the job cannot be sharded.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        options = framework.arguments(self, args, kwargs)
        self.rendezvous = SaveRendezvous()
        self._handles: list[weakref.ref[Sharded]] = []
        self._deferring: list[Sharded] = []  # models inside `no_sync`
        self._waiting: dict[Any, Any] = {}  # optimizers of unprepared models, with their hooks
        self.trainer_snapshots: TrainerSnapshots | None = None  # while `transformers.Trainer` takes any
        options["fsdp_plugin"] = resolve_plugin(options.get("fsdp_plugin"), options.pop("parallelism_config", None))
        if not framework.is_started():
            options["cpu"] = options.get("cpu", False) or framework.lacks_device()
            framework.start_state(options, options["fsdp_plugin"])
        super().__init__(**options)
        framework.ensure_group(self.device)
        patch_trainers(sharded_of_model)

    # -- handles ----------------------------------------------------------------------------------------------

    @property
    def handles(self) -> list[Sharded]:
        """Handles of all prepared models that still exist."""
        return [handle for reference in self._handles if (handle := reference()) is not None]

    def sharded_of(self, target: Any) -> Sharded:
        """Return the handle of a model: plan, traffic, memory.

        Args:
            target: Model or optimizer, from before or after `prepare`.

        Raises:
            LifecycleError: The model was not prepared.
        """
        handle = self.handle_of(target)
        if handle is None:
            raise LifecycleError(
                f"This {type(target).__name__} belongs to no model that was prepared. Call "
                "`accelerator.prepare(model)` first."
            )
        return handle

    def handle_of(self, target: Any) -> Sharded | None:
        """Return the handle of a model or of an optimizer's model; None for others."""
        target = framework.unwrap_optimizer(target)
        if isinstance(target, nn.Module):
            model = framework.unwrap_model(target)
            return next((handle for handle in self.handles if handle.model is model), None)
        groups = getattr(target, "param_groups", ())
        first = next((parameter for group in groups for parameter in group["params"]), None)
        return None if first is None else next((handle for handle in self.handles if _has_param(handle, first)), None)

    # -- preparing --------------------------------------------------------------------------------------------

    @override
    def prepare(self, *args: Any, device_placement: list[bool | None] | None = None) -> Any:
        """Prepare objects in any order; models are sharded in place.

        Objects may be prepared together or one by one.

        Raises:
            ConfigError: `mics_strategy.shard` refuses a model. Raised on every rank.
            ValueError: `device_placement` has the wrong length.
        """
        placements: list[bool | None] = [None] * len(args) if device_placement is None else device_placement
        if len(placements) != len(args):
            raise ValueError(
                f"`device_placement` has {len(placements)} entries for {len(args)} objects. Pass one entry per object."
            )
        for model in (item for item in args if isinstance(item, nn.Module)):
            self._shard(model)
        result = framework.two_pass_prepare(self, args, placements)
        framework.mark_prepared(self, result)
        return result if len(result) > 1 else result[0]

    @override
    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Shard a model in place, with the requested autocast and compilation."""
        self._shard(model)
        if self._recomputes_casts(model):
            framework.disable_autocast_cache(self)
        has_policy = self.state.fsdp_plugin.mixed_precision_policy is not None
        with framework.without_autocast(self) if has_policy else ExitStack():
            prepared: nn.Module = super().prepare_model(model, device_placement=False, evaluation_mode=True)
        return prepared

    @property
    def _autocast_dtype(self) -> torch.dtype | None:
        """The dtype of autocast around forwards; None without autocast."""
        if not self.native_amp or self.state.fsdp_plugin.mixed_precision_policy is not None:
            return None
        return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.mixed_precision)

    def _recomputes_casts(self, model: nn.Module) -> bool:
        """Whether casts of sharded fp32 parameters are recomputed activations.

        Autocast's cache would keep all of them until the end of the forward.
        """
        handle, plugin = self.handle_of(model), self.state.fsdp_plugin
        if handle is None or handle.scopes.params == 1 or self._autocast_dtype in (None, handle.config.param_dtype):
            return False
        return bool(plugin.activation_checkpointing or getattr(handle.model, "is_gradient_checkpointing", False))

    def _shard(self, model: nn.Module) -> None:
        model = framework.unwrap_model(model)
        if self.handle_of(model) is not None:
            return
        plugin = self.state.fsdp_plugin
        if self.ddp_handler is not None and self.ddp_handler.broadcast_buffers is False:
            plugin.config = plugin.config.replace(broadcast_buffers=False)
        dtype, flag = self._autocast_dtype, f"mixed_precision={self.mixed_precision!r}"
        config = with_mixed_precision(plugin.config, model, dtype, flag)
        sharded = reuse_sharded(model, plugin, config)
        if sharded is None:
            if framework.is_prepared(model):
                return
            device = self.device if self.device.type == "cuda" else torch.device(self.device.type)
            if self.mixed_precision != "no":
                use_fp32_masters(model)
            sharded = shard_for_plugin(model, plugin, config, device, self.gradient_accumulation_steps)
            apply_mixed_precision(sharded, dtype, flag)
        check_output_layer(sharded)
        patch_save_pretrained(sharded, self.rendezvous)
        self._handles = [*(reference for reference in self._handles if reference() is not None), weakref.ref(sharded)]
        for optimizer in [*self._waiting]:
            self._adopt(optimizer)

    @override
    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Any:
        """Switch an optimizer to its model's shards, now or once that is prepared.

        Raises:
            ConfigError: The optimizer has parameters of several models, or of none. Raised on every rank.
        """
        prepared = super().prepare_optimizer(optimizer, device_placement=False)
        self._adopt(framework.unwrap_optimizer(prepared))
        if self.state.fsdp_plugin.recovery.has_snapshots:
            framework.unwrap_optimizer(prepared).register_step_pre_hook(refuse_step(self))
        return prepared

    def _adopt(self, optimizer: Optimizer) -> None:
        handle = self.handle_of(optimizer)
        if handle is not None:
            handle.adopt(optimizer)
            if optimizer in self._waiting:
                self._waiting.pop(optimizer).remove()
        elif optimizer not in self._waiting and any(group["params"] for group in optimizer.param_groups):
            self._waiting[optimizer] = optimizer.register_step_pre_hook(_block_step)

    @override
    def free_memory(self, *objects: Any) -> Any:
        """Release everything that was prepared."""
        for hook in self._waiting.values():
            hook.remove()
        self._waiting.clear()
        return super().free_memory(*objects)

    # -- steps ------------------------------------------------------------------------------------------------

    @contextmanager
    @override
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Announce more micro-steps of this optimizer step.

        Gradients stay in their scope until the last one.

        For a model that was not prepared, nothing is deferred.
        """
        handles = [handle] if (handle := self.handle_of(model)) is not None else []
        self._deferring += handles
        try:
            with ExitStack() as stack:
                for handle in handles:
                    stack.enter_context(handle.micro_step(0, of=2))
                yield
        finally:
            for handle in handles:
                self._deferring.remove(handle)

    @override
    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run the backward; outside of `no_sync` it is the last of its optimizer step."""
        with ExitStack() as stack:
            for handle in self.handles:
                stack.enter_context(handle.micro_step(0, of=2 if handle in self._deferring else 1))
            super().backward(loss, **kwargs)

    @override
    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Clip the norm of gradients, over all ranks and models, to `max_norm`.

        Args:
            parameters: Parameters of prepared models, from before or after `prepare`.
            max_norm: Largest norm after clipping.
            norm_type: Exponent p of the p-norm.

        Returns:
            Norm before clipping: a plain scalar tensor, equal on all ranks.

        Raises:
            ConfigError: A parameter belongs to no prepared model.
        """
        self.unscale_gradients()
        by_model = self._by_model(parameters)
        if not by_model:
            return torch.zeros((), device=self.device)
        if len(by_model) == 1:
            ((handle, params),) = by_model
            return handle.clip_grad_norm_(float(max_norm), float(norm_type), only=params)
        norms = [handle.clip_grad_norm_(math.inf, float(norm_type), only=params) for handle, params in by_model]
        total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for grad in _local_gradients(by_model):
            grad.mul_(factor)
        return total

    @override
    def clip_grad_value_(self, parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float) -> None:
        """Limit every element of the gradients to [-clip_value, clip_value]."""
        self.unscale_gradients()
        by_model = self._by_model(parameters)
        for handle, _ in by_model:
            handle.internals.engine.finish_gradients()
        for grad in _local_gradients(by_model):
            grad.clamp_(-float(clip_value), float(clip_value))

    def _by_model(self, parameters: torch.Tensor | Iterable[torch.Tensor]) -> list[tuple[Sharded, list[torch.Tensor]]]:
        """Group parameters by model, and return their sharded counterparts.

        Raises:
            ConfigError: A parameter belongs to no prepared model.
        """
        rest = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        by_model: list[tuple[Sharded, list[torch.Tensor]]] = []
        for handle in self.handles:
            sharded = [handle.internals.sharded_param_for(parameter) for parameter in rest]
            rest = [parameter for parameter, its in zip(rest, sharded, strict=True) if its is None]
            if any(its is not None for its in sharded):
                by_model.append((handle, [its for its in sharded if its is not None]))
        if rest:
            raise ConfigError(
                f"A tensor of shape {list(rest[0].shape)} belongs to no prepared model, so its gradient cannot be "
                "clipped. Pass parameters of prepared models."
            )
        return by_model

    # -- saving and loading -----------------------------------------------------------------------------------

    @override
    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the full state dict on rank 0's CPU, empty on others. Collective."""
        handle = self.handle_of(model)
        if handle is None:
            plain: dict[str, Any] = framework.unwrap_model(model).state_dict()
            return plain
        return handle.full_state_dict()

    @override
    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        **save_model_func_kwargs: Any,
    ) -> str:
        """Save models, optimizers and other state as an atomic folder. Collective.

        Raises:
            CheckpointError: A rank failed; the error names it. Raised on every rank. An older checkpoint of that name
                is unchanged.
        """
        with (
            checkpoints.saving(self, output_dir) as (draft, target),
            framework.with_own_checkpoint_paths(self),
            framework.with_whole_custom_states(self),
        ):
            super().save_state(str(draft), safe_serialization, **save_model_func_kwargs)
        return str(target)

    @override
    def load_state(self, input_dir: str | os.PathLike[str] | None = None, *args: Any, **kwargs: Any) -> None:
        """Restore a folder of `save_state`, or of Accelerate with DDP or FSDP2.

        It may have been saved by any number of ranks.

        Raises:
            CheckpointError: The folder is damaged, or belongs to another model. Raised on every rank.
        """
        folder = checkpoints.to_load(self, input_dir)
        with framework.with_own_checkpoint_paths(self), framework.without_scaler(self) as scaler:
            super().load_state(str(folder), *args, **kwargs)
        if scaler is not None:
            checkpoints.load_scaler(scaler, folder)


def _has_param(handle: Sharded, parameter: torch.Tensor) -> bool:
    return handle.internals.sharded_param_for(parameter) is not None


def _local_gradients(by_model: list[tuple[Sharded, list[torch.Tensor]]]) -> Iterator[torch.Tensor]:
    """Yield this rank's part of each gradient."""
    for parameter in (parameter for _, params in by_model for parameter in params):
        if (grad := parameter.grad) is not None:
            yield grad.to_local() if isinstance(grad, DTensor) else grad


def _block_step(optimizer: Optimizer, *_: Any) -> None:
    raise LifecycleError(
        f"{type(optimizer).__name__} was prepared, but its model was not, so this rank would train its own copy. Call "
        "`accelerator.prepare(model)` before the first step."
    )


def resolve_plugin(requested: Any, parallelism: Any) -> MiCSPlugin:
    """Return the requested plugin, one made from it, or that of this process.

    Args:
        requested: Value of `Accelerator(fsdp_plugin=...)`, or None.
        parallelism: Value of `Accelerator(parallelism_config=...)`, or None.

    Raises:
        ConfigError: They contradict each other, or this process's earlier Accelerator.
    """
    if requested is None:
        requested = framework.current_plugin()
    if requested is None:
        plugin = MiCSPlugin()
    elif isinstance(requested, MiCSPlugin):
        plugin = requested
    else:
        plugin = MiCSPlugin.from_fsdp_plugin(requested)
    sizes = {name: getattr(parallelism, name) or 1 for name in launch.PARALLEL_SIZES} if parallelism else {}
    size = launch.partition_size_of(sizes) if sizes else launch.partition_size()
    if size is not None and plugin.config.partition_size != size:
        if plugin.config.partition_size != "auto":
            raise ConfigError(
                f"`partition_size={plugin.config.partition_size!r}` contradicts `parallelism_config` with "
                f"dp_shard_size={size}. Remove `parallelism_config`."
            )
    if size is not None and not _is_partitioned(size, plugin.config):
        raise ConfigError(
            f"`parallelism_config` with dp_shard_size={size} sets the size of a partition, but no scope of "
            f"{plugin.config} is a partition. Remove `parallelism_config`, or use the preset 'mics'."
        )
    if size is not None:
        plugin.config = plugin.config.replace(partition_size=size)
    current = framework.current_plugin()
    if isinstance(current, MiCSPlugin) and current.is_equivalent_to(plugin):
        return current  # a notebook cell was run again
    if framework.is_started():
        raise ConfigError(
            "This process already has an Accelerator without this `MiCSPlugin`, and all Accelerators of a process "
            "share one state. Pass the plugin to the first one, or import `mics_strategy.accelerate` before it."
        )
    return plugin


def _is_partitioned(size: int, config: ShardConfig) -> bool:
    """Whether scopes of the configuration are partitions of that size."""
    scopes = {config.params, config.grads, config.optimizer, config.secondary_params} - {"none", "replicate"}
    if size in (1, launch.num_processes()) and scopes <= ({"world"} if size > 1 else set()):
        return True
    return "partition" in scopes
