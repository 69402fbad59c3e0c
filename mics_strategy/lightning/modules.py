"""Preparation of modules for the strategies: units, unsharded tensors, patches.

The engine all-gathers a module's parameters when its forward is called. With automatic optimization, a whole step runs
inside the forward of the LightningModule, so the parameters outside of units are gathered there. With manual
optimization, a step contains backwards and optimizer steps and cannot be one forward. Therefore every child of the
LightningModule (generator, discriminator, ...) is a unit, which is gathered only when it is called.

`training_step` and the other steps bypass `forward`, where the engine gathers the root's parameters. Therefore a step
runs in place of the module's forward: hooks fire, parameters are unsharded inside, and the module is unchanged
afterwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from mics_strategy import ConfigError, ShardConfig
from mics_strategy.mixed_precision import with_mixed_precision

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from mics_strategy.lightning.framework import Framework, TrainerFramework

_TRUE_DTYPES = {"bf16-true": torch.bfloat16, "16-true": torch.float16}
UnitRule = str | int | type[nn.Module] | Iterable[type[nn.Module] | str] | Callable[[nn.Module], bool]


def unit_rule_for(module: nn.Module, units: UnitRule, *, every_child: bool) -> Any:
    """Convert the strategy's `units` to those of `shard`.

    Args:
        module: LightningModule.
        units: Units, as in `shard`.
        every_child: Whether every child of `module` that has parameters is also a unit.

    Raises:
        ConfigError: No module has a class of that name.
    """
    if not every_child or isinstance(units, int):
        return units
    entries = [units] if isinstance(units, str) and units != "auto" else units
    if isinstance(entries, Iterable) and not isinstance(entries, str):
        units = tuple(cls for entry in entries for cls in _classes(module, entry))
    unit_modules = {child for child in module.children() if any(True for _ in child.parameters())}
    unit_modules.update(_matching(module, units))
    return lambda candidate: candidate in unit_modules


def _classes(module: nn.Module, entry: type[nn.Module] | str) -> list[type[nn.Module]]:
    """Return a class, or the classes in `module` with its name."""
    if not isinstance(entry, str):
        return [entry]
    present = dict.fromkeys(type(child) for child in module.modules())
    matches = [cls for cls in present if cls.__name__ == entry.rpartition(".")[2]]
    if not matches:
        names = ", ".join(sorted(cls.__name__ for cls in present))
        raise ConfigError(f"`units={entry!r}`: the model has no module of that class. It has {names}.")
    return matches


def _matching(module: nn.Module, units: UnitRule) -> set[nn.Module]:
    if isinstance(units, str):
        return set(_repeated_in_containers(module))
    if isinstance(units, type | tuple):
        return {child for child in module.modules() if isinstance(child, units)}
    return {child for child in module.modules() if callable(units) and units(child)}


def _repeated_in_containers(module: nn.Module) -> Iterable[nn.Module]:
    """Yield the layers that occur repeatedly in a container."""
    for container in module.modules():
        if isinstance(container, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            children = list(container.children())
            counts = Counter(map(type, children))
            yield from (
                child for child in children if counts[type(child)] > 1 and any(True for _ in child.parameters())
            )


def move_unsharded(module: nn.Module, device: torch.device) -> None:
    """Move tensors that are not parameters or buffers, such as states of metrics.

    The engine has already moved parameters and buffers.
    """
    if next(module.parameters(), None) is None:
        module.to(device)
    else:
        for child in module.children():
            move_unsharded(child, device)


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


def autocast_dtype(framework: Framework, plugin: Any) -> torch.dtype | None:
    """Return the dtype of a precision plug-in's autocast.

    None without mixed precision, and for plug-ins of other classes than Lightning's.
    """
    if not isinstance(plugin, framework.mixed_precision):
        return None
    return torch.float16 if plugin.precision == "16-mixed" else torch.bfloat16


def with_precision(framework: Framework, plugin: Any, config: ShardConfig, module: nn.Module) -> ShardConfig:
    """Return the configuration of `shard` under a precision plug-in.

    Raises:
        ConfigError: `param_dtype` contradicts the precision.
    """
    true_dtype = _TRUE_DTYPES.get(getattr(plugin, "precision", ""), config.param_dtype)
    if config.param_dtype not in ("auto", true_dtype):
        raise ConfigError(
            f"`{precision_flag(plugin)}` stores and computes in {true_dtype}, but `param_dtype={config.param_dtype}` "
            "was also given. Remove `param_dtype`, or use `precision='32-true'` for fp32 masters."
        )
    return with_mixed_precision(config, module, autocast_dtype(framework, plugin), precision_flag(plugin))


def precision_flag(plugin: Any) -> str:
    """Return the `precision` argument of a plug-in, for errors and logs."""
    return f"precision={getattr(plugin, 'precision', type(plugin).__name__)!r}"


def without_codec_schedule(config: ShardConfig) -> ShardConfig:
    """Return the configuration without the length of the training."""
    return config.replace(grad_codec_until=1.0, training_steps="unknown")


def with_micro_steps(config: ShardConfig, trainer: Trainer, module: nn.Module) -> ShardConfig:
    """Return a configuration that states micro-steps for ``"auto"`` scopes.

    Under manual optimization they are unknown.
    """
    is_asked = config.is_auto and config.micro_steps == "unknown" and bool(module.automatic_optimization)
    return config.replace(micro_steps=trainer.accumulate_grad_batches) if is_asked else config


def without_micro_steps(config: ShardConfig) -> ShardConfig:
    """Return the configuration without micro-steps, which Trainers may differ in."""
    return config.replace(micro_steps="unknown")


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
