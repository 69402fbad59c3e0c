"""A count of the times that the host reads a value of the device, each of which waits for it."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class HostReads(TorchDispatchMode):
    """Counts the scalars that the host reads from tensors.

    Attributes:
        count: Reads so far.
        is_paused: Whether reads are not counted at the moment.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.is_paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not self.is_paused and func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))
