"""What does an operator of torch read and write, and where in memory?"""

import functools
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tests.cuda_harness.happens_before import Range

MOST_RANGES = 64  # of one tensor; beyond, the gaps between its rows count as used

# Operators of c10d, whose schemas do not say it: which argument is written, which is read. `reduce_` may write both.
COLLECTIVES: dict[str, tuple[int, int]] = {
    "_allgather_base_": (0, 1),
    "_reduce_scatter_base_": (0, 1),
    "allgather_": (0, 1),
    "allgather_into_tensor_coalesced_": (0, 1),
    "allreduce_": (0, 0),
    "allreduce_coalesced_": (0, 0),
    "alltoall_": (0, 1),
    "alltoall_base_": (0, 1),
    "broadcast_": (0, 0),
    "reduce_scatter_": (0, 1),
    "reduce_scatter_tensor_coalesced_": (0, 1),
    "barrier": (0, 0),
}
# Those that may work in place, each rank's own part being where it belongs.
GATHERS = frozenset(("_allgather_base_", "allgather_", "allgather_into_tensor_coalesced_", "alltoall_"))
# Operators whose result the host must know, or whose size depends on values: on a GPU the host waits for them.
WAITS_FOR_VALUES = frozenset(
    ("_local_scalar_dense", "equal", "is_nonzero", "masked_select", "nonzero", "_unique2", "unique_dim", "allclose")
)
# Operators that launch nothing.
LAUNCHES_NOTHING = frozenset(
    (
        "_wrap_tensor_autograd",
        "detach",
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "record_grad_output_stream",  # of FSDP2, torch 2.15
        "set_",
    )
)


@dataclass(frozen=True, slots=True)
class Signature:
    """Of one overload: the names of its arguments, those that it writes, and whether it only gives views."""

    names: tuple[str, ...]
    written: frozenset[str]
    is_view: bool


@functools.cache
def signature_of(operator: Any) -> Signature:
    """By the operator's schema."""
    schema = operator._schema
    written = frozenset(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    returned = [each.alias_info for each in schema.returns]
    is_view = bool(returned) and not written and all(alias is not None for alias in returned)
    return Signature(tuple(a.name for a in schema.arguments), written, is_view)


def tensors_in(tree: object) -> list[torch.Tensor]:
    """All of them, in order."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def operands(operator: Any, args: tuple, kwargs: dict[str, Any]) -> Iterator[tuple[torch.Tensor, bool]]:
    """Every tensor that is given to an operator, and whether it is written."""
    signature = signature_of(operator)
    for name, value in (*zip(signature.names, args, strict=False), *kwargs.items()):
        for tensor in tensors_in(value):
            yield tensor, name in signature.written


def num_kernels(name: str, inputs: list[tuple[torch.Tensor, bool]]) -> int:
    """Kernels that an operator launches on a GPU: one, but for operations on lists that differ in their strides.

    They take one tensor after the other (torch's `_check_tensors_share_sizes_and_strides`, which leaves out dimensions
    of size 1).
    """
    targets, sources = ([tensor for tensor, is_written in inputs if is_written is side] for side in (True, False))
    if not name.startswith("_foreach_") or not targets or len(sources) % len(targets):
        return 1
    pairs = zip(itertools.cycle(targets), sources, strict=False)  # one list after the other
    return 1 if all(_rows(target) == _rows(source) for target, source in pairs) else len(targets)


def _rows(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Size and stride of each dimension; those of size 1 have none that matters."""
    return [(n, s if n > 1 else 0) for n, s in zip(tensor.shape, tensor.stride(), strict=True)]


def ranges_of(tensor: torch.Tensor) -> list[Range]:
    """The bytes of a tensor within its storage."""
    size = tensor.itemsize
    if not tensor.numel():
        return []
    start = tensor.storage_offset() * size
    if tensor.is_contiguous():
        return [(start, start + tensor.numel() * size)]
    dims = sorted(((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1 and s), reverse=True)
    length = 1  # elements that are side by side
    while dims and dims[-1][0] <= length:
        stride, count = dims.pop()
        length = max(length, stride * (count - 1) + length)
    starts = [0]
    for place, (stride, count) in enumerate(dims):
        if len(starts) * count > MOST_RANGES:
            length += sum(s * (n - 1) for s, n in dims[place:])
            break
        starts = [first + stride * step for first in starts for step in range(count)]
    return [(start + first * size, start + (first + length) * size) for first in starts]


def numel_of(tensors: Iterable[torch.Tensor]) -> int:
    """Elements of all together."""
    return sum(tensor.numel() for tensor in tensors)
