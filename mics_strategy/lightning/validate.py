"""Validation of callbacks, precision plug-ins and options, and advice on errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mics_strategy import CheckpointError, ConfigError

if TYPE_CHECKING:
    from mics_strategy.lightning.framework import Framework, TrainerFramework


def check_callbacks(framework: TrainerFramework, trainer: Any) -> None:
    """Refuse callbacks that copy the model or replace its parameters by other tensors.

    Raises:
        ConfigError: There is such a callback; the error names it.
    """
    for callback in trainer.callbacks:
        if isinstance(callback, framework.copying_callbacks):
            raise ConfigError(
                f"`{type(callback).__name__}` copies the full model and averages it parameter by parameter, which does "
                "not work on shards. Average each rank's shards in your own callback (for every parameter, "
                "`average.lerp_(parameter.detach(), 1 - decay)`), or average saved checkpoints after the training."
            )
        if isinstance(callback, framework.pruning_callbacks):
            raise ConfigError(
                f"`{type(callback).__name__}` adds masks to the model and replaces its parameters by products, but "
                "every rank has only a part of each parameter. Prune with `torch.nn.utils.prune` before `trainer.fit` "
                "and call `prune.remove`, or prune the weights of a checkpoint after the training."
            )


def check_precision(framework: Framework, argument: str, plugin: Any) -> None:
    """Refuse precision plug-ins of other strategies.

    Args:
        framework: Namespace of the plug-in classes.
        argument: Name of the argument, for the error.
        plugin: The plug-in, or None.

    Raises:
        ConfigError: The plug-in belongs to another strategy; the error names it.
    """
    if plugin is None:
        return
    if not isinstance(plugin, framework.precision) or isinstance(plugin, framework.foreign_precisions):
        raise ConfigError(
            f"`{argument}={type(plugin).__name__}` does not work with this strategy. Use `precision=` with '32-true', "
            "'bf16-mixed', '16-mixed', 'bf16-true', '16-true' or '64-true', or an ordinary plug-in."
        )


def check_positive(name: str, value: int) -> int:
    """Return `value` if it is at least 1.

    Raises:
        ConfigError: It is less than 1.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"`{name}={value!r}` is not a positive integer. Use 1 or more.")
    return value


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> str:
    """Return `value` if it is one of `choices`.

    Raises:
        ConfigError: It is not one of them.
    """
    if value not in choices:
        raise ConfigError(f"`{name}={value!r}` is not supported. Use {', '.join(map(repr, choices))}.")
    return value


def check_ranks_remain(state_dict_type: str) -> None:
    """Refuse to write shards in the parent of the ranks, which has full weights only.

    Raises:
        CheckpointError: Shards are requested.
    """
    if state_dict_type == "sharded":
        raise CheckpointError(
            "`trainer.save_checkpoint` was called after the ranks have ended (spawn, fork, notebook). Their shards "
            "ended with them; this process has only the full weights. Save during the training (ModelCheckpoint), or "
            "use `state_dict_type='full'`."
        )


def check_saves_of_islands(outer_every: int, state_dict_type: str, trainer: Any) -> None:
    """Refuse full checkpoints of optimizers that differ between islands, before anything is trained.

    Raises:
        ConfigError: A callback would save them.
    """
    saves = [callback for callback in trainer.checkpoint_callbacks if not getattr(callback, "save_weights_only", False)]
    if outer_every and state_dict_type == "full" and saves:
        raise ConfigError(
            f"`outer_every={outer_every}` with `state_dict_type='full'`: one file holds one state of the optimizers, "
            f"which differ between islands, and {type(saves[0]).__name__} would fail at its first save. Use "
            "state_dict_type='sharded', ModelCheckpoint(save_weights_only=True) or Trainer(enable_checkpointing=False)."
        )


def check_async_save(state_dict_type: str, save_asynchronously: bool) -> None:
    """Refuse asynchronous saves of full checkpoints by this strategy.

    Raises:
        ConfigError: They are requested.
    """
    if save_asynchronously and state_dict_type != "sharded":
        raise ConfigError(
            f"`save_asynchronously=True` does not work with `state_dict_type={state_dict_type!r}`: this strategy "
            "writes only shards in the background. Use `state_dict_type='sharded'`, or the plug-in "
            "AsyncCheckpointIO for one file."
        )


def add_advice(exception: BaseException) -> None:
    """Add a note to an error of torch that explains its cause with sharded models."""
    if "its data is not allocated yet" in str(exception):
        exception.add_note(
            "mics_strategy: a gradient or parameter was read as if it were a plain tensor, for example by Lightning's "
            "`grad_norm`. Gradients are DTensors: use `torch.nn.utils.get_total_norm`, or `full_tensor()` on every "
            "rank."
        )
    if any(text in str(exception) for text in ("mixed dtype (CPU)", "the same dtype", "expected scalar type")):
        exception.add_note(
            "mics_strategy: under mixed precision, parameters are gathered in 16 bits. A module that computes in fp32 "
            "must cast its weights, or use `param_dtype='float32'` for autocast over parameters gathered in fp32."
        )
