"""What was a tensor computed from that ranks bring to a collective?

A collective on shards takes for granted that all ranks computed them alike. Where a script computes with a number of
this rank (`(weight * x.item()).norm()`), or each rank takes another weight of one shape, neither shapes nor values show
it. So every `ExactDTensor` has an origin: a parameter's name, or an operation with the numbers and the origins that it
got. Collectives are recorded with the origin of what they send, and each optimizer step compares the records of all
ranks (`comm.desync`). Values of plain tensors are no part of an origin; where they become part of shards, the step
compares their digests.

What was computed before the last step or reduction of gradients is a snapshot: its origin says of which moment, as
ranks may have kept snapshots of different ones (each the best by its own loss).
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist

from mics_strategy.comm.watched_work import call_watch

_MAX_LENGTH = 120
_NUM_SHOWN = 50  # at each end


def origin_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The operation with its arguments: ``mul(0.weight, 0.5)``. A checksum stands for the middle of a long text."""
    if func is torch.ops.aten.detach.default:
        return origin_now(args[0])
    return shortened(f"{func._schema.name.removeprefix('aten::')}({_texts((*args, *kwargs.values()))})")


def origin_now(tensor: Any) -> str:
    """The origin of a tensor of any kind, with its moment if that has passed and the tensor has kept its values."""
    text: str | None = getattr(tensor, "mics_origin", None)
    if text is None:
        return "tensor"
    is_past = tensor.mics_memory is None and tensor.mics_moment != moment()
    return f"{text} of moment {tensor.mics_moment}" if is_past else text


def moment() -> int:
    """Number of optimizer steps and reductions of gradients so far, of all models; equal on all ranks."""
    return call_watch(dist.get_rank()).records.moment if dist.is_initialized() else 0


def shortened(text: str) -> str:
    """A text of at most `_MAX_LENGTH` characters, with a checksum if it was longer."""
    if len(text) <= _MAX_LENGTH:
        return text
    return f"{text[:_NUM_SHOWN]}... #{zlib.crc32(text.encode()):08x} ...{text[-_NUM_SHOWN:]}"


def _texts(arguments: tuple[Any, ...] | list[Any]) -> str:
    return ", ".join(map(_text, arguments))


def _text(argument: Any) -> str:
    if isinstance(argument, torch.Tensor):
        return origin_now(argument)
    if isinstance(argument, (list, tuple)):
        return f"[{_texts(argument)}]"
    is_known = isinstance(argument, (bool, int, float, complex, str, torch.dtype))
    return str(argument) if is_known else "-"  # devices and generators are other ones on each rank
