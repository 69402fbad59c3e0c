"""Conversion of sharded models and optimizers to plain state dicts and back.

The conversion goes tensor by tensor: a rank never holds more than one whole parameter in addition to its shards, and
only rank 0 collects the whole tensors, on the CPU. Loading copies only this rank's part of a (memory-mapped) whole
tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from mics_strategy.comm.consensus import gather_objects, run_on_all_ranks
from mics_strategy.comm.placement import full_tensor, is_sharded
from mics_strategy.comm.process_groups import ProcessGroups
from mics_strategy.engine.optimizer.kinds import check_same_kind
from mics_strategy.engine.optimizer.quantized import concat_quantized, is_quantized, slice_quantized, to_local
from mics_strategy.engine.parameter import ShardedParameter
from mics_strategy.errors import CheckpointError

StateDict = dict[str, Any]
OwnerOf = Callable[[torch.Tensor], int | None]


def full_state_dict(model: nn.Module) -> StateDict:
    """The plain model's state dict on rank 0's CPU; empty on other ranks. Collective.

    It keeps the names, the order and the ties of the plain model.
    """
    whole: dict[int, torch.Tensor] = {}
    result: StateDict = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor):
            if id(value) not in whole:
                whole[id(value)] = to_rank_zero(value)
            value = whole[id(value)]
        result[name] = value
    return result if dist.get_rank() == 0 else {}


def load_full_values(model: nn.Module) -> None:
    """Let `load_state_dict` of each module load full tensors.

    It copies this rank's part. Every rank must pass the same values. With ``assign=True`` it copies as well: the
    parameters stay.
    """
    for module in model.modules():
        if any(isinstance(parameter, ShardedParameter) for parameter in module._parameters.values()):
            module.register_load_state_dict_pre_hook(_narrow_values)


def _narrow_values(
    module: nn.Module, state: StateDict, prefix: str, metadata: dict[str, Any], *_: Any, **__: Any
) -> None:
    metadata["assign_to_params_buffers"] = False
    for name, parameter in module._parameters.items():
        if f"{prefix}{name}" in state:
            state[f"{prefix}{name}"] = _piece(state[f"{prefix}{name}"], parameter)


def full_optimizer_state_dict(optimizer: Optimizer, owner_of: OwnerOf, groups: ProcessGroups) -> StateDict:
    """The plain optimizer's state dict on rank 0's CPU; empty on others. Collective.

    It keeps the integer ids of the parameters.

    Args:
        optimizer: Optimizer of the sharded model.
        owner_of: Function from a parameter to the rank of the optimizer scope that alone has its states, or None if
            every rank has its rows.
        groups: Process groups of the model.

    Raises:
        CheckpointError: A state cannot be reassembled from shards.
    """
    run_on_all_ranks(lambda: _check_reassemblable(optimizer, owner_of))
    state = optimizer.state_dict()
    quantized = _quantized_rows(state["state"])
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    owners = {index: owner for index, p in enumerate(parameters) if (owner := owner_of(p)) is not None}
    states = {}
    for index in range(len(parameters)):
        entry = state["state"].get(index)
        if index in owners:
            entry = _from_owner(entry, owners[index], groups)
        if entry is not None:
            states[index] = {
                key: _quantized_on_rank_zero(value, parameters[index], groups)
                if (index, key) in quantized
                else to_rank_zero(value)
                if isinstance(value, torch.Tensor)
                else value
                for key, value in entry.items()
            }
    return {**state, "state": states} if dist.get_rank() == 0 else {}


def _check_reassemblable(optimizer: Optimizer, owner_of: OwnerOf) -> None:
    """Raise for states that cannot be reassembled from shards.

    Raises:
        CheckpointError: A state is of an unknown kind. The error names the first one and its kind.
    """
    for parameter, states in optimizer.state.items():
        is_row_sharded = is_sharded(parameter) and owner_of(parameter) is None
        for key, value in states.items():
            if isinstance(value, torch.Tensor):
                is_unsupported = not is_quantized(value) and type(to_local(value)) not in (torch.Tensor, nn.Parameter)
                is_unsupported |= is_row_sharded and value.numel() > 1 and not isinstance(value, DTensor)
                description = f"is a {type(to_local(value)).__name__} {list(value.shape)}"
            else:
                is_unsupported = isinstance(value, (dict, list, tuple)) and _holds_tensor(value)
                description = f"holds tensors inside a {type(value).__name__}"
            if is_unsupported:
                raise CheckpointError(
                    f"`{key}` of {type(optimizer).__name__} {description}, which cannot be reassembled from shards. "
                    "Use a sharded checkpoint (`save_checkpoint`, or `state_dict_type='sharded'`), which loads on the "
                    "same ranks and scopes, or save the weights only."
                )


def _holds_tensor(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) and leaf.dim() > 0 for leaf in tree_leaves(value))


def _quantized_rows(states: dict[int, StateDict]) -> set[tuple[int, str]]:
    """Index and key of row-sharded states that are quantized on any rank. Collective.

    A rank whose rows are too short for a block has a plain state.
    """
    local_keys = {
        (index, key)
        for index, entry in states.items()
        for key, value in entry.items()
        if isinstance(value, DTensor) and is_quantized(value)
    }
    return set().union(*gather_objects(local_keys))


def _quantized_on_rank_zero(value: torch.Tensor, parameter: ShardedParameter, groups: ProcessGroups) -> torch.Tensor:
    """The whole quantized state on rank 0; an empty tensor on other ranks. Collective."""
    local, dim = to_local(value).detach().cpu(), parameter.mics_slice.dim
    if groups.shard_group is None or dim is None or not is_sharded(parameter):
        return to_rank_zero(local)
    pieces = []
    for source in range(groups.trainable_placement.degree):
        piece = groups.shard_group.broadcast_object(
            local if source == groups.trainable_placement.index else None, source
        )
        if dist.get_rank() == 0 and piece is not None:
            pieces.append(piece)
    return concat_quantized(pieces, dim, parameter.shape) if pieces else torch.empty(0)


def _from_owner(entry: StateDict | None, owner: int, groups: ProcessGroups) -> StateDict | None:
    """States of an owned parameter, broadcast from its owner, on the CPU. Collective."""
    if groups.shard_group is None:
        return entry
    payload = None if entry is None else {key: _on_cpu(value) for key, value in entry.items()}
    return groups.shard_group.broadcast_object(payload, owner)


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def load_full_optimizer_state_dict(optimizer: Optimizer, state: StateDict, owner_of: OwnerOf) -> None:
    """Load a plain optimizer's state dict that every rank passes as a whole.

    Args:
        optimizer: Optimizer of the sharded model.
        state: State dict of the plain optimizer.
        owner_of: Function from a parameter to its owner; see `full_optimizer_state_dict`.

    Raises:
        CheckpointError: The state dict holds another number of parameters, or is that of another kind of optimizer.
    """
    for group in state["param_groups"]:
        check_same_kind(optimizer, group)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    num_saved = sum(len(group["params"]) for group in state["param_groups"])
    if num_saved != len(parameters):
        raise CheckpointError(
            f"The checkpoint's optimizer has {num_saved} parameters, but this {type(optimizer).__name__} has "
            f"{len(parameters)}. Build the optimizer with the same parameters as when it was saved."
        )
    pieces = {}
    for index, entry in state["state"].items():
        parameter = parameters[index]
        owner = owner_of(parameter)
        if owner is None:
            pieces[index] = {key: _piece(value, parameter) for key, value in entry.items()}
        elif owner == parameter.mics_index:
            pieces[index] = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in entry.items()}
    optimizer.load_state_dict({**state, "state": pieces})


def to_rank_zero(value: torch.Tensor) -> torch.Tensor:
    """The whole tensor on rank 0's CPU; an empty tensor on others. Collective for DTensors."""
    whole = value.detach()
    if is_quantized(whole):
        return slice_quantized(whole.cpu(), None, 0, 0)
    if isinstance(whole, DTensor):
        whole = full_tensor(whole)
    if dist.get_rank() != 0:
        return torch.empty(0)
    return whole.cpu() if whole.is_cuda else whole.clone()


def _piece(value: Any, parameter: object) -> Any:
    """This rank's shard of a whole tensor, as a DTensor like `parameter`.

    Values that are not plain tensors, and values for anything but a sharded parameter, are returned unchanged.
    """
    if not isinstance(parameter, ShardedParameter) or not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
        return value
    if value.shape != parameter.shape:
        return value.clone()  # a state of another shape; for a parameter, torch raises and names both shapes
    if not value.dim():
        return DTensor.from_local(value.clone(), parameter.device_mesh, parameter.placements, run_check=False)
    if is_quantized(value):
        param_slice = parameter.mics_slice
        return parameter.like_self(
            slice_quantized(value, param_slice.dim, *param_slice.shard_range(parameter.mics_index)).to(parameter.device)
        )
    local = parameter.mics_slice.narrow(value, parameter.mics_index).to(parameter.device, copy=True)
    return parameter.like_self(local)
