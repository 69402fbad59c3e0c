"""How long is the training, of which gradients are encoded for a share?

The model may be sharded before that is known (for validation, say), so the strategy says it when a fit begins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mics_strategy import ConfigError, ShardConfig

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


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
