"""What does `self.log` get?

Norms and other reductions of gradients are DTensors, which loggers and metrics cannot average. They become plain
tensors on their way into the log, by a communication that every rank takes part in where one is needed.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map


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
