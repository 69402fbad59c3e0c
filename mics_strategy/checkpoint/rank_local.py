"""How are states of an optimizer saved that are more, or other, than tensors cut as their parameters are?

*Quantized* states are saved twice: their values under the name that every state has, so that they load on any ranks
and everybody reads them, and their very codes and scales by *place*, the part of the parameter to which they belong. A
rank that has that place again takes them as they were; any other quantizes the values anew.

States that hold tensors in a dict, list or tuple, and tensors of another shape than a rank's rows, are this rank's own,
and nobody knows how they would be cut elsewhere: they are saved by place only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.serialization import get_safe_globals
from torch.utils._pytree import tree_leaves, tree_map

from mics_strategy.engine.optimizer.quantized import is_quantized, requantize_like, to_local
from mics_strategy.engine.parameter import ShardedParameter, is_sharded
from mics_strategy.errors import CheckpointError

KEY = "kept"


@dataclass(frozen=True, slots=True)
class RankLocalState:
    """A state as this rank keeps it; saved as one object."""

    value: Any

    def plain(self) -> Any:
        """As plain data on the CPU, which whoever lacks the class of a quantized tensor can read, too."""
        if not is_quantized(self.value):
            return tree_map(_on_cpu, self.value)
        local: Any = to_local(self.value)
        names, context = local.__tensor_flatten__()
        parts = {name: _on_cpu(getattr(local, name)) for name in names}
        return {"class": class_name(type(local)), "parts": parts, "context": list(context)}


def class_name(kind: type) -> str:
    """With its module."""
    return f"{kind.__module__}.{kind.__qualname__}"


def is_rank_local(value: Any, parameter: torch.Tensor, owner: int | None) -> bool:
    """Whether a state is saved by place.

    Args:
        value: One entry of the state.
        parameter: Its parameter.
        owner: The rank that alone has the states of `parameter`, where one does.
    """
    if is_quantized(value) or _is_nested(value):
        return True
    is_rows = owner is None and is_sharded(parameter)
    return is_rows and isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.numel() > 1


def _is_nested(value: Any) -> bool:
    return isinstance(value, (dict, list, tuple)) and any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(value))


def shard_key(parameter: torch.Tensor, owner: int | None) -> str:
    """The name of the part of a parameter whose states this rank has, as ``start+length`` along each dimension."""
    starts, lengths = _shard_key(parameter, owner)
    name = "x".join(f"{start}+{length}" for start, length in zip(starts, lengths, strict=True)) or "scalar"
    if isinstance(parameter, ShardedParameter) and not lengths.numel():
        return f"{name} of {parameter.mics_index}"
    return name


def _shard_key(parameter: torch.Tensor, owner: int | None) -> tuple[torch.Size, torch.Size]:
    starts = [0] * parameter.dim()
    if owner is not None or not isinstance(parameter, ShardedParameter) or parameter.mics_slice.dim is None:
        return torch.Size(starts), parameter.shape
    starts[parameter.mics_slice.dim] = parameter.mics_slice.shard_range(parameter.mics_index)[0]
    return torch.Size(starts), parameter.local.shape


@dataclass(frozen=True, slots=True)
class StateSource:
    """The states of one parameter in a checkpoint.

    Attributes:
        optimizer: Its key, as ``optimizer_0``.
        name: Of the parameter.
        parameter: Where they go.
        owner: The rank that alone has them here, where one does.
    """

    optimizer: str
    name: str
    parameter: torch.Tensor
    owner: int | None

    def request(self, saved: Mapping[str, Any], *, are_quantized: bool) -> dict[str, dict[str, None]]:
        """What this rank reads by place: for every such state the name of one place, with nothing there yet.

        Its own place where that was saved; else any, to see how the state was quantized.

        Args:
            saved: Everything in the checkpoint, by name.
            are_quantized: Whether the optimizer keeps quantized states as the one that was saved.

        Raises:
            CheckpointError: A state that fits its own place only, which is not this rank's.
        """
        prefix = f"{KEY}.{self.optimizer}.{self.name}."
        places: dict[str, list[str]] = {}
        for found in saved:
            if found.startswith(prefix):
                state, _, place = found.removeprefix(prefix).rpartition(".")
                places.setdefault(state, []).append(place)
        wanted: dict[str, dict[str, None]] = {}
        own = shard_key(self.parameter, self.owner)
        for state, known in places.items():
            values = saved.get(f"{self.optimizer}.state.{self.name}.{state}")
            if values is None and own not in known and self.parameter.numel():
                raise CheckpointError(
                    f"`{state}` of `{self.name}` was saved as each rank keeps it, for the parts {', '.join(known[:3])}"
                    f"{', ...' if len(known) > 3 else ''}, and this rank has {own}: how such a state is cut is not "
                    "known. Load on as many ranks with the same scopes, or without the optimizer."
                )
            if values is None or are_quantized:
                if own in known:
                    wanted[state] = {own: None}
                elif not self._is_chunk(values):
                    wanted[state] = {min(known): None}
        return wanted

    def _is_chunk(self, values: Any) -> bool:
        """Whether this rank's place was one of those that were saved; not quantized then, if nothing says so."""
        chunks = values.chunks if isinstance(values, TensorStorageMetadata) else []
        return _shard_key(self.parameter, self.owner) in [(chunk.offsets, chunk.sizes) for chunk in chunks]

    def is_exact(self, place: str) -> bool:
        """Whether what was saved for a place is what this rank keeps."""
        return place == shard_key(self.parameter, self.owner)

    def restore(self, place: str, loaded: Any, values: torch.Tensor | None) -> Any:
        """A state as this rank keeps it.

        Args:
            place: Whose state was read.
            loaded: What was.
            values: Of this rank's part, where they were read.

        Raises:
            CheckpointError: A class that is not known here.
        """
        if not (isinstance(loaded, dict) and loaded.keys() == {"class", "parts", "context"}):
            return loaded
        local = _rebuilt(loaded)
        if not self.is_exact(place):
            if values is None:
                return None
            local = requantize_like(to_local(values), local)
        local = local.to(self.parameter.device)
        if isinstance(self.parameter, ShardedParameter) and self.owner is None:
            return self.parameter.like_self(local)
        return local


def _rebuilt(loaded: Mapping[str, Any]) -> torch.Tensor:
    known = {class_name(entry): entry for entry in get_safe_globals() if isinstance(entry, type)}
    kind: Any = known.get(loaded["class"])
    if kind is None:
        raise CheckpointError(
            f"The checkpoint holds states of the class {loaded['class']}, which is not known here as safe to load. "
            "Import what defines it, and name it with `torch.serialization.add_safe_globals`."
        )
    found: torch.Tensor = kind.__tensor_unflatten__(loaded["parts"], loaded["context"], None, None)
    return found


def quantizes_like(optimizer: Optimizer, position: int, saved: Sequence[str]) -> bool:
    """Whether an optimizer is of the class whose states were saved, so that it quantizes as that one did."""
    return position < len(saved) and saved[position] in map(class_name, type(optimizer).__mro__)


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value
