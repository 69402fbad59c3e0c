"""How does `accelerate test` compare a sharded parameter with a plain tensor?

By `torch.testing.assert_close`, which refuses such pairs before the parameter could answer. In jobs that are ours, they
are compared here as whole tensors, as `torch.equal` and `torch.allclose` do with parameters and gradients.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from mics_strategy.accelerate import framework
from mics_strategy.accelerate.plugin import MiCSPlugin


def patch_assert_close() -> None:
    """Let ``torch.testing.assert_close`` take a sharded tensor and a plain one. Collective then. Idempotent."""
    stock = torch.testing.assert_close
    if hasattr(stock, "mics_stock"):
        return

    @functools.wraps(stock)
    def assert_close(actual: Any, expected: Any, **options: Any) -> None:
        is_mixed = isinstance(actual, DTensor) != isinstance(expected, DTensor)
        if is_mixed and isinstance(framework.current_plugin(), MiCSPlugin):
            actual, expected = _whole(actual), _whole(expected)
        stock(actual, expected, **options)

    assert_close.mics_stock = stock  # type: ignore[attr-defined]
    torch.testing.assert_close = assert_close


def _whole(value: Any) -> Any:
    with torch.no_grad():
        return value.full_tensor() if isinstance(value, DTensor) else value
