"""Rank-local states of optimizers in a checkpoint.

A rank-local state of an optimizer is valid on one shard of a parameter only. A *quantized* state is saved twice. Its
values have the name that every state has, so that they load on any ranks and in any tool. Its codes and scales are
saved by *shard key*, the part of the parameter to which they belong. A rank that again has the same part loads codes
and scales unchanged; any other rank quantizes the values again.

Tensors in a dict, list or tuple, and tensors whose shape is not that of the rank's shard, cannot be resharded. They are
saved by shard key only.
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

from mics_strategy.comm.placement import is_sharded
from mics_strategy.engine.optimizer.quantized import is_quantized, requantize_like, to_local
from mics_strategy.engine.parameter import ShardedParameter
from mics_strategy.errors import CheckpointError

KEY = "kept"


@dataclass(frozen=True, slots=True)
class RankLocalState:
    """A state that is valid on this rank only, saved as one object."""

    value: Any

    def plain(self) -> Any:
        """Convert to plain CPU data that loads without the class of quantized tensors."""
        if not is_quantized(self.value):
            return tree_map(_on_cpu, self.value)
        local: Any = to_local(self.value)
        names, context = local.__tensor_flatten__()
        parts = {name: _on_cpu(getattr(local, name)) for name in names}
        return {"class": class_name(type(local)), "parts": parts, "context": list(context)}


def class_name(cls: type) -> str:
    """Return the name of a class with its module."""
    return f"{cls.__module__}.{cls.__qualname__}"


def is_rank_local(value: Any, parameter: torch.Tensor, owner: int | None) -> bool:
    """Whether a state is saved by shard key.

    Args:
        value: One entry of the state.
        parameter: Parameter of the state.
        owner: Rank that alone holds the states of `parameter`; None if every rank holds its shard.
    """
    if is_quantized(value) or _is_nested(value):
        return True
    is_rows = owner is None and is_sharded(parameter)
    return is_rows and isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.numel() > 1


def _is_nested(value: Any) -> bool:
    return isinstance(value, (dict, list, tuple)) and any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(value))


def shard_key(parameter: torch.Tensor, owner: int | None) -> str:
    """Name this rank's part of a parameter: ``start+length`` of each dimension."""
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
        optimizer: Key of the optimizer, such as ``optimizer_0``.
        name: Name of the parameter.
        parameter: Parameter whose states are loaded.
        owner: Rank that alone holds the states here; None if every rank holds its shard.
    """

    optimizer: str
    name: str
    parameter: torch.Tensor
    owner: int | None

    def request(self, saved: Mapping[str, Any], *, are_quantized: bool) -> dict[str, dict[str, None]]:
        """Select the rank-local states to read, each under one shard key with value None.

        The key is this rank's own if it was saved. Otherwise it is any key, to learn how the state was quantized.

        Args:
            saved: Entries of the checkpoint, by flat name.
            are_quantized: Whether the optimizer quantizes its states like the saved one.

        Raises:
            CheckpointError: A state that cannot be resharded was not saved for this rank's shard.
        """
        prefix = f"{KEY}.{self.optimizer}.{self.name}."
        keys_by_state: dict[str, list[str]] = {}
        for entry in saved:
            if entry.startswith(prefix):
                state, _, key = entry.removeprefix(prefix).rpartition(".")
                keys_by_state.setdefault(state, []).append(key)
        requested: dict[str, dict[str, None]] = {}
        local_key = shard_key(self.parameter, self.owner)
        for state, saved_keys in keys_by_state.items():
            values = saved.get(f"{self.optimizer}.state.{self.name}.{state}")
            if values is None and local_key not in saved_keys and self.parameter.numel():
                raise CheckpointError(
                    f"`{state}` of `{self.name}` cannot be resharded. It was saved for the shards "
                    f"{', '.join(saved_keys[:3])}{', ...' if len(saved_keys) > 3 else ''}, and this rank has "
                    f"{local_key}. Load on the same number of ranks with the same scopes, or without the optimizer."
                )
            if values is None or are_quantized:
                if local_key in saved_keys:
                    requested[state] = {local_key: None}
                elif not self._is_chunk(values):
                    requested[state] = {min(saved_keys): None}
        return requested

    def _is_chunk(self, values: Any) -> bool:
        """Whether this rank's shard was saved; without codes, it was not quantized."""
        chunks = values.chunks if isinstance(values, TensorStorageMetadata) else []
        return _shard_key(self.parameter, self.owner) in [(chunk.offsets, chunk.sizes) for chunk in chunks]

    def is_exact(self, key: str) -> bool:
        """Whether a shard key is this rank's own."""
        return key == shard_key(self.parameter, self.owner)

    def restore(self, key: str, loaded: Any, values: torch.Tensor | None) -> Any:
        """Return a state in this rank's form.

        Args:
            key: Shard key whose state was read.
            loaded: State that was read.
            values: Dequantized values of this rank's shard; None if they were not read.

        Raises:
            CheckpointError: The class of a quantized state is not known here.
        """
        if not (isinstance(loaded, dict) and loaded.keys() == {"class", "parts", "context"}):
            return loaded
        local = _rebuilt(loaded)
        if not self.is_exact(key):
            if values is None:
                return None
            local = requantize_like(to_local(values), local)
        local = local.to(self.parameter.device)
        if isinstance(self.parameter, ShardedParameter) and self.owner is None:
            return self.parameter.like_self(local)
        return local


def _rebuilt(loaded: Mapping[str, Any]) -> torch.Tensor:
    safe_classes = {class_name(entry): entry for entry in get_safe_globals() if isinstance(entry, type)}
    tensor_class: Any = safe_classes.get(loaded["class"])
    if tensor_class is None:
        raise CheckpointError(
            f"The checkpoint holds states of the class {loaded['class']}, which is not registered here as safe to "
            "load. Import the module that defines it, and register it with `torch.serialization.add_safe_globals`."
        )
    tensor: torch.Tensor = tensor_class.__tensor_unflatten__(loaded["parts"], loaded["context"], None, None)
    return tensor


def quantizes_like(optimizer: Optimizer, position: int, saved: Sequence[str]) -> bool:
    """Whether an optimizer is of the saved class, and so quantizes in the same way."""
    return position < len(saved) and saved[position] in map(class_name, type(optimizer).__mro__)


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value
