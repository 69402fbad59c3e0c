"""What Python gets of sharded tensors: numbers, lists, arrays. torch refuses them for every class but its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mics_strategy.errors import LifecycleError


class PythonValues:
    """Methods of a DTensor that have no tensors as results, or take functions."""

    __slots__ = ()  # the class of a DTensor is changed to one with this base

    def apply_(self: Any, function: Callable[[Any], Any]) -> Any:
        """Apply a function to each element. Collective."""
        self.copy_(self.full_tensor().detach().clone().apply_(function))
        return self

    def tolist(self: Any) -> Any:
        """The values of the whole tensor. Collective if it is sharded."""
        return self.full_tensor().tolist()

    def numpy(self: Any, *, force: bool = False) -> Any:
        """An array on the memory of a result that every rank has.

        Raises:
            LifecycleError: It would be this rank's part, or torch would not see what is written to it.
        """
        if not self.mics_is_result:
            raise LifecycleError(
                f"{self.mics_label} is sharded and has no array of all its values. Use `.full_tensor().numpy()`, on "
                "all ranks. To write, use operations of torch."
            )
        return self.to_local().numpy(force=force)

    def __format__(self: Any, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else object.__format__(self, spec)
