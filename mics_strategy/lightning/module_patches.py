"""How does a step of a LightningModule reach the parameters?

`training_step` and its like bypass `forward`, where the engine gathers what belongs to the root. So a step runs in
the place of the module's forward: hooks fire, parameters are whole inside, names and the module itself stay as they
are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from mics_strategy import ConfigError, ShardConfig

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from mics_strategy.lightning.framework import TrainerFramework


def run_as_forward(module: nn.Module, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``module.<method>(*args, **kwargs)`` with the root's parameters gathered.

    Args:
        module: A sharded LightningModule.
        method: Name of the step.
        args: Of the step.
        kwargs: Of the step.
    """
    attributes = vars(module)
    own = {"forward": attributes["forward"]} if "forward" in attributes else {}

    def restore() -> None:
        attributes.pop("forward", None)
        attributes.update(own)

    def step(*step_args: Any, **step_kwargs: Any) -> Any:
        restore()  # the step itself may call the real forward
        return getattr(module, method)(*step_args, **step_kwargs)

    attributes["forward"] = step
    try:
        return module(*args, **kwargs)
    finally:
        restore()


def without_codec_schedule(config: ShardConfig) -> ShardConfig:
    """The same configuration, with nothing said of the length of the training."""
    return config.replace(grad_codec_until=1.0, training_steps="unknown")


def grad_codec_steps(config: ShardConfig, trainer: Trainer) -> int | None:
    """Optimizer steps with encoded gradients; None for all.

    Raises:
        ConfigError: A share of a training without an end.
    """
    if config.grad_codec == "none" or config.grad_codec_until == 1.0 or config.training_steps != "unknown":
        return config.grad_codec_steps
    steps = trainer.estimated_stepping_batches
    if steps == float("inf"):
        raise ConfigError(
            f"`grad_codec_until={config.grad_codec_until!r}` is a share of a training without an end. Give the Trainer "
            "`max_steps` or `max_epochs`, or the strategy `training_steps`."
        )
    return config.replace(training_steps=int(steps)).grad_codec_steps


def log_dtensors(module: nn.Module) -> None:
    """Make ``module.log`` take DTensors. Idempotent."""
    attributes = vars(module)
    if not isinstance(attributes.get("log"), _PlainLog):
        attributes["log"] = _PlainLog(module.log)


class _PlainLog:
    """Stands in for ``LightningModule.log`` of one module."""

    def __init__(self, log: Any) -> None:
        self._log = log

    def __call__(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        self._log(name, tree_map(_plain, value), *args, **kwargs)


def _plain(leaf: Any) -> Any:
    return leaf.full_tensor() if isinstance(leaf, DTensor) else leaf


@contextmanager
def with_frozen_as_trainable(framework: TrainerFramework, trainer: Any, module: nn.Module) -> Iterator[None]:
    """While `module` is sharded, let nothing be frozen that a callback may unfreeze.

    Which parameters a callback will unfreeze is its own affair, so all frozen ones get memory for their gradients.

    Args:
        framework: Whose callbacks.
        trainer: Has them.
        module: Plain before, sharded after.
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
