"""Slicing and concatenation of quantized optimizer states.

A *quantized* state is a tensor subclass with one scale for each block of its flattened elements, such as torchao's. It
has a `block_size` and the methods `dequantize()`, `zeros(shape, ...)` (a new tensor of the same kind) and `copy_`. The
blocks of a sharded state are blocks of a rank's rows. Where these are also blocks of the whole tensor, codes and scales
are copied unchanged. Elsewhere values are quantized again, which may round them.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_FACTORY_ARGS = ("shape", "device", "dtype")  # arguments of `zeros` that do not belong to the quantized format


def to_local(value: torch.Tensor) -> torch.Tensor:
    """The local part of a DTensor, or the tensor itself."""
    return value.to_local() if isinstance(value, DTensor) else value


def is_quantized(value: Any) -> bool:
    """Whether a state or its local part is quantized."""
    if not isinstance(value, torch.Tensor):
        return False
    local: Any = to_local(value)
    return is_traceable_wrapper_subclass(local) and hasattr(local, "block_size") and hasattr(type(local), "zeros")


def dequantize(value: torch.Tensor) -> torch.Tensor:
    """Values of the local part in its nominal dtype; plain tensors unchanged."""
    local = to_local(value)
    return local.dequantize().to(local.dtype) if is_quantized(local) else local


def requantize_like(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Quantize plain values in the format of `like`, which may round them.

    Args:
        values: Plain values of any shape.
        like: Quantized tensor of any shape.

    Returns:
        The quantized values, or `values` itself if their number is not a multiple of the block size.
    """
    if not _is_whole_blocks(values.numel(), like):
        return values
    quantized = _empty(values.shape, like, values.device)
    quantized.copy_(values)
    return quantized


def slice_quantized(whole: torch.Tensor, dim: int | None, start: int, length: int) -> torch.Tensor:
    """A copy of a part of a quantized tensor.

    Codes and scales are copied if the part is whole blocks; otherwise values are quantized again.

    Args:
        whole: Quantized tensor.
        dim: Dimension of the cut; None copies the whole tensor.
        start: First position of the part along `dim`.
        length: Positions of the part along `dim`.
    """
    if dim is None:
        dim, start, length = 0, 0, whole.shape[0]
    stride = math.prod(whole.shape[1:])
    shape = torch.Size([*whole.shape[:dim], length, *whole.shape[dim + 1 :]])
    if dim or not _is_whole_blocks(length * stride, whole) or start * stride % _block_size(whole):
        return requantize_like(dequantize(whole).narrow(dim, start, length).contiguous(), whole)
    part = _empty(shape, whole, whole.device)
    part.copy_(whole[start : start + length])
    return part


def concat_quantized(pieces: Sequence[torch.Tensor], dim: int, shape: torch.Size) -> torch.Tensor:
    """Concatenate parts of which at least one is quantized.

    Codes and scales are copied if all parts are quantized and cut along dimension 0; otherwise values are quantized
    again.

    Args:
        pieces: Parts in order. Empty ones may be left out.
        dim: Dimension of the cut.
        shape: Shape of the whole tensor.
    """
    pieces = [piece for piece in pieces if piece.numel()]
    like = next(piece for piece in pieces if is_quantized(piece))
    if dim or not all(map(is_quantized, pieces)):
        return requantize_like(torch.cat([dequantize(piece) for piece in pieces], dim), like)
    whole, start = _empty(shape, like, like.device), 0
    for piece in pieces:
        whole[start : start + piece.shape[0]].copy_(piece)
        start += piece.shape[0]
    return whole


def _is_whole_blocks(numel: int, like: torch.Tensor) -> bool:
    return numel > 0 and numel % _block_size(like) == 0


def _block_size(quantized: Any) -> int:
    return int(quantized.block_size)


def _empty(shape: torch.Size, like: Any, device: torch.device) -> torch.Tensor:
    """Zeros of `shape` in the quantized format of `like`."""
    options = {
        name: getattr(like, name) for name in inspect.signature(like.zeros).parameters if name not in _FACTORY_ARGS
    }
    empty: torch.Tensor = like.zeros(shape, **options, device=device, dtype=like.dtype)
    return empty
