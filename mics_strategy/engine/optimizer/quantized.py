"""What do optimizers with quantized states keep, and how is it cut and put together?

A *quantized* state is a tensor subclass with one scale for each block of its flattened elements, as torchao's: it has
a `block_size`, gives its values by `dequantize()`, makes an empty one of its kind by `zeros(shape, ...)`, and is filled
by `copy_`. On rows, its blocks are those of a rank's rows. Where they are blocks of the whole, too, codes and scales
are copied as they are; where they are not, values are rounded once more.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_PLACE = ("shape", "device", "dtype")  # what `zeros` takes beside what tells one kind from another


def to_local(value: torch.Tensor) -> torch.Tensor:
    """This rank's part."""
    return value.to_local() if isinstance(value, DTensor) else value


def is_quantized(value: Any) -> bool:
    """Whether a state, or this rank's part of it, is quantized."""
    if not isinstance(value, torch.Tensor):
        return False
    local: Any = to_local(value)
    return is_traceable_wrapper_subclass(local) and hasattr(local, "block_size") and hasattr(type(local), "zeros")


def dequantize(value: torch.Tensor) -> torch.Tensor:
    """The values of this rank's part, in the dtype that it shows."""
    local = to_local(value)
    return local.dequantize().to(local.dtype) if is_quantized(local) else local


def requantize_like(values: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
    """Plain values quantized as `kind` is, which may round them; as they are, where they are not whole blocks.

    Args:
        values: Of this rank's part, or of the whole.
        kind: A quantized tensor of any shape.
    """
    if not _is_whole_blocks(values.numel(), kind):
        return values
    found = _empty(values.shape, kind, values.device)
    found.copy_(values)
    return found


def slice_quantized(whole: torch.Tensor, dim: int | None, start: int, length: int) -> torch.Tensor:
    """A part of a quantized tensor in memory of its own: its very codes where they are whole blocks, else rounded.

    Args:
        whole: The quantized tensor.
        dim: Along which it is cut; None takes all of it.
        start: Of the part.
        length: Of the part.
    """
    if dim is None:
        dim, start, length = 0, 0, whole.shape[0]
    stride = math.prod(whole.shape[1:])
    shape = torch.Size([*whole.shape[:dim], length, *whole.shape[dim + 1 :]])
    if dim or not _is_whole_blocks(length * stride, whole) or start * stride % _block_size(whole):
        return requantize_like(dequantize(whole).narrow(dim, start, length).contiguous(), whole)
    found = _empty(shape, whole, whole.device)
    found.copy_(whole[start : start + length])
    return found


def concat_quantized(pieces: Sequence[torch.Tensor], dim: int, shape: torch.Size) -> torch.Tensor:
    """The whole of parts of which at least one is quantized: their very codes where all are, else rounded.

    Args:
        pieces: In order; empty ones may be left out.
        dim: Along which they were cut.
        shape: Of the whole.
    """
    pieces = [piece for piece in pieces if piece.numel()]
    kind = next(piece for piece in pieces if is_quantized(piece))
    if dim or not all(map(is_quantized, pieces)):
        return requantize_like(torch.cat([dequantize(piece) for piece in pieces], dim), kind)
    whole, start = _empty(shape, kind, kind.device), 0
    for piece in pieces:
        whole[start : start + piece.shape[0]].copy_(piece)
        start += piece.shape[0]
    return whole


def _is_whole_blocks(numel: int, kind: torch.Tensor) -> bool:
    return numel > 0 and numel % _block_size(kind) == 0


def _block_size(kind: Any) -> int:
    return int(kind.block_size)


def _empty(shape: torch.Size, kind: Any, device: torch.device) -> torch.Tensor:
    """All zeros, of the kind of `kind`."""
    options = {name: getattr(kind, name) for name in inspect.signature(kind.zeros).parameters if name not in _PLACE}
    found: torch.Tensor = kind.zeros(shape, **options, device=device, dtype=kind.dtype)
    return found
