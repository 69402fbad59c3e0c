"""Patches of a LightningModule: steps, logging, codec schedule, frozen params.

`training_step` and the other steps bypass `forward`, where the engine gathers the root's parameters. Therefore a step
runs in place of the module's forward: hooks fire, parameters are unsharded inside, and the module is unchanged
afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from mics_strategy import ConfigError, ShardConfig

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from mics_strategy.lightning.framework import TrainerFramework


def run_as_forward(module: nn.Module, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``module.<method>(*args, **kwargs)`` with the root's parameters gathered.

    Args:
        module: Sharded LightningModule.
        method: Name of the step.
        args: Positional arguments of the step.
        kwargs: Keyword arguments of the step.
    """
    attributes = vars(module)
    original = {"forward": attributes["forward"]} if "forward" in attributes else {}

    def restore() -> None:
        attributes.pop("forward", None)
        attributes.update(original)

    def step(*step_args: Any, **step_kwargs: Any) -> Any:
        restore()  # the step itself may call the real forward
        return getattr(module, method)(*step_args, **step_kwargs)

    attributes["forward"] = step
    try:
        return module(*args, **kwargs)
    finally:
        restore()


def without_codec_schedule(config: ShardConfig) -> ShardConfig:
    """Return the configuration without the length of the training."""
    return config.replace(grad_codec_until=1.0, training_steps="unknown")


def grad_codec_steps(config: ShardConfig, trainer: Trainer) -> int | None:
    """Return the number of optimizer steps with quantized gradients; None for all.

    Raises:
        ConfigError: A fraction is requested of a training without an end.
    """
    if config.grad_codec == "none" or config.grad_codec_until == 1.0 or config.training_steps != "unknown":
        return config.grad_codec_steps
    steps = trainer.estimated_stepping_batches
    if steps == float("inf"):
        raise ConfigError(
            f"`grad_codec_until={config.grad_codec_until!r}` is a fraction of the training, but this training has no "
            "end. Give the Trainer `max_steps` or `max_epochs`, or the strategy `training_steps`."
        )
    return config.replace(training_steps=int(steps)).grad_codec_steps


def log_dtensors(module: nn.Module) -> None:
    """Make ``module.log`` accept DTensors. Idempotent."""
    attributes = vars(module)
    if not isinstance(attributes.get("log"), _FullTensorLog):
        attributes["log"] = _FullTensorLog(module.log)


class _FullTensorLog:
    """Replacement of ``LightningModule.log`` that converts DTensors to full tensors."""

    def __init__(self, log: Any) -> None:
        self._log = log

    def __call__(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        self._log(name, tree_map(_to_full, value), *args, **kwargs)


def _to_full(leaf: Any) -> Any:
    return leaf.full_tensor() if isinstance(leaf, DTensor) else leaf


@contextmanager
def with_frozen_as_trainable(framework: TrainerFramework, trainer: Any, module: nn.Module) -> Iterator[None]:
    """Mark parameters that a callback may unfreeze as trainable while sharding.

    It is unknown which parameters a callback will unfreeze, so all frozen ones get memory for their gradients.

    Args:
        framework: Namespace of the callback classes.
        trainer: Trainer with the callbacks.
        module: Module that is unsharded before the block and sharded after it.
    """
    unfreezes = any(isinstance(callback, framework.unfreezing_callbacks) for callback in trainer.callbacks)
    named = module.named_parameters() if unfreezes else ()
    frozen = [name for name, p in named if not p.requires_grad and p.is_floating_point()]
    for name in frozen:
        module.get_parameter(name).requires_grad_(True)
    try:
        yield
    finally:
        for name in frozen:
            module.get_parameter(name).requires_grad_(False)
