"""Which operations on DTensors need the rows of other ranks, and which have a result of this rank's own?

The answer is the same on all ranks, also where it hangs on the parts of some of them.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils._pytree import tree_leaves, tree_map_only

from mics_strategy.engine.op_schema import is_view, tensors_in

_aten = torch.ops.aten
_COMMUNICATES = (_aten.equal.default, _aten._local_scalar_dense.default)  # without a tensor as their result
_COPIES = (_aten.copy_.default, _aten.zero_.default, _aten.zeros_like.default)
_LAYOUT = ("device", "layout", "memory_format")  # arguments
_MISTAKEN = [
    _aten.squeeze_copy.default,  # by DTensor, which squeezes a dimension of which a rank has one row
    _aten.topk.default,  # and takes the shape of an earlier call with another `k`
]
if torch.__version__ < "2.12":
    _MISTAKEN.append(_aten.squeeze.default)


def is_elementwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operation makes one tensor of tensors of one layout, each element of those at its place.

    DTensor needs 9 ms of a CPU, for every operation and shape, to find that it runs on the parts of ranks.
    """
    if not (torch.Tag.pointwise in func.tags or func in _COPIES) or len(func._schema.returns) != 1:
        return False
    if any(isinstance(argument, (list, tuple)) for argument in args):
        return False
    if any(isinstance(value, torch.Tensor) or name in _LAYOUT for name, value in kwargs.items()):
        return False
    first, *others = (argument for argument in args if isinstance(argument, torch.Tensor))
    if not isinstance(first, DTensor) or not first.is_contiguous():
        return False
    return all(isinstance(other, DTensor) and other._spec == first._spec for other in others)


def run_on_parts(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an elementwise operation on this rank's parts."""
    first = next(argument for argument in args if isinstance(argument, DTensor))
    local = func(*(a._local_tensor if isinstance(a, DTensor) else a for a in args), **kwargs)
    if func._schema.is_mutable:
        return first
    spec = first._spec
    if local.dtype != first.dtype:
        spec = DTensorSpec(spec.mesh, spec.placements, TensorMeta(first.shape, first.stride(), local.dtype))
    return cast("Any", DTensor)(local, spec, requires_grad=False)


def needs_other_rows(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether DTensor would gather for an operation, or has no right rule for it.

    Args:
        func: Operation of torch.
        args: Its positional arguments, at least one of which is a DTensor.
        kwargs: Its other arguments.
    """
    if func is _aten.detach.default or is_elementwise(func, args, kwargs):
        return False
    dispatcher: Any = DTensor._op_dispatcher
    is_tensor = any("Tensor" in str(value.type) for value in func._schema.returns)
    has_handler = is_tensor and func in dispatcher._custom_op_handlers
    if (
        func in (*_COMMUNICATES, *_MISTAKEN)
        or has_handler
        or any(a.is_out or a.name == "reduction" for a in func._schema.arguments)
    ):
        return True  # the mean of a loss divides by the rows of this rank
    if not is_view(func) and any(isinstance(argument, list) and not argument for argument in args):
        return True  # no dimensions, by which DTensor does not understand all of them
    try:
        info = dispatcher.unwrap_to_op_info(func, args, kwargs)
        dispatcher.sharding_propagator.propagate(info)
    except (RuntimeError, ValueError, AssertionError, LookupError):  # it has no rule for these arguments
        return True
    sharding = info.output_sharding
    if sharding.needs_redistribute:
        wanted = tree_leaves(sharding.redistribute_schema.args_schema)
        pairs = zip(info.flat_args_schema, wanted, strict=False)
        if any(isinstance(have, DTensorSpec) and not have.is_replicated() and have != want for have, want in pairs):
            return True
    return _fails_on_an_empty_part(func, args, kwargs)


def mixes_plain(func: Any, tensors: list[torch.Tensor], *, has_rows: bool) -> bool:
    """Whether a plain tensor takes part, whose values may differ between ranks, such that the result is plain.

    A plain scalar does so where gradients are computed, and where it meets results that every rank has whole (``loss /
    weight.norm()``). Elsewhere it is a factor that ranks agree on, a clipping coefficient: parts of one tensor would
    have other factors otherwise. The next step compares it.

    Args:
        func: Operation of torch.
        tensors: Tensors that it is given.
        has_rows: Whether one of them is sharded.
    """
    plain = [tensor for tensor in tensors if not isinstance(tensor, DTensor)]
    if not plain:
        return False
    if any(tensor.dim() for tensor in plain) or in_backward():
        return True
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return True
    is_whole = not has_rows and any(isinstance(tensor, DTensor) and is_of_shards(tensor) for tensor in tensors)
    return is_whole and not func._schema.is_mutable


def is_of_shards(tensor: DTensor) -> bool:
    """Whether a tensor belongs to a model whose ranks have different rows."""
    return "shard" in (tensor.device_mesh.mesh_dim_names or ())


def in_backward() -> bool:
    """Whether autograd is running."""
    return torch._C._current_graph_task_id() != -1


def _fails_on_an_empty_part(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a rank has no rows, for which the operation raises: a maximum."""
    if not any(_has_empty_part(tensor) for tensor in tensors_in((args, kwargs)) if isinstance(tensor, DTensor)):
        return False
    empty_args, empty_kwargs = tree_map_only(torch.Tensor, _smallest_part, (args, kwargs))
    try:
        func(*empty_args, **empty_kwargs)
    except (NotImplementedError, RuntimeError, IndexError):
        return True
    return False


def _has_empty_part(tensor: DTensor) -> bool:
    return any(
        isinstance(placement, Shard) and _num_on_last_rank(tensor.shape[placement.dim], size) == 0
        for placement, size in zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    )


def _smallest_part(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor like the part of the last rank. Not on `meta`, where the maximum of nothing does not raise."""
    if not isinstance(tensor, DTensor):
        return tensor.cpu()
    shape = list(tensor.shape)
    for placement, size in zip(tensor.placements, tensor.device_mesh.shape, strict=True):
        if isinstance(placement, Shard):
            shape[placement.dim] = _num_on_last_rank(shape[placement.dim], size)
    return torch.zeros(shape, dtype=tensor.dtype)


def _num_on_last_rank(num: int, num_ranks: int) -> int:
    return max(0, num - math.ceil(num / num_ranks) * (num_ranks - 1))
