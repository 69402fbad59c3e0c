"""Memory of the engine that tensors of a script share.

The engine keeps the memory of a parameter and of its gradient for as long as the model lives. A script expects what it
has of torch: that setting `data` or `grad` moves a tensor to other memory, so that aliases and views that it has kept
stay as they are. They get a copy at that moment.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import torch

from mics_strategy.errors import LifecycleError

ExactDTensor: TypeAlias = Any  # whose module imports this one


@dataclass(slots=True)
class WriteCount:
    """Number of writes to the parameters of one bucket, besides torch's counts."""

    num: int = 0


@dataclass(slots=True, eq=False)
class TensorMemory:
    """Memory of one parameter or gradient.

    Attributes:
        writes: Count of writes to it, and to what else the engine counts with it.
        finish: Ends pending reductions into a gradient, before it is read. Collective.
        has_lost_graph: Whether the backward that filled it had `create_graph=True`: reductions are not differentiable.
        gathered: Returns the gathered values that views of it share, or None.
        shared: Living aliases and views, by id; not the engine's own tensor.
    """

    writes: WriteCount = field(default_factory=WriteCount)
    finish: Callable[[], None] | None = None
    has_lost_graph: bool = False
    gathered: Callable[[], Any] = lambda: None
    shared: WeakValueDictionary[int, ExactDTensor] = field(default_factory=WeakValueDictionary)

    def before_read(self) -> None:
        """End pending reductions. Collective if there are any.

        Raises:
            LifecycleError: The result would be taken for a constant in a loss, where torch differentiates a gradient.
        """
        if self.finish is not None:
            self.finish()
        if self.has_lost_graph and torch.is_grad_enabled():
            raise LifecycleError(
                "A gradient of `backward(create_graph=True)` is the mean over ranks, which cannot be differentiated "
                "again. For a loss of gradients, take those of whole parameters: `w = parameter.full_tensor()`, "
                "`torch.func.functional_call(model, {name: w}, inputs)`, `torch.autograd.grad(loss, w, "
                "create_graph=True)`. To look at it, use `torch.no_grad()` or `parameter.grad.detach()`."
            )

    def add(self, tensor: ExactDTensor) -> None:
        """Note an alias or view."""
        tensor.mics_memory = self
        self.shared[id(tensor)] = tensor

    def give(self, tensor: ExactDTensor, own: ExactDTensor) -> None:
        """Let a tensor be an alias of the engine's own one, without its values.

        Args:
            tensor: Tensor of the same shape and placements.
            own: The engine's tensor.
        """
        tensor._local_tensor = own._local_tensor.detach()
        self.add(tensor)

    def leave(self) -> None:
        """Move all aliases and views to a copy, which they share."""
        tensors = list(self.shared.values())
        self.shared.clear()
        if not tensors:
            return
        copied = tensors[0]._local_tensor.untyped_storage().clone()
        for tensor in tensors:
            local = tensor._local_tensor
            tensor.mics_memory = None
            tensor._local_tensor = local.new_empty(0).set_(copied, local.storage_offset(), local.shape, local.stride())
