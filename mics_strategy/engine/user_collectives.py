"""Collectives of a script on tensors that were computed from a sharded model."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from mics_strategy.engine.op_schema import tensors_in
from mics_strategy.errors import LifecycleError


def run_collective(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation of c10d on results that each rank has for itself.

    Such as a loss with a penalty on parameters.

    Raises:
        LifecycleError: A tensor is sharded, or what is written to it would not reach the engine.
    """
    for tensor in tensors_in((args, kwargs)):
        if not getattr(tensor, "mics_is_result", not isinstance(tensor, DTensor)):
            raise LifecycleError(
                f"`{func._schema.name}` got a sharded tensor. Replicas are kept equal, and gradients are means over "
                "all ranks already: leave the collective out. For one of whole values, pass `tensor.full_tensor()`."
            )
    return func(*tree_map_only(DTensor, lambda tensor: tensor._local_tensor, args), **kwargs)
