"""Which frozen parameters will be trained later?

Callbacks of Lightning that unfreeze layers freeze them before the model is sharded. The engine gives memory for
gradients to what requires them then, so such parameters are shown to it as trained, and are frozen again when it has
seen them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from mics_strategy.lightning.framework import TrainerFramework


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
