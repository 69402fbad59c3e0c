"""What would go wrong with a sharded model, and is refused or explained instead?"""

from __future__ import annotations

from typing import Any

from mics_strategy import CheckpointError, ConfigError
from mics_strategy.lightning.framework import Framework, TrainerFramework


def check_callbacks(framework: TrainerFramework, trainer: Any) -> None:
    """Refuse callbacks that deep-copy the model, or put other tensors in the place of its parameters.

    Raises:
        ConfigError: Naming the callback.
    """
    for callback in trainer.callbacks:
        if isinstance(callback, framework.copying_callbacks):
            raise ConfigError(
                f"`{type(callback).__name__}` copies the whole model and averages it parameter by parameter, which "
                "does not work on shards. Average each rank's shards in a callback of your own (for every parameter, "
                "`average.lerp_(parameter.detach(), 1 - decay)`), or average saved checkpoints after the training."
            )
        if isinstance(callback, framework.pruning_callbacks):
            raise ConfigError(
                f"`{type(callback).__name__}` puts masks beside the model's parameters and products in their place, "
                "and every rank has a part of each parameter. Prune with `torch.nn.utils.prune` before `trainer.fit` "
                "and call `prune.remove`, or prune the weights of a checkpoint after the training."
            )


def check_precision(framework: Framework, argument: str, plugin: Any) -> None:
    """Refuse precision plug-ins that belong to another strategy.

    Args:
        framework: Whose plug-ins.
        argument: By which it came.
        plugin: It; None is none.

    Raises:
        ConfigError: Naming the plug-in.
    """
    if plugin is None:
        return
    if not isinstance(plugin, framework.precision) or isinstance(plugin, framework.foreign_precisions):
        raise ConfigError(
            f"`{argument}={type(plugin).__name__}` does not work with this strategy. Use `precision=` with '32-true', "
            "'bf16-mixed', '16-mixed', 'bf16-true', '16-true' or '64-true', or an ordinary plug-in."
        )


def check_positive(name: str, value: int) -> int:
    """`value`, if it is 1 or more.

    Raises:
        ConfigError: It is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"`{name}={value!r}` is not a positive number. Use 1 or more.")
    return value


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> str:
    """`value`, if it is one of `choices`.

    Raises:
        ConfigError: It is not.
    """
    if value not in choices:
        raise ConfigError(f"`{name}={value!r}` is not known. Use {', '.join(map(repr, choices))}.")
    return value


def check_ranks_remain(state_dict_type: str) -> None:
    """Refuse to write shards in a process that started the ranks and has whole weights only.

    Raises:
        CheckpointError: They are asked for.
    """
    if state_dict_type == "sharded":
        raise CheckpointError(
            "`trainer.save_checkpoint` after the ranks have ended (spawn, fork, notebook): their shards went with "
            "them, and this process has whole weights. Save in the training (ModelCheckpoint), or use "
            "`state_dict_type='full'`."
        )


def check_async_save(state_dict_type: str, save_asynchronously: bool) -> None:
    """Refuse asynchronous saves of whole checkpoints by this strategy.

    Raises:
        ConfigError: They are asked for.
    """
    if save_asynchronously and state_dict_type != "sharded":
        raise ConfigError(
            f"`save_asynchronously=True` with `state_dict_type={state_dict_type!r}`: the strategy writes shards while "
            "training goes on. Use `state_dict_type='sharded'`, or the plug-in AsyncCheckpointIO for one file."
        )


def add_advice(exception: BaseException) -> None:
    """Add to an error of torch what it means here."""
    if "its data is not allocated yet" in str(exception):
        exception.add_note(
            "mics_strategy: something read a gradient or parameter as if it were a plain tensor, for instance "
            "`grad_norm` of Lightning. Gradients are DTensors here: use `torch.nn.utils.get_total_norm`, or "
            "`full_tensor()` on every rank."
        )
    if "mixed torch.Tensor and DTensor" in str(exception):
        exception.add_note(
            "mics_strategy: a parameter was used outside the forward of the module that owns it, where it is a shard. "
            "Call the module (its forward) instead of using its parameters or its other methods; with manual "
            "optimization, use parameters of the LightningModule itself inside its forward, as `self(...)`."
        )
