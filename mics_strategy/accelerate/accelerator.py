"""What does `accelerate.Accelerator` do differently when it trains sharded models?

It shards a model in place when it is prepared, points optimizers at the shards whenever those come, tells the engine
where an optimizer step ends, and clips, saves and loads over all ranks. Everything else is Accelerate's.
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

from mics_strategy import ConfigError, LifecycleError, Sharded
from mics_strategy.accelerate import checkpoints, framework
from mics_strategy.accelerate.prepare import check_output_layer, reuse_sharded, shard_for_plugin
from mics_strategy.accelerate.rendezvous import Rendezvous
from mics_strategy.accelerate.resolve import resolve_plugin
from mics_strategy.accelerate.save_pretrained import patch_save_pretrained
from mics_strategy.accelerate.transformers_patches import patch_trainers


class MiCSAccelerator(Accelerator):  # type: ignore[misc]
    """An `Accelerator` whose models are sharded by a `ShardConfig`.

    ``accelerate.Accelerator(...)`` constructs it where MiCS was asked for; derive from this class to add to it. On GPUs
    and on CPUs, under any launcher or none.

    Args:
        *args: As `Accelerator` takes them.
        **kwargs: As `Accelerator` takes them. `fsdp_plugin` is a `MiCSPlugin`; left out, what the launcher's
            configuration says. `parallelism_config` may give the partition size (`dp_shard_size`).

    Raises:
        ConfigError: Impossible options, or a job that cannot be sharded.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = framework.arguments(self, args, kwargs)
        self.rendezvous = Rendezvous()
        self._handles: list[weakref.ref[Sharded]] = []
        self._deferring: list[Sharded] = []  # inside `no_sync`
        self._waiting: dict[Any, Any] = {}  # optimizers whose model is not prepared yet, and how to stop waiting
        given["fsdp_plugin"] = resolve_plugin(given.get("fsdp_plugin"), given.pop("parallelism_config", None))
        if not framework.is_started():
            given["cpu"] = given.get("cpu", False) or framework.lacks_device()
            framework.start_state(given, given["fsdp_plugin"])
        super().__init__(**given)
        framework.ensure_group(self.device)
        patch_trainers()

    # -- handles ----------------------------------------------------------------------------------------------

    @property
    def handles(self) -> list[Sharded]:
        """Of all models that were prepared and are still there."""
        return [handle for reference in self._handles if (handle := reference()) is not None]

    def sharded_of(self, of: Any) -> Sharded:
        """The handle of a model: plan, traffic, memory.

        Args:
            of: A model or an optimizer, before or after `prepare`.

        Raises:
            LifecycleError: It was not prepared.
        """
        found = self.handle_of(of)
        if found is None:
            raise LifecycleError(
                f"This {type(of).__name__} belongs to no model that was prepared. Call `accelerator.prepare(model)` "
                "first."
            )
        return found

    def handle_of(self, of: Any) -> Sharded | None:
        """The handle of a model or of the one that an optimizer steps on; None for anything else."""
        of = framework.unwrap_optimizer(of)
        if isinstance(of, nn.Module):
            model = framework.unwrap_model(of)
            return next((handle for handle in self.handles if handle.model is model), None)
        groups = getattr(of, "param_groups", ())
        first = next((parameter for group in groups for parameter in group["params"]), None)
        return None if first is None else next((handle for handle in self.handles if _has(handle, first)), None)

    # -- preparing --------------------------------------------------------------------------------------------

    @override
    def prepare(self, *args: Any, device_placement: list[bool | None] | None = None) -> Any:
        """Prepare objects in any order, together or one by one; models are sharded in place.

        Raises:
            ConfigError: On every rank, for what `mics_strategy.shard` refuses.
            ValueError: `device_placement` of another length.
        """
        placements: list[bool | None] = [None] * len(args) if device_placement is None else device_placement
        if len(placements) != len(args):
            raise ValueError(
                f"`device_placement` has {len(placements)} entries for {len(args)} objects. Give one each."
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
        """Shard a model in place, for training or evaluation, with autocast and compilation as they were asked for."""
        self._shard(model)
        has_policy = self.state.fsdp_plugin.mixed_precision_policy is not None
        with framework.without_autocast(self) if has_policy else ExitStack():
            prepared: nn.Module = super().prepare_model(model, device_placement=False, evaluation_mode=True)
        return prepared

    def _shard(self, model: nn.Module) -> None:
        model = framework.unwrap_model(model)
        if self.handle_of(model) is not None:
            return
        plugin = self.state.fsdp_plugin
        if self.ddp_handler is not None and self.ddp_handler.broadcast_buffers is False:
            plugin.config = plugin.config.replace(broadcast_buffers=False)
        sharded = reuse_sharded(model, plugin)
        if sharded is None:
            if framework.is_prepared(model):
                return
            device = self.device if self.device.type == "cuda" else torch.device(self.device.type)
            sharded = shard_for_plugin(model, plugin, device, in_low_precision=self.mixed_precision != "no")
        check_output_layer(sharded)
        patch_save_pretrained(sharded, self.rendezvous)
        self._handles = [*(each for each in self._handles if each() is not None), weakref.ref(sharded)]
        for optimizer in [*self._waiting]:
            self._adopt(optimizer)

    @override
    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Any:
        """Point an optimizer at the shards of its model, now or when that is prepared.

        Raises:
            ConfigError: On every rank, for an optimizer over parameters of several models, or of none.
        """
        prepared = super().prepare_optimizer(optimizer, device_placement=False)
        self._adopt(framework.unwrap_optimizer(prepared))
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
        """Let go of all that was prepared."""
        for hook in self._waiting.values():
            hook.remove()
        self._waiting.clear()
        return super().free_memory(*objects)

    # -- steps ------------------------------------------------------------------------------------------------

    @contextmanager
    @override
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Say that more micro-steps of this optimizer step follow: gradients stay within their scope until then.

        A model that was not prepared has nothing to defer.
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
        """Run the backward, which outside of `no_sync` is the last of its optimizer step."""
        with ExitStack() as stack:
            for handle in self.handles:
                stack.enter_context(handle.micro_step(0, of=2 if handle in self._deferring else 1))
            super().backward(loss, **kwargs)

    @override
    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Scale gradients so that their norm over all ranks, and over all models together, is at most `max_norm`.

        Args:
            parameters: Of prepared models, as they were before or after `prepare`.
            max_norm: The largest norm to leave.
            norm_type: Of the p-norm.

        Returns:
            The norm before, a plain scalar tensor, the same on all ranks.

        Raises:
            ConfigError: A parameter of no model that was prepared.
        """
        self.unscale_gradients()
        by_model = self._by_model(parameters)
        if not by_model:
            return torch.zeros((), device=self.device)
        if len(by_model) == 1:
            ((handle, own),) = by_model
            return handle.clip_grad_norm_(float(max_norm), float(norm_type), only=own)
        norms = [handle.clip_grad_norm_(math.inf, float(norm_type), only=own) for handle, own in by_model]
        total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for grad in _local_gradients(by_model):
            grad.mul_(factor)
        return total

    @override
    def clip_grad_value_(self, parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float) -> None:
        """Limit every element of the gradients."""
        self.unscale_gradients()
        by_model = self._by_model(parameters)
        for handle, _ in by_model:
            handle.finish_gradients()
        for grad in _local_gradients(by_model):
            grad.clamp_(-float(clip_value), float(clip_value))

    def _by_model(self, parameters: torch.Tensor | Iterable[torch.Tensor]) -> list[tuple[Sharded, list[torch.Tensor]]]:
        """The sharded parameters of each model.

        Raises:
            ConfigError: Some belong to no prepared model.
        """
        rest = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        by_model: list[tuple[Sharded, list[torch.Tensor]]] = []
        for handle in self.handles:
            sharded = [handle.sharded_param_for(parameter) for parameter in rest]
            rest = [parameter for parameter, its in zip(rest, sharded, strict=True) if its is None]
            if any(its is not None for its in sharded):
                by_model.append((handle, [its for its in sharded if its is not None]))
        if rest:
            raise ConfigError(
                f"Gradients of a tensor {list(rest[0].shape)} of no model that was prepared cannot be clipped. Pass "
                "those of models after `prepare`."
            )
        return by_model

    # -- saving and loading -----------------------------------------------------------------------------------

    @override
    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The plain model's state dict, whole on rank 0's CPU; empty on other ranks. Collective."""
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
        """Save models, optimizers and all else as a folder that is whole or absent. Collective, on all ranks.

        Raises:
            CheckpointError: On every rank, naming the one that failed; an older checkpoint of that name is as it was.
        """
        with checkpoints.saving(self, output_dir) as (draft, target), framework.with_own_checkpoint_paths(self):
            super().save_state(str(draft), safe_serialization, **save_model_func_kwargs)
        return str(target)

    @override
    def load_state(self, input_dir: str | os.PathLike[str] | None = None, *args: Any, **kwargs: Any) -> None:
        """Restore what `save_state` wrote, by any number of ranks, or what Accelerate saved with DDP or FSDP2.

        Raises:
            CheckpointError: On every rank, for a folder that is damaged or another model's.
        """
        folder = checkpoints.to_load(self, input_dir)
        with framework.with_own_checkpoint_paths(self), framework.without_scaler(self) as scaler:
            super().load_state(str(folder), *args, **kwargs)
        if scaler is not None:
            checkpoints.load_scaler(scaler, folder)


def _has(handle: Sharded, parameter: torch.Tensor) -> bool:
    return handle.sharded_param_for(parameter) is not None


def _local_gradients(by_model: list[tuple[Sharded, list[torch.Tensor]]]) -> Iterator[torch.Tensor]:
    """This rank's part of each gradient."""
    for parameter in (parameter for _, own in by_model for parameter in own):
        if (grad := parameter.grad) is not None:
            yield grad.to_local() if isinstance(grad, DTensor) else grad


def _block_step(optimizer: Optimizer, *_: Any) -> None:
    raise LifecycleError(
        f"{type(optimizer).__name__} was prepared, and its model was not: it would train this rank's own copy. Call "
        "`accelerator.prepare(model)` before the first step."
    )
