"""State dicts of a sharded model and its optimizers, to save and to load.

Parameters and buffers have the names of the unsharded model (``model.<name>``). The states of optimizer i have the name
of their parameter (``optimizer_i.state.<name>.<key>``). Parameter groups hold their options and the names of their
parameters. Every reader that knows the unsharded model can read such a checkpoint: torch's own tools, FSDP2,
Lightning's consolidation. Optimizer states that are valid on one shard only have names of their own; see `rank_local`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from mics_strategy.checkpoint import rank_local
from mics_strategy.engine.handle import Sharded
from mics_strategy.engine.optimizer.kinds import check_same_kind, has_states_elsewhere
from mics_strategy.engine.optimizer.quantized import is_quantized, to_local
from mics_strategy.engine.parameter import ShardedParameter
from mics_strategy.errors import CheckpointError

StateDict = dict[str, Any]
Optimizers = Sequence[Optimizer] | Mapping[str, Optimizer]
MODEL, OPTIMIZER = "model", "optimizer"
_SHOWN = 5  # names in an error


def by_key(optimizers: Optimizers) -> dict[str, Optimizer]:
    """Map keys to optimizers: their own keys, or ``optimizer_<position>``."""
    if isinstance(optimizers, Optimizer):
        raise CheckpointError(f"`optimizers` is one {type(optimizers).__name__}. Pass a list: `[optimizer]`.")
    if isinstance(optimizers, Mapping):
        return dict(optimizers)
    return {f"{OPTIMIZER}_{position}": optimizer for position, optimizer in enumerate(optimizers)}


@dataclass(frozen=True, slots=True)
class ReplicaId:
    """Position of a rank among the ranks with equal copies: number `index` of `count`."""

    index: int
    count: int


SOLE = ReplicaId(0, 1)


@dataclass(slots=True)
class LocalState:
    """The part of a state that one rank holds.

    Attributes:
        values: Nested dicts. Leaves are DTensors, plain tensors and other values.
        copies: Replica index and count of each plain tensor that only some ranks hold, by flat name.
        holder: Position of this rank among those with equal copies of other plain values; None for all ranks.
        scalars: Flat names of scalar parameters and of their states. Each rank of a partition updates a copy; sums of
            gradients may differ in their last bits there, and forwards use the first copy.
    """

    values: StateDict
    copies: dict[str, ReplicaId] = field(default_factory=dict)
    scalars: set[str] = field(default_factory=set)
    holder: ReplicaId | None = None

    def replica_of(self, name: str, value: Any) -> ReplicaId:
        """Return which of the equal copies of a leaf this rank holds."""
        if isinstance(value, DTensor):
            return _replica_of(value)
        return self.copies.get(name) or self.holder or ReplicaId(dist.get_rank(), dist.get_world_size())

    def add(self, path: tuple[str, str, str, str], value: Any, copy: ReplicaId) -> None:
        """Add a rank-local state.

        Args:
            path: Key of the optimizer, name of the parameter, name of the state, and shard key.
            value: State of this rank.
            copy: Index of this copy among the equal ones.
        """
        inside = self.values.setdefault(rank_local.KEY, {})
        for step in path[:-1]:
            inside = inside.setdefault(step, {})
        inside[path[-1]] = rank_local.RankLocalState(value)
        self.copies[".".join((rank_local.KEY, *path))] = copy


def local_state(sharded: Sharded, optimizers: Optimizers, model_state: StateDict | None = None) -> LocalState:
    """Name everything that this rank holds. Nothing is copied.

    Args:
        sharded: Model.
        optimizers: Optimizers in their order, or by key.
        model_state: State dict that replaces the model's own.

    Raises:
        CheckpointError: An optimizer steps on a tensor without a name, or has a state of an unsupported tensor type.
    """
    names = names_of(sharded.model)
    state = sharded.model.state_dict() if model_state is None else model_state
    local = LocalState({MODEL: {name: _detached(value) for name, value in state.items()}})
    local.scalars.update(f"{MODEL}.{name}" for name, value in state.items() if _is_scalar(value))
    for key, optimizer in by_key(optimizers).items():
        check_known(optimizer)
        states: StateDict = {}
        for parameter, state in optimizer.state.items():
            name = _name(names, parameter, optimizer)
            owner = sharded.internals.owner_of(optimizer, parameter)
            rank_local_keys = [k for k, value in state.items() if rank_local.is_rank_local(value, parameter, owner)]
            states[name] = {k: value for k, value in state.items() if k not in rank_local_keys or is_quantized(value)}
            if owner is not None:
                local.copies.update({f"{key}.state.{name}.{k}": ReplicaId(*sharded.internals.replica) for k in state})
            if owner is None and _is_scalar(parameter):
                local.scalars.update(f"{key}.state.{name}.{k}" for k in state)
            copy = (
                _replica_of(parameter)
                if owner is None and isinstance(parameter, DTensor)
                else ReplicaId(*sharded.internals.replica)
            )
            for k in rank_local_keys:
                local.add((key, name, k, rank_local.shard_key(parameter, owner)), state[k], copy)
        local.values[key] = {
            "state": states,
            "param_groups": [_group(names, g, optimizer) for g in optimizer.param_groups],
        }
    return local


def names_of(model: nn.Module) -> dict[int, str]:
    """Map the id of each parameter to its name; a tied parameter has its first name."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def _group(names: Mapping[int, str], group: StateDict, optimizer: Optimizer) -> StateDict:
    params = [_name(names, parameter, optimizer) for parameter in group["params"]]
    return {**{key: value for key, value in group.items() if key != "params"}, "params": params}


def _name(names: Mapping[int, str], parameter: Any, optimizer: Optimizer) -> str:
    if id(parameter) not in names:
        raise CheckpointError(
            f"{type(optimizer).__name__} steps on a tensor of shape {list(parameter.shape)} that is not a parameter "
            "of the model, so its states have no name. Register it as a parameter of the model, or save this "
            "optimizer yourself."
        )
    return names[id(parameter)]


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _is_scalar(value: Any) -> bool:
    return isinstance(value, DTensor) and value.dim() == 0


def _replica_of(tensor: DTensor) -> ReplicaId:
    """The position of this rank among the ranks over which the tensor is replicated."""
    mesh, index, count = tensor.device_mesh, 0, 1
    for axis, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            index, count = index * mesh.size(axis) + mesh.get_local_rank(axis), count * mesh.size(axis)
    return ReplicaId(index, count)


@dataclass(frozen=True, slots=True)
class CheckpointContents:
    """Entries of a checkpoint, and the classes of its optimizers.

    Attributes:
        entries: Metadata of torch for each entry, by its flat name.
        optimizer_classes: Class names of the saved optimizers; empty if unknown.
    """

    entries: Mapping[str, Any]
    optimizer_classes: Sequence[str] = ()


def check_known(optimizer: Optimizer) -> None:
    """Check that all states of an optimizer can be saved and loaded.

    Raises:
        CheckpointError: A state has another tensor type, which the error names, or another optimizer holds states.
    """
    if has_states_elsewhere(optimizer):
        raise CheckpointError(
            f"{type(optimizer).__name__} steps another optimizer, which holds states of its own, and checkpoints do "
            "not support that. Save only the weights, or save `optimizer.state_dict()` on each rank; that loads on the "
            "same ranks with the same scopes."
        )
    for states in optimizer.state.values():
        others = [(key, value) for key, value in states.items() if not is_quantized(value)]
        for key, leaf in ((key, leaf) for key, value in others for leaf in tree_leaves(value)):
            if isinstance(leaf, torch.Tensor) and type(to_local(leaf)) not in (torch.Tensor, nn.Parameter):
                raise CheckpointError(
                    f"`{key}` of {type(optimizer).__name__} holds a {type(to_local(leaf)).__name__}, a tensor type "
                    "that checkpoints do not support. Save only the weights, or save `optimizer.state_dict()` on "
                    "each rank; that loads on the same ranks with the same scopes."
                )


class LoadTarget:
    """Tensors to read a checkpoint into, for a model and its optimizers.

    Parameters and buffers are read in place. Optimizer states are read into new tensors. Both are only this rank's
    shards.

    Args:
        sharded: Model.
        optimizers: Optimizers in the order in which they were saved, or by the same keys.
        saved: Contents of the checkpoint.
        strict: Whether missing and unexpected names are errors.
        has_model: Whether the model is also read.

    Raises:
        CheckpointError: The checkpoint belongs to another model or to other optimizers.
    """

    def __init__(
        self,
        sharded: Sharded,
        optimizers: Optimizers,
        saved: CheckpointContents,
        *,
        strict: bool,
        has_model: bool = True,
    ) -> None:
        self._sharded = sharded
        self._optimizers = by_key(optimizers)
        self._saved = saved.entries
        self._optimizer_classes = saved.optimizer_classes
        self._sources: dict[tuple[str, str], rank_local.StateSource] = {}
        self._strict = strict
        self._names = names_of(sharded.model)
        self.values: StateDict = {MODEL: self._model_targets() if has_model else {}}
        for position, key in enumerate(self._optimizers):
            self.values[key] = self._optimizer_targets(position, key)

    def _model_targets(self) -> StateDict:
        local_state = self._sharded.model.state_dict(keep_vars=True)
        saved = {name.removeprefix(f"{MODEL}."): entry for name, entry in self._saved.items() if _is_in(name, MODEL)}
        _check_shapes({n: t for n, t in local_state.items() if n in saved and isinstance(t, torch.Tensor)}, saved)
        if self._strict:
            _check_same_names("The model", set(local_state), set(saved))
        return {name: _detached(value) for name, value in local_state.items() if name in saved}

    def _optimizer_targets(self, position: int, key: str) -> StateDict:
        optimizer = self._optimizers[key]
        if not any(_is_in(name, key) for name in self._saved):
            count = sum(name.endswith(".param_groups.0.params") for name in self._saved)
            raise CheckpointError(
                f"The checkpoint has no `{key}`; it was saved with {count} optimizers. Pass {count} optimizers, in "
                "the same order."
            )
        groups = self._groups(f"{key}.param_groups")
        for group in groups:
            check_same_kind(optimizer, (option.partition(".")[0] for option in group))
        states: StateDict = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = _name(self._names, parameter, optimizer)
                prefix = f"{key}.state.{name}."
                saved = [key for key in self._saved if key.startswith(prefix)]
                owner = self._sharded.internals.owner_of(optimizer, parameter)
                if owner in (None, self._sharded.internals.index):
                    exact = self._request_rank_local(
                        position, optimizer, rank_local.StateSource(key, name, parameter, owner)
                    )
                    targets = {
                        k.removeprefix(prefix): _empty_like_saved(self._saved[k], parameter, owner) for k in saved
                    }
                    if targets or exact:
                        states[name] = {k: target for k, target in targets.items() if k not in exact}
        return {"state": states, "param_groups": groups}

    def _request_rank_local(self, position: int, optimizer: Optimizer, source: rank_local.StateSource) -> set[str]:
        """Request rank-local states; return the names of those that need no values."""
        are_quantized = rank_local.quantizes_like(optimizer, position, self._optimizer_classes)
        requested = source.request(self._saved, are_quantized=are_quantized)
        if requested:
            self._sources[source.optimizer, source.name] = source
            self.values.setdefault(rank_local.KEY, {}).setdefault(source.optimizer, {})[source.name] = requested
        return {state for state, shards in requested.items() if all(map(source.is_exact, shards))}

    def _groups(self, key: str) -> list[StateDict]:
        groups: dict[int, StateDict] = {}
        for name, entry in self._saved.items():
            if _is_in(name, key):
                number, _, option = name.removeprefix(f"{key}.").partition(".")
                groups.setdefault(int(number), {})[option] = _empty_like_saved(entry, None, None)
        return [groups[number] for number in sorted(groups)]

    def optimizer_states(self) -> list[StateDict]:
        """Return what was read for each optimizer, as that optimizer's own state dict.

        Raises:
            CheckpointError: Parameter groups of an optimizer do not fit the saved ones.
        """
        for (key, name), source in self._sources.items():
            states = self.values[key]["state"].setdefault(name, {})
            for state, shards in self.values[rank_local.KEY][key][name].items():
                [(shard_key, loaded)] = shards.items()
                states[state] = source.restore(shard_key, loaded, states.get(state))
        return [self._numbered(optimizer, self.values[key]) for key, optimizer in self._optimizers.items()]

    def apply(self, optimizer_states: list[StateDict]) -> None:
        """Apply the loaded values. Parameters and tensor buffers were already read in place."""
        model = self._sharded.model
        others = {name: value for name, value in self.values[MODEL].items() if not isinstance(value, torch.Tensor)}
        self._sharded.internals.target.restart()  # until the round of the checkpoint is read
        if others:
            model.load_state_dict(others, strict=False)
        self._sharded.mark_modified()
        for optimizer, states in zip(self._optimizers.values(), optimizer_states, strict=True):
            optimizer.load_state_dict(states)

    def _numbered(self, optimizer: Optimizer, loaded: StateDict) -> StateDict:
        """Convert to the optimizer's own format. Parameters get numbers, and its own groups get the saved options."""
        saved_in = {name: number for number, group in enumerate(loaded["param_groups"]) for name in group["params"]}
        states: dict[int, StateDict] = {}
        groups: list[StateDict] = []
        param_names: set[str] = set()
        for group in optimizer.param_groups:
            names = [_name(self._names, parameter, optimizer) for parameter in group["params"]]
            first = len(param_names)
            param_names.update(names)
            states.update({first + i: loaded["state"][name] for i, name in enumerate(names) if name in loaded["state"]})
            sources = sorted({saved_in[name] for name in names if name in saved_in})
            if len(sources) > 1 and self._strict:
                raise CheckpointError(
                    f"A parameter group of {type(optimizer).__name__} holds parameters of the saved groups {sources}, "
                    "whose options may differ. Build the same groups as in the saved run, or load with "
                    f"`strict=False` to use the options of group {sources[0]}."
                )
            options = loaded["param_groups"][sources[0]] if sources else group
            groups.append({**options, "params": list(range(first, len(param_names)))})
        if self._strict:
            _check_same_names(type(optimizer).__name__, param_names, set(saved_in))
        return {"state": states, "param_groups": groups}


def empty_model_like_saved(sharded: Sharded, entries: Mapping[str, Any]) -> StateDict:
    """Allocate memory for a saved model, by name.

    Sharded tensors get memory for this rank's shard; values that are no tensors get None.
    """
    model_state = sharded.model.state_dict(keep_vars=True)
    saved = {name.removeprefix(f"{MODEL}."): e for name, e in entries.items() if _is_in(name, MODEL)}
    return {name: _empty_like_saved(entry, model_state.get(name), None) for name, entry in saved.items()}


def _is_in(name: str, key: str) -> bool:
    return name.startswith(f"{key}.")


def _check_shapes(local: Mapping[str, torch.Tensor], saved: Mapping[str, Any]) -> None:
    """Check tensors that the model and the checkpoint have; no option loads those of other shapes."""
    shapes = {name: getattr(saved[name], "size", None) for name in local}
    problems = [
        f"`{name}` has shape {list(tensor.shape)} in the model and {list(shapes[name] or ())} in the checkpoint"
        for name, tensor in local.items()
        if shapes[name] != tensor.shape
    ]
    if problems:
        raise CheckpointError(
            f"{_listed(problems)} ({len(problems)} of the {len(local)} tensors that both have). Build the model with "
            "the configuration that it was saved with."
        )


def _check_same_names(subject: str, local: set[str], saved: set[str]) -> None:
    remedy = ", or load with `strict=False`" if local & saved else ""  # which would load nothing
    for names, problem in ((local - saved, "not in the checkpoint"), (saved - local, "only in the checkpoint")):
        if names:
            raise CheckpointError(
                f"{subject}: {_listed(sorted(names))} {problem}. Build the model and the optimizer as they were "
                f"saved{remedy}."
            )


def _listed(texts: Sequence[str]) -> str:
    rest = f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return f"{', '.join(texts[:_SHOWN])}{rest}"


def _empty_like_saved(entry: Any, parameter: torch.Tensor | None, owner: int | None) -> Any:
    """Allocate memory for a saved value: this rank's shard, or None for no tensor."""
    if not isinstance(entry, TensorStorageMetadata):
        return None
    dtype = entry.properties.dtype
    if isinstance(parameter, ShardedParameter) and owner is None and entry.size == parameter.shape and parameter.dim():
        return parameter.like_self(torch.empty_like(parameter.local, dtype=dtype))
    return torch.empty(entry.size, dtype=dtype)
